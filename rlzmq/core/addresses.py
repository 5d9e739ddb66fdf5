"""Checks of socket addresses, and a lock that prevents a second bind of an ipc path."""

from __future__ import annotations

import os
from pathlib import Path

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import FileLock, lock_file
from rlzmq.core.suggest import did_you_mean

__all__ = [
    "MAX_IPC_PATH_BYTES",
    "AddressLock",
    "check_bind_address",
    "check_connect_address",
    "ipc_path",
    "is_loopback",
    "split_tcp",
]

MAX_IPC_PATH_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1 on Linux

_SCHEMES = ("ipc", "tcp", "inproc")
_WILDCARDS = {"", "*", "0.0.0.0", "::", "[::]"}


def check_bind_address(address: str, *, has_keys: bool, insecure: bool = False) -> None:
    """Raise an error for addresses that must not be bound.

    Args:
        address: ``ipc:///path``, ``tcp://host:port`` or ``inproc://name``.
        has_keys: Whether the socket requires CURVE keys.
        insecure: Whether TCP may be bound without keys.

    Raises:
        ConfigurationError: The scheme is unknown, the host is a wildcard, TCP has no keys, or the ipc path is too long.
    """
    scheme, rest = _split(address)
    if scheme == "ipc":
        _check_ipc_path(rest)
        return
    if scheme == "inproc":
        return
    host, _ = split_tcp(address)
    if host in _WILDCARDS:
        raise ConfigurationError(
            f"refusing to listen on every interface ({address}): name the address of the interface that the "
            "peers reach, e.g. tcp://10.0.0.5:5555"
        )
    if not has_keys and not insecure:
        raise ConfigurationError(
            f"refusing to listen on {address} without keys: anyone who reaches the port could connect. Create "
            "keys (`rlzmq` does so when it writes a join file), use ipc:// on one machine, or set insecure"
        )


def check_connect_address(address: str, *, has_keys: bool, insecure: bool = False) -> None:
    """Raise an error for addresses to which a connection is impossible or not allowed.

    Raises:
        ConfigurationError: The scheme is unknown, the host or port is malformed, TCP has no keys, or the ipc path is
            too long.
    """
    scheme, rest = _split(address)
    if scheme == "ipc":
        _check_ipc_path(rest)
    elif scheme == "tcp":
        host, port = split_tcp(address)
        if host in _WILDCARDS or port == 0:
            raise ConfigurationError(f"cannot connect to {address}: expected tcp://host:port of one machine")
        if not has_keys and not insecure:
            raise ConfigurationError(
                f"refusing to connect to {address} without keys: take them from the join file, or set "
                "insecure"
            )


def ipc_path(address: str) -> Path | None:
    """Return the file of an ipc address; None for other schemes and for abstract sockets (``ipc://@…``)."""
    scheme, _, rest = address.partition("://")
    return Path(rest) if scheme == "ipc" and not rest.startswith("@") else None


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach the address."""
    if not address.startswith("tcp://"):
        return True
    host, _ = split_tcp(address)
    return host in ("localhost", "::1", "[::1]", "lo") or host.startswith("127.")


def split_tcp(address: str) -> tuple[str, int]:
    """Return the host and port of ``tcp://host:port``. The port may be 0 or ``*`` (the system chooses).

    Raises:
        ConfigurationError: It is not of that form.
    """
    scheme, rest = _split(address)
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not (port == "*" or (port.isdecimal() and int(port) < 65536)):
        raise ConfigurationError(f"malformed address {address!r}: expected tcp://host:port, port 0 to 65535")
    return host, 0 if port == "*" else int(port)


def _split(address: str) -> tuple[str, str]:
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ConfigurationError(
            f"malformed address {address!r}: expected ipc:///path, tcp://host:port or inproc://name."
            + (did_you_mean(scheme, _SCHEMES) if separator else "")
        )
    return scheme, rest


def _check_ipc_path(path: str) -> None:
    if path in ("", "*"):
        raise ConfigurationError("an ipc address needs a path, e.g. ipc:///run/user/1000/rlzmq-x/control")
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_IPC_PATH_BYTES:
        raise ConfigurationError(
            f"the ipc path {path} has {num_bytes} bytes, the system allows {MAX_IPC_PATH_BYTES}: use a "
            "shorter run directory, e.g. with XDG_RUNTIME_DIR=/tmp"
        )


class AddressLock:
    """Lock of an ipc path against a second bind, which libzmq would silently allow.

    The lock is a file ``<path>.lock`` under ``flock``, which the system releases when its process dies.
    """

    def __init__(self, path: Path, lock: FileLock) -> None:
        self._path = path
        self._lock = lock

    @classmethod
    def take(cls, address: str) -> AddressLock | None:
        """Lock the path of an ipc address; return None for addresses without a path.

        Raises:
            ConfigurationError: Another socket listens on the path.
        """
        path = ipc_path(address)
        if path is None:
            return None
        try:
            lock = lock_file(Path(f"{path}.lock"))
        except BlockingIOError as error:
            holder = error.strerror or "unknown"
            raise ConfigurationError(
                f"{address} is in use by process {holder}: stop it, or choose another run directory"
            ) from None
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {address}: {error.strerror}") from error
        lock.write(str(os.getpid()))
        return cls(path, lock)

    def release(self) -> None:
        """Release the path after its socket was closed. Idempotent."""
        if self._lock.is_held:
            self._path.unlink(missing_ok=True)  # libzmq does not remove it
            self._lock.release(remove=True)
