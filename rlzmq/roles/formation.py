"""Formation of a generation of learner ranks, which fails as soon as one of them dies or hangs; and their rendezvous.

    driver ──rejoin──► every rank ──► rendezvous in the store ──► connect ──► adopt the newest state ──► done
       └── a rank died, hangs or failed: the attempt is cancelled, and repeated without it

| consumes                 | produces           | waits for         | unblocked by                             |
|--------------------------|--------------------|-------------------|------------------------------------------|
| the ranks' `rejoin`      | a new generation   | all of its ranks  | a death, a failure, silence, the deadline |

The store of the rendezvous is a file, or the driver's TCP store.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.addresses import split_tcp
from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.core.process import loopback_interface

with contextlib.suppress(ModuleNotFoundError):  # runs in several processes need it, clients do not
    import fcntl

__all__ = [
    "LEARNER_ROLE",
    "StoreServer",
    "connecting_timeout_s",
    "form_group",
    "guarded_connections",
    "interface_for",
    "open_store",
]

# Name of the actor class of a rank: only the rank imports it, since it imports torch.
LEARNER_ROLE = "rlzmq.roles.learner_role:LearnerRole"

# An unreachable machine does not close its connections: a collective would wait until its timeout. With these
# settings the system probes the other side after a second of silence, and drops the connection after three.
_KEEPALIVE_S, _NUM_KEEPALIVES = 1, 3
# The request for all IPv4 addresses of this machine, from Linux's headers (netdevice(7)).
_SIOCGIFCONF, _IFREQ_BYTES, _MAX_INTERFACES = 0x8912, 40, 1024


class StoreServer:
    """A torch TCPStore served by the driver, which outlives every rank, on one interface only.

    It has no authentication: like all of torch.distributed it requires a trusted network.

    Args:
        host: Host of the interface to listen on.
        port: Port to listen on; 0: any free one.

    Raises:
        ConfigurationError: The address cannot be used.
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
        self.port: int = int(self._socket.getsockname()[1])
        # A TCPStore would listen on every interface, so it is given a bound socket.
        self._store: Any = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=self._socket.detach()
        )

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._store = None


def open_store(place: str, num_ranks: int) -> Any:
    """Return the store at a file's path, or at ``tcp://host:port``."""
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    if not place.startswith("tcp://"):
        return FileStore(place, num_ranks)
    host, port = split_tcp(place)
    return TCPStore(host, port, is_master=False, wait_for_workers=False)


def interface_for(place: str) -> str | None:
    """Return the network interface for connections between ranks: loopback for a file, else that of the store's route.

    The result is None if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set.
    """
    if not place.startswith("tcp://"):
        return loopback_interface()
    if os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME"):
        return None
    host, port = split_tcp(place)
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing, only looks up the route
        own = probe.getsockname()[0]
        return _interface_of(probe, own.partition("%")[0])


def _interface_of(any_socket: socket.socket, address: str) -> str | None:
    """Return the interface that has this address of this machine; None if it cannot be found."""
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    if len(packed) == 16:
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, *_, name = line.split()
                if bytes.fromhex(digits) == packed:
                    return name
        return None
    entries = array.array("B", bytes(_IFREQ_BYTES * _MAX_INTERFACES))
    request = struct.pack("iL", len(entries), entries.buffer_info()[0])
    with contextlib.suppress(OSError):
        used = struct.unpack("iL", fcntl.ioctl(any_socket, _SIOCGIFCONF, request))[0]
        for start in range(0, used, _IFREQ_BYTES):  # 16 bytes of name; family, port, address
            entry = entries[start : start + _IFREQ_BYTES].tobytes()
            if entry[20:24] == packed:
                return entry[:16].partition(b"\0")[0].decode()
    return None


@contextlib.contextmanager
def guarded_connections() -> Iterator[None]:
    """Set keepalive on TCP connections created within the block, so that they break soon after a peer vanishes.

    torch.distributed has no such setting; its sockets are found among the process's open files.
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
    """Return the descriptor of every socket of this process, by inode."""
    found = {}
    with contextlib.suppress(OSError):  # no /proc: no guard
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(name)
    return found


def connecting_timeout_s(config: BaseConfig) -> float:
    """Return the seconds that ranks have to connect once all are present; NCCL's first connection is slow."""
    return 30.0 if config.num_gpus_per_learner else 4.0


async def form_group(
    handles: Sequence[Any],
    store: str,
    generation: int,
    *,
    deadline_s: float,
    registers: bool = True,
) -> None:
    """Form a group of these ranks, all with the newest state among them.

    Ranks without an answer at the deadline are killed, unless all have none.

    Args:
        handles: The ranks in rank order.
        store: The rendezvous store; see `LearnerRole.rejoin`.
        generation: Higher than all earlier ones.
        deadline_s: Seconds for the whole attempt.
        registers: See `LearnerRole.rejoin`.

    Raises:
        PeerLostError: A rank died, hung, or could not reach the others; the live ranks can try again.
        Exception: The user's code failed in a rank.
    """
    calls = {
        asyncio.ensure_future(handle.call("rejoin", rank, len(handles), store, generation, registers)): handle
        for rank, handle in enumerate(handles)
    }
    pending = set(calls)
    try:
        done, pending = await asyncio.wait(pending, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
        failures = [error for call in done if (error := call.exception()) is not None]
        for failure in sorted(failures, key=lambda failure: isinstance(failure, PeerLostError)):
            raise failure  # an error of the user's code before its consequences
        if pending:
            late = [handle for call, handle in calls.items() if call in pending]
            for handle in late if done else late[1:]:
                handle.kill_hanging(f"the group was not formed within {deadline_s:g} s")
            names = ", ".join(handle.name for handle in late)
            raise PeerLostError(f"{names} did not answer while the learner group was formed")
    finally:
        for call in pending:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
