"""TrialProcess: the actor that runs one trial's Algorithm, Trainable or function, one result at a time."""

from __future__ import annotations

import datetime
import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.config.base_config import BaseConfig
from rlzmq.config.plain import to_json
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import opener
from rlzmq.telemetry.writers import make_writers
from rlzmq.tune.search import TrialConfig
from rlzmq.tune.trial_api import (
    Checkpoint,
    RunningFunction,
    Trainable,
    TrialContext,
    set_running_function,
)

__all__ = ["STAGED_CHECKPOINT", "TrialProcess"]

STAGED_CHECKPOINT = ".checkpoint-reported"
"""Directory, within the trial's directory, of a function's reported checkpoint until it gets its final name."""


class _Running(Protocol):
    """A trainable that has been started."""

    def step(self) -> tuple[dict[str, Any], bool] | None:
        """Return the next result and whether a checkpoint was staged with it; None after the last result."""

    def save(self, path: Path) -> bool:
        """Save the state to a new directory; return False if only the trial's code can save it."""

    def stop(self) -> None:
        """Release all resources."""


class TrialProcess:
    """Runs one trial in its own process.

    Args:
        trainable: An Algorithm class, a Trainable class, or a function of the config.
        config: The trial's config, without search objects.
        context: Facts about the trial.
        checkpoint: Directory to continue from; None: a new trial.
        before: The last result before the checkpoint; {} for a new trial.
        log_files: Names of the files, in the trial's directory, of this process's stdout and stderr; (): unchanged.
        log: Names of the writers of an algorithm's results.
    """

    def __init__(
        self,
        trainable: object,
        config: TrialConfig,
        context: TrialContext,
        checkpoint: str | None,
        before: Mapping[str, Any],
        log_files: Sequence[str] = (),
        log: str = "",
    ) -> None:
        for descriptor, name in enumerate(log_files, start=1):
            with open(Path(context.trial_dir) / name, "ab", opener=opener) as file:
                os.dup2(file.fileno(), descriptor)
        self._context = context
        self._iteration = int(before.get("training_iteration", 0))
        self._time_total_s = float(before.get("time_total_s", 0.0))
        self._iterations_since_restore = 0
        self._time_since_restore = 0.0
        self._running = _start(trainable, config, context, checkpoint, self._iteration, log)

    def train(self) -> dict[str, Any]:
        """Return ``{"result": the next result, or None after the last, "has_checkpoint": whether one is staged}``."""
        start = time.perf_counter()
        found = self._running.step()
        if found is None:
            return {"result": None, "has_checkpoint": False}
        metrics, has_checkpoint = found
        seconds = float(metrics.get("time_this_iter_s", time.perf_counter() - start))
        self._iteration += 1
        self._iterations_since_restore += 1
        self._time_total_s += seconds
        self._time_since_restore += seconds
        now = datetime.datetime.now()
        facts = {
            "training_iteration": self._iteration,
            "time_this_iter_s": seconds,
            "time_total_s": self._time_total_s,
        }
        result = {
            **facts,
            **to_json(metrics),
            "done": bool(metrics.get("done", False)),
            "trial_id": self._context.trial_id,
            "date": now.strftime("%Y-%m-%d_%H-%M-%S"),
            "timestamp": now.timestamp(),
            "pid": os.getpid(),
            "hostname": platform.node(),
            "time_since_restore": self._time_since_restore,
            "iterations_since_restore": self._iterations_since_restore,
        }
        return {"result": result, "has_checkpoint": has_checkpoint}

    def save(self, path: str) -> bool:
        """Save a checkpoint to this directory; return False if only the trial's code can save its state."""
        target = Path(path)
        shutil.rmtree(target, ignore_errors=True)  # left by an unfinished save
        return self._running.save(target)

    def stop(self) -> None:
        """Release the trial's resources."""
        self._running.stop()


def _start(
    trainable: Any,
    config: TrialConfig,
    context: TrialContext,
    checkpoint: str | None,
    iteration: int,
    log: str,
) -> _Running:
    if isinstance(trainable, type) and issubclass(trainable, Algorithm):
        assert isinstance(config, BaseConfig)
        trial = _AlgorithmTrial(trainable, config, Path(context.trial_dir), log)
        return _RunningTrainable(trial, checkpoint, iteration)
    if isinstance(trainable, type):
        return _RunningTrainable(trainable(config, context), checkpoint, iteration)
    stage = Path(context.trial_dir) / STAGED_CHECKPOINT
    from_checkpoint = None if checkpoint is None else Checkpoint(checkpoint)
    function = RunningFunction(trainable, config, context, from_checkpoint, stage)
    set_running_function(function)
    return function


def _with_own_files(config: BaseConfig, trial_dir: Path) -> BaseConfig:
    """Return a config whose run writes its files, which trials cannot share, in the trial's directory."""
    config = config.copy(copy_frozen=False)
    if config.trace is not None:
        name = "trace.json" if config.trace == "auto" else Path(config.trace).name
        config.debugging(trace=str(trial_dir / name))
    if config.record_dir is not None:
        config.debugging(record_dir=str(trial_dir / Path(config.record_dir).name))
    return config


class _AlgorithmTrial(Trainable):
    """An algorithm as a Trainable."""

    def __init__(self, algorithm_class: type[Algorithm], config: BaseConfig, place: Path, log: str) -> None:
        self.iteration = 0
        writers = make_writers(log, place)
        self._algorithm = algorithm_class(_with_own_files(config, place))
        try:
            for writer in writers:
                writer.on_algorithm_init(algorithm=self._algorithm, metrics_logger=self._algorithm.metrics)
                self._algorithm.callbacks.add(writer)
        except BaseException:
            self.cleanup()
            raise

    def step(self) -> dict[str, Any]:
        return self._algorithm.train()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        self._algorithm.save_to_path(checkpoint_dir)

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self._algorithm.restore_from_path(checkpoint_dir)

    def cleanup(self) -> None:
        self._algorithm.stop()


class _RunningTrainable:
    def __init__(self, trainable: Trainable, checkpoint: str | None, iteration: int) -> None:
        self._trainable = trainable
        if checkpoint is not None:
            try:
                self._trainable.load_checkpoint(checkpoint)
            except BaseException:
                self._trainable.cleanup()
                raise
            self._trainable.iteration = iteration

    def step(self) -> tuple[dict[str, Any], bool]:
        result = self._trainable.step()
        if not isinstance(result, Mapping):
            raise ConfigurationError(
                f"{type(self._trainable).__name__}.step() returned {result!r}; expected a dict of metrics."
            )
        self._trainable.iteration += 1
        return dict(result), False

    def save(self, path: Path) -> bool:
        unfinished = path.with_name(f".{path.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        self._trainable.save_checkpoint(str(unfinished))
        unfinished.rename(path)
        return True

    def stop(self) -> None:
        self._trainable.cleanup()
