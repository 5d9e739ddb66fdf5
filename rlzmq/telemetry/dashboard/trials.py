"""WatchedSearch: a search of `rlzmq.tune`, read from its files, for parallel coordinates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlzmq.telemetry.dashboard.metrics_tail import MetricsTail
from rlzmq.telemetry.metric_paths import number_at, value_at

__all__ = ["WatchedSearch", "WatchedTrial", "find_searches"]

_SEARCH = "__search__"
_LOGARITHMIC = ("loguniform", "qloguniform", "lograndint", "qlograndint")
_MAX_TEXT = 40


class WatchedTrial:
    """One trial's directory.

    Attributes:
        path: The directory.
        tail: Its results.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail: MetricsTail = MetricsTail(path / "result.json")
        self._params: tuple[int, dict[str, Any]] = (0, {})

    @property
    def params(self) -> dict[str, Any]:
        """Its current config, which population-based training may change."""
        file = self.path / "params.json"
        try:
            changed = file.stat().st_mtime_ns
            if changed != self._params[0]:
                self._params = (changed, json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError):  # not written yet
            pass
        return self._params[1]

    @property
    def state(self) -> str:
        """``"failed"``, ``"ended"``, ``"running"``, ``"unfinished"`` or ``"starting"``."""
        if (self.path / "error.txt").exists():
            return "failed"
        newest = self.tail.newest
        if not newest:
            return "starting"
        if newest.get("done"):
            return "ended"
        return "running" if Path(f"/proc/{newest.get('pid')}").exists() else "unfinished"

    @property
    def error(self) -> str:
        """The traceback of the error that ended it; "" if there is none."""
        try:
            return (self.path / "error.txt").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


class WatchedSearch:
    """A search.

    Attributes:
        path: Its directory.
        trials: Its trials so far, by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: dict[str, WatchedTrial] = {}
        stored = json.loads((path / "tuner.json").read_text(encoding="utf-8"))
        space = stored.get("param_space") or {}
        self._axes = dict(_searched(space.get("values") or space.get("space") or {}))
        fields = (stored.get("tune_config") or {}).get("fields") or {}
        self._metric = (fields.get("metric") or {}).get("value") or "env_runners/episode_return_mean"
        self._mode = (fields.get("mode") or {}).get("value") or "max"

    def look(self) -> list[WatchedTrial]:
        """Look for new trials and return them."""
        found = sorted(path.parent for path in self.path.glob("*/params.json"))
        new = [WatchedTrial(path) for path in found if path.name not in self.trials]
        self.trials |= {trial.path.name: trial for trial in new}
        return new

    def table(self) -> dict[str, Any]:
        """Return the search's axes and trials.

        The form is ``{"metric", "mode", "axes": [{"path", "is_log"}], "trials": [{"name", "state", "iteration",
        "values", "metric"}]}``; values that are not numbers are given as text.
        """
        return {
            "name": self.path.name,
            "metric": self._metric,
            "mode": self._mode,
            "axes": [{"path": path, "is_log": kind in _LOGARITHMIC} for path, kind in self._axes.items()],
            "trials": [
                {
                    "name": name,
                    "state": trial.state,
                    "iteration": trial.tail.newest.get("training_iteration"),
                    "values": [_plain(value_at(trial.params, path)) for path in self._axes],
                    "metric": number_at(trial.tail.newest, self._metric),
                }
                for name, trial in sorted(self.trials.items())
            ],
        }


def find_searches(place: Path) -> list[Path]:
    """Return the directories of searches in a directory, which may be one itself."""
    return [
        path.parent
        for pattern in ("tuner.json", "*/tuner.json", "*/*/tuner.json")
        for path in place.glob(pattern)
    ]


def _searched(space: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, kind) of the search objects in a stored space."""
    if not isinstance(space, Mapping):
        return
    for name, value in space.items():
        if isinstance(value, Mapping) and isinstance(value.get(_SEARCH), Mapping):
            yield f"{prefix}{name}", next(iter(value[_SEARCH]), "")
        else:
            yield from _searched(value, f"{prefix}{name}/")


def _plain(value: Any) -> float | str | None:
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        return (value if isinstance(value, str) else json.dumps(value))[:_MAX_TEXT]
    return value
