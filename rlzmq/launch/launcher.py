"""Starts a cluster's roles, shows all their logs, starts again what dies, and ends everything at once.

    connect ─► preflight ─► head (rlzmq train --listen) ─► its join files ─► learners, runners (keys by stdin)

The head's end is the run's end: its goodbye ends the others. What was cut off ends by itself when its
broker stays silent (`rlzmq runner --patience`).
"""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable
from typing import Any

from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.launch.cluster import Cluster, Place
from rlzmq.launch.hosts import Host, Process, connect

__all__ = ["Launcher"]

_MAX_CLOCK_SKEW_S = 5.0
_JOIN_FILE_S = 120.0
_GRACE_S = 15.0
_PROBE = "import rlzmq, sys, time; print(rlzmq.__version__, '%d.%d' % sys.version_info[:2], time.time())"


class Launcher:
    """Runs one cluster.

    Args:
        cluster: What to start where.
        say: Called with each line to show.
    """

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._hosts: dict[str, Host] = {}
        self._running: dict[str, Process] = {}
        self._is_stopping = False
        self._directory = ""

    async def run(self) -> int:
        """Run until the head ends: its exit code.

        Raises:
            PeerLostError: A host cannot be reached, or a process died more often than `restarts`.
            AuthenticationError: A host's key is unknown, or ours is refused.
            ConfigurationError: Versions differ.
        """
        try:
            found = await asyncio.gather(*(connect(name, self._cluster) for name in self._cluster.hosts))
            self._hosts = {host.name: host for host in found}
            await self.preflight()
            return await self._run_roles()
        finally:
            await self._end_all()

    async def preflight(self) -> None:
        """The same rlzmq and Python everywhere; clocks that agree about as far as logs need it.

        Raises:
            PeerLostError: rlzmq does not start there.
            ConfigurationError: Versions differ.
        """
        python = self._cluster.python

        async def probe(host: Host) -> tuple[str, str, float]:
            before = time.time()
            version, interpreter, clock = (await host.run([python, "-c", _PROBE], timeout_s=60)).split()[-3:]
            return version, interpreter, float(clock) - (before + time.time()) / 2

        facts = dict(zip(self._hosts, await asyncio.gather(*map(probe, self._hosts.values())), strict=True))
        versions = {name: (version, interpreter) for name, (version, interpreter, _) in facts.items()}
        if len(set(versions.values())) > 1:
            told = ", ".join(f"{name}: rlzmq {v}, Python {p}" for name, (v, p) in versions.items())
            raise ConfigurationError(
                f"the hosts have different versions ({told}): install the same everywhere"
            )
        for name, (_, _, skew_s) in facts.items():
            if abs(skew_s) > _MAX_CLOCK_SKEW_S:
                self._say(f"[{name}] its clock is {skew_s:+.0f} s off: only log times suffer")
        self._say(f"preflight: {len(facts)} hosts, rlzmq {next(iter(versions.values()))[0]}")

    async def stop(self) -> None:
        """End the head in order (it saves a checkpoint); `run` returns then."""
        self._is_stopping = True
        if (head := self._running.get("head")) is not None:
            await head.signal("INT")

    async def _run_roles(self) -> int:
        cluster = self._cluster
        host = self._hosts[cluster.head]
        self._directory = (await host.run(["mktemp", "-d"])).strip()  # of mode 0700
        join = f"{self._directory}/join.toml"
        command = [cluster.python, "-m", "rlzmq", "train", *cluster.train, "--listen", cluster.listen]
        command += ["--join-file", join]
        if cluster.num_learners:
            command += [
                "--learners",
                str(cluster.num_learners),
                "--num-remote-learners",
                str(cluster.num_learners),
            ]
        head = asyncio.create_task(self._follow("head", host, command, ""))
        roles = asyncio.create_task(self._start_others(host, join))
        try:
            await asyncio.wait((head, roles), return_when=asyncio.FIRST_COMPLETED)
            if roles.done() and roles.exception() is not None and not head.done():
                await self.stop()
                await asyncio.wait((head,), timeout=_GRACE_S)
                roles.result()
            return await head
        finally:
            if not head.done():
                head.cancel()
            await asyncio.wait((roles,), timeout=_GRACE_S)  # the run's goodbye reaches them
            roles.cancel()
            await asyncio.gather(head, roles, return_exceptions=True)

    async def _start_others(self, head: Host, join: str) -> None:
        cluster = self._cluster
        async with asyncio.TaskGroup() as tasks:
            for role, places, path in (
                ("learner", cluster.learners, join.replace("join.toml", "join.learner.toml")),
                ("runner", cluster.runners, join),
            ):
                if not places:
                    continue
                text = await self._read_when_there(head, path)
                for place in places:
                    for number in range(place.count):
                        tasks.create_task(self._keep(role, place, number, text))

    async def _read_when_there(self, head: Host, path: str) -> str:
        script = (
            f'for i in $(seq {int(_JOIN_FILE_S * 5)}); do [ -f "$1" ] && break; sleep 0.2; done; cat "$1"'
        )
        return await head.run(["sh", "-c", script, "sh", path], timeout_s=_JOIN_FILE_S + 10)

    async def _keep(self, role: str, place: Place, number: int, join_text: str) -> None:
        """One process, started again when it fails, until the budget is spent."""
        cluster = self._cluster
        name = f"{role}-{place.host}-{number}"
        command = [cluster.python, "-m", "rlzmq", role, "--join", "/dev/stdin", *place.arguments]
        for attempt in range(cluster.restarts + 1):
            code = await self._follow(name, self._hosts[place.host], command, join_text)
            if code == 0 or self._is_stopping or "head" not in self._running:
                return
            self._say(f"[{name}] ended with {code}; restart {attempt + 1} of {cluster.restarts}")
            await asyncio.sleep(min(0.5 * 2**attempt, 30.0))
        raise PeerLostError(f"{name} ended {cluster.restarts + 1} times: {shlex.join(command)}")

    async def _follow(self, name: str, host: Host, command: list[str], stdin: str) -> int:
        process = await host.start(command, stdin=stdin)
        self._running[name] = process
        self._say(f"[{name}] {host.name}: {shlex.join(command)}")
        try:
            async for line in process.lines():
                self._say(f"[{name}] {line}")
            return await process.wait()
        finally:
            if self._running.get(name) is process and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                del self._running[name]

    async def _end_all(self) -> None:
        """Whatever still runs is killed, and the directory with the keys removed."""
        running, self._running = list(self._running.values()), {}
        jobs: list[Any] = [process.signal("KILL") for process in running]
        if self._directory:
            jobs.append(self._hosts[self._cluster.head].run(["rm", "-rf", self._directory]))
        await asyncio.gather(*jobs, return_exceptions=True)
        await asyncio.gather(*(host.close() for host in self._hosts.values()), return_exceptions=True)
