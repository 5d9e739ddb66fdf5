"""SocketDirectory: the private directory of one run, with ipc sockets, keys and locks; removed with the run."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
import time
from multiprocessing.process import current_process
from multiprocessing.util import Finalize
from pathlib import Path

from rlzmq.core.addresses import MAX_IPC_PATH_BYTES
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import lock_file

__all__ = [
    "SocketDirectory",
    "ensure_multiprocessing_directory",
    "process_directory",
    "set_multiprocessing_directory",
]

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

    Raises:
        BlockingIOError: Another process owns the directory of this name; ``filename`` is a file in it.
        ConfigurationError: No base directory is writable and short enough.

    Example:
        >>> with SocketDirectory() as directory:
        ...     directory.address("control").startswith("ipc:///")
        True
    """

    def __init__(self, base: str | os.PathLike[str] | None = None, *, name: str = "") -> None:
        self.path: Path = _make_directory(base, name)
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
        if len(os.fsencode(path)) > MAX_IPC_PATH_BYTES:
            raise ConfigurationError(
                f"the ipc path {path} is longer than the {MAX_IPC_PATH_BYTES} bytes the system allows: "
                "use a shorter name or run directory"
            )
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


def _make_directory(base: str | os.PathLike[str] | None, name: str) -> Path:
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
