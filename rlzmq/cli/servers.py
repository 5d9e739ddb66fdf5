"""``rlzmq dashboard`` and ``rlzmq serve``: HTTP servers, for runs and for a policy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from rlzmq.cli.interrupt import on_signals
from rlzmq.cli.main import EXIT_INTERRUPTED
from rlzmq.cli.parsing import command
from rlzmq.cli.policies import PolicyOptions, place_of, policy_arguments, unknown_ids_explained
from rlzmq.core.addresses import is_loopback, tcp_address
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import make_directories, read_private_file, write_text
from rlzmq.core.imports import import_optional

__all__ = ["check_installed", "dashboard", "dashboard_of", "serve"]


_MIN_TOKEN_CHARS = 16


def token_in(path: Path) -> str:
    """Return the token in a file; write a new one if there is no file.

    Raises:
        ConfigurationError: Others may read the file, it holds no token, or it cannot be written.
    """
    if path.exists():
        token = read_private_file(path).strip()
        if len(token) < _MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigurationError(
                f"{path} holds no token: expected at least {_MIN_TOKEN_CHARS} printable ASCII characters without "
                "spaces. Remove it; a new one will be written."
            )
        return token
    token = secrets.token_urlsafe(32)
    try:
        write_text(path, token, is_private=True)  # without a line end: programs put it into a header
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}. Name another file.") from error
    return token


_USUAL_PORT = 8470
_NICE = 10  # training has precedence


@dataclass
class DashboardOptions:
    """Options of ``rlzmq dashboard``."""

    runs: tyro.conf.Positional[list[str]] = field(default_factory=list)
    """Run directories, directories of runs; or, to watch a broker alone, a join file, a run's private directory, or
    ipc:///path of its data socket (default: runs)."""
    port: int | None = None
    """Port to listen on; 0: any free one (default: 8470, or a free one if it is taken)."""
    host: str = "127.0.0.1"
    """Address to listen on (default: 127.0.0.1)."""
    allow_host: list[str] = field(default_factory=list)
    """Additional name of this server in the Host header of requests; repeatable (default: none)."""
    insecure: bool = False
    """Listen on another address than loopback although the traffic, including the session's cookie, is not encrypted
    (default: False)."""
    token_file: Path | None = None
    """File with a token for programs, e.g. Prometheus (header 'Authorization: Bearer TOKEN'); created if it is missing
    (default: none, browsers only)."""
    end_with_stdin: bool = False
    """End when the standard input ends (default: False)."""


@command(
    DashboardOptions,
    usage="rlzmq dashboard [RUN… | ADDRESS] [options]",
    description="Watch runs in a browser: returns, rates, runners, drops, events, trials. Ctrl-C ends it "
    "without an effect on the runs.",
)
def dashboard(options: DashboardOptions) -> int:
    check_installed()
    if not (options.insecure or is_loopback(tcp_address(options.host, 0))):
        raise ConfigurationError(
            f"--host {options.host}: others could read the traffic there, which is not encrypted. Forward the port by "
            "ssh instead (ssh -L 8470:127.0.0.1:8470 HOST), or give --insecure."
        )
    if not 0 <= (options.port or 0) < 1 << 16:
        raise ConfigurationError(f"--port {options.port}: expected 0 to 65535")
    from rlzmq.telemetry.dashboard.server import Dashboard
    from rlzmq.telemetry.dashboard.watched import Watched

    token = None if options.token_file is None else token_in(options.token_file)
    watched = Watched(options.runs or ["runs"])

    def started(port: int) -> Dashboard:
        return Dashboard(watched, host=options.host, port=port, hosts=options.allow_host, token=token)

    if options.port is not None:
        dashboard = started(options.port)
    else:
        try:
            dashboard = started(_USUAL_PORT)
        except ConfigurationError:
            dashboard = started(0)
    if options.end_with_stdin:
        os.nice(_NICE)

        def wait() -> None:
            sys.stdin.buffer.read()
            dashboard.stop()

        threading.Thread(target=wait, name="stdin", daemon=True).start()
    dashboard.serve()
    return 0


