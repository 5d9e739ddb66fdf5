"""``rlzmq doctor``: check whether this machine can run rlzmq, and what would be slow or unsafe."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlzmq.cli.main import EXIT_CONFIG
from rlzmq.cli.parsing import command
from rlzmq.core.addresses import SocketDirectory, check_bind_address, split_tcp
from rlzmq.core.process import loopback_interface, num_usable_cores
from rlzmq.net.keys import JoinFile, curve_support

__all__ = ["CHECKS", "REQUIRED", "Finding", "doctor"]

Level = Literal["ok", "warn", "FAIL"]

_MIN_FILES = 1024
_FILES_OF_A_BROKER = 40
_FILES_PER_PEER = 2  # a runner has two connections
_FEW_PEERS = 50
# What pyproject.toml asks for, because rlzmq itself need not be installed.
REQUIRED = (
    "pyzmq", "msgpack", "torch", "gymnasium", "numpy", "uvloop", "cloudpickle", "optree", "safetensors", "pydantic",
    "rich", "tyro",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    what: str
    detail: str


@dataclass
class DoctorOptions:
    """Options of ``rlzmq doctor``."""

    listen: str | None = None
    """Check that the ports of tcp://HOST:PORT, on which a run will listen, are free (default: not checked)."""
    join: Path | None = None
    """Check that this join file is private and that its broker accepts its key (default: not checked)."""
    timeout: float = 5.0
    """Seconds to wait for the broker of --join (default: 5)."""


@command(
    DoctorOptions,
    usage="rlzmq doctor [options]",
    description="Check this machine before a run.",
)
def doctor(options: DoctorOptions) -> int:
    """Run the command with `arguments`, which follow ``rlzmq doctor``; return 0 if nothing fails, else 78."""
    num_failed = 0
    for check in CHECKS:
        try:
            findings = list(check(options))
        except Exception as error:  # a check that cannot run is a failure
            findings = [
                Finding("FAIL", check.__name__.removeprefix("check_"), f"{type(error).__name__}: {error}")
            ]
        for finding in findings:
            print(f"{finding.level:<5} {finding.what:<16} {finding.detail}", flush=True)
            num_failed += finding.level == "FAIL"
    return EXIT_CONFIG if num_failed else 0


def check_versions(options: DoctorOptions) -> Iterator[Finding]:
    """Check Python and the required packages."""
    version = sys.version.split()[0]
    yield Finding("ok" if sys.version_info >= (3, 11) else "FAIL", "python", f"{version} (3.11 or newer)")
    missing, found = [], []
    for name in REQUIRED:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding(
        "FAIL" if missing else "ok",
        "packages",
        f"missing: {', '.join(missing)}" if missing else ", ".join(found),
    )


def check_keys(options: DoctorOptions) -> Iterator[Finding]:
    """Check CURVE support in libzmq, and a join file's mode and broker."""
    version, has_curve = curve_support()
    yield Finding(
        "ok" if has_curve else "FAIL",
        "keys",
        f"libzmq {version} {'with' if has_curve else 'WITHOUT'} CURVE"
        + ("" if has_curve else ": TCP cannot be used"),
    )
    if options.join is None:
        return
    import asyncio

    from rlzmq.roles.remote_peer import Conversation
    from rlzmq.wire.messages import Config, ConfigRequest, Refused

    join = JoinFile.read(options.join)
    yield Finding("ok", "join file", f"{options.join} lets a {join.role} in, mode 0600")

    async def ask() -> tuple[Any, float]:
        async with Conversation(join.addresses["data"], join) as conversation:
            start = time.perf_counter()
            answer, _ = await conversation.ask(ConfigRequest(), (Config, Refused), timeout_s=options.timeout)
            return answer, time.perf_counter() - start

    answer, seconds = asyncio.run(ask())
    told = f"{join.addresses['data']} took this key and answered in {seconds * 1e3:.0f} ms"
    if isinstance(answer, Refused):
        told += f": {answer.detail}"
    is_fine = not isinstance(answer, Refused) or answer.reason == "no_driver"
    yield Finding("ok" if is_fine else "FAIL", "broker", told)


