"""Where learner ranks meet before they have connections of their own: a file, or the driver's TCP store."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from typing import Any

from rlzmq.core.addresses import split_tcp
from rlzmq.core.errors import ConfigurationError

__all__ = ["StoreServer", "guarded_connections", "interface_for", "open_store"]

# A machine that is cut off sends no end of a connection: a collective would wait for it until its timeout. The
# system asks the other side after a second of silence, and gives the connection up after three.
_KEEPALIVE_S, _NUM_KEEPALIVES = 1, 3


class StoreServer:
    """torch's TCPStore, served by the driver, which outlives every rank; on one interface only.

    It has no keys: like all of torch.distributed it needs a network that can be trusted.

    Args:
        host: Of the interface to listen on.
        port: 0: any free one.

    Raises:
        ConfigurationError: It cannot be listened on.
    """

    def __init__(self, host: str, port: int) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        try:
            family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(1024)
        except OSError as error:
            raise ConfigurationError(f"cannot serve learners at {host}:{port}: {error.strerror}") from error
        self.port = int(self._socket.getsockname()[1])
        # By itself a TCPStore would listen on every interface: it gets a socket of ours instead.
        self._store: Any = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach()
        )

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._store = None


def open_store(place: str, num_ranks: int) -> Any:
    """The store at a file's path, or at ``tcp://host:port``."""
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    if not place.startswith("tcp://"):
        return FileStore(place, num_ranks)
    host, port = split_tcp(place)
    return TCPStore(host, port, is_master=False, wait_for_workers=False)


def interface_for(place: str) -> str | None:
    """The network interface for connections between ranks: loopback for a file, else the one towards the store.

    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where set, win: None then.
    """
    from rlzmq.learners.distributed import loopback_interface

    if not place.startswith("tcp://"):
        return loopback_interface()
    if os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME"):
        return None
    import psutil  # type: ignore[import-untyped]

    host, port = split_tcp(place)
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it only asks the routing table
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in addresses):
            return str(name)
    return None


@contextlib.contextmanager
def guarded_connections() -> Iterator[None]:
    """TCP connections that come into being within the block break a few seconds after their other side vanished.

    torch.distributed has no setting for it; its sockets are found among the process's open files.
    """
    before = _socket_inodes()
    yield
    for inode, fd in _socket_inodes().items():
        if inode in before:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:  # the same connection
            if ours.proto != socket.IPPROTO_TCP:
                continue
            ours.getpeername()  # OSError where it only listens
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_S)
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_KEEPALIVES)
            ours.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _KEEPALIVE_S * _NUM_KEEPALIVES
            )


def _socket_inodes() -> dict[int, int]:
    """Inode → descriptor of every socket of this process."""
    found = {}
    with contextlib.suppress(OSError):  # no /proc: no guard
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(name)
    return found
