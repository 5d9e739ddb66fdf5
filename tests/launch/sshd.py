"""asyncssh's server side as a machine's sshd, in a process of its own: ``python sshd.py DIRECTORY [HOST]``."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncssh


async def serve(directory: Path, host: str = "127.0.0.1") -> tuple[Any, int]:
    """Listen; writes ``client_key`` and ``known_hosts`` into the directory: (server, port)."""
    server_key, client_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    client_key.write_private_key(str(directory / "client_key"))
    client_key.write_public_key(str(directory / "authorized_keys"))
    server = await asyncssh.listen(
        host, 0, server_host_keys=[server_key], authorized_client_keys=str(directory / "authorized_keys"),
        process_factory=_run,
    )  # fmt: skip
    port = server.get_port()
    public = server_key.export_public_key().decode().strip()
    (directory / "known_hosts").write_text(f"[{host}]:{port} {public}\n")
    return server, port


async def _run(process: Any) -> None:
    shell = subprocess.Popen(  # noqa: ASYNC220 - asyncssh redirects pipes of this kind
        process.command, shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    await process.redirect(stdin=shell.stdin, stdout=shell.stdout)
    code = await asyncio.to_thread(shell.wait)
    await process.stdout.drain()
    process.exit(code if code >= 0 else 128 - code)


async def _main() -> None:
    _, port = await serve(Path(sys.argv[1]), *sys.argv[2:])
    print(port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
