"""All kinds of faults mixed at random, on one run; used by `nemesis.py --storm`.

| fault               | effect                                                                                |
|---------------------|---------------------------------------------------------------------------------------|
| kill, stop          | SIGKILL, SIGSTOP for a runner, a rank or the broker                                   |
| frozen, then broker | SIGSTOP for a runner or a rank, SIGKILL for the broker a moment later                 |
| nan                 | a runner's next fragment holds NaN                                                    |
| starting            | a runner, a rank or the broker is killed; its replacement is killed or stopped while it starts |
| cut                 | the connections of a runner, a rank, the driver or the joined runner are broken       |
| hole                | the same after up to 3 s without traffic                                              |
| flood               | 200 connections without a key at once at the port                                     |
| flood with a key    | a peer with the run's runner key sends without reading, or registers under new names  |
| join or leave       | a runner joins by TCP, leaves by SIGTERM, is killed                                   |

Every role of the run connects to the broker through a proxy, so that its connections can be cut. Each fault comes at
its time, whether or not all processes are back. The last rank that is neither dead nor frozen is not hit: its loss
would also lose the weights, which is another guarantee.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _pauses import Pauses

from rlzmq.actors.forkserver import get_fork_server
from rlzmq.actors.process_state import is_stopped
from rlzmq.core import faults
from rlzmq.core.addresses import split_tcp
from rlzmq.driver import broker_pipeline
from rlzmq.net.keys import JoinFile
from rlzmq.wire.messages import ConfigRequest, Hello, SnapshotRequest, encode_message
from tests.net.chaos_proxy import ChaosProxy

__all__ = ["KINDS", "MAX_STILL_S", "Lines", "Storm"]

KINDS = (
    "kill", "kill", "kill", "stop", "stop", "frozen then broker", "starting", "starting", "nan", "flood",
    "flood with a key", "join or leave", "cut", "cut", "hole",
)  # fmt: skip
MAX_STILL_S = 15.0
"""Longest time that an update may take, whatever happens."""

_GIVE_UP_S = 180.0
_NUM_STRANGERS = 200
_MAX_HOLE_S = 3.0
_FLOOD_S = 0.5
_START_S = 5.0


def spoil_the_next_fragment(role: Any) -> None:
    """Run in a runner's process: its next fragment contains NaN."""
    runner = role.env_runner
    sample_lease = runner.sample_lease

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        batch = sample_lease(*args, **kwargs)
        if batch.num_env_steps:
            runner.sample_lease = sample_lease
            batch.columns["rewards"][int(batch.step_slots()[0])] = float("nan")
        return batch

    runner.sample_lease = spoilt


class Lines:
    """A proxy for each connection between a process of the run and its broker; an async context manager.

    Attributes:
        proxies: ``"runner-0 data"``, … → its proxy.
    """

    def __init__(self, directory: Path, num_runners: int, num_learners: int) -> None:
        self._directory = directory
        self._names = [
            *(f"runner-{index} {line}" for index in range(num_runners) for line in ("data", "weights")),
            *(f"learner-{rank} data" for rank in range(num_learners)),
            "driver data",
        ]
        self.proxies: dict[str, ChaosProxy] = {}
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Lines:
        for number, name in enumerate(self._names):
            listen = f"ipc://{self._directory}/line-{number}"
            proxy = ChaosProxy("", listen)
            self.proxies[name] = await self._stack.enter_async_context(proxy)
        self._stack.enter_context(self._lead_through())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    @contextlib.contextmanager
    def _lead_through(self) -> Iterator[None]:
        """Give the roles and the driver the proxies' addresses instead of the broker's."""
        link, driver_link = broker_pipeline.BrokerPipeline._link, broker_pipeline.DriverLink

        def proxied_link(pipeline: Any, name: str, **more: Any) -> dict[str, Any]:
            addresses = link(pipeline, name, **more)
            for line in ("data", "weights"):
                if f"{line}_address" in addresses:
                    addresses[f"{line}_address"] = self._through(
                        f"{name} {line}", addresses[f"{line}_address"]
                    )
            return addresses

        def proxied_driver(run_id: str, data_address: str, **more: Any) -> Any:
            return driver_link(run_id, self._through("driver data", data_address), **more)

        setattr(broker_pipeline.BrokerPipeline, "_link", proxied_link)  # noqa: B010
        setattr(broker_pipeline, "DriverLink", proxied_driver)  # noqa: B010
        try:
            yield
        finally:
            setattr(broker_pipeline.BrokerPipeline, "_link", link)  # noqa: B010
            setattr(broker_pipeline, "DriverLink", driver_link)  # noqa: B010

    def _through(self, name: str, upstream: str) -> str:
        self.proxies[name].upstream = upstream
        return self.proxies[name].address


