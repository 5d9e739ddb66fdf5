"""Tuner: searches for good values of a config, in many trials."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from rlzmq.actors.forkserver import get_fork_server
from rlzmq.actors.loop_thread import get_loop_thread
from rlzmq.algorithms.algorithm import Algorithm
from rlzmq.algorithms.registry import ALGORITHMS, get_config_class
from rlzmq.config.base_config import BaseConfig
from rlzmq.config.search_space import SearchObject, find_search_objects
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.files import make_directories, write_text
from rlzmq.core.run_dir import RunDir
from rlzmq.core.signatures import check_takes
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.trust import Trust, is_signed, signature_of
from rlzmq.telemetry.runs import find_run, value_at
from rlzmq.telemetry.view import LiveView, View
from rlzmq.tune.experiment import Experiment
from rlzmq.tune.result_grid import ResultGrid
from rlzmq.tune.search import config_value, load_optuna
from rlzmq.tune.settings import RunConfig, TuneConfig, settings_from_stored, stored_settings
from rlzmq.tune.study import EndedTrial
from rlzmq.tune.trial import Trial
from rlzmq.tune.trial_api import Trainable, WithResources

__all__ = [
    "CLIReporter",
    "LinesView",
    "TableView",
    "Tuner",
    "register_trainable",
]


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
        max_report_frequency: Has no effect; accepted for compatibility with Ray Tune. A line is printed when a trial
            starts, pauses or ends.
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
        """Return the table of the trials: running trials first, then the newest."""
        counts = Counter(trial.status.lower() for trial in shown)
        caption = ", ".join(f"{number} {status}" for status, number in counts.items())
        table = Table(title=self._title, caption=caption)
        table.add_column("trial")
        table.add_column("status")
        for name in (*self._space, *self._columns.values()):
            table.add_column(name.rpartition("/")[2] if name in self._space else name, justify="right")
        chosen = sorted(shown, key=lambda trial: (trial.status != "RUNNING", -trial.claim.index))[:_MAX_ROWS]
        for trial in sorted(chosen, key=lambda trial: trial.claim.index):
            cells = _cells(trial, self._space, self._columns)
            table.add_row(trial.name, trial.status, *(text for _, text in cells))
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


def _value(trial: Trial, path: str) -> object:
    """Return the trial's config value at a path, or None."""
    try:
        return config_value(trial.config, path)
    except ConfigurationError:
        return None


def _text(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:30]


_FILE = "tuner.json"
_TRAINABLES: dict[str, Any] = {}


def register_trainable(name: str, trainable: object) -> None:
    """Give a trainable a name for `Tuner`.

    Args:
        name: The name.
        trainable: An Algorithm class, a Trainable class or a function.

    Raises:
        ConfigurationError: `trainable` is none of these.
    """
    _parts_of(trainable)
    _TRAINABLES[name] = trainable


