"""``rlzmq train`` and ``rlzmq demo``: train an algorithm with a live view, a run directory, and an orderly end."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
import shlex
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from rlzmq.actors.forkserver import get_fork_server
from rlzmq.cli.interrupt import DRAIN_S, Interrupt
from rlzmq.cli.main import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_USAGE
from rlzmq.cli.parsing import command, flag_of, import_first, parse
from rlzmq.cli.servers import check_installed, dashboard_of
from rlzmq.core import faults
from rlzmq.core.checkpoint import read_manifest
from rlzmq.core.errors import CheckpointError, ConfigurationError, Interrupted, printable, short_path
from rlzmq.core.process import open_stack_channel, outlive_readers
from rlzmq.core.run_dir import find_checkpoint, run_of
from rlzmq.core.synonyms import did_you_mean, instead_of_key, renamed
from rlzmq.core.tracebacks import run_error
from rlzmq.telemetry.runs import find_run, results_in, value_at
from rlzmq.telemetry.view import make_view, processes_of
from rlzmq.telemetry.writers import make_writers

if TYPE_CHECKING:
    from rlzmq.algorithms.algorithm_config import AlgorithmConfig
    from rlzmq.core.run_dir import Found
    from rlzmq.telemetry.run_directory import RunDirectory

__all__ = [
    "OFFLINE_PATHS",
    "StopCriteria",
    "TrainOptions",
    "apply_preset",
    "demo",
    "misplaced_algorithm",
    "setting_of_others",
    "train",
]

_LAST_CHECKPOINT_S = 1.0  # to get the state of a run whose update did not end in that time
_STOP_S = 2.0  # after a signal, time for all processes to stop in order before they are killed


# What `--help` shows; `--help-all` shows every setting.
_USUAL = (
    "env", "config", "preset", "stop", "run_dir", "resume", "log", "dashboard", "quiet",
    "env_config", "num_env_runners", "num_envs_per_env_runner", "num_learners", "num_gpus_per_learner",
    "lr", "gamma", "train_batch_size_per_learner", "model_config", "evaluation_interval", "seed",
)  # fmt: skip


@dataclass(kw_only=True)
class TrainOptions:
    """Options that are not settings of the algorithm."""

    env: str | None = None
    """Gymnasium id, or 'package.module:Class' (default: that of --config or of the checkpoint)."""
    config: Path | None = None
    """TOML file of settings; flags override it (default: none)."""
    preset: Annotated[str, tyro.conf.arg(metavar="auto|none|NAME")] = "auto"
    """Start from settings that are known to learn an env; config and flags override them. auto: those for this env, if
    there are any; NAME: these (rlzmq presets lists them), with their env unless --env is given (default: auto)."""
    stop: list[str] = field(default_factory=list)
    """End the run when this is reached: return=475, steps=300000, iterations=50, time=60 (s), or a/result/path=number;
    repeatable (default: never)."""
    run_dir: Path | None = None
    """Directory for config, metrics and checkpoints. One with a run in it needs --resume or --overwrite (default:
    runs/<algorithm>-<env>-<time>)."""
    resume: str | None = None
    """Continue the run in this directory, there; or start a run from this checkpoint. 'auto': continue the run in
    --run-dir (else the newest of this algorithm and env under runs/), or start a new one if it has no
    checkpoint. Without --env and --config the settings are the checkpoint's (default: a new run)."""
    overwrite: bool = False
    """Move a run that is in --run-dir aside, and start a new one there (default: False)."""
    trust: list[str] = field(default_factory=list)
    """Package whose code the settings of somebody else's checkpoint may name; repeatable (default: none)."""
    record: bool = False
    """Record what each update is trained on into RUN_DIR/arrivals, for `rlzmq replay` (default: False)."""
    log: str = ""
    """Also log to these, e.g. 'tb,wandb': tb (TensorBoard, in the run directory), wandb, mlflow, trackio
    (default: none)."""
    dashboard: bool = False
    """Show the run in a browser while it runs; its link is printed (default: False)."""
    quiet: bool = False
    """Print only the summary at the end (default: False)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""
    on: str = "local"
    """Where the run's processes start: local, or the engine that starts them: slurm, k8s, ray, ray://HOST:PORT or
    dask://HOST:PORT (docs/how_to) (default: local)."""
    cluster: Path | None = None
    """TOML file with the roles' resources: [head], [learners], [runners] (default: one head, which starts all)."""
    dry_run: bool = False
    """Print what --on ENGINE would submit (default: False)."""


