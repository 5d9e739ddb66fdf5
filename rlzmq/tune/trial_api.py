"""The API for a trial's code: `report`, `get_checkpoint`, `get_context`, `Checkpoint` and `Trainable`."""

from __future__ import annotations

import contextlib
import queue
import shutil
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rlzmq.core.errors import ConfigurationError
from rlzmq.tune.search import TrialConfig

__all__ = [
    "Checkpoint",
    "PlacementGroupFactory",
    "RunningFunction",
    "Trainable",
    "TrialContext",
    "TrialStopped",
    "get_checkpoint",
    "get_context",
    "report",
    "set_running_function",
    "with_parameters",
    "with_resources",
]

_STOP_S = 3.0  # for the clean-up of a function that is stopped


@dataclass(frozen=True)
class Checkpoint:
    """A directory with a saved state.

    Attributes:
        path: The directory.
    """

    path: str

    @classmethod
    def from_directory(cls, path: str | Path) -> Self:
        """Return the checkpoint in this directory."""
        return cls(str(path))

    def to_directory(self, path: str | Path | None = None) -> str:
        """Copy the files to `path`, or to a new temporary directory, and return its path."""
        target = str(path) if path is not None else tempfile.mkdtemp(prefix="checkpoint-")
        shutil.copytree(self.path, target, dirs_exist_ok=True)
        return target

    def __fspath__(self) -> str:
        return self.path

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """Return a context manager that yields the directory's path, for reading."""
        yield self.path


@dataclass(frozen=True)
class TrialContext:
    """Facts about the trial that runs in this process.

    Attributes:
        experiment_name: Name of the experiment.
        trial_id: The trial's id within the experiment.
        trial_name: Name of the trial and of its directory.
        trial_dir: The trial's directory.
        trial_resources: Resources assigned to the trial, e.g. ``{"cpu": 1}``.
    """

    experiment_name: str
    trial_id: str
    trial_name: str
    trial_dir: str
    trial_resources: dict[str, float]

    def get_experiment_name(self) -> str:
        """Return the experiment's name."""
        return self.experiment_name

    def get_trial_id(self) -> str:
        """Return the trial's id."""
        return self.trial_id

    def get_trial_name(self) -> str:
        """Return the trial's name."""
        return self.trial_name

    def get_trial_dir(self) -> str:
        """Return the trial's directory."""
        return self.trial_dir

    def get_trial_resources(self) -> dict[str, float]:
        """Return the resources assigned to the trial."""
        return dict(self.trial_resources)


class TrialStopped(BaseException):
    """Raised by `report` when the trial is stopped, so that the function's ``finally`` blocks run."""


class RunningFunction:
    """A trial's function, on a thread of its own: `report` hands over one result and waits until the next is asked for.

    Args:
        function: The function.
        config: Its argument.
        context: Facts about the trial.
        checkpoint: What `get_checkpoint` returns.
        stage: Directory into which a reported checkpoint is copied.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        config: TrialConfig,
        context: TrialContext,
        checkpoint: Checkpoint | None,
        stage: Path,
    ) -> None:
        self.context = context
        self.checkpoint = checkpoint
        self._stage = stage
        self._reports: queue.SimpleQueue[tuple[dict[str, Any], bool] | BaseException | None] = (
            queue.SimpleQueue()
        )
        self._permits: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_over, self._has_reported = False, False
        self._thread = threading.Thread(target=self._run, args=(function, config), name="trial", daemon=True)

    def _run(self, function: Callable[[Any], Any], config: TrialConfig) -> None:
        try:
            returned = function(config)
            if isinstance(returned, Mapping):  # the function's last result
                self._reports.put((dict(returned), False))
            elif returned is not None and not self._has_reported:  # e.g. a generator, which has not run
                raise ConfigurationError(
                    f"the trial's function returned {returned!r} and reported nothing; expected a dict of metrics, or "
                    "calls of tune.report({'score': …}) in it."
                )
            self._reports.put(None)
        except TrialStopped:
            self._reports.put(None)
        except BaseException as error:
            self._reports.put(error)

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> None:
        """Hand over a result and wait until the trial may continue.

        Raises:
            TrialStopped: The trial is stopped instead.
            ConfigurationError: `metrics` is no dict.
        """
        if not isinstance(metrics, Mapping):
            raise ConfigurationError(
                f"tune.report({metrics!r}): expected a dict, e.g. {{'score': {metrics!r}}}."
            )
        self._has_reported = True
        if checkpoint is not None:
            shutil.rmtree(self._stage, ignore_errors=True)
            shutil.copytree(checkpoint.path, self._stage)
        self._reports.put((dict(metrics), checkpoint is not None))
        if not self._permits.get():
            raise TrialStopped

    def step(self) -> tuple[dict[str, Any], bool] | None:
        """Let the function go on; return its next result and whether it has a checkpoint, or None after the last one.

        Raises:
            BaseException: The error that the function raised.
        """
        if self._is_over:
            return None
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._permits.put(True)
        found = self._reports.get()
        self._is_over = not isinstance(found, tuple)
        if isinstance(found, BaseException):
            raise found
        return found

    def save(self, path: Path) -> bool:
        """Return False: only the function itself can save its state."""
        return False

    def stop(self) -> None:
        """Make a function that waits in `report` raise TrialStopped."""
        if self._thread.is_alive():
            self._permits.put(False)
            self._thread.join(_STOP_S)
        set_running_function(None)


_running: RunningFunction | None = None


def set_running_function(function: RunningFunction | None) -> None:
    """Set the function of the trial that this process runs."""
    global _running
    _running = function


def _running_function(name: str) -> RunningFunction:
    if _running is None:
        raise ConfigurationError(
            f"tune.{name}() was called outside of a trial: call it in the function that is passed to tune.Tuner(…)."
        )
    return _running


def report(metrics: Mapping[str, Any], *, checkpoint: Checkpoint | None = None) -> None:
    """Report a result of the trial and wait until the trial may continue.

    Args:
        metrics: Numbers by name; may be nested.
        checkpoint: A directory with the trial's state. It is copied before this function returns.

    Raises:
        ConfigurationError: Called outside of a trial, or `metrics` is no dict.
    """
    _running_function("report").report(metrics, checkpoint)


def get_checkpoint() -> Checkpoint | None:
    """Return the checkpoint from which the trial continues; None for a new one.

    Raises:
        ConfigurationError: Called outside of a trial.
    """
    return _running_function("get_checkpoint").checkpoint


def get_context() -> TrialContext:
    """Return the facts about this trial.

    Raises:
        ConfigurationError: Called outside of a trial.
    """
    return _running_function("get_context").context


class Trainable:
    """Base class of trainables with a step method. Subclasses define `setup` and `step`.

    Attributes:
        config: The trial's config.
        iteration: Number of steps taken.
        trial_id: The trial's id.
        logdir: The trial's directory.
    """

    def __init__(self, config: dict[str, Any], context: TrialContext) -> None:
        self.config = config
        self.iteration = 0
        self.trial_id: str = context.trial_id
        self.logdir: str = context.trial_dir
        self.setup(config)

    def setup(self, config: dict[str, Any]) -> None:
        """Prepare the trial. Does nothing by default."""

    def step(self) -> dict[str, Any]:
        """Run one iteration and return its result, which ends the trial if it contains ``{"done": True}``."""
        raise NotImplementedError

    def save_checkpoint(self, checkpoint_dir: str) -> Any:
        """Save the state to files in this directory.

        Returns:
            None, or the directory.
        """
        raise NotImplementedError(f"{type(self).__name__} has no save_checkpoint(checkpoint_dir).")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Restore the state from the files in this directory."""
        raise NotImplementedError(f"{type(self).__name__} has no load_checkpoint(checkpoint_dir).")

    def cleanup(self) -> None:
        """Release the resources that `setup` acquired. Does nothing by default."""


