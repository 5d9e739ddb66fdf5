"""``rlzmq runner``: an env runner that joins a run, from any terminal or machine, at any time."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlzmq.cli.joining import exit_code_of, on_signals, read_join_file, run_async, the_runs_config
from rlzmq.cli.parsing import parse

if TYPE_CHECKING:
    from rlzmq.net.join_file import JoinFile

__all__ = ["RunnerOptions", "run"]


@dataclass
class RunnerOptions:
    """Options of ``rlzmq runner``."""

    join: Path
    """The join file that the run wrote, mode 0600; -: standard input."""
    envs: int | None = None
    """Environments in this process (default: the run's num_envs_per_env_runner)."""
    timeout: float = 30.0
    """Seconds to wait for the broker at the start (default: 30)."""
    patience: float = 120.0
    """Seconds without a message from the broker until this runner gives up (default: 120)."""
    import_: list[str] = field(default_factory=list)
    """Module to import first, e.g. one that registers envs; repeatable (default: none)."""
    quiet: bool = False
    """Print only errors (default: False)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq runner``; return the exit code."""
    options = parse(
        RunnerOptions,
        arguments,
        usage="rlzmq runner --join FILE [options]",
        description="Sample for a run that listens.",
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return run_async(_main(options))


async def _main(options: RunnerOptions) -> int:
    join = read_join_file(options.join, "runner")
    signals: list[int] = []
    reason, detail = await _sample(join, options, signals, timeout_s=options.timeout)
    while reason == "run_id" and not signals:  # the driver was started again
        _say(options, "the run was started again: joining it")
        reason, detail = await _sample(join, options, signals, timeout_s=options.patience)
    return exit_code_of(reason, detail, signals[0] if signals else 0)


async def _sample(
    join: JoinFile, options: RunnerOptions, signals: list[int], *, timeout_s: float
) -> tuple[str, str]:
    """Join the run that is at these addresses, and sample until its end; return (reason, detail)."""
    from rlzmq.roles.runner.remote_runner import RemoteRunner

    run_id, config, digest = await the_runs_config(join, options.import_, timeout_s=timeout_s)
    if options.envs is not None:
        config.env_runners(num_envs_per_env_runner=options.envs)
    config.freeze()
    runner = RemoteRunner(join, run_id, config, patience_s=options.patience, config_digest=digest)

    def leave(number: int) -> None:
        signals.append(number)
        _say(options, "leaving: the current fragment is sent first; again to leave at once")
        runner.leave()

    start = time.monotonic()
    try:
        await runner.start()
        at = join.addresses["data"]
        _say(options, f"{runner.name} joined {at}: {config.num_envs_per_env_runner} × {config.env}")
        with on_signals(leave):
            reason, detail = await runner.wait()
        _say(options, f"{reason}: {runner.num_env_steps} env steps in {time.monotonic() - start:.1f} s")
    finally:
        await runner.close()
    return reason, detail


def _say(options: RunnerOptions, text: str) -> None:
    if not options.quiet:
        print(text, flush=True)
