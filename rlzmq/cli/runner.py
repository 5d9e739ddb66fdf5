"""``rlzmq runner``: env runners that join a run, from any terminal or machine, at any time."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlzmq.actors.system import ActorSystem
from rlzmq.cli.joining import exit_code_of, on_signals, read_join_file, run_async, the_runs_config
from rlzmq.cli.parsing import parse
from rlzmq.core.errors import ConfigurationError

if TYPE_CHECKING:
    from rlzmq.algorithms.algorithm_config import AlgorithmConfig
    from rlzmq.net.keys import JoinFile

__all__ = ["RunnerOptions", "run"]


@dataclass
class RunnerOptions:
    """Options of ``rlzmq runner``."""

    join: Path
    """The join file that the run wrote, mode 0600; -: standard input."""
    env_runners: int = 1
    """Env runners, each in a process that is replaced when it dies; together they need far less memory (default: 1)."""
    envs_per_env_runner: int | None = None
    """Environments of each (default: the run's num_envs_per_env_runner)."""
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
    if options.env_runners < 1:
        raise ConfigurationError(f"--env-runners must be at least 1, got {options.env_runners}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.env_runners > 1:
        from rlzmq.actors import forkserver

        forkserver.prestart()  # it imports torch while this process fetches the config
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
    run_id, config, digest = await the_runs_config(join, options.import_, timeout_s=timeout_s)
    if options.envs_per_env_runner is not None:
        config.env_runners(num_envs_per_env_runner=options.envs_per_env_runner)
    config.freeze()
    settings: dict[str, Any] = {"patience_s": options.patience, "config_digest": digest}
    at = f"{join.addresses['data']}: {config.num_envs_per_env_runner} × {config.env}"

    def joined(name: str) -> None:
        _say(options, f"{name} joined {at}")

    runners: Any
    if options.env_runners > 1:
        runners = _Runners(options.env_runners, config, (join, run_id, config), settings, joined)
    else:
        from rlzmq.roles.runner_role import RemoteRunner

        runners = RemoteRunner(join, run_id, config, **settings)
    leaving: list[asyncio.Task[None]] = []

    def leave(number: int) -> None:
        signals.append(number)
        _say(options, "leaving: the current fragment is sent first; again to leave at once")
        leaving.append(asyncio.create_task(runners.leave()))

    start = time.monotonic()
    try:
        if (name := await runners.start()) is not None:
            joined(name)
        with on_signals(leave):
            reason, detail = await runners.wait()
        _say(options, f"{reason}: {runners.num_env_steps} env steps in {time.monotonic() - start:.1f} s")
    finally:
        await runners.stop()
    return reason, detail


class _Runners:
    """Several env runners, forked from one server and replaced when they die or hang; they end as one.

    Args:
        count: How many.
        config: The run's config, whose fault-tolerance settings hold here, too.
        arguments, settings: Those of `RemoteRunner`.
        joined: Called with the name of each runner that has joined.
    """

    def __init__(
        self,
        count: int,
        config: AlgorithmConfig,
        arguments: tuple[Any, ...],
        settings: dict[str, Any],
        joined: Callable[[str], None],
    ) -> None:
        from rlzmq.driver.runner_supervision import RunnerSupervisor

        self._count = count
        self._arguments, self._settings, self._joined = arguments, settings, joined
        self._system = ActorSystem()
        self._handles: list[Any] = []
        self._supervisor = RunnerSupervisor(config, self._spawn, self._handles)
        self._places: list[asyncio.Task[tuple[str, str]]] = []
        self._num_env_steps: dict[Any, int] = {}
        self._is_leaving = False

    @property
    def num_env_steps(self) -> int:
        """Env steps that these runners have sampled, and those that they replaced."""
        return sum(self._num_env_steps.values())

    async def start(self) -> None:
        """Start the processes, which join by themselves."""
        await self._supervisor.start(self._count)
        self._places = [asyncio.create_task(self._serve(index)) for index in range(self._count)]

    async def _spawn(self, index: int, supervision: Any) -> Any:
        return await self._system.spawn(
            "rlzmq.roles.runner_role:RemoteRunner",
            *self._arguments,
            name=f"runner-{index}",
            patience=supervision.patience,
            **self._settings,
        )

    async def _serve(self, index: int) -> tuple[str, str]:
        """Let a place's runner, and those that replace it, sample until the end of one of them."""

        async def work(handle: Any) -> tuple[str, str] | None:
            if handle not in self._num_env_steps:
                if self._is_leaving:
                    return "left", "before it was replaced"
                name = await handle.start()
                self._num_env_steps[handle] = 0
                self._joined(name)
            if self._is_leaving:
                await handle.leave()
            self._num_env_steps[handle], end = await handle.work()
            return None if end is None else (end[0], end[1])

        while True:
            end: tuple[str, str] | None = await self._supervisor.call(index, work)
            if end is not None:
                return end

    async def wait(self) -> tuple[str, str]:
        """Return the (reason, detail) of the first runner that ends; of the last one after `leave`."""
        await asyncio.wait(self._places, return_when=asyncio.FIRST_COMPLETED)
        if self._is_leaving:
            await asyncio.wait(self._places)
        return next(place.result() for place in self._places if place.done())

    async def leave(self) -> None:
        """Let all runners send their current fragments, and leave."""
        self._is_leaving = True
        await asyncio.gather(*(handle.leave() for handle in self._handles), return_exceptions=True)

    async def stop(self) -> None:
        """End all processes."""
        for place in self._places:
            place.cancel()
        await asyncio.gather(*self._places, return_exceptions=True)
        await self._supervisor.stop()
        await self._system.stop()


def _say(options: RunnerOptions, text: str) -> None:
    if not options.quiet:
        print(text, flush=True)
