"""Where learner ranks meet: connections that break when the other machine vanishes."""

from __future__ import annotations

import socket

from rlzmq.roles.learner.rendezvous import guarded_connections


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
