"""The ceilings of BUDGET.toml: no figure of the code is above its ceiling, nor more than 1 % below it."""

from __future__ import annotations

from scripts.code_figures import ceilings, figures


def test_every_figure_is_at_its_ceiling() -> None:
    limits = ceilings()
    found = {(table, name): figure for table, named in figures().items() for name, figure in named.items()}
    assert set(found) == {(table, name) for table, named in limits.items() for name in named}
    above = {
        f"{table}.{name}": figure for (table, name), figure in found.items() if figure > limits[table][name]
    }
    assert not above, f"{above}: above the ceilings. What comes in is saved elsewhere first."
    below = {
        f"{table}.{name}": figure
        for (table, name), figure in found.items()
        if figure < 0.99 * limits[table][name]
    }
    assert not below, f"{below}: lock these savings in, python scripts/code_figures.py --lower"
