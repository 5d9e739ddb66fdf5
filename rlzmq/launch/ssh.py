"""Roles on machines that only have ssh: each process has a host there, under systemd or in a session of its own.

The hosts need nobody: the machine that started them may go away. They are found again by their command lines. This
module is also the program that `Ssh` calls on the other machines.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlzmq.core.errors import ConfigurationError, PeerLostError, RlzmqError
from rlzmq.core.files import make_directories, write_private_file
from rlzmq.launch.engine import Engine, Jobs, Role, command
from rlzmq.launch.host import OWN, Hosted

__all__ = ["Ssh"]

_SSH = "ssh -oBatchMode=yes -oStrictHostKeyChecking=yes -oConnectTimeout=10 -oServerAliveInterval=15"
_UNREACHABLE = 255  # ssh's own exit code
_UNIT = ("systemd-run", "--user", "--quiet", "--collect", "--same-dir", "--property=Type=exec")
_GOODBYE = '[ "$1" = 0 ]'  # is the run's end: no other news of the head reach the other machines
_POLL_S = 0.2


class Ssh(Engine):
    """Starts roles on the ``hosts`` of their tables; ``options`` are those of ssh."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        for role in jobs.roles.values():
            if not role.hosts:
                raise ConfigurationError(f'--on ssh: [{role.name}] needs hosts, e.g. hosts = ["a", "b"].')

    def start(self, role: Role, places: Sequence[int] = ()) -> str:
        """Start processes, each on the host with the fewest; the head only if all machines can be reached."""
        for each in self.jobs.roles.values() if role.name == "head" else ():
            self.living(each)
        hosts = self.living(role)
        for place in places or range(role.count):
            if place not in hosts:
                hosts[place] = min(role.hosts, key=list(hosts.values()).count)
        key = "" if role.name == "head" else self._on_head("key", role.key.name)
        self._on_each(role, "begin", lambda host: ([place for place in hosts if hosts[place] == host], key))
        return f"{role.name}@{','.join(role.hosts)}"

    def living(self, role: Role) -> dict[int, str]:
        """Return the hosts by place."""
        found = self._on_each(role, "living", lambda host: ())
        return {int(place): host for host, places in found.items() for place in places}

    def end(self, role: Role, places: Collection[int], grace_s: float) -> None:
        """End processes on all machines."""
        self._on_each(role, "end", lambda host: (list(places), grace_s))

    def lines(self, role: Role, read: dict[str, int]) -> tuple[list[str], dict[str, int]]:
        """Return the further lines of all machines."""
        found = self._on_each(role, "lines", lambda host: (read,))
        for _, now_read in found.values():
            read = read | now_read
        return [line for lines, _ in found.values() for line in lines], read

    def exit_code(self, head: Role) -> int:
        """Return the exit code that the head has left on its machine."""
        return int(self._on_head("exit_code"))

    def _on_head(self, what: str, *arguments: str) -> Any:
        head = self.jobs.roles["head"]
        return self._on(head, head.hosts[0], what, *arguments)

    def _on_each(self, role: Role, what: str, arguments: Callable[[str], Sequence[Any]]) -> dict[str, Any]:
        """Call a method of `_Here` on each host of a role; return the results."""
        hosts = role.hosts
        with ThreadPoolExecutor(len(hosts)) as pool:
            results = pool.map(lambda host: self._on(role, host, what, *arguments(host)), hosts)
            return dict(zip(hosts, results, strict=True))

    def _on(self, role: Role, host: str, what: str, *arguments: Any) -> Any:
        """Call a method of `_Here` on a host.

        Raises:
            PeerLostError: The host cannot be reached, or its key is unknown.
            ConfigurationError: The method fails; there is no ssh, or no rlzmq on the host.
        """
        there = f"cd {shlex.quote(str(self.jobs.workdir))} && exec {shlex.quote(role.argv[0])} -m {__name__}"
        asked = json.dumps([self.jobs.model_dump(mode="json"), host, role.name, what, arguments])
        try:
            ssh = (*shlex.split(_SSH), *role.options, "--", host, there)
            return json.loads(command(*ssh, stdin=asked, what=host))
        except ConfigurationError as error:
            failed = error.__cause__
            if isinstance(failed, subprocess.CalledProcessError) and failed.returncode == _UNREACHABLE:
                raise PeerLostError(str(error)) from None
            raise


class _Here(Hosted):
    """The processes of this machine, as one of `Ssh`'s hosts."""

    def begin(self, role: Role, places: Sequence[int], key: str) -> None:
        """Start those of the processes that do not live, with the text of their join file."""
        if missing := sorted({*places} - self.living(role)):
            self.start(role, missing)
        if key:
            make_directories(role.key.parent, mode=0o700)
            write_private_file(role.key, key)

    def submit(self, role: Role, places: Sequence[int]) -> str:
        """Start hosts."""
        address = os.environ["SSH_CONNECTION"].split()[2]  # by which ssh came in: the others reach it, too
        null = subprocess.DEVNULL
        address = f"[{address}]" if ":" in address else address
        for place in places:
            rank = ["env", f"LOCAL_RANK={place // len(role.hosts)}"] if role.gpus else []
            own = [*rank, sys.executable, *OWN, self.name(role, place), str(role.key), str(role.cpus)]
            own += [address, _GOODBYE, "", *role.argv]
            lingers = Path("/var/lib/systemd/linger", getpass.getuser()).exists()
            if not (lingers and subprocess.call([*_UNIT, *own]) == 0):
                subprocess.Popen(own, stdin=null, stdout=null, stderr=null, start_new_session=True)
        return ""

    def living(self, role: Role) -> set[int]:
        """Return the places of hosts."""
        lines = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                lines.append(path.read_text(errors="replace").split("\0"))
        return self.places(
            role, [line[3] for line in lines if (*line[1:3], *line[4:5]) == (*OWN, str(role.key))]
        )

    def key(self, role: Role, name: str) -> str:
        """Wait until the head has written a join file; return the text."""
        while not (file := role.key.with_name(name)).exists():
            if not self.living(role):
                last = "\n".join(self.lines(role, {})[0][-5:])
                raise ConfigurationError(f"the head has ended; the end of its log:\n{last}")
            time.sleep(_POLL_S)
        return file.read_text()


def _answer() -> None:
    """Do what `Ssh` asks this machine on the standard input; print the result."""
    jobs, host, name, what, arguments = json.load(sys.stdin)
    here = _Here(Jobs.model_validate(jobs))
    here.mark = f"@{host}"
    try:
        result = getattr(here, what)(here.jobs.roles[name], *arguments)
        print(json.dumps(result, default=list))
    except RlzmqError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _answer()
