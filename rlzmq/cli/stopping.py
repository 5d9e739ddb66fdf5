"""Stop criteria of a training run: ``--stop return=475 --stop steps=300000``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean, instead_of_key
from rlzmq.telemetry.metric_paths import value_at

__all__ = ["StopCriteria"]

_SHORT = {
    "return": "env_runners/episode_return_mean",
    "steps": "num_env_steps_sampled_lifetime",
    "iterations": "training_iteration",
    "time": "time_total_s",
}

# Where to find these for a run that samples nothing.
_OFFLINE = {
    "env_runners/episode_return_mean": "evaluation/env_runners/episode_return_mean",
    "num_env_steps_sampled_lifetime": "num_env_steps_trained_lifetime",
}


class StopCriteria:
    """Ends the run as soon as one criterion is met.

    Args:
        texts: Each is ``name=number``. A name is return, steps, iterations, time (seconds), or a slash path into the
            result. The criterion is met when the value there is at least the number.

    Attributes:
        goals: Path in the result -> number.

    Raises:
        ConfigurationError: A text does not have this form.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.goals: dict[str, float] = {}
        for text in texts:
            name, separator, number = text.partition("=")
            path = _SHORT.get(name, name)
            if not separator or (name not in _SHORT and "/" not in name and name not in _SHORT.values()):
                known = instead_of_key(name)
                here = next((short for short, path in _SHORT.items() if path == known), known)
                hint = f" Instead: --stop {here}={number or '…'}." if here else did_you_mean(name, _SHORT)
                hint = "" if name in _SHORT else hint
                raise ConfigurationError(f"--stop {text!r}: expected name=number, e.g. return=475.{hint}")
            try:
                self.goals[path] = float(number)
            except ValueError:
                raise ConfigurationError(f"--stop {text!r}: {number!r} is not a number.") from None

    def met_by(self, result: Mapping[str, Any]) -> str | None:
        """Return a description of the criterion that the result meets, or None."""
        is_offline = result.get("num_env_steps_sampled_lifetime") == 0
        for goal_path, goal in self.goals.items():
            path = _OFFLINE.get(goal_path, goal_path) if is_offline else goal_path
            value = value_at(result, path)
            if isinstance(value, int | float) and value >= goal:
                return f"{path} = {value:.6g} ≥ {goal:g}"
        return None
