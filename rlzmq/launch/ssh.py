"""Roles on machines that only have ssh: each process has a host there, under systemd or in a session of its own.

The hosts need nobody: the machine that started them may go away. They are found again by their command lines. This
module is also the program on the other machines: of a host, and, without arguments, of a call by `Ssh`.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlzmq.core.errors import ConfigurationError, PeerLostError, RlzmqError
from rlzmq.core.files import make_directories, write_private_file
from rlzmq.launch.engine import Engine, Jobs, Resources, Role, command
from rlzmq.launch.host import forget, stay

__all__ = ["Ssh"]

_SSH = "ssh -oBatchMode=yes -oStrictHostKeyChecking=yes -oConnectTimeout=10 -oServerAliveInterval=15"
_UNREACHABLE = 255  # ssh's own exit code
_OWN = ("-m", "rlzmq.launch.ssh")
_UNIT = ("systemd-run", "--user", "--quiet", "--collect", "--same-dir", "--property=Type=exec")
_POLL_S = 0.2


class Ssh(Engine):
    """Starts roles on the ``hosts`` of their tables; ``options`` are those of ssh."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        for role in jobs.roles.values():
            if not role.resources.hosts:
                raise ConfigurationError(f'--on ssh: [{role.name}] needs hosts, e.g. hosts = ["a", "b"].')
        self._head = jobs.roles["head"]

    def start(self, role: Role, places: Sequence[int] = ()) -> str:
        """Start processes, each on the host with the fewest; the head only if all machines can be reached."""
        for each in self.jobs.roles.values() if role is self._head else ():
            self.living(each)
        hosts = self.living(role)
        for place in places or range(role.resources.count):
            if place not in hosts:
                hosts[place] = min(role.resources.hosts, key=list(hosts.values()).count)
        key = "" if role is self._head else self._on_head("key", role.key.name)
        self._on_each(role, "start", lambda host: [[place for place in hosts if hosts[place] == host], key])
        return f"{role.name}@{','.join(role.resources.hosts)}"

    def living(self, role: Role) -> dict[int, str]:
        """Return the hosts by place."""
        return {int(place): host for host, found in self._on_each(role, "living").items() for place in found}

    def end(self, role: Role, places: Collection[int], grace_s: float) -> None:
        """End processes on all machines."""
        self._on_each(role, "end", lambda host: [list(places), grace_s])

    def lines(self, role: Role, read: dict[str, int]) -> Iterator[str]:
        """Yield the new lines of all machines."""
        for host in role.resources.hosts:
            lines, now_read = self._on(role, host, "lines_and_read", read)
            read.update(now_read)
            yield from lines

    def exit_code(self) -> int:
        """Return the exit code that the head has left on its host."""
        return int(self._on_head("exit_code_of"))

    def _on_head(self, what: str, *arguments: str) -> Any:
        return self._on(self._head, self._head.resources.hosts[0], what, *arguments)

    def _on_each(
        self, role: Role, what: str, arguments: Callable[[str], Sequence[Any]] = lambda host: ()
    ) -> dict[str, Any]:
        """Call a method of `_Here` on each host of a role; return the results."""
        hosts = role.resources.hosts
        with ThreadPoolExecutor(len(hosts)) as pool:
            results = pool.map(lambda host: self._on(role, host, what, *arguments(host)), hosts)
            return dict(zip(hosts, results, strict=True))

    def _on(self, role: Role, host: str, what: str, *arguments: Any) -> Any:
        """Call a method of `_Here` on a host.

        Raises:
            PeerLostError: The host cannot be reached, or its key is unknown.
            ConfigurationError: The method fails; there is no ssh, or no rlzmq on the host.
        """
        there = f"cd {shlex.quote(str(self.jobs.workdir))} && exec {shlex.join((role.argv[0], *_OWN))}"
        asked = (self.jobs.model_dump(mode="json"), host, role.name, what, arguments)
        argv = (*shlex.split(_SSH), *role.resources.options, "--", host, there)
        try:
            return json.loads(command(*argv, stdin=json.dumps(asked), what=host))
        except ConfigurationError as error:
            failed = error.__cause__
            if isinstance(failed, subprocess.CalledProcessError) and failed.returncode == _UNREACHABLE:
                raise PeerLostError(str(error)) from None
            raise


