"""Where multiprocessing puts its sockets in a process of the run: a private directory with a short path.

Its default, ``pymp-*`` in ``TMPDIR``, stays behind when the process is killed, and its sockets' paths are too long for
the system if that of ``TMPDIR`` is.
"""

from __future__ import annotations

import os
from multiprocessing.process import current_process
from multiprocessing.util import Finalize
from pathlib import Path

from rlzmq.core.socket_directory import SocketDirectory

__all__ = ["ensure_multiprocessing_directory", "process_directory", "set_multiprocessing_directory"]

_KEY = "tempdir"
_AFTER_ITS_USERS = -100  # exit priority of multiprocessing's own directory


def process_directory(run_directory: str | os.PathLike[str], pid: int) -> Path:
    """Return the directory of one process of a run within the run's private directory."""
    return Path(run_directory, f"mp-{pid}")


def set_multiprocessing_directory(path: Path) -> None:
    """Create a directory and make it multiprocessing's in this process; the run removes it when the process ends."""
    path.mkdir(mode=0o700, exist_ok=True)
    current_process()._config[_KEY] = str(path)  # type: ignore[attr-defined]


def ensure_multiprocessing_directory() -> None:
    """Make a private directory multiprocessing's if it has none yet in this process; it is removed at exit.

    If the process is killed, the next :class:`SocketDirectory` removes it.

    Raises:
        ConfigurationError: No base directory is writable and short enough.
    """
    config = current_process()._config  # type: ignore[attr-defined]
    if config.get(_KEY) is None:
        directory = SocketDirectory()
        config[_KEY] = str(directory.path)
        Finalize(None, directory.close, exitpriority=_AFTER_ITS_USERS)
