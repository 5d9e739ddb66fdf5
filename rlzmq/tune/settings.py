"""What a search is given: TuneConfig, RunConfig, CheckpointConfig, FailureConfig, and callbacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlzmq.config.plain import plain_setting, revive_setting
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.trust import NOBODY, Trust, find_code
from rlzmq.telemetry.runs import Mode, check_mode
from rlzmq.tune.search import Searcher
from rlzmq.tune.trial import CheckpointConfig, Trial

if TYPE_CHECKING:
    from rlzmq.tune.schedulers import TrialScheduler
    from rlzmq.tune.stopper import Stopper

__all__ = [
    "Callback",
    "FailureConfig",
    "LoggerCallback",
    "RunConfig",
    "TuneConfig",
    "settings_from_stored",
    "stored_settings",
]


class Callback:
    """Base class of callbacks of a search, for ``RunConfig(callbacks=[…])``. Every hook does nothing by default.

    Hooks are called in the driver, one at a time, on a thread of their own; the trial waits for them. An error in a
    hook ends the search, and `Tuner.fit` raises it.

    Example::

        class Print(tune.Callback):
            def on_trial_result(self, iteration, trials, trial, result, **info):
                print(trial.name, result["training_iteration"])
    """

    def on_trial_start(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: object) -> None:
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
        trials: Sequence[Trial],
        trial: Trial,
        result: dict[str, Any],
        **info: object,
    ) -> None:
        """Run after each result of a trial; see `on_trial_start`."""

    def on_trial_complete(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: object
    ) -> None:
        """Run when a trial has ended without an error; see `on_trial_start`."""

    def on_trial_error(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: object) -> None:
        """Run when a trial has failed, with the error in ``trial.error``; see `on_trial_start`."""

    def on_experiment_end(self, trials: Sequence[Trial], **info: object) -> None:
        """Run when all trials have ended."""


class LoggerCallback(Callback):
    """A Callback with the hooks of Ray Tune's loggers: override these."""

    def log_trial_start(self, trial: Trial) -> None:
        """Run when a trial starts, or continues."""

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        """Run after each result of a trial."""

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Run when a trial has ended."""

    def on_trial_start(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: object) -> None:
        self.log_trial_start(trial)

    def on_trial_result(
        self,
        iteration: int,
        trials: Sequence[Trial],
        trial: Trial,
        result: dict[str, Any],
        **info: object,
    ) -> None:
        self.log_trial_result(iteration, trial, result)

    def on_trial_complete(
        self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: object
    ) -> None:
        self.log_trial_end(trial)

    def on_trial_error(self, iteration: int, trials: Sequence[Trial], trial: Trial, **info: object) -> None:
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


@dataclasses.dataclass
class TuneConfig:
    """How values are chosen, and which trials continue.

    Attributes:
        metric: Path of the metric in a result, e.g. ``"env_runners/episode_return_mean"``.
        mode: Whether the metric should be large ("max") or small ("min").
        search_alg: Chooses the values; None: a BasicVariantGenerator (grid search and random values).
        scheduler: Ends or changes trials depending on their results; None: a FIFOScheduler, which never does.
        num_samples: Trials for each grid point; -1: new trials until `time_budget_s` is over.
        max_concurrent_trials: Maximum number of trials at the same time; None or 0: as many as this machine has cores
            for.
        time_budget_s: Seconds after which all trials end; None: no limit.
        reuse_actors: Has no effect; accepted for compatibility with Ray Tune. Each trial has a new process, which
            starts in less than a tenth of a second.
        trial_name_creator: Function of a new trial that returns its name; None: the trainable's name and the trial's
            number. It may read the trial's trial_id, trainable_name, evaluated_params (the searched values by path) and
            config. Stored in the study, so that a resumed trial keeps its name.
        trial_dirname_creator: Function of a new trial that returns the name of its directory, without slashes; None:
            the trial's name. The number is appended to a name that another trial's directory has.
        storage: URL of Optuna's storage, e.g. ``"postgresql://…"``, which several machines may share; None: SQLite in
            the experiment's directory.
    """

    metric: str | None = None
    mode: Mode | None = None
    search_alg: Searcher | None = None
    scheduler: TrialScheduler | None = None
    num_samples: int = 1
    max_concurrent_trials: int | None = None
    time_budget_s: float | None = None
    storage: str | None = None
    reuse_actors: bool | None = False
    trial_name_creator: Callable[[Trial], str] | None = None
    trial_dirname_creator: Callable[[Trial], str] | None = None

    def __post_init__(self) -> None:
        check_mode(self.mode, "TuneConfig")
        if not isinstance(self.num_samples, int) or (self.num_samples < 1 and self.num_samples != -1):
            raise ConfigurationError(
                f"TuneConfig(num_samples={self.num_samples!r}): expected an int from 1, or -1: no limit."
            )
        if self.num_samples == -1 and self.time_budget_s is None:
            raise ConfigurationError("TuneConfig(num_samples=-1) never ends: set time_budget_s, too.")


@dataclasses.dataclass
class FailureConfig:
    """What happens when a trial fails.

    Attributes:
        max_failures: How often a trial is restarted from its last checkpoint after its code raised an error; -1:
            always.
        fail_fast: Whether the first failed trial ends the search; "raise": `fit` raises its error.
        max_kills: How often a trial is restarted from its last checkpoint after its process was killed; -1: always.
    """

    max_failures: int = 0
    fail_fast: bool | Literal["raise"] = False
    max_kills: int = 3

    def __post_init__(self) -> None:
        if self.fail_fast and self.max_failures:
            raise ConfigurationError(
                f"FailureConfig(max_failures={self.max_failures}, fail_fast={self.fail_fast!r}): with fail_fast the "
                "first failure ends the search; leave max_failures at 0."
            )


@dataclasses.dataclass
class RunConfig:
    """Where the files of a search are stored, and when its trials stop.

    Attributes:
        name: Name of the experiment; None: the trainable's name with date and time.
        storage_path: Directory that contains experiments; None: ``runs/tune``.
        stop: A dict of result paths and the values at which a trial ends, e.g. ``{"training_iteration": 10}``; a
            function ``(trial_id, result) -> bool``; or a `Stopper`.
        checkpoint_config: When checkpoints are saved.
        failure_config: What happens when a trial fails.
        verbose: 0: print nothing; None or more: a live table on a terminal, lines elsewhere.
        progress_reporter: A `CLIReporter` that names the table's columns; None: chosen from the results.
        callbacks: `Callback` objects that are called at the events of the search.
        log_to_file: Whether trials write their stdout and stderr to the files ``stdout`` and ``stderr`` in their
            directories, with those of their processes; or the name of one file for both; or both names.
        log: Names of the writers of an algorithm's results, e.g. ``"tb,wandb"``; their files are in the trials'
            directories.
        sync_config: Must be None: the files of a search are in a directory.
        storage_filesystem: Must be None, too.
    """

    name: str | None = None
    storage_path: str | Path | None = None
    stop: Mapping[str, float] | Callable[[str, dict[str, Any]], bool] | Stopper | None = None
    checkpoint_config: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    failure_config: FailureConfig = dataclasses.field(default_factory=FailureConfig)
    verbose: int | None = None
    progress_reporter: Any = None
    callbacks: Sequence[Callback] | None = None
    log_to_file: bool | str | Sequence[str] = False
    log: str = ""
    sync_config: None = None
    storage_filesystem: None = None

    def __post_init__(self) -> None:
        check_callbacks(self.callbacks or ())
        for name in ("sync_config", "storage_filesystem"):
            if getattr(self, name) is not None:
                raise ConfigurationError(
                    f"RunConfig({name}=…) is not supported: storage_path is a directory, which machines may share."
                )
        files = self.log_files
        if not all(isinstance(file, str) and Path(file).name == file for file in files) or len(files) not in (
            0,
            2,
        ):
            raise ConfigurationError(
                f"RunConfig(log_to_file={self.log_to_file!r}): expected a bool, a file name, or two file names."
            )
        self.checkpoint_config = self.checkpoint_config or CheckpointConfig()
        self.failure_config = self.failure_config or FailureConfig()
        if self.name is not None and (not self.name or "/" in self.name or self.name.startswith(".")):
            raise ConfigurationError(f"RunConfig(name={self.name!r}): expected the name of a directory.")

    @property
    def log_files(self) -> tuple[str, ...]:
        """Names of the files of a trial's stdout and stderr; () if it writes to the driver's."""
        given = self.log_to_file
        if isinstance(given, bool):
            return ("stdout", "stderr") if given else ()
        return (given, given) if isinstance(given, str) else tuple(given)


def stored_settings(value: object) -> Any:
    """Return the plain form of a settings object and of the objects in it, or of a search space.

    Raises:
        ConfigurationError: It contains code without a name, or an object of a class outside rlzmq.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {
            "value": plain_setting("tune", str(value) if isinstance(value, Path) else value, in_script=True)
        }
    kind = type(value)
    if not kind.__module__.startswith("rlzmq."):
        raise ConfigurationError(f"{value!r} is of a class outside rlzmq.")
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "fields": {name: stored_settings(item) for name, item in fields.items()},
    }


def settings_from_stored(stored: Mapping[str, Any], trust: Trust) -> Any:
    """Return what `stored_settings` converted.

    Args:
        stored: The plain form.
        trust: Whose code it may name, besides rlzmq's own.

    Raises:
        CheckpointError: The data names other code, or is malformed.
    """
    try:
        if "value" in stored:
            # In a dict of this name, code that "env" and "wrappers" name is checked, too.
            return revive_setting("evaluation_config", stored["value"], trust)
        kind: Any = find_code(stored["class"], NOBODY, object)
        if not hasattr(kind, "__dataclass_fields__"):
            raise CheckpointError(f"The stored settings name {stored['class']!r}, which holds no settings.")
        fields = {name: settings_from_stored(item, trust) for name, item in stored["fields"].items()}
        return kind(**fields)
    except (KeyError, TypeError, AttributeError, ConfigurationError) as error:
        raise CheckpointError(f"The stored settings cannot be read: {error!r}.") from None
