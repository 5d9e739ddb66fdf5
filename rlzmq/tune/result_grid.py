"""Result and ResultGrid: what a search returns."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlzmq.core.errors import ConfigurationError, RlzmqError
from rlzmq.core.imports import import_optional
from rlzmq.core.synonyms import did_you_mean
from rlzmq.telemetry.runs import RETURN_MEAN, Mode, check_mode, flatten, number_at, score_at, value_at
from rlzmq.tune.trial import read_checkpoints, read_results
from rlzmq.tune.trial_api import Checkpoint

__all__ = ["Result", "ResultGrid", "TrialError", "TuneError"]

_SCOPES = ("last", "all", "avg", "last-5-avg", "last-10-avg")


class TuneError(RlzmqError, RuntimeError):
    """A search cannot return what was requested, e.g. the best trial by a metric that no trial has."""


class TrialError(RlzmqError, RuntimeError):
    """The error that ended a trial, of which only the text is left: the traceback."""


@dataclass(frozen=True)
class Result:
    """The outcome of one trial.

    Attributes:
        metrics: Its last result, with the config under "config"; {} if there is none.
        config: Its config, as a dict.
        path: Its directory.
        error: What ended it; None if nothing did.
        checkpoint: Its newest checkpoint, or None.
        best_checkpoints: Its checkpoints with their results, oldest first.
    """

    metrics: dict[str, Any]
    config: dict[str, Any]
    path: str
    error: BaseException | None = None
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.metrics:
            object.__setattr__(self, "metrics", {**self.metrics, "config": self.config})

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint, or None."""
        return self.best_checkpoints[-1][0] if self.best_checkpoints else None

    @classmethod
    def from_path(cls, path: str | Path) -> Result:
        """Return the result of a trial from the files in its directory.

        Raises:
            ConfigurationError: The directory is not a trial's.
        """
        folder = Path(path)
        if not (folder / "params.json").is_file():
            raise ConfigurationError(f"{folder} is not a trial's directory: it has no params.json.")
        results = read_results(folder)
        error = folder / "error.txt"
        return cls(
            metrics=results[-1] if results else {},
            config=json.loads((folder / "params.json").read_text(encoding="utf-8")),
            path=str(folder),
            error=TrialError(error.read_text(encoding="utf-8")) if error.is_file() else None,
            best_checkpoints=[
                (Checkpoint(str(folder / saved.name)), saved.result) for saved in read_checkpoints(folder)
            ],
        )

    @property
    def metrics_dataframe(self) -> Any:
        """All results as a pandas DataFrame, with slash paths as columns."""
        return _pandas().DataFrame([flatten(result) for result in read_results(Path(self.path))])

    def get_best_checkpoint(self, metric: str, mode: Mode) -> Checkpoint | None:
        """Return the checkpoint with the largest or smallest metric; None if none has the metric."""
        check_mode(mode, "get_best_checkpoint")
        having = [saved for saved in self.best_checkpoints if number_at(saved[1], metric) is not None]
        return max(having, key=lambda saved: score_at(saved[1], metric, mode))[0] if having else None


