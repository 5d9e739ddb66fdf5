"""``rlzmq dashboard``: watch runs in a browser."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from rlzmq.cli.parsing import parse
from rlzmq.cli.token_file import token_in
from rlzmq.core.addresses import is_loopback
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import make_directories
from rlzmq.core.imports import import_optional

__all__ = ["DashboardOptions", "check_installed", "dashboard_of", "run"]

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


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq dashboard``; return the exit code."""
    options = parse(
        DashboardOptions,
        arguments,
        usage="rlzmq dashboard [RUN… | ADDRESS] [options]",
        description="Watch runs in a browser: returns, rates, runners, drops, events, trials. Ctrl-C ends it "
        "without an effect on the runs.",
    )
    check_installed()
    host = f"[{options.host}]" if ":" in options.host else options.host
    if not (options.insecure or is_loopback(f"tcp://{host}:0")):
        raise ConfigurationError(
            f"--host {options.host}: others could read the traffic there, which is not encrypted. Forward the port by "
            "ssh instead (ssh -L 8470:127.0.0.1:8470 HOST), or give --insecure."
        )
    from rlzmq.telemetry.dashboard.server import Dashboard
    from rlzmq.telemetry.dashboard.watched import Watched

    token = None if options.token_file is None else token_in(options.token_file)
    watched = Watched(options.runs or ["runs"])

    def started(port: int) -> Dashboard:
        return Dashboard(
            watched, host=options.host, port=port, hosts=options.allow_host, token=token, announce=_announce
        )

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


def _announce(link: str) -> None:
    print(f"dashboard   {link}", flush=True)


def check_installed() -> None:
    """Raise MissingPackageError if the packages of ``rlzmq[dash]`` are missing."""
    for module in ("starlette", "uvicorn", "prometheus_client"):
        import_optional(module, "The dashboard", "rlzmq[dash]")
