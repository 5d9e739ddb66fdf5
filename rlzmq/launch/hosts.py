"""Hosts on which processes are started: by ssh with strict host keys, or this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rlzmq.core.errors import AuthenticationError, ConfigurationError, PeerLostError
from rlzmq.core.extras import import_optional
from rlzmq.core.printable import printable
from rlzmq.launch.cluster import LOCAL, Cluster

__all__ = ["Host", "Process", "connect"]

_CONNECT_S = 20.0
_RECONNECT_S = 120.0
_MAX_RECONNECT_DELAY_S = 5.0
# A host that was cut off for a minute keeps its connection; one that lost power is noticed after two minutes.
_KEEPALIVE_S, _MAX_KEEPALIVES = 15, 8
_MAX_LINE_BYTES = 1 << 20
_PID_MARK = "rlzmq-pid "
_END_MARK = "rlzmq-end-of-environment"
# Arguments are visible to every user of the host (ps), the standard input is not.
_SCRIPT = f"""echo "{_PID_MARK}$$"
set=
while IFS= read -r line && [ "$line" != {_END_MARK} ]; do set="$set$line
"; done
eval "$set"
unset set line
cd "$1" && shift && exec "$@" 2>&1"""


class Process:
    """A command that runs on a host.

    Attributes:
        pid: Its process id on the host; 0 until its first line has arrived.
    """

    def __init__(self, raw: Any, host: Host) -> None:
        self._raw = raw
        self._host = host
        self.pid: int = 0

    async def lines(self) -> AsyncIterator[str]:
        """Yield the lines that it prints, stdout and stderr together, as they are safe to show."""
        async for line in self._raw.stdout:
            text = (line.decode(errors="replace") if isinstance(line, bytes) else line).rstrip("\n")
            if not self.pid and text.startswith(_PID_MARK):
                self.pid = int(text.removeprefix(_PID_MARK))
            elif text:
                yield printable(text, keep="\t")

    async def wait(self) -> int | None:
        """Wait for the exit code; None if the connection broke first and the process may still run."""
        await self._raw.wait()
        code = self._raw.returncode
        return None if code is None else int(code)

    async def signal(self, name: str) -> None:
        """Send INT, TERM or KILL; do nothing if the process has ended."""
        if self.pid:
            await self._host.run(
                ["sh", "-c", 'kill -"$1" "$2" 2>/dev/null || true', "sh", name, str(self.pid)]
            )


class Host:
    """One machine.

    Args:
        name: As in the cluster file.
        connection: The asyncssh connection; None for this machine.
    """

    def __init__(self, name: str, connection: Any, cluster: Cluster) -> None:
        self.name = name
        self._connection = connection
        self._cluster = cluster
        self._connecting = asyncio.Lock()
        self._is_closed = False

    async def start(self, command: Sequence[str], *, stdin: str = "") -> Process:
        """Start a command in the working directory.

        Args:
            command: The argument list; every argument is quoted.
            stdin: The complete standard input of the command; keys are passed this way, not by arguments or files. The
                cluster's environment precedes it.

        Raises:
            PeerLostError: The connection is broken.
        """
        environment = [
            f"export {name}={shlex.quote(value)}\n" for name, value in self._cluster.environment.items()
        ]
        stdin = "".join([*environment, f"{_END_MARK}\n", stdin])
        argv = ["sh", "-c", _SCRIPT, "sh", self._cluster.workdir, *command]
        if self._connection is None:
            raw: Any = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                limit=_MAX_LINE_BYTES,
            )
            # The pipe is closed if the process has ended already: uvloop raises RuntimeError, asyncio OSError.
            with contextlib.suppress(OSError, RuntimeError):
                raw.stdin.write(stdin.encode())
                raw.stdin.close()
            return Process(raw, self)
        import asyncssh

        try:
            raw = await self._connection.create_process(shlex.join(argv))
            raw.stdin.write(stdin)
            raw.stdin.write_eof()
        except (OSError, asyncssh.Error) as error:
            raise PeerLostError(f"{self.name}: the ssh connection broke: {error}") from error
        return Process(raw, self)

    async def reconnect(self) -> None:
        """Reconnect if the connection is broken, for up to two minutes.

        Raises:
            PeerLostError: The host cannot be reached.
            AuthenticationError: The host has another key now.
        """
        async with self._connecting:
            if self._connection is None or not self._connection.is_closed():
                return
            delay_s = 0.5
            deadline = asyncio.get_running_loop().time() + _RECONNECT_S
            while not self._is_closed:
                try:
                    self._connection = (await connect(self.name, self._cluster))._connection
                    return
                except PeerLostError:
                    if asyncio.get_running_loop().time() > deadline:
                        raise
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _MAX_RECONNECT_DELAY_S)

    async def run(self, command: Sequence[str], *, timeout_s: float = 30.0) -> str:
        """Run a command to its end and return its output.

        Raises:
            PeerLostError: The command failed or took longer than ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                process = await self.start(command)
                output = "\n".join([line async for line in process.lines()])
                code = await process.wait()
        except (TimeoutError, OSError) as error:
            raise PeerLostError(
                f"{self.name}: {command[0]} did not end within {timeout_s:g} s ({error!r})"
            ) from error
        if code:
            raise PeerLostError(
                f"{self.name}: {shlex.join(command)[:200]} ended with {code}: {output[-500:]}"
            )
        return output

    async def close(self) -> None:
        """Close the connection; processes that still run there end with the run."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()
            await self._connection.wait_closed()


async def connect(name: str, cluster: Cluster) -> Host:
    """Connect to a host of the cluster.

    Raises:
        AuthenticationError: The host's key is not in known_hosts, or the host refuses the client's key.
        PeerLostError: The host cannot be reached.
        ConfigurationError: asyncssh is not installed, or there is no known_hosts file.
    """
    if name == LOCAL:
        return Host(name, None, cluster)
    asyncssh = import_optional("asyncssh", "Launching over ssh", "rlzmq[ssh]")
    known_hosts, keys = _local_files(cluster)
    if not known_hosts:
        raise ConfigurationError(
            f"no known_hosts file at {cluster.known_hosts}: hosts are never trusted unseen"
        )
    options: dict[str, Any] = {
        "known_hosts": known_hosts,
        "agent_forwarding": False,
        "keepalive_interval": _KEEPALIVE_S,
        "keepalive_count_max": _MAX_KEEPALIVES,
    }
    if cluster.user:
        options["username"] = cluster.user
    if keys:
        options["client_keys"] = keys
    try:
        async with asyncio.timeout(_CONNECT_S):
            connection = await asyncssh.connect(name, cluster.port, **options)
    except (asyncssh.HostKeyNotVerifiable, asyncssh.PermissionDenied) as error:
        raise AuthenticationError(f"{name}: {error}") from error
    except (OSError, TimeoutError, asyncssh.Error) as error:
        what = str(error) or f"no answer within {_CONNECT_S:g} s"
        raise PeerLostError(f"{name}: cannot connect by ssh to port {cluster.port}: {what}") from error
    return Host(name, connection, cluster)


def _local_files(cluster: Cluster) -> tuple[str, list[str]]:
    """Return the known_hosts file ("" if missing) and the client's key files."""
    known_hosts = os.path.expanduser(cluster.known_hosts)
    keys = [os.path.expanduser(cluster.key)] if cluster.key else []
    return (known_hosts if os.path.isfile(known_hosts) else ""), keys
