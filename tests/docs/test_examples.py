"""The scripts in docs/examples, for one or two iterations."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")
def test_a_league_that_grows_and_drops_its_oldest_player_plays_connect_four(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pettingzoo.classic")
    script = EXAMPLES / "league_connect_four.py"
    options = (
        "--iterations 2 --win-rate 0 --snapshots 1 --num-env-runners 0 --batch 1024 --games 4 --target 0"
    )
    monkeypatch.setattr(sys, "argv", [str(script), *options.split()])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(script), run_name="__main__")
    assert " of 4 games won" in (said := capsys.readouterr().out)
    assert "league: ['random', 'main_2']" in said


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["td3", "crossq"])
def test_an_algorithm_outside_of_the_package_learns(name: str) -> None:
    result = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"](iterations=14, seed=1)
    assert result["env_runners"]["episode_return_mean"] > -250.0
