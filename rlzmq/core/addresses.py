"""Addresses of sockets: their checks, a lock on each ipc path, and the private directory of a run."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import current_process
from multiprocessing.util import Finalize
from pathlib import Path

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import FileLock, lock_file
from rlzmq.core.synonyms import did_you_mean

__all__ = [
    "AddressLock",
    "SocketDirectory",
    "check_bind_address",
    "check_connect_address",
    "ensure_multiprocessing_directory",
    "ipc_path",
    "is_loopback",
    "process_directory",
    "set_multiprocessing_directory",
    "split_tcp",
    "tcp_address",
]


MAX_IPC_PATH_BYTES = 107  # sizeof(sockaddr_un.sun_path) - 1 on Linux

_SCHEMES = ("ipc", "tcp", "inproc")
_WILDCARDS = {"", "*", "0.0.0.0", "::"}


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
    if scheme != "tcp":
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
    return host in ("localhost", "::1", "lo") or host.startswith("127.")


def split_tcp(address: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of ``tcp://host:port``; 0 or ``*``: the system chooses one.

    Raises:
        ConfigurationError: It is not of that form.
    """
    scheme, rest = _split(address)
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon or not (port == "*" or (port.isdecimal() and int(port) < 65536)):
        raise ConfigurationError(f"malformed address {address!r}: expected tcp://host:port, port 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), 0 if port == "*" else int(port)


def tcp_address(host: str, port: int) -> str:
    """Return ``tcp://host:port``, the inverse of `split_tcp`; an IPv6 address has brackets there."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


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


_PREFIX = "rlzmq-"
_LOCK_NAME = "owner.lock"
_ROOM_BYTES = 40  # reserved for names in the directory when its path is chosen
_STALE_AGE_S = 60.0


class SocketDirectory:
    """A directory that only this user may enter (mode 0700), with short paths for ipc sockets.

    It is created under ``XDG_RUNTIME_DIR`` or the system's temporary directory, or under ``/tmp`` if those paths are
    too long for a Unix socket. Its creation removes the directories of killed runs.

    Args:
        base: Parent directory; None: chosen as above.
        name: Its name, for processes that find each other by it; the first of them owns it. "": a new one.
        before: Called with the path before the directory is made: whoever removes it if this process is killed.

    Raises:
        BlockingIOError: Another process owns the directory of this name; ``filename`` is a file in it.
        ConfigurationError: No base directory is writable and short enough.

    Example:
        >>> with SocketDirectory() as directory:
        ...     directory.address("control").startswith("ipc:///")
        True
    """

    def __init__(
        self,
        base: str | os.PathLike[str] | None = None,
        *,
        name: str = "",
        before: Callable[[Path], object] = lambda path: None,
    ) -> None:
        self.path: Path = _make_directory(base, name, before)
        self._lock = lock_file(self.path / _LOCK_NAME)
        _remove_stale(self.path.parent, keep=self.path)

    def address(self, name: str) -> str:
        """Return the ipc address of the socket ``name`` in this directory.

        Raises:
            ConfigurationError: The path would be too long, or ``name`` is not one path component.
        """
        if "/" in name or name in ("", ".", ".."):
            raise ConfigurationError(f"{name!r} cannot name a socket: expected one path component")
        path = self.path / name
        _check_ipc_path(str(path))
        return f"ipc://{path}"

    def close(self) -> None:
        """Remove the directory and its contents. Idempotent. Does nothing in a forked child."""
        if self._lock.is_held:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.release()

    def __enter__(self) -> SocketDirectory:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _make_directory(base: str | os.PathLike[str] | None, name: str, before: Callable[[Path], object]) -> Path:
    if base is not None:
        candidates = [Path(base)]
    else:
        runtime = os.environ.get("XDG_RUNTIME_DIR")
        candidates = [Path(runtime)] if runtime else []
        candidates += [Path(tempfile.gettempdir()), Path("/tmp")]
    reasons = []
    for candidate in candidates:
        root = candidate.absolute()
        path = root / f"{_PREFIX}{name or secrets.token_hex(4)}"
        if len(os.fsencode(path)) + _ROOM_BYTES > MAX_IPC_PATH_BYTES:
            reasons.append(f"{root}: its path is too long for Unix sockets")
            continue
        before(path)
        try:
            path.mkdir(mode=0o700, exist_ok=bool(name))
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                raise FileExistsError(errno.EEXIST, f"{path} is not this user's directory")
            path.chmod(0o700)  # independent of the umask
        except OSError as error:
            reasons.append(f"{root}: {error.strerror}")
            continue
        return path
    raise ConfigurationError(
        "no place for the run directory (" + "; ".join(reasons) + "): set XDG_RUNTIME_DIR to a short, "
        "writable directory"
    )


def _remove_stale(root: Path, keep: Path) -> None:
    """Remove this user's run directories whose owner is dead (their lock is free)."""
    with contextlib.suppress(OSError):
        for path in root.glob(f"{_PREFIX}*"):
            if path != keep:
                _remove_if_stale(path)


def _remove_if_stale(path: Path) -> None:
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            return
        if time.time() - status.st_mtime < _STALE_AGE_S:  # its owner may not have taken the lock yet
            return
        lock = lock_file(path / _LOCK_NAME, create=False)
    except OSError:
        return
    shutil.rmtree(path, ignore_errors=True)
    lock.release()


_KEY = "tempdir"
_AFTER_ITS_USERS = -100  # exit priority of multiprocessing's own directory


def process_directory(run_directory: str | os.PathLike[str], pid: int) -> Path:
    """Return the directory of one process within the run's private directory."""
    return Path(run_directory, f"mp-{pid}")


def set_multiprocessing_directory(path: Path) -> None:
    """Create a directory and set it as multiprocessing's in this process. The run removes it when the process ends."""
    path.mkdir(mode=0o700, exist_ok=True)
    current_process()._config[_KEY] = str(path)  # type: ignore[attr-defined]


def ensure_multiprocessing_directory() -> None:
    """Give multiprocessing a private directory in this process if it has none. It is removed at exit.

    The default, ``pymp-*`` in ``TMPDIR``, remains if the process is killed, and below a long ``TMPDIR`` its sockets'
    paths are too long for the system.

    If the process is killed, the next `SocketDirectory` removes it.

    Raises:
        ConfigurationError: No base directory is writable and short enough.
    """
    config = current_process()._config  # type: ignore[attr-defined]
    if config.get(_KEY) is None:
        directory = SocketDirectory()
        config[_KEY] = str(directory.path)
        Finalize(None, directory.close, exitpriority=_AFTER_ITS_USERS)