class ResultGrid(Sequence[Result]):
    """The results of all trials, as a sequence.

    Args:
        results: The trials' results.
        experiment_path: The experiment's directory.
        metric, mode: Defaults of `get_best_result`.

    Attributes:
        experiment_path: The experiment's directory.
        metric: Path of the metric that the search compares; None if it has none.
    """

    metric: str | None

    def __init__(
        self,
        results: Sequence[Result],
        experiment_path: str,
        metric: str | None = None,
        mode: Mode | None = None,
    ) -> None:
        self._results = list(results)
        self.experiment_path = experiment_path
        self.metric, self._mode = metric, mode

    def __len__(self) -> int:
        return len(self._results)

    def __getitem__(self, index: Any) -> Any:
        return self._results[index]

    @property
    def errors(self) -> list[BaseException]:
        """The errors of the trials that failed."""
        return [result.error for result in self._results if result.error is not None]

    @property
    def num_errors(self) -> int:
        """Number of trials that failed."""
        return len(self.errors)

    @property
    def num_terminated(self) -> int:
        """Number of trials that ended without an error."""
        return len(self._results) - self.num_errors

    def get_best_result(
        self,
        metric: str | None = None,
        mode: Mode | None = None,
        scope: str = "last",
        filter_nan_and_inf: bool = True,
    ) -> Result:
        """Return the best trial's result.

        Args:
            metric: Path of the metric; None: that of TuneConfig. Not needed for a single trial.
            mode: "max" or "min"; None: that of TuneConfig.
            scope: Which value of a trial counts: its "last" result, the best of "all", the mean ("avg") of all, or of
                the newest ones ("last-5-avg", "last-10-avg").
            filter_nan_and_inf: Whether to leave out values that are not finite.

        Raises:
            ValueError: There is no metric or mode, or the scope is unknown.
            RuntimeError: No trial has the metric.
        """
        metric, mode = metric or self.metric, mode or self._mode
        if len(self._results) == 1 and metric is None:
            return self._results[0]
        if metric is None or mode is None:
            raise ConfigurationError("get_best_result needs metric=… and mode=…, here or in TuneConfig.")
        check_mode(mode, "get_best_result")
        if scope not in _SCOPES:
            raise ConfigurationError(
                f"get_best_result(scope={scope!r}): expected one of {', '.join(_SCOPES)}."
            )
        sign = 1 if mode == "max" else -1
        scored = []
        for result in self._results:
            value = _value(result, metric, sign, scope, filter_nan_and_inf)
            if value is not None:
                scored.append((-math.inf if math.isnan(value) else sign * value, result))
        if not scored:
            first = f" First of {self.num_errors} errors: {self.errors[0]!r}." if self.num_errors else ""
            hint = did_you_mean(metric, [path for each in self._results for path in flatten(each.metrics)])
            if metric == RETURN_MEAN:
                hint = " No episode has ended in any of them: let them run longer."
            raise TuneError(f"No trial has a value of {metric!r}.{hint}{first}")
        return max(scored, key=lambda item: item[0])[1]

    def get_dataframe(self, filter_metric: str | None = None, filter_mode: Mode | None = None) -> Any:
        """Return one row per trial as a pandas DataFrame: results under slash paths, config under ``config/…``.

        Args:
            filter_metric: Take the result with the best value of this metric; None: the last one.
            filter_mode: "max" or "min".

        Raises:
            ConfigurationError: Only one of the two is given.
        """
        if (filter_metric is None) != (filter_mode is None):
            raise ConfigurationError("get_dataframe needs both filter_metric and filter_mode, or neither.")
        rows = []
        for result in self._results:
            metrics = result.metrics
            if filter_metric is not None and filter_mode is not None:
                newest_first = [metrics, *reversed(read_results(Path(result.path)))]
                metrics = max(newest_first, key=lambda each: score_at(each, filter_metric, filter_mode))
            rows.append({**flatten(metrics), **flatten(result.config, "config"), "logdir": result.path})
        return _pandas().DataFrame(rows)

    def __repr__(self) -> str:
        return f"ResultGrid({len(self)} trials, {self.num_errors} errors, {self.experiment_path})"


def _value(result: Result, metric: str, sign: int, scope: str, filters: bool) -> float | None:
    if scope == "last":
        results = [result.metrics]
    else:
        results = read_results(Path(result.path))
        if scope.startswith("last-"):
            results = results[-int(scope.split("-")[1]) :]
    values = [value for each in results if isinstance(value := value_at(each, metric), bool | int | float)]
    if filters:
        values = [value for value in values if math.isfinite(value)]
    if not values:
        return None
    if scope == "all":
        return sign * max(sign * value for value in values)
    return values[-1] if scope == "last" else statistics.fmean(values)


def _pandas() -> Any:
    return import_optional("pandas", "A data frame", "rlzmq[tune]")
