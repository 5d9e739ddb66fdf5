"""Terminal output of a run in progress: a live panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

if TYPE_CHECKING:
    from rich.console import RenderableType

    from rlzmq.config.base_config import BaseConfig

__all__ = ["LinesView", "LiveView", "PanelView", "View", "make_view", "processes_of", "summary_line"]

_NUM_FIRST, _EVERY_S = 10, 3.0  # lines of the first iterations; between two later ones
_BARS = "▁▂▃▄▅▆▇█"
_SHORT = {"mean_kl_loss": "kl", "entropy": "entropy", "vf_explained_var": "ev", "total_loss": "loss"}


Shown = TypeVar("Shown")


class View(Generic[Shown]):
    """Base class of the views. It shows nothing."""

    def show(self, shown: Shown) -> None:
        """Show the newest state, e.g. an iteration's result."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Stop showing."""


class LiveView(View[Shown]):
    """Base class of the views that redraw in place on a terminal."""

    def __init__(self, refresh_per_second: float = 8) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(), refresh_per_second=refresh_per_second)

    def draw(self, shown: Shown) -> RenderableType:
        """Return what to draw."""
        raise NotImplementedError

    def show(self, shown: Shown) -> None:
        """Draw the newest state."""
        self._live.update(self.draw(shown), refresh=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._live.__exit__(*exc_info)


class LinesView(View[Mapping[str, Any]]):
    """A view that prints a line for each of the first iterations, then one per some seconds, and the last one.

    The newest evaluation is in the next line, and a change of the health is printed at once.
    """

    def __init__(self) -> None:
        self._num_lines = 0
        self._due_at = -math.inf
        self._facts: dict[str, str] = {}  # that are not printed yet
        self._health: str | None = None

    def show(self, shown: Mapping[str, Any]) -> None:
        """Print one line, if it is time for it."""
        evaluated = {name: text for name, text in self._facts.items() if name == "evaluation"}
        self._facts = _facts(shown)
        self._facts = {**self._facts, **evaluated, **self._facts}  # evaluation last
        health, now = self._facts.get("health"), time.monotonic()
        if self._num_lines < _NUM_FIRST or now >= self._due_at or health != self._health:
            self._due_at, self._health = now + _EVERY_S, health
            self._print()

    def __exit__(self, *exc_info: object) -> None:
        if self._facts:
            self._print()

    def _print(self) -> None:
        self._num_lines += 1
        line, self._facts = _line(self._facts), {}
        print(line, flush=True)


class PanelView(LiveView[Mapping[str, Any]]):
    """A live panel: the return curve, rates, losses and the account of steps."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self._curve: deque[float] = deque(maxlen=60)

    def draw(self, shown: Mapping[str, Any]) -> RenderableType:
        """Return the panel for an iteration's result."""
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        mean = shown["env_runners"].get("episode_return_mean", math.nan)
        if not math.isnan(mean):
            self._curve.append(mean)
        table = Table.grid(padding=(0, 2))
        for name, text in _facts(shown).items():
            table.add_row(f"[bold]{name}[/bold]", text)
        if "bottleneck" in shown:
            table.add_row("", Text(shown["bottleneck"]["advice"], style="dim"))
        for name, finding in shown.get("health", {}).items():
            table.add_row(
                "[bold red]health[/bold red]", Text(f"{name}: {finding['cause']}. {finding['remedy']}.")
            )
        table.add_row("[bold]curve[/bold]", f"[green]{sparkline(list(self._curve))}[/green]")
        return Panel(table, title=self._title, expand=False)


def processes_of(config: BaseConfig) -> str:
    """Describe the processes that the run starts."""
    parts = []
    for number, what in (
        (config.num_env_runners, "runner"),
        (config.num_learners, "learner"),
        (config.evaluation_num_env_runners if config.evaluation_interval else 0, "evaluation runner"),
    ):
        if number:
            parts.append(f"{number} {what}{'s' if number > 1 else ''}")
    return ", ".join(parts) or "one process"


def make_view(name: str, config: BaseConfig, *, quiet: bool = False) -> View[Mapping[str, Any]]:
    """Return the view for the output: a panel on a terminal, lines elsewhere, nothing if ``quiet``."""
    if quiet:
        return View()
    if not sys.stdout.isatty():
        return LinesView()
    title = f"{name} on {config.env}  ({processes_of(config)})"
    return PanelView(title)


def summary_line(result: Mapping[str, Any]) -> str:
    """Format one iteration's result as one line."""
    return _line(_facts(result))


def _line(facts: Mapping[str, str]) -> str:
    return "  ".join(f"{name} {text}" for name, text in facts.items())


def size_text(num_bytes: float) -> str:
    """Return a size in MB, or from 1 GB on in GB."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def sparkline(values: list[float]) -> str:
    """Draw values as bars of eight heights, from the lowest to the highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in values)


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    runners = result["env_runners"]
    mean = runners.get("episode_return_mean", math.nan)
    accounting = result["accounting"]
    sampled, trained = (result.get(f"num_env_steps_{what}_lifetime", 0) for what in ("sampled", "trained"))
    stage = result.get("bottleneck", {}).get("stage", "unknown")
    facts = {"iter": str(result["training_iteration"])}
    if trained and not sampled:  # from recorded data
        facts["steps"] = str(trained)
    else:
        facts |= {
            "return": _return_text(mean),
            "episodes": str(runners.get("num_episodes_lifetime", 0)),
            "steps": str(sampled),
            "steps/s": f"{runners.get('num_env_steps_sampled_lifetime_throughput', 0.0):.0f}",
        }
    facts |= {
        **_dropped(accounting["dropped"]),
        "time": f"{result['time_total_s']:.1f}s",
        **({} if stage == "unknown" else {"bottleneck": stage}),
        **({"health": ", ".join(found)} if (found := result.get("health")) else {}),
    }
    for module_id, values in result.get("learners", {}).items():
        if module_id.startswith("__"):
            continue
        for name, short in _SHORT.items():
            is_shown = len(result["learners"]) <= 2 and bool(sampled) != (name == "total_loss")
            if is_shown and isinstance(values.get(name), int | float):
                facts[short] = f"{values[name]:.3f}"
    evaluated = result.get("evaluation", {}).get("env_runners")
    if evaluated is not None:
        facts["evaluation"] = _return_text(evaluated.get("episode_return_mean", math.nan))
    return facts


def _dropped(reasons: Mapping[str, int]) -> dict[str, str]:
    """Return the number of dropped steps and why they were."""
    lost = {reason: number for reason, number in reasons.items() if number}
    return {"dropped": f"{sum(lost.values())} ({', '.join(lost)})"} if lost else {}


def _return_text(mean: float) -> str:
    if math.isnan(mean):
        return "– (no episode has ended)"
    return f"{mean:.1f}" if abs(mean) >= 10 else f"{mean:.2f}"  # some envs' returns are at most 1
