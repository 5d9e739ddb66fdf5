"""``rlzmq tune``: search for good settings, given as flags (``--lr 1e-4..1e-2:log``) or in a TOML file."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from rlzmq.algorithms.registry import ALGORITHMS, get_config_class, preset_for
from rlzmq.cli.interrupt import DRAIN_S, Interrupt
from rlzmq.cli.main import EXIT_INTERNAL, EXIT_USAGE
from rlzmq.cli.options import apply_settings, options_type
from rlzmq.cli.parsing import import_first, parse
from rlzmq.cli.servers import check_installed, dashboard_of
from rlzmq.cli.train import OFFLINE_PATHS, StopCriteria, apply_preset, misplaced_algorithm, setting_of_others
from rlzmq.config.base_config import BaseConfig
from rlzmq.config.search_space import GridSearch, find_search_objects, search_objects_in_tables
from rlzmq.config.values import read_toml
from rlzmq.core.errors import ConfigurationError, Interrupted, RlzmqError, short_path
from rlzmq.core.process import outlive_readers
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.trust import CALLER, find_code
from rlzmq.telemetry.runs import RETURN_MEAN, number_at

if TYPE_CHECKING:
    from rlzmq.tune.result_grid import ResultGrid
    from rlzmq.tune.tuner import Tuner

__all__ = ["TuneOptions", "tune"]

_TABLES = ("trainable", "param_space", "tune", "stop", "checkpoint", "failure")


_TRIALS = 10  # of a range that was given as a flag
_STEPS = 100_000  # of a trial without a preset
# What `rlzmq tune ppo --help` shows; `--help-all` shows every setting.
_USUAL = (
    "env", "trials", "stop", "name", "resume", "preset", "dashboard", "num_env_runners", "num_envs_per_env_runner",
    "lr", "gamma", "train_batch_size_per_learner", "model_config", "seed",
)  # fmt: skip


@dataclass(kw_only=True)
class TuneOptions:
    """Options of both forms of ``rlzmq tune``."""

    trials: int | None = None
    """Number of trials for each grid point (default: num_samples in the file's tune table, else 1; 10 if a range is
    given as a flag)."""
    max_concurrent_trials: int | None = None
    """Most trials at the same time (default: as many as this machine has cores for)."""
    metric: str | None = None
    """Path of the metric in a result (default: metric in the file's tune table, else
    env_runners/episode_return_mean, of algorithms that learn from files that of evaluations)."""
    mode: Literal["max", "min"] | None = None
    """Whether the metric is to be large or small (default: mode in the file's tune table, else max)."""
    stop: list[str] = field(default_factory=list)
    """End a trial when this is reached: return=475, steps=300000, iterations=50, time=60 (s), or a/result/path=number;
    repeatable (default: the file's stop table; with flags the steps of the env's preset, else steps=100000)."""
    time_budget: float | None = None
    """End the search after this many seconds (default: no limit)."""
    storage: str | None = None
    """URL of an Optuna storage, which several machines may share, e.g. postgresql://HOST/DATABASE (default: SQLite in
    the experiment's directory)."""
    dir: Path = Path("runs/tune")
    """Directory of the experiments (default: runs/tune)."""
    name: str | None = None
    """Name of the experiment and its directory (default: the algorithm's name with date and time)."""
    resume: bool = False
    """Continue the experiment of this --name, or start it if there is none (default: False)."""
    preset: Annotated[str, tyro.conf.arg(metavar="auto|none|NAME")] = "auto"
    """Settings to start from, which the file overrides. auto: those shipped for this algorithm and env, if there are
    any; NAME: these (rlzmq presets lists them) (default: auto)."""
    log: str = ""
    """Writers of each trial's results, in its directory: tb, wandb, mlflow, trackio, separated by commas
    (default: none)."""
    dashboard: bool = False
    """Show the search in a browser while it runs; its link is printed (default: False)."""
    quiet: bool = False
    """Print only the summary at the end (default: False)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""


@dataclass(kw_only=True)
class _FileOptions(TuneOptions):
    space: tyro.conf.Positional[Path]
    """TOML file: trainable, settings with search objects, and tables for tune, stop, checkpoint and failure."""


@dataclass(kw_only=True)
class AlgorithmOptions(TuneOptions):
    env: str | None = None
    """Gymnasium id, or 'package.module:Class' (default: that of --preset)."""


def tune(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq tune``; return the exit code."""
    first = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if meant := misplaced_algorithm("tune", first, arguments):
        print(meant, file=sys.stderr)
        return EXIT_USAGE
    algorithm = first.lower() if first.lower() in ALGORITHMS else None
    if first and algorithm is None and not Path(first).suffix and not Path(first).exists():  # no file
        get_config_class(first)
    kind: type = _FileOptions
    if algorithm is not None:
        config_class = get_config_class(algorithm)
        kind = options_type(config_class, f"Tune{config_class.__name__}", AlgorithmOptions)
    options: Any = parse(
        kind,
        arguments if algorithm is None else arguments[1:],
        usage=f"rlzmq tune {algorithm} --env ENV --lr 1e-4..1e-2:log [options]"
        if algorithm
        else "rlzmq tune SPACE.toml [options]",
        description="Search for good settings: run trials of a training with different values, in parallel processes. "
        "A setting's value may be a range (0.9..0.99, 1e-4..1e-2:log) or a list (32,64), after the name of an "
        "algorithm (rlzmq tune ppo --help); or it stands in a TOML file.",
        usual=_USUAL if algorithm else None,
        elsewhere=setting_of_others,
    )
    if options.dashboard:
        check_installed()
    import_first(options.import_)
    tuner = _tuner(algorithm, options)
    named = [] if options.name else ["--name", tuner.path.name]
    again = shlex.join(["rlzmq", "tune", *arguments, *named, *([] if options.resume else ["--resume"])])
    page = dashboard_of(tuner.path) if options.dashboard else contextlib.nullcontext()
    outlive_readers(lambda: signal.raise_signal(signal.SIGHUP))
    with Interrupt(drain_s=DRAIN_S) as interrupt:
        interrupt.ends_at_once, interrupt.on_first = False, tuner.interrupt
        try:
            with page:
                results = tuner.fit()
        except Interrupted:
            pass
        if interrupt.is_set:
            print(f"interrupted\nresume      {again}", flush=True)
            return interrupt.exit_code
    return _print_summary(results, tuner, options)


def _tuner(algorithm: str | None, options: Any) -> Tuner:
    """Return the Tuner that the flags or the file describe."""
    from rlzmq.tune import CheckpointConfig, FailureConfig, RunConfig, Tuner

    if algorithm is None:
        tables = search_objects_in_tables(read_toml(options.space))
        trainable, param_space = _trainable(tables, options)
    else:
        trainable, param_space, tables = _searched_flags(algorithm, options)
    stop = StopCriteria(options.stop).goals or tables.get("stop")
    config = param_space if isinstance(param_space, BaseConfig) else None
    samples = config is None or type(config)().is_online
    if stop and not samples:
        stop = {OFFLINE_PATHS.get(path, path): number for path, number in stop.items()}
    run_config = RunConfig(
        name=options.name,
        storage_path=options.dir,
        stop=stop,
        checkpoint_config=_made(CheckpointConfig, "checkpoint", tables),
        failure_config=_made(FailureConfig, "failure", tables),
        verbose=0 if options.quiet else None,
        log=options.log,
    )
    tune_config = _tune_config(tables.get("tune", {}), options, samples=samples)
    evaluates = config is None or config.evaluation_interval or config.offline_evaluation_interval
    if tune_config.metric.startswith("evaluation/") and not evaluates:
        raise ConfigurationError(
            f"Trials are compared by {tune_config.metric}, but nothing is evaluated. Set evaluation_interval "
            "(--evaluation-interval 1), or name another --metric."
        )
    path = options.dir / str(options.name)
    if options.resume and options.name is None:
        raise ConfigurationError("--resume needs the --name of the experiment.")
    if options.resume and Tuner.can_restore(path):
        return Tuner.restore(
            path, trainable, param_space=param_space, tune_config=tune_config, run_config=run_config
        )
    return Tuner(trainable, param_space=param_space, tune_config=tune_config, run_config=run_config)


def _searched_flags(algorithm: str, options: Any) -> tuple[str, Any, dict[str, Any]]:
    """Return the trainable, the config with the search objects that flags give, and what else the search needs."""
    config = get_config_class(algorithm)()
    apply_preset(config, algorithm, options.env, options)
    apply_settings(config, options)
    if options.env is not None:
        config.environment(options.env)
    searched = find_search_objects(config)
    if not searched:
        raise ConfigurationError(
            "which settings are to be searched? Give a range or a list: --lr 1e-4..1e-2:log, --num-epochs 4,10."
        )
    preset = preset_for(algorithm, config.env)
    num_steps = _STEPS if preset is None or preset.budget is None else preset.budget
    num_samples = 1 if all(isinstance(each, GridSearch) for each in searched.values()) else _TRIALS
    return (
        config._algorithm,
        config,
        {"stop": StopCriteria([f"steps={num_steps}"]).goals, "tune": {"num_samples": num_samples}},
    )


def _trainable(tables: Mapping[str, Any], options: _FileOptions) -> tuple[Any, Any]:
    """Return the trainable and its search space."""
    named = tables.get("trainable")
    if not isinstance(named, str):
        raise ConfigurationError(f'{options.space}: which trainable? Begin with e.g. trainable = "PPO".')
    rest = {key: value for key, value in tables.items() if key not in _TABLES}
    if ":" in named:
        if rest:
            key = next(iter(rest))
            raise ConfigurationError(f"{options.space} has no table {key!r}.{did_you_mean(key, _TABLES)}")
        return find_code(named, CALLER), tables.get("param_space", {})
    config_class = get_config_class(named)
    given = config_class().update_from_tables(rest).given()
    config = config_class()
    apply_preset(config, named.lower(), given.get("env"), options)
    return named, config.update_from_dict(given)


def _tune_config(table: Mapping[str, Any], options: TuneOptions, *, samples: bool) -> Any:
    from rlzmq.tune.schedulers import create_scheduler
    from rlzmq.tune.search import create_searcher
    from rlzmq.tune.settings import TuneConfig

    given = dict(table)
    for name, create in (("scheduler", create_scheduler), ("search_alg", create_searcher)):
        if isinstance(given.get(name), str):
            given[name] = create(given[name])
        elif isinstance(given.get(name), Mapping):
            settings = dict(given[name])
            given[name] = create(settings.pop("name", ""), **settings)
    chosen = {
        "num_samples": options.trials,
        "max_concurrent_trials": options.max_concurrent_trials,
        "metric": options.metric,
        "mode": options.mode,
        "time_budget_s": options.time_budget,
        "storage": options.storage,
    }
    defaults = {"metric": RETURN_MEAN if samples else OFFLINE_PATHS[RETURN_MEAN], "mode": "max"}
    given = {**defaults, **given, **{name: value for name, value in chosen.items() if value is not None}}
    return _made(TuneConfig, "tune", {"tune": given})


def _made(kind: type, name: str, tables: Mapping[str, Any]) -> Any:
    try:
        return kind(**tables.get(name, {}))
    except TypeError as error:
        raise ConfigurationError(f"table [{name}]: {str(error).partition(') ')[2] or error}.") from None


def _print_summary(results: ResultGrid, tuner: Tuner, options: TuneOptions) -> int:
    """Print the best trial and the commands to continue with; return the exit code."""
    from rlzmq.tune.search import config_value

    print(f"{results.num_terminated} trials ended, {results.num_errors} failed; {tuner.path}")
    if not results.num_terminated:
        print(f"first error {results.errors[0]}" if results.errors else "no trial has ended")
        return EXIT_INTERNAL
    try:
        best = results.get_best_result()
    except RlzmqError as error:  # no trial has the metric
        raise ConfigurationError(str(error)) from None
    value = number_at(best.metrics, str(results.metric))
    print(f"best        {results.metric} = {value:.6g} in {short_path(best.path)}")
    for path in tuner.space:
        try:
            print(f"            {path} = {config_value(best.config, path)}")
        except ConfigurationError:  # an argument of a function
            continue
    imports = "".join(f" --import {shlex.quote(module)}" for module in options.import_)
    config = Path(best.path) / "config.toml"
    if config.is_file():
        name = Path(best.path).name.rpartition("_")[0].lower()
        print(
            f"train       rlzmq train {name} --config {shlex.quote(short_path(config))} --preset none{imports}"
        )
        if best.checkpoint is not None:
            print(f"evaluate    rlzmq evaluate {shlex.quote(short_path(best.checkpoint.path))}{imports}")
    return 0
