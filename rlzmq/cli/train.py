"""``rlzmq train``: a run from the command line, with a live view, a run directory and a clean end."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

__all__ = ["TrainOptions", "run"]

_DRAIN_S = 4.0  # Ctrl-C: how long the running iteration may take to end before it is cancelled


@dataclass(kw_only=True)
class TrainOptions:
    """Options that are no settings of the algorithm; each says its unit and default."""

    env: str | None = None
    """Gymnasium id, or 'package.module:Class'."""
    config: Path | None = None
    """TOML file of settings; flags win over it."""
    preset: Literal["auto", "none"] = "auto"
    """Begin with the settings shipped for this algorithm and env, if there are some; config and flags win."""
    stop: list[str] = field(default_factory=list)
    """End when met: return=475, steps=300000, iterations=50, time=60 (s), or a/result/path=number; repeatable."""
    run_dir: Path | None = None
    """Directory for config, metrics and checkpoints (default: runs/<algorithm>-<env>-<time>)."""
    resume: Path | None = None
    """Go on from this checkpoint (or run directory)."""
    quiet: bool = False
    """Print the summary at the end only."""


def run(arguments: Sequence[str]) -> int:
    """The command: `arguments` without ``rlzmq train``; the exit code."""
    from rlzmq.cli.main import EXIT_USAGE

    algorithm = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if not algorithm:
        print("usage: rlzmq train ALGORITHM --env ENV [options]   (rlzmq train ppo --help)", file=sys.stderr)
        return 0 if arguments and arguments[0] in ("-h", "--help") else EXIT_USAGE
    if not {"-h", "--help"} & set(arguments):
        _prestart()
    options, config = _parse(algorithm, list(arguments[1:]))
    return _train(algorithm, options, config)


def _prestart() -> None:
    """Let the fork server import torch while this process still parses its options."""
    try:
        from rlzmq.actors import forkserver
    except ImportError:
        return
    forkserver.prestart()


def _parse(algorithm: str, arguments: list[str]) -> tuple[Any, Any]:
    import tyro

    from rlzmq.algorithms.presets import apply_preset
    from rlzmq.algorithms.registry import get_config_class
    from rlzmq.cli.options import apply_settings, options_type

    config_class = get_config_class(algorithm)
    kind: Any = options_type(config_class, f"Train{config_class.__name__}", TrainOptions)
    marked: Any = Annotated[kind, tyro.conf.UseAppendAction, tyro.conf.FlagCreatePairsOff]
    options = tyro.cli(
        marked, args=arguments, prog=f"rlzmq train {algorithm}", description=f"Train {algorithm}."
    )
    config = config_class()
    given = {} if options.config is None else config_class.from_toml(options.config).given()
    env = options.env if options.env is not None else given.get("env")
    if options.preset == "auto" and apply_preset(config, algorithm, env) and not options.quiet:
        print(f"settings: the preset for {env} (--preset none: the algorithm's defaults)")
    config.update_from_dict(given)
    apply_settings(config, options)
    if options.env is not None:
        config.environment(options.env)
    return options, config


def _train(name: str, options: Any, config: Any) -> int:
    from rlzmq.cli.interrupt import Interrupt
    from rlzmq.cli.main import EXIT_INTERRUPTED, EXIT_RESUMABLE
    from rlzmq.cli.stopping import StopCriteria
    from rlzmq.telemetry.run_directory import RunDirectory
    from rlzmq.telemetry.view import make_view

    criteria = StopCriteria(options.stop)
    config.validate()
    start = time.perf_counter()
    with Interrupt(drain_s=_DRAIN_S) as interrupt:
        algorithm = _build(options, config)
        directory = RunDirectory.create(options.run_dir, name, algorithm.config)
        view = make_view(name, algorithm.config, quiet=options.quiet)
        why, result = "", None
        try:
            with view:
                while not why:
                    result = algorithm.train()
                    directory.log(result)
                    view.show(result)
                    why = criteria.met_by(result) or ("interrupted" if interrupt.is_set else "")
            with interrupt.shielded():
                checkpoint = algorithm.save_to_path(directory.path / "checkpoint")
        finally:
            directory.close()
            with interrupt.shielded():
                algorithm.stop()
    accounting = algorithm._async.session.accounting
    print(f"{why}; {time.perf_counter() - start:.1f} s")
    print(f"accounting: {accounting}")
    print(f"metrics     {directory.path / 'metrics.jsonl'}")
    print(f"evaluate    rlzmq evaluate {checkpoint}")
    print(f"resume      rlzmq train {name} --resume {checkpoint} …")
    if why != "interrupted":
        return 0
    return EXIT_INTERRUPTED if interrupt.signal_number == signal.SIGINT else EXIT_RESUMABLE


def _build(options: Any, config: Any) -> Any:
    algorithm = config.build()
    if options.resume is not None:
        path = options.resume
        nested = path / "checkpoint"
        try:
            algorithm.restore_from_path(nested if nested.is_dir() else path)
        except BaseException:
            algorithm.stop()
            raise
    return algorithm