class Storm:
    """Faults at random while `train` runs.

    Args:
        algo: A started AsyncAlgorithm that listens.
        lines: The proxies between its processes and the broker.
        num_faults, seconds: Number of faults, and the time over which they are spread.
        seed: Seed of the random stream.
        directory: Directory for the joined runner's join file.
        long_s: Pauses of at least this length are printed with their events.

    Attributes:
        fired: Number of faults by kind.
        gaps_s: Seconds between each two committed updates.
    """

    def __init__(
        self,
        algo: Any,
        lines: Lines,
        *,
        num_faults: int,
        seconds: float,
        seed: int,
        directory: Path,
        long_s: float = 8.0,
    ) -> None:
        self.algo = algo
        self.session = algo.session
        self.num_faults = num_faults
        self.seconds = seconds
        self.random = random.Random(seed)
        self.directory = directory
        self.fired: Counter[str] = Counter()
        self.gaps_s: list[float] = []
        self._lines = lines.proxies
        self._proxies: dict[str, ChaosProxy] = {}
        self._join: Any = None
        self._floods = 0
        self._holes: set[asyncio.Task[None]] = set()
        self._outside: subprocess.Popen[bytes] | None = None
        self._updated_at = time.monotonic()
        self._pauses = Pauses(algo.session, long_s)

    async def run(self) -> None:
        """Train until all faults have fired, and all processes are back.

        Raises:
            RuntimeError: Training made no progress, or a process did not come back.
        """
        async with contextlib.AsyncExitStack() as stack:
            self._join = join = JoinFile.read(self.session.pipeline._broker.join_files["runner"])
            for name in ("data", "weights"):
                proxy = ChaosProxy(join.addresses[name])
                self._proxies[name] = await stack.enter_async_context(proxy)
            addresses = {**join.addresses, **{name: proxy.address for name, proxy in self._proxies.items()}}
            (self.directory / "join.toml").touch(0o600)
            (self.directory / "join.toml").write_text(replace(join, addresses=addresses).to_text())
            stack.callback(self._leave)
            await stack.enter_async_context(self._pauses)
            training = asyncio.create_task(self._train())
            raging = asyncio.create_task(self._rage())
            try:
                await asyncio.wait((training, raging), return_when=asyncio.FIRST_COMPLETED)
                (training if training.done() else raging).result()
                await self._calm_down(training)
            finally:
                for task in (training, raging):
                    task.cancel()
                await asyncio.gather(training, raging, return_exceptions=True)

    async def _train(self) -> None:
        self._updated_at = time.monotonic()
        while True:
            await self.algo.train()
            self._updated_at = time.monotonic()
            self.gaps_s.append(self._pauses.updated(self._updated_at))

    async def _rage(self) -> None:
        begin = time.monotonic()
        for number in range(self.num_faults):
            due = begin + (number + self.random.random()) * self.seconds / self.num_faults
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            kind = ""
            while not kind:
                kind = await self._one(self.random.choice(KINDS))
            self._pauses.note(f"FAULT  {kind}")
            self.fired[kind] += 1
            if time.monotonic() - self._updated_at > _GIVE_UP_S:
                status = await asyncio.wait_for(self.session.pipeline.status(), 5)
                raise RuntimeError(f"no update for {_GIVE_UP_S:g} s: {status['waits']}")
            if (number + 1) % 25 == 0:
                print(f"{number + 1} faults, {len(self.gaps_s)} updates, {dict(self.fired)}", flush=True)

    async def _calm_down(self, training: asyncio.Task[None]) -> None:
        """Wait, without faults, until all processes are back, and for two more updates."""
        config, session = self.algo.config, self.session
        updates = len(self.gaps_s)
        async with asyncio.timeout(_GIVE_UP_S):
            while (
                session.env_runner_group.num_healthy_remote_workers() < config.num_env_runners
                or len(session.learner_group.handles) < config.num_learners
                or len(self.gaps_s) < updates + 2
            ):
                if training.done():
                    training.result()
                await asyncio.sleep(0.05)

    # -- the faults -----------------------------------------------------------------------------

    async def _one(self, kind: str) -> str:
        """Fire a fault. Return its description; "" if it is not possible now."""
        if kind in ("kill", "stop"):
            role = self.random.choice(("runner", "learner", "broker"))
            number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
            return f"{kind} {role}" if self._signal(role, number) is not None else ""
        if kind == "frozen then broker":
            frozen = self._signal(self.random.choice(("runner", "learner")), signal.SIGSTOP)
            if frozen is None:
                return ""
            await asyncio.sleep(self.random.random() * 0.5)
            self._signal("broker", signal.SIGKILL)
            return kind
        if kind == "nan":
            runner = self._pick("runner")
            if runner is None:
                return ""
            work = asyncio.ensure_future(runner.apply(spoil_the_next_fragment))
            # It may die during this.
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            return kind
        if kind == "flood":
            await asyncio.to_thread(_flood, self._proxies["data"].upstream)
            return kind
        if kind == "flood with a key":
            self._floods += 1
            await asyncio.to_thread(_flood_with_key, self._join, self._floods)
            return kind
        if kind in ("cut", "hole"):
            return self._cut(kind)
        if kind == "starting":
            return await self._hit_who_starts()
        return self._join_or_leave()

    def _cut(self, kind: str) -> str:
        """Break the connections of one process."""
        outside = {f"outside {name}": proxy for name, proxy in self._proxies.items()}
        lines = {**self._lines, **outside}
        whose = self.random.choice(sorted({name.split()[0] for name in lines}))
        proxies = [proxy for name, proxy in lines.items() if name.split()[0] == whose]
        if not any(proxy.num_connections for proxy in proxies):
            return ""
        self._pauses.note(f"FAULT  {kind} {whose}")
        if kind == "hole":
            seconds = self.random.random() * _MAX_HOLE_S
            task = asyncio.create_task(_hold_up(proxies, seconds), name="hole")
            self._holes.add(task)
            task.add_done_callback(self._holes.discard)
        else:
            for proxy in proxies:
                proxy.cut()
        return f"{kind} {whose.partition('-')[0]}"

    async def _hit_who_starts(self) -> str:
        """Kill a process, and its replacement once that has a process."""
        role = self.random.choice(("runner", "learner", "broker"))
        before = self._forked()
        if self._signal(role, signal.SIGKILL) is None:
            return ""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if new := self._forked() - before:
                await asyncio.sleep(self.random.random() * 0.2)
                process = self.random.choice(sorted(new, key=lambda process: process.pid))
                number = self.random.choice((signal.SIGKILL, signal.SIGSTOP))
                handles = [*self.session.env_runner_group.handles, *self.session.learner_group.handles]
                names = {handle.pid: handle.name for handle in handles}
                if process.pid in names or process.pid == self.session.pipeline._broker.handle.pid:
                    return f"kill {role}"  # it has started already
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
                self._pauses.note(f"FAULT  {number.name} pid {process.pid}, which starts")
                return f"starting {role}"
            await asyncio.sleep(0.005)
        return f"kill {role}"

    def _forked(self) -> set[psutil.Process]:
        return set(psutil.Process(get_fork_server().pid).children())

    def _pick(self, role: str) -> Any:
        """Return a process that is alive and not frozen; None if there is none, or it is the last rank."""
        session = self.session
        handles = {
            "runner": session.env_runner_group.handles,
            "learner": session.learner_group.handles,
            "broker": [session.pipeline._broker.handle],
        }[role]
        well = [handle for handle in handles if not handle.exited.done() and not is_stopped(handle.pid)]
        return self.random.choice(well) if len(well) > (role == "learner") else None

    def _signal(self, role: str, number: int) -> Any:
        handle = self._pick(role)
        if handle is not None:
            handle.send_signal(number)
            self._pauses.note(f"FAULT  {signal.Signals(number).name} {handle.name} (pid {handle.pid})")
            if number == signal.SIGKILL:
                faults.record("killed", place=handle.name, pid=handle.pid)
        return handle

    def _join_or_leave(self) -> str:
        if self._outside is not None and self._outside.poll() is None:
            if self._proxies["data"].num_connections == 0:
                return ""  # it is about to join
            if self.random.random() < 0.5:
                self._outside.terminate()
                return "leave"
            self._leave()
            return "kill outside"
        self._leave()  # it has ended
        self._outside = subprocess.Popen(
            [sys.executable, "-m", "rlzmq", "runner", "--join", str(self.directory / "join.toml")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).resolve().parents[1],
        )
        return "join"

    def _leave(self) -> None:
        if self._outside is not None:
            self._outside.kill()
            self._outside.wait()
            for path in Path(os.environ["RLZMQ_HISTORY"]).glob(f"runner-*.{self._outside.pid}.jsonl"):
                faults.record("ended", place=path.name.partition(".")[0], pid=self._outside.pid)


