"""asyncssh's server side as a machine's sshd, in a process of its own.

    python sshd.py DIRECTORY [--host 127.0.0.1] [--port 0] [--name NAME]

DIRECTORY has (or gets) ``client_key``, ``authorized_keys`` and ``known_hosts``; this server's own new key is
appended to the latter. With --name the process and its commands have that host name (needs a UTS namespace of
their own). Prints its port once it listens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import asyncssh

_CHUNK_BYTES = 1 << 16


async def serve(directory: Path, host: str, port: int) -> int:
    """Listen: the port."""
    server_key = asyncssh.generate_private_key("ssh-ed25519")
    if not (directory / "client_key").exists():
        client_key = asyncssh.generate_private_key("ssh-ed25519")
        client_key.write_private_key(str(directory / "client_key"))
        client_key.write_public_key(str(directory / "authorized_keys"))
    server = await asyncssh.listen(
        host, port, server_host_keys=[server_key], authorized_client_keys=str(directory / "authorized_keys"),
        process_factory=_run, encoding=None, reuse_address=True,
    )  # fmt: skip
    port = server.get_port()
    public = server_key.export_public_key().decode().strip()
    with (directory / "known_hosts").open("a") as known_hosts:
        known_hosts.write(f"{host if port == 22 else f'[{host}]:{port}'} {public}\n")
    return port


async def _run(process: Any) -> None:
    """One command; when the connection breaks it goes on, with its pipes closed, as under OpenSSH."""
    shell = await asyncio.create_subprocess_shell(
        process.command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert shell.stdin is not None
    assert shell.stdout is not None
    feeding = asyncio.create_task(_feed(process.stdin, shell.stdin))
    with contextlib.suppress(OSError, asyncssh.Error):
        await _pump(shell.stdout, process.stdout)
    shell._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
    code = await shell.wait()
    feeding.cancel()
    with contextlib.suppress(OSError, asyncssh.Error):
        process.exit(code if code >= 0 else 128 - code)


async def _feed(source: Any, target: Any) -> None:
    await _pump(source, target)
    target.close()


async def _pump(source: Any, target: Any) -> None:
    with contextlib.suppress(OSError, asyncssh.Error):
        while chunk := await source.read(_CHUNK_BYTES):
            target.write(chunk)
            await target.drain()


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--name")
    args = parser.parse_args()
    if args.name:
        socket.sethostname(args.name)
    print(await serve(args.directory, args.host, args.port), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