_SHORT = {
    "return": "env_runners/episode_return_mean",
    "steps": "num_env_steps_sampled_lifetime",
    "iterations": "training_iteration",
    "time": "time_total_s",
}

OFFLINE_PATHS = {
    "env_runners/episode_return_mean": "evaluation/env_runners/episode_return_mean",
    "num_env_steps_sampled_lifetime": "num_env_steps_trained_lifetime",
}
"""Where a run that samples nothing has these."""


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
            path = OFFLINE_PATHS.get(goal_path, goal_path) if is_offline else goal_path
            value = value_at(result, path)
            if isinstance(value, int | float) and value >= goal:
                return f"{path} = {value:.6g} ≥ {goal:g}"
        return None


def train(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq train``; return the exit code."""
    algorithm = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if algorithm and arguments[1:2] and not arguments[1].startswith("-"):  # rlzmq train ppo CartPole-v1
        arguments = [algorithm, "--env", *arguments[1:]]
    asks = bool({"-h", "--help", "--help-all"} & set(arguments))
    if named := misplaced_algorithm("train", algorithm, arguments):
        print(named, file=sys.stderr)
        return EXIT_USAGE
    if not algorithm:
        print(_usage(), file=sys.stdout if asks else sys.stderr)
        return 0 if asks else EXIT_USAGE
    if asks:
        _parse(algorithm, list(arguments[1:]))
    with Interrupt(drain_s=DRAIN_S) as interrupt:  # a job may be stopped during its start
        try:
            outlive_readers(lambda: signal.raise_signal(signal.SIGHUP))
            faults.arm("driver")
            open_stack_channel("driver")
            options = _parse(algorithm, list(arguments[1:]))
            if options.on == "local" and (options.cluster or options.dry_run):
                raise ConfigurationError("--cluster and --dry-run are for --on ENGINE, e.g. --on ssh.")
            options.quiet |= options.dry_run  # it prints a script
            with _taken(algorithm, options) as (directory, config):
                if options.on == "local":
                    get_fork_server()  # the fork server imports torch while this process reads the settings
                    return _train(arguments, options, config, directory, interrupt)
                config.validate()
            return _submit(arguments, options, directory.path)  # the directory is the head's
        except Interrupted:
            print("interrupted", flush=True)
            return interrupt.exit_code or EXIT_INTERRUPTED


def misplaced_algorithm(command: str, first: str, arguments: Sequence[str]) -> str | None:
    """Return what to write instead of ``--algo ppo …`` and of ``train CartPole-v1``; None if all is well.

    Args:
        command: ``"train"`` or ``"tune"``.
        first: What stands where the algorithm should; "" if a flag does.
        arguments: All arguments of the command.
    """
    from rlzmq.algorithms.registry import ALGORITHMS

    words, meant = list(arguments), []
    for flag, value in itertools.pairwise(words):
        if not first and flag in ("--algo", "--algorithm", "--run") and value.lower() in ALGORITHMS:
            at = words.index(flag)
            meant = [value.lower(), *words[:at], *words[at + 2 :]]
    if re.search(r"-v\d+$|\w:\w", first):
        meant = ["ppo", "--env", *words]
    if not meant:
        return None
    return f"rlzmq {command}: the algorithm comes first. Instead: {shlex.join(['rlzmq', command, *meant])}"


def _usage() -> str:
    """Return the usage text with every algorithm and its presets."""
    from rlzmq.algorithms.registry import ALGORITHMS, presets_of

    width = shutil.get_terminal_size().columns
    lines = ["usage: rlzmq train ALGORITHM --env ENV [options]", "", "algorithms:"]
    for name in ALGORITHMS:
        lines.append(f"  {name:<8} {_about(name).partition(' (')[0]}")
        if presets := presets_of(name):
            text = f"presets: {', '.join(presets)}"
            lines += textwrap.wrap(text, width, initial_indent=" " * 11, subsequent_indent=" " * 13)
    lines += ["", "e.g.  rlzmq train ppo --env CartPole-v1", "      rlzmq train ppo --help"]
    return "\n".join(lines)


def _about(algorithm: str) -> str:
    """Return the first line of the docstring of the algorithm's package."""
    from rlzmq.algorithms.registry import ALGORITHMS

    package = importlib.import_module(ALGORITHMS[algorithm.lower()].partition(":")[0])
    return (package.__doc__ or "").partition("\n")[0]


def _parse(algorithm: str, arguments: list[str]) -> Any:
    from rlzmq.algorithms.registry import get_config_class
    from rlzmq.cli.options import options_type

    config_class = get_config_class(algorithm)
    kind: Any = options_type(config_class, f"Train{config_class.__name__}", TrainOptions)
    return parse(
        kind,
        _with_values(arguments, config_class),
        usage=f"rlzmq train {algorithm} --env ENV [options]",
        description=_about(algorithm),
        usual=_USUAL,
        elsewhere=setting_of_others,
    )


def setting_of_others(name: str) -> str | None:
    """Return which algorithms have a setting; None if none has."""
    from rlzmq.algorithms.registry import ALGORITHMS, get_config_class

    for other in ALGORITHMS:
        fields = get_config_class(other)._fields
        if here := next((one for one in (name, f"{name}_", renamed(name, fields)) if one in fields), None):
            having = [other for other in ALGORITHMS if here in get_config_class(other)._fields]
            what = "a setting" if here == name else f"{flag_of(here)}"
            return f"{what} of {', '.join(having)}"
    return None


@contextlib.contextmanager
def _taken(algorithm: str, options: TrainOptions) -> Iterator[tuple[RunDirectory, AlgorithmConfig]]:
    """Take the run's directory, before anything is written or started; yield it, and the run's config."""
    from rlzmq.telemetry.run_directory import RunDirectory, check_continues

    ways = "Name another --run-dir, or start over with --overwrite instead of --resume."
    path, resumes = options.run_dir, options.resume == "auto"
    if options.resume is not None and not resumes:
        path, resumes = _run_of_checkpoint(algorithm, options)
    if resumes and options.overwrite:
        raise ConfigurationError(
            "--overwrite starts a new run, --resume continues the one that is there: give one."
        )

    def take(path: Path) -> RunDirectory:
        more = "Add --resume auto to continue it, name another --run-dir, or --overwrite to move it aside."
        directory = RunDirectory.open(path, resumes=resumes, overwrites=options.overwrite, ways=more)
        if (aside := directory.moved_to) is not None:
            print(f"moved       the run in {path} to {aside}", flush=True)
            stack.callback(lambda: aside.exists() or print(f"moved       {aside} back to {path}", flush=True))
        return directory

    with contextlib.ExitStack() as stack:
        directory = None if path is None else stack.enter_context(take(path))
        if directory is not None and directory.found is not None:
            check_continues(directory.found, algorithm, None, ways)
        import_first(options.import_)
        config = _config(algorithm, options)
        if directory is None:
            newest = RunDirectory.newest_path(algorithm, config) if resumes else None
            fresh = RunDirectory.open_new(algorithm, config) if newest is None else take(newest)
            directory = stack.enter_context(fresh)
        elif directory.found is not None:
            check_continues(directory.found, algorithm, config, ways)
        yield directory, config


def _run_of_checkpoint(algorithm: str, options: TrainOptions) -> tuple[Path | None, bool]:
    """Return the directory for a run that resumes from a place (None: a new one), and whether it continues there."""
    place, given = Path(options.resume or ""), options.run_dir
    run = run_of(place)
    if given is not None:
        return given, run.resolve() == given.resolve()
    found = find_run(run) if place.is_dir() and not (place / "manifest.json").exists() else None
    continues = found is not None and found.algorithm.lower() == algorithm.lower()
    return (run if continues else None), continues


def _config(algorithm: str, options: TrainOptions) -> AlgorithmConfig:
    """Return the config that checkpoint, preset, file and flags describe."""
    from rlzmq.algorithms.registry import get_config_class
    from rlzmq.cli.options import apply_settings

    config_class = get_config_class(algorithm)
    config: AlgorithmConfig = config_class()
    stored = _stored_settings(config_class, options)
    given = stored or ({} if options.config is None else config_class.from_toml(options.config).given())
    env = options.env if options.env is not None else given.get("env")
    if stored is None:  # a checkpoint's settings include those of its preset
        apply_preset(config, algorithm, env, options)
    config.update_from_dict(given)
    apply_settings(config, options)
    if options.env is not None:
        config.environment(options.env)
    return config


def _with_values(arguments: list[str], config_class: type[AlgorithmConfig]) -> list[str]:
    """Return the arguments with a value for flags that may stand alone: ``--resume``, ``--trace``, ``--explore``."""
    alone = {"--resume": "auto", "--trace": "auto"}
    for name, setting in config_class._fields.items():
        if setting.annotation is bool:
            alone["--" + name.replace("_", "-")] = "true"
    given: list[str] = []
    for argument in arguments:
        if given and given[-1] in alone and argument.startswith("-"):
            given.append(alone[given[-1]])
        given.append(argument)
    return [*given, alone[given[-1]]] if given and given[-1] in alone else given


def apply_preset(config: AlgorithmConfig, algorithm: str, env: object, options: Any) -> None:
    """Apply the preset that --preset names, or the one for `env`."""
    from rlzmq.algorithms.registry import find_preset, preset_for

    if options.preset == "none":
        return
    named = options.preset != "auto"
    preset = find_preset(algorithm, options.preset) if named else preset_for(algorithm, env)
    if preset is None:
        if env is not None and not options.quiet:
            print(
                f"settings: {config._algorithm}'s defaults: no preset is for {env} (rlzmq presets {algorithm})"
            )
        return
    preset.apply(config, options.preset if env is None and preset.matches(options.preset) else env)
    if not options.quiet:
        also = "" if named else " (--preset none: the algorithm's defaults)"
        print(f"settings: the preset for {preset.name}{also}")


def _stored_settings(config_class: type[AlgorithmConfig], options: TrainOptions) -> dict[str, Any] | None:
    """Return the settings of the checkpoint to resume from; None if the command line gives the settings."""
    place = options.run_dir if options.resume == "auto" else options.resume
    if place is None or options.env is not None or options.config is not None:
        return None
    from rlzmq.algorithms.checkpoints import read_algorithm
    from rlzmq.algorithms.stored_config import Given

    found = find_checkpoint(place)
    if found.path is None:
        if options.resume != "auto" or found.skipped:
            raise _nothing_to_resume(place, found)
        return None
    saved, own = str(read_manifest(found.path)["about"].get("config")), config_class.__name__
    if saved != own:
        name = saved.removesuffix("Config")
        raise CheckpointError(
            f"{place} holds the settings of {name}, which {own.removesuffix('Config')} does not have: rlzmq train "
            f"{name.lower()} --resume {place} continues it."
        )
    return dict(read_algorithm(found.path).config_to("resume", Given(trust=options.trust)).given())


def _train(
    arguments: Sequence[str],
    options: TrainOptions,
    config: AlgorithmConfig,
    directory: RunDirectory,
    interrupt: Interrupt,
) -> int:
    name, path = arguments[0], directory.path
    criteria = StopCriteria(options.stop)
    if options.dashboard:
        check_installed()
    if config.env is None and config.observation_space is None:
        raise ConfigurationError(
            f"which environment? rlzmq train {name} --env CartPole-v1, or env in the --config file."
        )
    if not options.quiet:  # before torch is imported, which takes seconds
        print(f"starting    {processes_of(config)} for {config.env}", flush=True)
    checkpoint = _checkpoint_to_resume(options, path)
    if checkpoint is not None and (met := _met_before(checkpoint, path, criteria)):
        criterion, iteration = met
        print(f"{criterion}, reached before: nothing is left to train")
        stops = [f"iterations={2 * iteration}"]
        print(_next_commands(name, options, path, checkpoint, stops), flush=True)
        return 0
    if options.record and config.record_dir is None:
        config.debugging(record_dir=str((path / "arrivals").absolute()))
    if config.trace == "auto":
        config.debugging(trace=str((path / "trace.json").absolute()))
    config.validate()
    start = time.perf_counter()
    # Join files hold keys, and environments have processes: only an orderly end removes them.
    if config.listen is not None or config.gym_env_vectorize_mode == "async":
        interrupt.ends_at_once, interrupt.on_first = False, interrupt.raise_now
    writers = make_writers(options.log, path)
    algorithm = _build(config, checkpoint)
    why = ""
    saved: Path | None = None
    error: CheckpointError | None = None
    ended_by: BaseException | None = None
    try:
        directory.begin(algorithm.config, arguments)
        algorithm.keep_checkpoints(directory)
        for writer in writers:
            writer.on_algorithm_init(algorithm=algorithm, metrics_logger=algorithm.metrics)
            algorithm.callbacks.add(writer)
        interrupt.on_first, interrupt.last_words = algorithm.cut_iteration_short, "interrupted\n"
        interrupt.ends_at_once = False
        try:
            page = dashboard_of(path) if options.dashboard else contextlib.nullcontext()
            with page, make_view(name, algorithm.config, quiet=options.quiet) as view:
                while not why:
                    result = algorithm.train()
                    directory.log(result)
                    view.show(result)
                    why = criteria.met_by(result) or ("interrupted" if interrupt.is_set else "")
            if algorithm.iteration:
                with interrupt.shielded():
                    saved = algorithm.save_checkpoint()
        except CheckpointError as failure:
            error = failure
        except BaseException as failure:
            if interrupt.is_set:
                with contextlib.suppress(Exception), interrupt.shielded():
                    saved = algorithm.save_interrupted(_LAST_CHECKPOINT_S)
                lost = "what was trained since the last checkpoint" if saved is None else "its data"
                why = f"interrupted before the current update was complete: {lost} is lost"
                if not isinstance(failure, Interrupted):  # the signal may have ended processes of the user's
                    why += f"; then {type(failure).__name__}: {printable(str(failure))}"
                    directory.events.add_error(run_error(failure))
            else:  # without a signal, user code raised it
                ended_by, why = run_error(failure), "ended by an error, see below"
                directory.events.add_error(ended_by)
    finally:
        ended = why or "interrupted"
        if interrupt.is_set:
            interrupt.last_words = f"{ended}\n{_next_commands(name, options, path, saved, options.stop)}\n"
        with interrupt.shielded(_STOP_S):
            algorithm.stop()
    print(f"{why}; {time.perf_counter() - start:.1f} s")
    print(f"accounting: {algorithm.accounting}")
    is_met = " ≥ " in why and ended_by is None
    stops = [f"iterations={2 * algorithm.iteration}"] if is_met else options.stop  # a resumed run ends
    print(_next_commands(name, options, path, saved, stops), flush=True)
    if ended_by is not None:
        raise ended_by
    if error is not None:
        print(f"rlzmq: {error}", file=sys.stderr)
    if why.startswith("interrupted"):
        return interrupt.exit_code
    return 0 if error is None else EXIT_INTERNAL


def _submit(arguments: Sequence[str], options: TrainOptions, path: Path) -> int:
    """Hand the run's roles to an engine; return the exit code."""
    from rlzmq.algorithms.registry import get_config_class
    from rlzmq.launch.engine import Jobs, engine_of, start

    if options.overwrite or options.resume not in (None, "auto"):
        raise ConfigurationError(
            f"a role that is started again repeats its command: --on {options.on} needs a new --run-dir or --resume "
            "auto, without --overwrite."
        )
    own = ("--on", "--cluster", "--dry-run", "--run-dir", "--resume")
    train: list[str] = []
    words = iter(_with_values(list(arguments), get_config_class(arguments[0])))
    for word in words:
        if word.partition("=")[0] not in own:
            train.append(word)
        elif word in own and word != "--dry-run":
            next(words)
    jobs = Jobs.of(options.on, train, options.cluster, path)
    if options.dry_run:
        print(engine_of(jobs).dry_run())
        return 0
    start(jobs, path, lambda line: print(line, flush=True))
    run = shlex.quote(str(path))
    print(f"logs        rlzmq launch logs {run} --follow")
    if "runners" in jobs.roles:
        print(f"scale       rlzmq scale {run} --env-runners N")
    print(f"stop        rlzmq launch stop {run}")
    return 0


def _next_commands(
    name: str, options: TrainOptions, path: Path, saved: Path | None, stops: Sequence[str]
) -> str:
    """Return the lines that say how to look at a run and go on."""
    lines = [
        f"metrics     {path / 'metrics.jsonl'}",
        f"watch       rlzmq dashboard {shlex.quote(str(path))}",
    ]
    saved = saved or find_checkpoint(path).path
    if saved is not None:
        imports = "".join(f" --import {shlex.quote(module)}" for module in options.import_)
        until = "".join(f" --stop {shlex.quote(stop)}" for stop in stops)
        lines.append(f"evaluate    rlzmq evaluate {shlex.quote(short_path(saved))}{imports}")
        lines.append(f"resume      rlzmq train {name} --resume {shlex.quote(str(path))}{imports}{until}")
    return "\n".join(lines)


def _checkpoint_to_resume(options: TrainOptions, path: Path) -> Path | None:
    """Return the checkpoint to resume from; None for a new run."""
    if options.resume is None:
        return None
    is_auto = options.resume == "auto"
    place = path if is_auto else options.resume
    found = find_checkpoint(place)
    if found.path is not None or is_auto:
        for skipped, reason in found.skipped:
            print(f"skipped     {skipped}: {printable(reason)}", flush=True)
    if found.path is not None:
        print(f"resumed     {short_path(found.path)}", flush=True)
    elif not is_auto:
        raise _nothing_to_resume(place, found)
    elif found.skipped:
        raise CheckpointError(
            f"{place}: none of its checkpoints can be used. Name another --run-dir, or start over with --overwrite "
            "instead of --resume."
        )
    elif not options.quiet:
        print(f"nothing to resume: starting a new run in {path}", flush=True)
    return found.path


def _met_before(checkpoint: Path, path: Path, criteria: StopCriteria) -> tuple[str, int] | None:
    """Return the criterion that the run in `path` met at this checkpoint of its own, and the iteration; or None."""
    if path.resolve() not in checkpoint.resolve().parents:
        return None
    iteration = read_manifest(checkpoint)["about"].get("iteration")
    results = results_in(path / "metrics.jsonl")
    met = [criteria.met_by(result) for result in results if result["training_iteration"] == iteration]
    return (met[-1], iteration) if met and met[-1] else None


def _nothing_to_resume(place: str | Path, found: Found) -> CheckpointError:
    skipped = "".join(f"\n  {path}: {printable(reason)}" for path, reason in found.skipped)
    return CheckpointError(
        f"{place} is neither a complete checkpoint nor a run directory that holds one. With --resume auto "
        f"and --env or --config a new run starts if there is none.{skipped}"
    )


def _build(config: AlgorithmConfig, checkpoint: Path | None) -> Any:
    from rlzmq.algorithms.checkpoints import with_stored_seed

    algorithm = (config if checkpoint is None else with_stored_seed(config, checkpoint)).build()
    if checkpoint is not None:
        try:
            algorithm.restore_from_path(checkpoint)
        except BaseException as error:
            algorithm.stop()
            if isinstance(error, ValueError):
                own, saved = type(algorithm).__name__, read_manifest(checkpoint)["about"].get("algorithm")
                if saved != own:
                    raise CheckpointError(f"{own} cannot resume {checkpoint}, of {saved}: {error}") from error
            raise
    return algorithm


@dataclass
class DemoOptions:
    """Options of ``rlzmq demo``."""

    env_runners: int = 2
    """Number of processes that sample (default: 2)."""
    learners: int = 2
    """Number of processes that train (default: 2)."""


@command(
    DemoOptions,
    usage="rlzmq demo [options]",
    description="Train CartPole-v1 until the mean return is 450, for at most 300,000 env steps.",
)
def demo(options: DemoOptions) -> int:
    processes = ["--env-runners", str(options.env_runners), "--learners", str(options.learners)]
    words = ["ppo", "--env", "CartPole-v1", *processes, "--seed", "1"]
    words += ["--stop", "return=450", "--stop", "steps=300000"]
    print(f"$ rlzmq train {' '.join(words)}", flush=True)
    return train(words)
