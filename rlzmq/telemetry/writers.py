"""Writers: callbacks that send each result to TensorBoard, Weights & Biases, MLflow or trackio.

Each writer logs the numbers of a result under their paths, e.g. ``env_runners/episode_return_mean``, at the result's
env step, and the run's settings as hyperparameters. A writer imports its package when it is created.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlzmq.core.callbacks import Callback
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import import_optional
from rlzmq.core.synonyms import did_you_mean
from rlzmq.telemetry.runs import numbers_in

__all__ = [
    "WRITERS",
    "MLflowWriter",
    "TensorBoardWriter",
    "TrackioWriter",
    "WandbWriter",
    "Writer",
    "make_writers",
]

_log = logging.getLogger(__name__)

_PROJECT = "rlzmq"
_MAX_PARAM_CHARS = 500


def settings_of(algorithm: Any) -> dict[str, bool | int | float | str]:
    """Return the settings that differ from the defaults, as values that all trackers accept."""
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)[:_MAX_PARAM_CHARS]
        for name, value in sorted(algorithm.config.diff().items())
    }


class Writer(Callback):
    """Base class of the writers. A writer that fails after `open` is closed with a warning, and the run continues."""

    _is_open = False

    def open(self, algorithm: object, settings: dict[str, bool | int | float | str]) -> None:
        """Start a tracked run with these settings. An error here ends the run."""

    def write(
        self, algorithm: object, result: Mapping[str, Any], numbers: dict[str, float], step: int
    ) -> None:
        """Write a result's finite numbers, by path, at this env step."""
        raise NotImplementedError

    def close(self) -> None:
        """End the tracked run."""

    def on_algorithm_init(self, *, algorithm: object, **kwargs: object) -> None:
        """Open the writer."""
        self._is_open = True
        self.open(algorithm, settings_of(algorithm))

    def on_train_result(self, *, algorithm: object, result: dict[str, Any], **kwargs: object) -> None:
        """Write the result."""
        if self._is_open:
            finite = {name: value for name, value in numbers_in(result) if math.isfinite(value)}
            step = result["num_env_steps_sampled_lifetime"] or result["num_env_steps_trained_lifetime"]
            self._attempt(lambda: self.write(algorithm, result, finite, int(step)))

    def on_algorithm_end(self, **kwargs: object) -> None:
        """Close the writer."""
        if self._is_open:
            self._attempt(self.close)

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._is_open = False
            name = type(self).__name__
            _log.warning("%s failed, and writes no more: %s: %s", name, type(error).__name__, error)


