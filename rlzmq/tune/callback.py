"""Callback: user code that is called at the events of a search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.tune.config_paths import TrialConfig

__all__ = ["Callback", "LoggerCallback", "SearchTrial", "check_callbacks"]


class SearchTrial(Protocol):
    """A trial, as schedulers, callbacks and the functions that name trials see it. ``str(trial)`` is its name.

    Attributes:
        trial_id: Its id.
        name: Its name.
        trainable_name: Name of the trainable.
        path: Its directory; missing while the trial is being named.
        config: Its current config.
        last_result: Its newest result; {} before the first.
        error: What ended it; None if nothing did.
    """

    trial_id: str
    name: str
    trainable_name: str
    path: Path
    config: TrialConfig
    last_result: dict[str, Any]
    error: BaseException | None

    @property
    def evaluated_params(self) -> dict[str, Any]:
        """Its searched values by path, except those of functions."""

    @property
    def is_waiting(self) -> bool:
        """Whether the trial waits for a free slot: it is new, or paused."""

    @property
    def is_finished(self) -> bool:
        """Whether the trial has ended."""


class Callback:
    """Base class of callbacks of a search, for ``RunConfig(callbacks=[…])``. Every hook does nothing by default.

    Hooks are called in the driver, one at a time, on a thread of their own; the trial waits for them. An error in a
    hook ends the search, and `Tuner.fit` raises it.

    Example::

        class Print(tune.Callback):
            def on_trial_result(self, iteration, trials, trial, result, **info):
                print(trial.name, result["training_iteration"])
    """

    def on_trial_start(
        self, iteration: int, trials: Sequence[SearchTrial], trial: SearchTrial, **info: object
    ) -> None:
        """Run when a trial starts, or continues after a pause.

        Args:
            iteration: Number of results that the search has received so far.
            trials: The trials of this driver so far.
            trial: The trial.
            info: Room for further arguments.
        """

    def on_trial_result(
        self,
        iteration: int,
        trials: Sequence[SearchTrial],
        trial: SearchTrial,
        result: dict[str, Any],
        **info: object,
    ) -> None:
        """Run after each result of a trial; see `on_trial_start`."""

    def on_trial_complete(
        self, iteration: int, trials: Sequence[SearchTrial], trial: SearchTrial, **info: object
    ) -> None:
        """Run when a trial has ended without an error; see `on_trial_start`."""

    def on_trial_error(
        self, iteration: int, trials: Sequence[SearchTrial], trial: SearchTrial, **info: object
    ) -> None:
        """Run when a trial has failed, with the error in ``trial.error``; see `on_trial_start`."""

    def on_experiment_end(self, trials: Sequence[SearchTrial], **info: object) -> None:
        """Run when all trials have ended."""


class LoggerCallback(Callback):
    """A Callback with the hooks of Ray Tune's loggers: override these."""

    def log_trial_start(self, trial: SearchTrial) -> None:
        """Run when a trial starts, or continues."""

    def log_trial_result(self, iteration: int, trial: SearchTrial, result: dict[str, Any]) -> None:
        """Run after each result of a trial."""

    def log_trial_end(self, trial: SearchTrial, failed: bool = False) -> None:
        """Run when a trial has ended."""

    def on_trial_start(
        self, iteration: int, trials: Sequence[SearchTrial], trial: SearchTrial, **info: object
    ) -> None:
        self.log_trial_start(trial)

    def on_trial_result(
        self,
        iteration: int,
        trials: Sequence[SearchTrial],
        trial: SearchTrial,
        result: dict[str, Any],
        **info: object,
    ) -> None:
        self.log_trial_result(iteration, trial, result)

    def on_trial_complete(
        self, iteration: int, trials: Sequence[SearchTrial], trial: SearchTrial, **info: object
    ) -> None:
        self.log_trial_end(trial)

    def on_trial_error(
        self, iteration: int, trials: Sequence[SearchTrial], trial: SearchTrial, **info: object
    ) -> None:
        self.log_trial_end(trial, failed=True)


_HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Check that all are callbacks, and that their hooks are called.

    Raises:
        ConfigurationError: One is not a Callback, or has a hook that does not exist.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"RunConfig(callbacks=…): expected objects of tune.Callback classes, got {callback!r}."
            )
        for name in dir(callback):
            if name.startswith("on_") and name not in _HOOKS:
                raise ConfigurationError(
                    f"{type(callback).__name__}.{name} is never called: a tune.Callback has no such hook."
                    f"{did_you_mean(name, _HOOKS)}"
                )
