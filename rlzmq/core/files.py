"""Files and directories that only their owner and, if the umask allows it, their group can write.

A *fragment log* is a file of records with checksums, which readers map into memory::

    magic      names the kind of the file and its version
    records    each: u32 CRC-32 of the rest, u8 kind, u64 length, payload

An incomplete record (after a kill or a power failure) or an altered one ends what can be read.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import mmap
import os
import secrets
import stat
import struct
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from rlzmq.core import faults
from rlzmq.core.errors import ConfigurationError, printable

_HAS_LOCKS = importlib.util.find_spec("fcntl") is not None  # elsewhere nothing is locked
if _HAS_LOCKS:
    import fcntl

__all__ = [
    "RECORD_BYTES",
    "FileLock",
    "Record",
    "holder_of",
    "lock_file",
    "make_directories",
    "map_file",
    "opener",
    "read_private_file",
    "read_records",
    "sync_directory",
    "write_all",
    "write_record",
    "write_text",
]

# Maximum mode. The umask may remove permissions, but with a umask of 0 others still get none.
_FILE_MODE = 0o664
_DIRECTORY_MODE = 0o775
_MAX_LOCK_TRIES = 10_000  # of some 0.5 ms; only a reader that is stopped in its look needs more than a few
_STDIN = ("-", "/dev/stdin")


def opener(path: str, flags: int) -> int:
    """Open a file for ``open(..., opener=opener)``."""
    return os.open(path, flags, _FILE_MODE)


def write_text(path: str | os.PathLike[str], text: str, *, is_private: bool = False) -> None:
    """Write a small UTF-8 file at once: after a failure or a kill it has either the old or the new content.

    A link is replaced, not followed. So is every other kind of file.

    Args:
        path: The file.
        text: Its content.
        is_private: Whether nobody else may read it (mode 0600). It is then on disk when this returns.

    Raises:
        OSError: It cannot be written; ``filename`` is its path.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        mine = partial(os.open, mode=0o600) if is_private else opener
        with open(scratch, "x", encoding="utf-8", opener=mine) as file:
            file.write(text)
            if is_private:
                file.flush()
                os.fsync(file.fileno())
        scratch.rename(path)
        if is_private:
            sync_directory(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            scratch.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # a write to a full disk leaves it out
        raise


def make_directories(path: Path, *, mode: int = _DIRECTORY_MODE) -> None:
    """Create a directory with this mode, and its parents, if they are missing."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=mode if place == path else _DIRECTORY_MODE, exist_ok=True)
    path.mkdir(exist_ok=True)  # raises an error if it is a file


class FileLock:
    """An exclusive lock of a file, held until `release` or the end of this process. Forked children do not hold it."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        _held.add(self)

    @property
    def is_held(self) -> bool:
        """Whether this process has the lock."""
        return self._fd >= 0

    def write(self, text: str) -> None:
        """Replace the file's content by a few words about the holder, for `lock_file`'s error."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def release(self, *, remove: bool = False) -> None:
        """Release the lock. Idempotent. The file stays, unless `remove`."""
        if self._fd < 0:
            return
        if remove:
            with contextlib.suppress(OSError):
                # its directory may have been renamed
                if os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
                    self.path.unlink()
        if _HAS_LOCKS:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # also for a child that was forked a moment ago
        self.forget()

    def forget(self) -> None:
        """Close this process's descriptor, without an effect on those of others."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.forget()


_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _forget_parents_locks() -> None:
    for lock in list(_held):
        lock.forget()


# A descriptor in a forked child would hold the lock after the death of its owner.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents_locks)


def lock_file(path: Path, *, create: bool = True, mode: int = 0o600) -> FileLock:
    """Lock a file.

    Args:
        path: The file.
        create: Whether to create it, with `mode`, if it is missing.

    Raises:
        BlockingIOError: It is locked; ``strerror`` is what its holder wrote into it.
        OSError: It cannot be opened, is a symbolic link, or its filesystem has no locks.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    while True:
        fd = os.open(path, flags, mode)
        try:
            if not _try_lock(fd):
                raise BlockingIOError(errno.EAGAIN, _text_of(fd), str(path))
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return FileLock(path, fd)
        except FileNotFoundError:
            pass  # its last holder removed the file between open and lock, so try again
        except OSError:
            os.close(fd)
            raise
        os.close(fd)


def holder_of(path: Path) -> str | None:
    """Return what the holder of a file's lock wrote into it; None if nobody holds it.

    Raises:
        OSError: The file cannot be read, or its filesystem has no locks.
    """
    if not _HAS_LOCKS:
        return None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _text_of(fd)
    finally:
        os.close(fd)
    return None


def _try_lock(fd: int) -> bool:
    """Take the exclusive lock; return False if another holds it. `holder_of` shares it, but only for a moment."""
    if not _HAS_LOCKS:
        return True
    for _ in range(_MAX_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            fcntl.flock(fd, fcntl.LOCK_UN)
            time.sleep(secrets.randbelow(1000) / 1e6)  # so that two who try do not do so in step
        else:
            return True
    return False


def _text_of(fd: int) -> str:
    return printable(os.pread(fd, 512, 0).decode(errors="replace"), keep=" \n").strip()


def write_all(file: Any, data: Any) -> None:
    """Write a buffer to an unbuffered file, in as many calls as it takes."""
    left = memoryview(data).cast("B")
    while left:
        left = left[file.write(left) :]


def sync_directory(path: Path) -> None:
    """Wait until a directory's entries are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_MAX_SECRET_BYTES = 64 * 1024


def read_private_file(path: str | os.PathLike[str]) -> str:
    """Read a file that holds secrets.

    Args:
        path: The file; ``-`` is standard input of any kind (/dev/stdin cannot be opened if it is a socket). A file
            in the volume of a Kubernetes secret may be readable by its group: with an fsGroup, kubelet sets
            this mode whatever the volume's defaultMode, and only the pod is in that group.

    Raises:
        ConfigurationError: The file is missing, larger than 64 KiB, readable by other users, or another user's.
    """
    try:
        is_stdin = os.fspath(path) in _STDIN
        file = open(os.dup(0) if is_stdin else path, "rb")  # noqa: SIM115
    except OSError as error:
        raise ConfigurationError(f"cannot read {os.fspath(path)}: {error.strerror}") from error
    with file:
        status = os.fstat(file.fileno())
        if not stat.S_ISSOCK(status.st_mode):  # a socket's mode means nothing
            _check_mode(os.fspath(path), stat.S_IMODE(status.st_mode))
            if status.st_uid not in (os.geteuid(), 0):  # root: kubelet, systemd
                raise ConfigurationError(
                    f"{os.fspath(path)} should hold a secret of yours, but belongs to user {status.st_uid}, who may "
                    "know or change it: use a file of your own"
                )
        data = file.read(_MAX_SECRET_BYTES + 1)
    if len(data) > _MAX_SECRET_BYTES:
        raise ConfigurationError(f"{path} is larger than {_MAX_SECRET_BYTES} bytes: not a key or join file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigurationError(f"{os.fspath(path)} is not a text file") from None


def _check_mode(path: str, mode: int) -> None:
    if not mode & 0o077:
        return
    cure = f"chmod 600 {path}"
    # Kubelet links the files of a secret's volume to ..data, itself a link, and lets the pod's group read them.
    directory = os.path.dirname(path)
    if os.path.islink(os.path.join(directory, "..data")) and os.path.islink(path):
        if not mode & 0o037:
            return
        cure = "give the pod's secret volume defaultMode: 0400"
    raise ConfigurationError(
        f"{path} holds a secret key and others may read it (mode {mode:04o}): {cure}, and replace the keys "
        "if others had access"
    )


_RECORD = struct.Struct("<IBQ")
RECORD_BYTES = _RECORD.size
"""Size of a record without its payload."""


class Record(NamedTuple):
    """A record of a log: its kind and payload, and where it ends in the file."""

    kind: int
    payload: memoryview
    end: int


def write_record(file: BinaryIO, kind: int, parts: Sequence[bytes | bytearray | memoryview]) -> None:
    """Append one record whose payload is the concatenated `parts`, which are not copied."""
    length = sum(memoryview(part).nbytes for part in parts)
    crc = zlib.crc32(_RECORD.pack(0, kind, length)[4:])
    for part in parts:
        crc = zlib.crc32(part, crc)
    file.write(_RECORD.pack(crc, kind, length))
    faults.at("record.begun")
    for part in parts:
        write_all(file, part)


def map_file(path: Path) -> memoryview:
    """Return a file's content, memory-mapped."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def read_records(content: memoryview, start: int) -> Iterator[Record]:
    """Yield the records behind `start`, up to the first incomplete or altered one."""
    while start + _RECORD.size <= len(content):
        crc, kind, length = _RECORD.unpack_from(content, start)
        end = start + _RECORD.size + length
        if end > len(content) or zlib.crc32(content[start + 4 : end]) != crc:
            return
        yield Record(kind, content[start + _RECORD.size : end], end)
        start = end