class TensorBoardWriter(Writer):
    """Writes event files for TensorBoard. Iterations that a resumed run repeats replace the earlier ones.

    Args:
        directory: Directory of the event files.
        histograms: Whether to write histograms of the modules' weights and of lists of numbers in results (such as
            the returns of an evaluation round).
    """

    def __init__(self, directory: str | Path = "runs/tensorboard", *, histograms: bool = False) -> None:
        import_optional("tensorboard", "TensorBoard's files", "rlzmq[tb]")
        self._torch = import_optional("torch.utils.tensorboard", "TensorBoard's files", "rlzmq[tb]")
        self._directory, self._histograms = str(directory), histograms
        self._settings: dict[str, bool | int | float | str] = {}
        self._writer: Any = None

    def open(self, algorithm: Any, settings: dict[str, bool | int | float | str]) -> None:
        """Check that there are weights to read. The files are created with the first result."""
        if self._histograms and inspect.iscoroutinefunction(algorithm.get_module):
            raise ConfigurationError(
                "TensorBoardWriter(histograms=True) needs an Algorithm, not an AsyncAlgorithm."
            )
        self._settings = settings

    def write(
        self, algorithm: object, result: Mapping[str, Any], numbers: dict[str, float], step: int
    ) -> None:
        """Add scalars and histograms."""
        if self._writer is None:
            self._writer = self._torch.SummaryWriter(self._directory, purge_step=step)
            metrics = {"env_runners/episode_return_mean": math.nan}
            for part in self._torch.summary.hparams(self._settings, metrics):
                self._writer.file_writer.add_summary(part)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        if self._histograms:
            for name, values in [*_lists_in(result), *_weights_of(algorithm, result)]:
                self._writer.add_histogram(name, values, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        if self._writer is not None:
            self._writer.close()


class WandbWriter(Writer):
    """Logs to Weights & Biases, to the project ``WANDB_PROJECT`` (default: rlzmq).

    Args:
        directory: Directory of W&B's files.
    """

    _package = "wandb"
    _title = "Weights & Biases"

    def __init__(self, directory: str | Path = "runs") -> None:
        self._library: Any = import_optional(self._package, f"Logging to {self._title}", self._package)
        self._directory = Path(directory)

    def open(self, algorithm: object, settings: dict[str, bool | int | float | str]) -> None:
        """Start a run."""
        project = os.environ.get(f"{self._package.upper()}_PROJECT", _PROJECT)
        self._library.init(project=project, config=settings, **self._place())

    def _place(self) -> dict[str, str]:
        return {"dir": str(self._directory)}

    def write(
        self, algorithm: object, result: Mapping[str, Any], numbers: dict[str, float], step: int
    ) -> None:
        """Log the numbers."""
        self._library.log(numbers, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._library.finish()


class MLflowWriter(Writer):
    """Logs a run to MLflow: to ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME``, if they are set.

    Args:
        directory: The run is named after it.
    """

    def __init__(self, directory: str | Path = "rlzmq") -> None:
        self._mlflow: Any = import_optional("mlflow", "Logging to MLflow", "mlflow")
        self._name = Path(directory).name

    def open(self, algorithm: object, settings: dict[str, bool | int | float | str]) -> None:
        """Start a run."""
        self._run_id = self._mlflow.start_run(run_name=self._name).info.run_id
        self._mlflow.log_params(settings)

    def write(
        self, algorithm: object, result: Mapping[str, Any], numbers: dict[str, float], step: int
    ) -> None:
        """Log the numbers."""
        # MLflow refuses other characters, such as those in agents' ids.
        allowed = {re.sub(r"[^\w./ -]", "_", name): value for name, value in numbers.items()}
        self._mlflow.log_metrics(allowed, step=step, run_id=self._run_id)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


class TrackioWriter(WandbWriter):
    """Logs to trackio, whose interface is W&B's, to the project ``TRACKIO_PROJECT`` (default: rlzmq).

    Args:
        directory: The run is named after it.
    """

    _package = _title = "trackio"

    def _place(self) -> dict[str, str]:
        return {"name": self._directory.name}


WRITERS: dict[str, Callable[[Path], Callback]] = {
    "tb": TensorBoardWriter,
    "wandb": WandbWriter,
    "mlflow": MLflowWriter,
    "trackio": TrackioWriter,
}
"""The writers of ``rlzmq train --log``, by name. Each is called with the run's directory."""


def make_writers(names: str, directory: Path) -> list[Callback]:
    """Return the writers with these names.

    Args:
        names: Names separated by commas, e.g. ``"tb,wandb"``; "" for none.
        directory: The run's directory.

    Raises:
        ConfigurationError: A name is unknown, or a package is not installed.
    """
    chosen = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in WRITERS:
            raise ConfigurationError(f"--log {names}: no writer {name!r}.{did_you_mean(name, WRITERS)}")
    return [WRITERS[name](directory) for name in chosen]


def _lists_in(result: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the lists and arrays of numbers in a result, by path."""
    for name, value in result.items():
        if isinstance(value, Mapping):
            yield from _lists_in(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple | np.ndarray) and len(value):
            numbers = np.asarray(value)
            if numbers.dtype.kind in "iuf" and np.isfinite(numbers).all():
                yield f"{prefix}{name}", numbers


def _weights_of(algorithm: Any, result: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the weights of the trained modules, by path."""
    for module_id in result["learners"]:
        if not module_id.startswith("__"):
            for name, weights in algorithm.get_module(module_id).named_parameters():
                yield f"weights/{module_id}/{name}", weights.detach()
