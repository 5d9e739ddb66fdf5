"""Progress output of a search: a live table of trials on a terminal, lines elsewhere."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from rlzmq.config.search_space import SearchObject
from rlzmq.core.errors import ConfigurationError
from rlzmq.telemetry.metric_paths import value_at
from rlzmq.telemetry.view import LiveView, View
from rlzmq.tune.config_paths import config_value
from rlzmq.tune.trial import Trial

__all__ = ["CLIReporter", "LinesView", "TableView", "make_view", "trial_table"]

_COLUMNS = {
    "training_iteration": "iter",
    "time_total_s": "time (s)",
    "env_runners/episode_return_mean": "return",
    "num_env_steps_sampled_lifetime": "steps",
}
_MAX_ROWS = 40


@dataclasses.dataclass
class CLIReporter:
    """The columns of the table of trials.

    Args:
        metric_columns: Metric paths, or path -> heading; None: iteration, time, return, steps, and the search's metric.
        max_report_frequency: Seconds between two lines of a trial if the output is not a terminal.
    """

    metric_columns: Sequence[str] | Mapping[str, str] | None = None
    max_report_frequency: float = 5.0

    def columns(self, metric: str | None) -> dict[str, str]:
        """Return the columns as path -> heading."""
        given = self.metric_columns
        if isinstance(given, Mapping):
            return dict(given)
        chosen = dict(_COLUMNS) if given is None else {path: _COLUMNS.get(path, path) for path in given}
        return chosen if metric is None or metric in chosen else {**chosen, metric: metric}


class LinesView(View[Sequence[Trial]]):
    """A view that prints a line when a trial starts, pauses or ends."""

    def __init__(self, space: Mapping[str, SearchObject], columns: Mapping[str, str]) -> None:
        self._space = space
        self._columns = columns
        self._shown: dict[str, str] = {}

    def show(self, shown: Sequence[Trial]) -> None:
        """Print the trials with a changed status."""
        for trial in shown:
            if self._shown.get(trial.trial_id) != trial.status:
                self._shown[trial.trial_id] = trial.status
                cells = (f"{name} {text}" for name, text in _cells(trial, self._space, self._columns) if text)
                print(f"{trial.name} {trial.status.lower():<10} " + "  ".join(cells), flush=True)


class TableView(LiveView[Sequence[Trial]]):
    """A live table of the trials."""

    def __init__(self, title: str, space: Mapping[str, SearchObject], columns: Mapping[str, str]) -> None:
        super().__init__(refresh_per_second=4)
        self._title = title
        self._space = space
        self._columns = columns

    def draw(self, shown: Sequence[Trial]) -> Table:
        """Return the table of the trials."""
        return trial_table(self._title, shown, self._space, self._columns)


def make_view(
    title: str,
    space: Mapping[str, SearchObject],
    metric: str | None,
    verbose: int | None,
    reporter: CLIReporter | None,
) -> View[Sequence[Trial]]:
    """Return the view for the output: a table on a terminal, lines elsewhere, nothing with ``verbose=0``."""
    if verbose == 0:
        return View()
    columns = (reporter or CLIReporter()).columns(metric)
    return TableView(title, space, columns) if sys.stdout.isatty() else LinesView(space, columns)


def trial_table(
    title: str, trials: Sequence[Trial], space: Mapping[str, SearchObject], columns: Mapping[str, str]
) -> Table:
    """Return the table of trials: running trials first, then the newest."""
    counts = Counter(trial.status.lower() for trial in trials)
    table = Table(title=title, caption=", ".join(f"{number} {status}" for status, number in counts.items()))
    shown = sorted(trials, key=lambda trial: (trial.status != "RUNNING", -trial.claim.index))[:_MAX_ROWS]
    shown.sort(key=lambda trial: trial.claim.index)
    table.add_column("trial")
    table.add_column("status")
    for name in (*space, *columns.values()):
        table.add_column(name.rpartition("/")[2] if name in space else name, justify="right")
    for trial in shown:
        table.add_row(trial.name, trial.status, *(text for _, text in _cells(trial, space, columns)))
    return table


def _cells(
    trial: Trial, space: Mapping[str, SearchObject], columns: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return (name, text) of a trial's values and metrics."""
    cells = []
    for path in space:
        values = {**trial.claim.parameters, **trial.changes}
        cells.append(
            (path.rpartition("/")[2], _text(values[path] if path in values else _value(trial, path)))
        )
    return cells + [(heading, _text(value_at(trial.last_result, path))) for path, heading in columns.items()]


def _value(trial: Trial, path: str) -> Any:
    """Return the trial's config value at a path; None if there is none."""
    try:
        return config_value(trial.config, path)
    except ConfigurationError:
        return None


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:30]
