"""The launcher: start a cluster's roles, show their logs, restart processes that die, and stop everything together.

    connect ─► head (rlzmq train --listen) ─► its join files ─► learners, runners (keys by stdin)

The run ends with the head, whose goodbye ends the other roles. If the head dies and can resume, it is restarted
with all others. A process that is cut off ends when its broker stays silent (`rlzmq runner --patience`).
"""

from __future__ import annotations

import asyncio
import itertools
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlzmq.core.errors import PeerLostError, first_error
from rlzmq.launch.cluster import Cluster, Place
from rlzmq.launch.hosts import Host, Process, connect

__all__ = ["Launcher"]

EXIT_RESUMABLE, EXIT_INTERRUPTED = 75, 130  # exit codes of the head (`rlzmq.cli.main`)
_EXIT_UNREACHABLE, _EXIT_OUT_OF_MEMORY = 69, 71

_JOIN_FILE_S = 120.0
_GRACE_S = 15.0
_GRACE_WITHOUT_GOODBYE_S = 2.0
_HEALTHY_S = 60.0  # a process that ran this long has no consecutive failures


class Launcher:
    """Runs one cluster."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._hosts: dict[str, Host] = {}
        self._running: dict[str, Process] = {}
        self._is_stopping = False
        self._directory = ""

    async def run(self) -> int:
        """Run the cluster until the head ends and return the head's exit code.

        Raises:
            PeerLostError: A host cannot be reached, or a process died more often than `restarts`.
            AuthenticationError: A host's key is unknown, or the host refuses the client's key.
        """
        try:
            found = await asyncio.gather(*(connect(name, self._cluster) for name in self._cluster.hosts))
            self._hosts = {host.name: host for host in found}
            return await self._run_head_and_others()
        finally:
            await self._end_roles()
            await asyncio.gather(*(host.close() for host in self._hosts.values()), return_exceptions=True)

    async def stop(self, signal_name: str = "INT") -> None:
        """Stop the head in order, with this signal (it saves a checkpoint); `run` then returns."""
        self._is_stopping = True
        if (head := self._running.get("head")) is not None:
            await head.signal(signal_name)

    async def _run_head_and_others(self) -> int:
        """Run all roles; restart them while the head dies and can resume, until the restarts are used up."""
        num_failures = 0
        while True:
            started = time.monotonic()
            code = await self._run_roles()
            if self._is_stopping or not (_has_died(code) and _resumes(self._cluster.train)):
                return code
            num_failures = 1 if time.monotonic() - started > _HEALTHY_S else num_failures + 1
            if num_failures > self._cluster.restarts:
                return code
            self._say(
                f"[head] ended with {code}; restart {num_failures} of {self._cluster.restarts}, with all others"
            )
            await self._end_roles()
            await asyncio.sleep(min(0.5 * 2 ** (num_failures - 1), 30.0))

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
        head = asyncio.create_task(self._run_process("head", host, command, ""))
        roles = asyncio.create_task(self._start_others(host, join))
        code: int | None = None
        try:
            await asyncio.wait((head, roles), return_when=asyncio.FIRST_COMPLETED)
            if roles.done() and (failure := roles.exception()) is not None and not head.done():
                await self.stop()
                await asyncio.wait((head,), timeout=_GRACE_S)
                code = EXIT_INTERRUPTED
                raise first_error(failure)
            _, code = await head
            if code is None:
                raise PeerLostError(f"the connection to the head {host.name} broke: it may still run there")
            return code
        finally:
            if not head.done():
                head.cancel()
            # The run's goodbye ends them; a head that died sent none.
            said_goodbye = code in (0, EXIT_RESUMABLE, EXIT_INTERRUPTED)
            await asyncio.wait((roles,), timeout=_GRACE_S if said_goodbye else _GRACE_WITHOUT_GOODBYE_S)
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
                        tasks.create_task(self._supervise(role, place, number, text))

    async def _read_when_there(self, head: Host, path: str) -> str:
        is_over = '[ -f "$1" -o ! -d "${1%/*}" ]'
        script = f'for i in $(seq {int(_JOIN_FILE_S * 5)}); do {is_over} && break; sleep 0.2; done; cat "$1"'
        return await head.run(["sh", "-c", script, "sh", path], timeout_s=_JOIN_FILE_S + 10)

    async def _supervise(self, role: str, place: Place, number: int, join_text: str) -> None:
        """Run one process; restart it when it fails, until the restarts are used up."""
        cluster, host = self._cluster, self._hosts[place.host]
        name = f"{role}-{place.host}-{number}"
        command = [cluster.python, "-m", "rlzmq", role, "--join", "-", *place.arguments]
        num_failures = 0
        while True:
            started = time.monotonic()
            process, code = await self._run_process(name, host, command, join_text)
            if code == 0 or self._is_stopping or "head" not in self._running:
                return
            if code is None:
                self._say(f"[{name}] the ssh connection to {host.name} broke")
                await host.reconnect()
                await process.signal("KILL")  # its output can no longer be read
            num_failures = 1 if time.monotonic() - started > _HEALTHY_S else num_failures + 1
            if num_failures > cluster.restarts:
                raise PeerLostError(
                    f"{name} failed {num_failures} times in a row, the last time with exit code {code} (its log is "
                    f"above); restarts = {cluster.restarts} is spent: {shlex.join(command)}"
                )
            self._say(f"[{name}] ended with {code}; restart {num_failures} of {cluster.restarts}")
            await asyncio.sleep(min(0.5 * 2 ** (num_failures - 1), 30.0))

    async def _run_process(
        self, name: str, host: Host, command: list[str], stdin: str
    ) -> tuple[Process, int | None]:
        """Start a process and show its log until it ends; return the process and its exit code."""
        process = await host.start(command, stdin=stdin)
        self._running[name] = process
        self._say(f"[{name}] {host.name}: {shlex.join(command)}")
        try:
            async for line in process.lines():
                self._say(f"[{name}] {line}")
            return process, await process.wait()
        finally:
            if self._running.get(name) is process and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                del self._running[name]

    async def _end_roles(self) -> None:
        """Kill all processes that still run and remove the directory with the keys."""
        running, self._running = list(self._running.values()), {}
        jobs: list[Any] = [process.signal("KILL") for process in running]
        if self._directory:
            jobs.append(self._hosts[self._cluster.head].run(["rm", "-rf", self._directory]))
            self._directory = ""
        await asyncio.gather(*jobs, return_exceptions=True)


def _has_died(code: int) -> bool:
    """Return whether the head was killed, out of memory or cut off, rather than ended by itself."""
    was_killed = (code < 0 or code > 128) and code != EXIT_INTERRUPTED
    return was_killed or code in (_EXIT_UNREACHABLE, _EXIT_OUT_OF_MEMORY)


def _resumes(train: Sequence[str]) -> bool:
    """Return whether the head's command resumes from its newest checkpoint."""
    return "--resume=auto" in train or ("--resume", "auto") in itertools.pairwise(train)
