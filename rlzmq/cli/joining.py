"""``rlzmq runner`` and ``rlzmq learner``: peers that join a run, from any machine."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlzmq.actors.forkserver import get_fork_server
from rlzmq.actors.loop_thread import new_event_loop
from rlzmq.actors.system import ActorSystem
from rlzmq.cli.interrupt import exit_code_of_signal, on_signals
from rlzmq.cli.main import EXIT_UNREACHABLE
from rlzmq.cli.parsing import command, import_first
from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.core.trust import CALLER, find_code
from rlzmq.net.keys import JoinFile
from rlzmq.roles.remote_peer import fetch_config

if TYPE_CHECKING:
    from rlzmq.algorithms.algorithm_config import AlgorithmConfig

__all__ = ["learner", "make_config", "ranks_here", "runner"]


def read_join_file(path: Path, role: str) -> Any:
    """Read a join file and check that it is for this role.

    Raises:
        ConfigurationError: The file is missing, readable by others, malformed, or for another role.
    """
    join = JoinFile.read(path)
    if join.role != role:
        raise ConfigurationError(f"{path} lets a {join.role} in, not a {role}")
    for name in ("data", "control") if role == "learner" else ("data", "weights"):
        if name not in join.addresses:
            raise ConfigurationError(f"{path}: addresses.{name} is missing")
    return join


def make_config(packed: object) -> AlgorithmConfig:
    """Build the config from a frame of `driver.join_files.pack_config`.

    Raises:
        ConfigurationError: The config names code that is not installed here.
    """
    from rlzmq.algorithms.algorithm_config import AlgorithmConfig
    from rlzmq.driver.join_files import unpack_config

    name, settings = unpack_config(packed)
    config_class = find_code(name, CALLER)
    if not (isinstance(config_class, type) and issubclass(config_class, AlgorithmConfig)):
        raise ConfigurationError(f"the run's config class {name!r} is not an AlgorithmConfig")
    return config_class.from_state(settings, trust=CALLER)  # whoever joins a run trusts it


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


@command(
    RunnerOptions,
    usage="rlzmq runner --join FILE [options]",
    description="Sample for a run that listens.",
)
def runner(options: RunnerOptions) -> int:
    if options.env_runners < 1:
        raise ConfigurationError(f"--env-runners must be at least 1, got {options.env_runners}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.env_runners > 1:
        get_fork_server()  # it imports torch while this process fetches the config
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run_runners(options))


async def _run_runners(options: RunnerOptions) -> int:
    join = read_join_file(options.join, "runner")
    signals: list[int] = []
    reason, detail = await _sample(join, options, signals, timeout_s=options.timeout)
    while reason == "run_id" and not signals:  # the driver was started again
        _say(options, "the run was started again: joining it")
        reason, detail = await _sample(join, options, signals, timeout_s=options.patience)
    if signals:
        return exit_code_of_signal(signals[0])
    if reason == "goodbye":
        return 0
    print(f"rlzmq: the broker refuses this peer: {reason}, {detail}", file=sys.stderr)
    return EXIT_UNREACHABLE


async def _sample(
    join: JoinFile, options: RunnerOptions, signals: list[int], *, timeout_s: float
) -> tuple[str, str]:
    """Join the run that is at these addresses, and sample until its end; return (reason, detail)."""
    import_first(options.import_)
    run_id, packed = await fetch_config(join, timeout_s=timeout_s)
    config = make_config(packed)
    if options.envs_per_env_runner is not None:
        config.env_runners(num_envs_per_env_runner=options.envs_per_env_runner)
    config.freeze()
    settings: dict[str, Any] = {"patience_s": options.patience}
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
        with on_signals(asyncio.get_running_loop(), leave):
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
        from rlzmq.driver.supervision import env_runner_supervisor

        self._count = count
        self._arguments, self._settings, self._joined = arguments, settings, joined
        self._system = ActorSystem()
        self._supervisor = env_runner_supervisor(config, self._spawn)
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

    async def _spawn(self, place: Any) -> object:
        return await self._system.spawn(
            "rlzmq.roles.runner_role:RemoteRunner",
            *self._arguments,
            name=f"runner-{place.index}",
            patience=place.patience,
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
        await asyncio.gather(*(handle.leave() for handle in self._supervisor.handles), return_exceptions=True)

    async def stop(self) -> None:
        """End all processes."""
        for place in self._places:
            place.cancel()
        await asyncio.gather(*self._places, return_exceptions=True)
        await self._supervisor.end()
        await self._system.stop()


def _say(options: RunnerOptions, text: str) -> None:
    if not options.quiet:
        print(text, flush=True)


# A signal may have been sent to all processes of the run: without learners its driver has no last checkpoint to write.
_LEAVE_S, _LEAVE_AFTER_CTRL_C_S = 8.0, 3.0

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")
_LOCAL = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def ranks_here(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return this process's rank in a scheduler's job, and on this machine (its GPU); -1: the scheduler sets none.

    MASTER_ADDR and MASTER_PORT are not needed: learners use the driver's store.

    Raises:
        ConfigurationError: A variable is not a number.
    """
    return _first(environment, _RANK), _first(environment, _LOCAL)


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> int:
    for name in names:
        if name in env:
            try:
                return int(env[name])
            except ValueError:
                raise ConfigurationError(f"{name}={env[name]!r} is not a number") from None
    return -1


@dataclass
class LearnerOptions:
    """Options of ``rlzmq learner``."""

    join: Path
    """The run's *.learner.toml, mode 0600; -: standard input."""
    timeout: float = 300.0
    """Seconds to wait for the driver at the start (default: 300); once connected it waits as a spare, without limit."""
    import_: list[str] = field(default_factory=list)
    """Module to import first; repeatable (default: none)."""


@command(
    LearnerOptions,
    usage="rlzmq learner --join FILE [options]",
    description="Train a rank of a run with num_remote_learners. RANK, LOCAL_RANK (torchrun) and "
    "SLURM_PROCID, SLURM_LOCALID are used where set.",
)
def learner(options: LearnerOptions) -> int:
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        code = runner.run(_run_learner(options))
    os._exit(code)  # a collective without its peers may still block the training thread


async def _run_learner(options: LearnerOptions) -> int:
    from rlzmq.roles.learner_role import RemoteLearner

    rank, local_rank = ranks_here(os.environ)
    join = read_join_file(options.join, "learner")
    import_first(options.import_)

    def config_here(packed: object) -> Any:
        config = make_config(packed)
        if local_rank >= 0:
            config.learners(local_gpu_idx=local_rank)
        config.freeze()
        return config

    learner = RemoteLearner(join, config_here, preferred_rank=rank, timeout_s=options.timeout)
    print(f"{learner.name} waits for {join.addresses['control']}", flush=True)
    signals: list[int] = []

    def leave(number: int) -> None:
        signals.append(number)
        wait_s = _LEAVE_S if number != signal.SIGINT else _LEAVE_AFTER_CTRL_C_S
        print(
            f"leaving in {wait_s:g} s, or with the run if it ends before; again to leave at once", flush=True
        )
        asyncio.get_running_loop().call_later(wait_s, learner.end)

    try:
        with on_signals(asyncio.get_running_loop(), leave):
            await learner.run()
    except PeerLostError as error:
        print(f"rlzmq: {error}", file=sys.stderr, flush=True)
        return EXIT_UNREACHABLE
    return exit_code_of_signal(signals[0]) if signals else 0