class Tuner:
    """A search: many trials of one trainable with different values.

    Each trial runs in its own process, which may start others. As many trials run at a time as this machine has cores
    for. A trial whose process is killed is restarted from its last checkpoint. If the driver is killed, `restore`
    continues the search.

    Args:
        trainable: Name of an algorithm (``"PPO"``), its config class, an Algorithm class, a `Trainable` class, a
            function of the config that calls ``tune.report(…)``, or one of these from `with_resources`.
        param_space: A config, or a dict, with search objects such as ``tune.loguniform(1e-5, 1e-3)`` in it.
        tune_config: How values are chosen, and which trials continue.
        run_config: Where the files are stored, and when trials stop.

    Raises:
        ConfigurationError: Optuna is not installed, or an argument is invalid.

    Example::

        config = PPOConfig().environment("CartPole-v1").training(lr=tune.grid_search([1e-4, 1e-3]))
        tuner = tune.Tuner("PPO", param_space=config, run_config=tune.RunConfig(stop={"training_iteration": 5}))
        print(tuner.fit().get_best_result("env_runners/episode_return_mean", "max").config["lr"])
    """

    def __init__(
        self,
        trainable: object,
        *,
        param_space: BaseConfig | Mapping[str, Any] | None = None,
        tune_config: TuneConfig | None = None,
        run_config: RunConfig | None = None,
    ) -> None:
        load_optuna()
        self._tune_config = tune_config or TuneConfig()
        self._run_config = run_config or RunConfig()
        self._trainable, self._name, config_class, self._resources = _parts_of(trainable)
        if param_space is None and isinstance(trainable, BaseConfig):
            param_space = trainable
        self._param_space = _checked_space(param_space, self._name, config_class)
        name = self._run_config.name or f"{self._name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}"
        self._path = Path(self._run_config.storage_path or Path("runs") / "tune").expanduser() / name
        self._is_restored = False
        self._runs_again: Callable[[EndedTrial], bool] = lambda trial: False
        self._results: ResultGrid | None = None
        self._running: Experiment | None = None

    @property
    def path(self) -> Path:
        """The experiment's directory."""
        return self._path

    @property
    def space(self) -> dict[str, SearchObject]:
        """The search objects by path."""
        return find_search_objects(self._param_space)

    # -- running ----------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Let each trial save a checkpoint after its current iteration, and `fit` return; `restore` continues.

        A signal handler may call this.
        """
        if self._running is not None:
            self._running.interrupt()

    def fit(self) -> ResultGrid:
        """Run all trials and return their results. Errors of trials are collected, not raised.

        Raises:
            ConfigurationError: The experiment exists already, another process runs it or the directory holds a training
                run, the settings are incompatible, or results lack the metric or all metrics that end trials.
        """
        get_fork_server()  # the fork server imports torch while this process opens the study
        return get_loop_thread().run(self.fit_async())

    async def fit_async(self) -> ResultGrid:
        """Run all trials and return their results, like `fit`."""
        is_shared = (
            self._tune_config.storage is not None
        )  # its drivers share the trials, maybe in one directory
        # First, since the lock leaves a directory behind.
        experiment = self._experiment(self._view())
        with contextlib.nullcontext() if is_shared else RunDir(self._path):
            self._check_directory(is_shared)
            make_directories(self._path)
            write_text(self._path / _FILE, json.dumps(self._stored(), indent=1))
            self._is_restored = True
            self._running = experiment
            self._results = await experiment.run(self._runs_again)
        self._runs_again = lambda trial: False
        return self._results

    def _check_directory(self, is_shared: bool) -> None:
        """Raise ConfigurationError if another experiment, or a training run, is in the directory."""
        has_experiment = self.can_restore(self._path)
        if has_experiment and not self._is_restored and not is_shared:
            raise ConfigurationError(
                f"There is an experiment in {self._path}. Continue it (rlzmq tune --resume, or "
                f"tune.Tuner.restore({str(self._path)!r}, trainable)), or choose another name."
            )
        if not has_experiment and (found := find_run(self._path)) is not None:
            raise ConfigurationError(f"{self._path} holds the run of {found}. Choose another name.")

    def get_results(self) -> ResultGrid:
        """Return the results of the trials that have ended.

        Raises:
            ConfigurationError: The search has not been started.
        """
        if self._results is None and not (self._path / _FILE).exists():
            raise ConfigurationError("The search has no results so far: call fit() first.")
        if self._results is not None:
            return self._results
        return get_loop_thread().run(self._experiment(View()).stored_results())

    def _view(self) -> View[Sequence[Trial]]:
        """Return the view for the output: a table on a terminal, lines elsewhere, nothing with ``verbose=0``."""
        if self._run_config.verbose == 0:
            return View()
        columns = (self._run_config.progress_reporter or CLIReporter()).columns(self._tune_config.metric)
        if sys.stdout.isatty():
            return TableView(self._path.name, self.space, columns)
        return LinesView(self.space, columns)

    def _experiment(self, view: View[Sequence[Trial]]) -> Experiment:
        return Experiment(
            self._trainable,
            self._name,
            self._param_space,
            self._tune_config,
            self._run_config,
            self._path,
            self._resources,
            view,
        )

    # -- continuing -------------------------------------------------------------------------------------------

    @classmethod
    def can_restore(cls, path: str | Path) -> bool:
        """Return whether the directory contains an experiment."""
        return (Path(path) / _FILE).is_file()

    @classmethod
    def restore(
        cls,
        path: str | Path,
        trainable: object,
        resume_unfinished: bool = True,
        resume_errored: bool = False,
        restart_errored: bool = False,
        param_space: BaseConfig | Mapping[str, Any] | None = None,
        tune_config: TuneConfig | None = None,
        run_config: RunConfig | None = None,
    ) -> Tuner:
        """Return a Tuner that continues the search in a directory. `fit` runs the remaining trials.

        Args:
            path: The experiment's directory.
            trainable: As for the first Tuner.
            resume_unfinished: Must be True: trials that had not ended continue from their last checkpoint.
            resume_errored: Whether failed trials continue from their last checkpoint.
            restart_errored: Whether failed trials start again from the beginning.
            param_space: As for the first Tuner; needed if it held code without a name, such as lambdas.
            tune_config: As for the first Tuner; needed if it held such code, or objects of your classes.
            run_config: As for the first Tuner; needed if it held these. Its name and storage_path are ignored.

        Raises:
            CheckpointError: There is no experiment, or an argument that held code is missing.
            ConfigurationError: `resume_unfinished` is False.
        """
        folder = Path(path).expanduser()
        if not resume_unfinished:
            raise ConfigurationError(
                "Tuner.restore(resume_unfinished=False) is not supported: use get_results()."
            )
        try:
            stored = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise CheckpointError(f"There is no experiment in {folder}: {error}.") from None
        trust = Trust(is_full=is_signed("experiment", _signed_part(stored), stored.get("signature")))
        given = {"param_space": param_space, "tune_config": tune_config, "run_config": run_config}
        arguments: dict[str, Any] = {}
        for name, value in given.items():
            if value is None and name in stored["left_out"]:
                raise CheckpointError(
                    f"The {name} of {folder} held code, which is not stored: pass {name}=…."
                )
            arguments[name] = settings_from_stored(stored[name], trust) if value is None else value
        tuner = cls(trainable, **arguments)
        tuner._path = folder
        tuner._is_restored = True
        if restart_errored:
            tuner._runs_again = lambda trial: (
                trial.status == "ERROR" and _clear(folder / Path(trial.path).name)
            )
        elif resume_errored:
            tuner._runs_again = lambda trial: trial.status == "ERROR"
        return tuner

    def _stored(self) -> dict[str, Any]:
        """Return the values that `restore` reads, without those that hold code."""
        stored: dict[str, Any] = {"trainable": self._name, "left_out": []}
        for name, value in (
            ("param_space", self._param_space),
            ("tune_config", self._tune_config),
            ("run_config", self._run_config),
        ):
            try:
                stored[name] = stored_settings(value)
            except ConfigurationError:
                stored["left_out"].append(name)
        return {**stored, "signature": signature_of("experiment", _signed_part(stored))}

    def __repr__(self) -> str:
        return f"Tuner({self._name}, {self._path})"


def _parts_of(trainable: object) -> tuple[Any, str, Any, Mapping[str, float] | None]:
    """Return the class or function to run, its name, its config class if it is an algorithm, and its resources."""
    if isinstance(trainable, WithResources):
        return (*_parts_of(trainable.trainable)[:3], trainable.resources)
    if isinstance(trainable, str):
        if trainable in _TRAINABLES:
            target, _, config_class, resources = _parts_of(_TRAINABLES[trainable])
            return target, trainable, config_class, resources
        if trainable.lower() not in ALGORITHMS:
            known = [name.upper() for name in ALGORITHMS] + list(_TRAINABLES)
            raise ConfigurationError(f"Tuner: no trainable {trainable!r}.{did_you_mean(trainable, known)}")
        trainable = get_config_class(trainable)
    if isinstance(trainable, type) and issubclass(trainable, BaseConfig):
        trainable = trainable()
    if isinstance(trainable, BaseConfig):
        return trainable.algo_class, trainable.algo_class.__name__, type(trainable), None
    if isinstance(trainable, type) and issubclass(trainable, Algorithm):
        return trainable, trainable.__name__, type(trainable.get_default_config()), None
    if isinstance(trainable, type) and issubclass(trainable, Trainable):
        return trainable, trainable.__name__, None, None
    if callable(trainable) and not isinstance(trainable, type):
        check_takes(trainable, "Tuner(trainable)", "config")
        return trainable, getattr(trainable, "__name__", "function").strip("<>"), None, None
    raise ConfigurationError(
        f"Tuner({trainable!r}): expected the name of an algorithm, its config, an Algorithm or tune.Trainable class, "
        "or a function of the config."
    )


def _checked_space(param_space: Any, name: str, config_class: Any) -> object:
    """Return the search space as a config for an algorithm, else as a dict."""
    if config_class is None:
        if isinstance(param_space, BaseConfig) or not isinstance(param_space, Mapping | None):
            raise ConfigurationError(f"Tuner({name}, param_space={param_space!r}): expected a dict.")
        return dict(param_space or {})
    if param_space is None:
        param_space = config_class()
    if isinstance(param_space, Mapping):
        param_space = config_class.from_dict(param_space)
    if not isinstance(param_space, config_class):
        raise ConfigurationError(
            f"Tuner({name!r}, param_space={type(param_space).__name__}): expected a {config_class.__name__} or a dict."
        )
    space = param_space.copy(copy_frozen=False)
    if space.env is None and space.observation_space is None:
        raise ConfigurationError(
            f"Tuner({name!r}): param_space has no environment, e.g. .environment('CartPole-v1')."
        )
    return space


def _signed_part(stored: Mapping[str, Any]) -> bytes:
    return json.dumps({**stored, "signature": ""}, sort_keys=True).encode()


def _clear(path: Path) -> bool:
    """Remove a failed trial's results and checkpoints, so that it starts from the beginning; return True."""
    for name in ("result.json", "checkpoints.json"):
        (path / name).unlink(missing_ok=True)
    return True