class PlacementGroupFactory:
    """Resources of a trial as Ray states them: one bundle for each of its processes. A trial occupies their sum.

    Args:
        bundles: A dict of resources for each process, e.g. ``[{"CPU": 1}, {"CPU": 2}]``.
        strategy: Has no effect; accepted for compatibility with Ray Tune. A trial's processes are on one machine.

    Attributes:
        bundles: The bundles.
        required_resources: Their sum by resource, without those that are 0.
    """

    def __init__(self, bundles: Sequence[Mapping[str, float]], strategy: str = "PACK") -> None:
        self.bundles: list[dict[str, float]] = [dict(bundle) for bundle in bundles]
        names = {name for bundle in self.bundles for name in bundle}
        sums = {name: sum(float(bundle.get(name, 0)) for bundle in self.bundles) for name in sorted(names)}
        self.required_resources: dict[str, float] = {name: number for name, number in sums.items() if number}


class WithResources:
    """A trainable and the resources that each of its trials occupies."""

    def __init__(self, trainable: object, resources: Mapping[str, float]) -> None:
        self.trainable = trainable
        self.resources: dict[str, float] = {name.lower(): float(number) for name, number in resources.items()}


def with_resources(
    trainable: object, resources: Mapping[str, float] | PlacementGroupFactory
) -> WithResources:
    """Return the trainable together with the resources of one trial.

    Args:
        trainable: A trainable, as for `Tuner`.
        resources: ``{"cpu": n}``: how many of this machine's cores a trial occupies; or a PlacementGroupFactory, whose
            bundles are summed.

    Raises:
        ConfigurationError: Another resource is named, or the number of cores is not positive.
    """
    given = resources.required_resources if isinstance(resources, PlacementGroupFactory) else dict(resources)
    made = WithResources(trainable, given)
    if set(made.resources) != {"cpu"} or not made.resources["cpu"] > 0:
        raise ConfigurationError(
            f"with_resources(…, {given!r}): expected {{'cpu': a positive number}}. GPUs are set in the config: "
            "learners(num_gpus_per_learner=…)."
        )
    return made


def with_parameters(trainable: Any, **objects: Any) -> Any:
    """Return the trainable with additional arguments for the function, or for the class's `setup`.

    Args:
        trainable: ``function(config, **objects)``, or a Trainable class with ``setup(config, **objects)``.
        objects: The arguments. They are copied into each trial's process.
    """
    if isinstance(trainable, type) and issubclass(trainable, Trainable):
        given_setup: Callable[..., None] = trainable.setup

        def setup(self: Trainable, config: dict[str, Any]) -> None:
            given_setup(self, config, **objects)

        return types.new_class(trainable.__name__, (trainable,), {}, lambda names: names.update(setup=setup))

    def function(config: dict[str, Any]) -> Any:
        return trainable(config, **objects)

    function.__name__ = getattr(trainable, "__name__", "function")
    return function