class _Here(Engine):
    """The processes of this machine, as one of `Ssh`'s hosts."""

    def __init__(self, jobs: Jobs, host: str) -> None:
        super().__init__(jobs)
        self.mark = f"@{host}"

    def start(self, role: Role, places: Sequence[int] = (), key: str = "") -> str:
        """Start the hosts of those processes that do not live."""
        asked, missing = role.resources, sorted({*places} - self.living(role).keys())
        address = os.environ["SSH_CONNECTION"].split()[2]  # by which ssh came in: the others reach it, too
        make_directories(role.key.parent, mode=0o700)
        if key:
            write_private_file(role.key, key)
        elif missing:
            forget(role.key.parent)
        for place in missing:
            rank = ["env", f"LOCAL_RANK={place // len(asked.hosts)}"] if asked.gpus else []
            own = [*rank, sys.executable, *_OWN, self.mark, role.name, str(role.key), str(place)]
            own += [f"[{address}]" if ":" in address else address, str(asked.cpus), *role.argv]
            lingers = Path("/var/lib/systemd/linger", getpass.getuser()).exists()
            if not (lingers and subprocess.call([*_UNIT, *own]) == 0):
                null = subprocess.DEVNULL
                subprocess.Popen(own, stdin=null, stdout=null, stderr=null, start_new_session=True)
        return ""

    def living(self, role: Role) -> dict[int, int]:
        """Return the ids of hosts by place."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().decode(errors="replace").split("\0")
                if words[1:6] == [*_OWN, self.mark, role.name, str(role.key)]:
                    found[int(words[6])] = int(path.parent.name)
        return found

    def end(self, role: Role, places: Collection[int], grace_s: float) -> None:
        """Send SIGTERM to hosts, which pass it on, and SIGKILL in the end."""
        deadline = time.monotonic() + grace_s
        pids = {pid for place, pid in self.living(role).items() if place in places}
        _send(signal.SIGTERM, pids)
        while pids := pids.intersection(self.living(role).values()):
            if time.monotonic() > deadline:
                _send(signal.SIGKILL, pids)
            time.sleep(_POLL_S)

    def key(self, role: Role, name: str) -> str:
        """Wait until the head has written a join file; return the text."""
        while not (file := role.key.with_name(name)).exists():
            if not self.living(role):
                last = "\n".join(list(self.lines(role, {}))[-5:])
                raise ConfigurationError(f"the head has ended; the end of its log:\n{last}")
            time.sleep(_POLL_S)
        return file.read_text()

    def lines_and_read(self, role: Role, read: dict[str, int]) -> tuple[list[str], dict[str, int]]:
        """Return what `lines` yields, and the argument that it updates."""
        return list(self.lines(role, read)), read

    def exit_code_of(self, role: Role) -> int:
        """Return the head's exit code."""
        return self.exit_code()


def _send(number: signal.Signals, pids: Collection[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _answer() -> None:
    """Do what `Ssh` asks this machine on the standard input; print the result."""
    jobs, host, name, what, arguments = json.load(sys.stdin)
    here = _Here(Jobs.model_validate(jobs), host)
    try:
        print(json.dumps(getattr(here, what)(here.jobs.roles[name], *arguments)))
    except RlzmqError as error:
        sys.exit(str(error))


def _host(mark: str, name: str, key: str, place: str, address: str, cpus: str, *argv: str) -> None:
    role = Role(name, argv, Path(key), Resources(cpus=int(cpus)))
    own = name if name == "head" else f"{name}-{place}"
    stay(
        role, own + mark, address, lambda code: code == 0
    )  # a goodbye: no other news of the head reach this machine


if __name__ == "__main__":
    _host(*sys.argv[1:]) if sys.argv[1:] else _answer()