async def _hold_up(proxies: list[ChaosProxy], seconds: float) -> None:
    """Block all traffic for a while, then break the connections."""
    for proxy in proxies:
        proxy.to_server.black_hole = proxy.to_client.black_hole = True
    try:
        await asyncio.sleep(seconds)
    finally:
        for proxy in proxies:
            proxy.cut()
            proxy.to_server.black_hole = proxy.to_client.black_hole = False


def _flood_with_key(join: JoinFile, number: int) -> None:
    """Act as a peer with a key that sends requests without reading, or registers under new names."""
    context: zmq.Context[Any] = zmq.Context()
    client = context.socket(zmq.DEALER)
    try:
        client.set(zmq.LINGER, 0)
        client.set(zmq.RCVHWM, 1)
        client.set(zmq.SNDTIMEO, 50)
        client.set(zmq.ROUTING_ID, b"storm-%d" % number)
        keys = join.curve()
        assert keys is not None
        keys.apply(client)
        client.connect(join.addresses["data"])
        deadline, count = time.monotonic() + _FLOOD_S, 0
        while time.monotonic() < deadline:
            count += 1
            name = f"storm-{number}-{count}"
            asks = (
                ConfigRequest(),
                SnapshotRequest(0, 0),
                Hello("runner", f"{name}@elsewhere", name, num_envs=1),
            )
            with contextlib.suppress(zmq.Again):
                client.send_multipart(encode_message(asks[(number + (count > 1)) % 3]))
    finally:
        client.close(0)
        context.term()


def _flood(address: str) -> None:
    """Open many connections at once that send garbage."""
    host, port = split_tcp(address)
    with contextlib.ExitStack() as stack:
        for _ in range(_NUM_STRANGERS):
            with contextlib.suppress(OSError):
                stranger = stack.enter_context(socket.create_connection((host, port), timeout=1.0))
                stranger.sendall(os.urandom(64))
