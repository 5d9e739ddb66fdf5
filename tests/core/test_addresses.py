"""Where one may listen and connect; a second bind never steals an ipc path."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlzmq.core.addresses import (
    AddressLock,
    SocketDirectory,
    check_bind_address,
    check_connect_address,
)
from rlzmq.core.errors import ConfigurationError
from rlzmq.net.context import Context
from rlzmq.net.socket import DrainSocket


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]", ""])
@pytest.mark.parametrize("has_keys", [True, False])
def test_every_interface_at_once_is_never_bound(host: str, has_keys: bool) -> None:
    with pytest.raises(ConfigurationError, match="name the address of the interface"):
        check_bind_address(f"tcp://{host}:5555", has_keys=has_keys, insecure=True)


@pytest.mark.parametrize("address", ["tcp://10.0.0.5:5555", "tcp://127.0.0.1:0", "tcp://eth0:0"])
def test_tcp_without_keys_is_refused_unless_insecure(address: str) -> None:
    with pytest.raises(ConfigurationError, match="without keys"):
        check_bind_address(address, has_keys=False)
    check_bind_address(address, has_keys=False, insecure=True)
    check_bind_address(address, has_keys=True)


@pytest.mark.parametrize(
    "address", ["tcp://10.0.0.5", "tcp://h:65536", "tcp://h:x", "tcp://h:-1", "udp://h:1", "h:1"]
)
def test_malformed_addresses_are_named(address: str) -> None:
    for check in (check_bind_address, check_connect_address):
        with pytest.raises(ConfigurationError, match="malformed address"):
            check(address, has_keys=True)


def test_connecting_needs_one_machine_and_its_keys() -> None:
    for address in ("tcp://0.0.0.0:5555", "tcp://10.0.0.5:0"):
        with pytest.raises(ConfigurationError, match="one machine"):
            check_connect_address(address, has_keys=True)
    with pytest.raises(ConfigurationError, match="join file"):
        check_connect_address("tcp://10.0.0.5:5555", has_keys=False)
    check_connect_address("tcp://10.0.0.5:5555", has_keys=True)


def test_an_ipc_path_beyond_the_systems_limit_is_named() -> None:
    check_bind_address("ipc:///" + "x" * 106, has_keys=False)
    with pytest.raises(ConfigurationError, match="XDG_RUNTIME_DIR"):
        check_bind_address("ipc:///" + "x" * 107, has_keys=False)


async def test_a_second_bind_on_an_ipc_path_names_the_holder() -> None:
    with SocketDirectory() as directory, Context() as context:
        address = directory.address("control")
        first = DrainSocket(context, "ROUTER", None)
        first.bind(address)
        second = DrainSocket(context, "ROUTER", None)
        with pytest.raises(ConfigurationError, match=f"in use by process {os.getpid()}"):
            second.bind(address)
        first.close()
        second.bind(address)


def test_a_killed_holder_leaves_the_path_free() -> None:
    script = (
        "import sys, time; from rlzmq.core.addresses import AddressLock; l = AddressLock.take(sys.argv[1]); "
    )
    with SocketDirectory() as directory:
        address = directory.address("control")
        holder = subprocess.Popen(
            [sys.executable, "-c", script + "print('held', flush=True); time.sleep(60)", address],
            stdout=subprocess.PIPE,
            text=True,
        )
        with holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            with pytest.raises(ConfigurationError, match=f"in use by process {holder.pid}"):
                AddressLock.take(address)
            holder.send_signal(signal.SIGKILL)
        lock = AddressLock.take(address)
        assert lock is not None
        lock.release()
        lock.release()


def test_the_run_directory_is_private_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    old_umask = os.umask(0)
    try:
        with SocketDirectory() as directory:
            assert directory.path.stat().st_mode & 0o777 == 0o700
            assert directory.address("a") == f"ipc://{directory.path}/a"
            for wrong in ("", "..", "a/b"):
                with pytest.raises(ConfigurationError, match="cannot name a socket"):
                    directory.address(wrong)
            with pytest.raises(ConfigurationError, match="107"):
                directory.address("x" * 100)
    finally:
        os.umask(old_umask)
    assert not directory.path.exists()
    directory.close()


def test_a_long_runtime_directory_gives_way_to_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with SocketDirectory() as directory:
        assert long not in directory.path.parents
    with pytest.raises(ConfigurationError, match="too long"):
        SocketDirectory(long)


def test_directories_of_dead_runs_are_removed_and_those_of_live_ones_kept() -> None:
    with SocketDirectory() as base, SocketDirectory(base.path) as alive:
        dead = SocketDirectory(base.path)
        dead._lock.release()  # as the system does for a killed process
        fresh = base.path / "rlzmq-fresh"
        fresh.mkdir()
        for directory in (alive.path, dead.path):
            os.utime(directory, (0, 0))
        with SocketDirectory(base.path):
            assert alive.path.exists()
            assert fresh.exists()
            assert not dead.path.exists()
