"""Where learner ranks meet: by which interface, and connections that break when the other machine vanishes."""

from __future__ import annotations

import socket

import psutil
import pytest

from rlzmq.roles.formation import guarded_connections, interface_for


def _keepalive(connection: socket.socket) -> tuple[int, int]:
    return (
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    )


def test_connections_made_within_are_guarded_and_others_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as before:
            unix, other = socket.socketpair()
            with guarded_connections():
                within = socket.create_connection(address)
            with unix, other, within:
                assert _keepalive(within) == (1, 3000)
                assert _keepalive(before)[0] == 0
                within.sendall(b"still open")
                accepted = [server.accept()[0] for _ in range(2)]
                assert accepted[1].recv(10) == b"still open"
                for connection in accepted:
                    connection.close()


def test_the_interface_is_the_one_on_the_way_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert interface_for("/tmp/store") == interface_for("tcp://127.0.0.1:1") == "lo"
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and psutil.net_if_stats()[name].isup:
                # What this machine sends to its own address goes through loopback, and has that address as its source.
                assert interface_for(f"tcp://{entry.address}:1") == name
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert interface_for("tcp://127.0.0.1:1") is None