@contextlib.contextmanager
def dashboard_of(path: Path) -> Iterator[None]:
    """Show a directory in a dashboard while the block runs, from a process that ends with this one.

    Args:
        path: Directory of a run or a search; created if it is missing.
    """
    make_directories(path)
    command = [sys.executable, "-m", "rlzmq", "dashboard", str(path.absolute()), "--end-with-stdin"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = process.stdout
        threading.Thread(
            target=lambda: [print(line, end="", flush=True) for line in lines], name="dashboard", daemon=True
        ).start()
        try:
            yield
        finally:
            process.stdin.close()
            try:
                process.wait(3.0)
            except subprocess.TimeoutExpired:
                process.kill()


def check_installed() -> None:
    """Raise MissingPackageError if the packages of ``rlzmq[dash]`` are missing."""
    for module in ("starlette", "uvicorn", "prometheus_client"):
        import_optional(module, "The dashboard", "rlzmq[dash]")


@dataclass
class ServeOptions(PolicyOptions):
    """Options of ``rlzmq serve``."""

    port: int = 8000
    """Port to listen on; 0: any free one (default: 8000)."""
    host: str = "127.0.0.1"
    """Address to listen on (default: 127.0.0.1)."""
    token_file: Path | None = None
    """File of the bearer token, mode 0600; written if there is none (default: serve.token in the run
    directory)."""
    allow_host: list[str] = field(default_factory=list)
    """Additional name of this server in the Host header of requests, e.g. a proxy's; repeatable (default: none)."""
    insecure: bool = False
    """Serve HTTP on another address than loopback although it is not encrypted (default: False)."""
    max_body: int = 4 << 20
    """Largest request, in bytes (default: 4194304)."""
    max_batch_size: int = 256
    """Most observations in one forward pass (default: 256)."""
    batch_wait: float = 1.0
    """Milliseconds that an idle server waits for more requests before it computes (default: 1)."""
    reload_interval: float = 2.0
    """Seconds between two looks for a newer checkpoint of the run; 0: never (default: 2)."""


@command(
    ServeOptions,
    usage="rlzmq serve RUN_OR_CHECKPOINT [options]",
    description="Answer requests for actions with a checkpoint's policy, and with newer ones of its run.",
)
def serve(options: ServeOptions) -> int:
    for name in ("max_body", "max_batch_size"):
        if getattr(options, name) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')}: expected 1 or more")
    for name in ("batch_wait", "reload_interval"):
        if not 0 <= getattr(options, name) < 1e6:
            raise ConfigurationError(f"--{name.replace('_', '-')}: expected 0 or more")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("rlzmq.serve").setLevel(logging.INFO)
    from rlzmq.actors.loop_thread import new_event_loop

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(options))


async def _serve(options: ServeOptions) -> int:
    from rlzmq.deploy.policy_server import AsyncPolicyServer

    token_file = options.token_file or place_of(options, "serve.token", "--token-file")
    server = AsyncPolicyServer(
        options.checkpoint,
        **policy_arguments(options),
        http=f"[{options.host}]:{options.port}" if ":" in options.host else f"{options.host}:{options.port}",
        token=token_in(token_file),
        allowed_hosts=options.allow_host,
        insecure=options.insecure,
        max_body_bytes=options.max_body,
        max_batch_size=options.max_batch_size,
        batch_wait_timeout_s=options.batch_wait / 1000,
        reload_interval_s=options.reload_interval,
    )
    loop = asyncio.get_running_loop()
    interrupted: asyncio.Future[int] = loop.create_future()
    tasks: set[asyncio.Task[Any]] = set()

    def reload() -> None:
        task = loop.create_task(server.reload())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    with on_signals(loop, interrupted.set_result):
        with unknown_ids_explained():
            await server.start()
        loop.add_signal_handler(signal.SIGHUP, reload)
        print(f"serving     {server.checkpoint}")
        print(f"http        {server.http_url}")
        print(f"token       {token_file}")
        await interrupted
        print("ending", flush=True)
        loop.remove_signal_handler(signal.SIGHUP)
        await server.stop()
    return EXIT_INTERRUPTED if interrupted.result() == signal.SIGINT else 0