def check_files(options: DoctorOptions) -> Iterator[Finding]:
    """Check the limit of open files; each peer needs some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    level: Level = "ok"
    hint = " (raised automatically)"
    if hard != resource.RLIM_INFINITY and hard < _MIN_FILES:
        level = "warn" if hard >= _FILES_OF_A_BROKER + _FEW_PEERS else "FAIL"
        num_peers = max(0, (hard - _FILES_OF_A_BROKER) // _FILES_PER_PEER)
        hint = f": a broker serves about {num_peers} peers; raise the hard limit (ulimit -Hn)"
    yield Finding(level, "open files", f"soft {soft}, hard {most}{hint}")


def check_run_directory(options: DoctorOptions) -> Iterator[Finding]:
    """Create a private directory with a path short enough for Unix sockets, and a socket in it."""
    with SocketDirectory() as directory, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(directory.address("doctor").removeprefix("ipc://"))
        mode = directory.path.stat().st_mode & 0o777
        yield Finding(
            "ok" if mode == 0o700 else "FAIL",
            "ipc",
            f"{directory.path.parent}, directories of mode {mode:04o}",
        )


def check_loopback(options: DoctorOptions) -> Iterator[Finding]:
    """Check loopback TCP, over which the learners of one machine connect."""
    start = time.perf_counter()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(b"x")
            client.recv(1)
    yield Finding(
        "ok",
        "loopback",
        f"{loopback_interface()}, a connection in {(time.perf_counter() - start) * 1e3:.1f} ms",
    )


def check_ports(options: DoctorOptions) -> Iterator[Finding]:
    """Check that the ports of `listen` are free."""
    if options.listen is None:
        return
    check_bind_address(options.listen, has_keys=True)
    host, port = split_tcp(options.listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    names = {0: "data", 1: "weights", 2: "learners", 3: "learners' store"}
    for offset, name in names.items() if port else ():
        try:
            with socket.create_server((host, port + offset), family=family):
                yield Finding("ok", f"port {port + offset}", f"free ({name})")
        except OSError as error:
            who = f": ss -ltnp 'sport = :{port + offset}' names who listens there, or choose another port"
            yield Finding("FAIL", f"port {port + offset}", f"{name}: {error.strerror}{who}")


def check_threads(options: DoctorOptions) -> Iterator[Finding]:
    """Compare torch's threads per process with the CPU cores."""
    import torch

    cores = num_usable_cores()
    threads, named = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    level: Level = "ok" if named or cores <= 2 else "warn"
    hint = "" if named else "; runners use 1 (torch_num_threads), OMP_NUM_THREADS is not set"
    yield Finding(level, "torch threads", f"{threads} on {cores} cores{hint}")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield Finding("ok", "GPUs", str(gpus) if gpus else "none: learners train on the CPU")


def check_network(options: DoctorOptions) -> Iterator[Finding]:
    """Report this machine's address for others and torch.distributed's interface."""
    name = socket.gethostname()
    try:
        own = socket.gethostbyname(name)
    except OSError:
        yield Finding("warn", "host name", f"{name} has no address here: name one in config.listen")
        return
    is_local = own.startswith("127.")
    hint = " (loopback: other machines need config.networking(advertise=…))" if is_local else ""
    yield Finding("ok", "host name", f"{name} is {own}{hint}")
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    yield Finding(
        "ok",
        "learners' link",
        interface or "chosen by the route to the driver; GLOO_SOCKET_IFNAME is not set",
    )


def check_disk(options: DoctorOptions) -> Iterator[Finding]:
    """Check the space for checkpoints and temporary files."""
    for path in dict.fromkeys((os.getcwd(), tempfile.gettempdir())):
        free = shutil.disk_usage(path).free
        yield Finding("ok" if free > 1 << 30 else "warn", "disk", f"{path}: {free / 2**30:.1f} GiB free")


CHECKS: tuple[Callable[[Any], Iterator[Finding]], ...] = (
    check_versions,
    check_keys,
    check_files,
    check_run_directory,
    check_loopback,
    check_ports,
    check_threads,
    check_network,
    check_disk,
)
