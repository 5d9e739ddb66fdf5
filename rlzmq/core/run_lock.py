"""The lock of a run directory: one driver at a time, whichever command or script starts it."""

from __future__ import annotations

import errno
import logging
import os
import platform
import time
from pathlib import Path

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import FileLock, holder_of, lock_file, make_directories

__all__ = ["LOCK", "driver_of", "lock_run", "move_aside", "run_of"]

_log = logging.getLogger("rlzmq.runs")

LOCK = "driver.lock"
"""Name of the file; its text says which process drives the run, on which host and since when."""

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def run_of(path: Path) -> Path:
    """Return the run directory of a directory of checkpoints, of a checkpoint in one, or of itself."""
    for place in (path, path.parent):
        if place.absolute().name == "checkpoints":
            return place.parent if place.name else place.absolute().parent
    return path


def lock_run(directory: Path) -> FileLock | None:
    """Take a directory for this process, until the lock is released or the process ends.

    Returns:
        The lock; None, after a warning, on a filesystem without locks.

    Raises:
        ConfigurationError: Another driver has the directory, or it cannot be written.
    """
    try:
        make_directories(directory)
        lock = lock_file(directory / LOCK, mode=0o664)
        lock.write(f"pid {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    except BlockingIOError as error:
        raise ConfigurationError(
            f"{directory} is in use by {error.strerror or 'another process'}: a run has one driver. End that one "
            "first, or name another directory."
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise ConfigurationError(
                f"cannot write to the run directory {directory}: {error.strerror}"
            ) from error
        _log.warning("%s: its filesystem has no locks, so a second driver would not be noticed.", directory)
        return None
    return lock


def driver_of(directory: Path) -> str | None:
    """Return who drives the run in a directory, e.g. ``"pid 4711 on gpu3 since …"``; None if nobody does.

    Raises:
        OSError: The filesystem has no locks, or the lock may not be read.
    """
    return holder_of(directory / LOCK)


def move_aside(directory: Path) -> Path:
    """Rename a directory to ``NAME.old-DATE-TIME`` and return its new path.

    Raises:
        ConfigurationError: It cannot be renamed, e.g. because it is a mount point.
    """
    directory = directory.absolute()
    aside = directory.with_name(f"{directory.name}.old-{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    while aside.exists():
        number += 1
        aside = aside.with_name(f"{aside.name.partition('_')[0]}_{number}")
    try:
        directory.rename(aside)
    except OSError as error:
        raise ConfigurationError(f"cannot rename {directory} to {aside}: {error.strerror}") from error
    (aside / LOCK).unlink(missing_ok=True)
    return aside
