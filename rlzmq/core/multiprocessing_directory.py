"""The directory of multiprocessing's sockets in a process of the run: private, with a short path.

The default, ``pymp-*`` in ``TMPDIR``, remains if the process is killed, and if the path of ``TMPDIR`` is long, the
sockets' paths are too long for the system.
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
    """Return the directory of one process within the run's private directory."""
    return Path(run_directory, f"mp-{pid}")


def set_multiprocessing_directory(path: Path) -> None:
    """Create a directory and set it as multiprocessing's in this process. The run removes it when the process ends."""
    path.mkdir(mode=0o700, exist_ok=True)
    current_process()._config[_KEY] = str(path)  # type: ignore[attr-defined]


def ensure_multiprocessing_directory() -> None:
    """Give multiprocessing a private directory in this process if it has none. It is removed at exit.

    If the process is killed, the next `SocketDirectory` removes it.

    Raises:
        ConfigurationError: No base directory is writable and short enough.
    """
    config = current_process()._config  # type: ignore[attr-defined]
    if config.get(_KEY) is None:
        directory = SocketDirectory()
        config[_KEY] = str(directory.path)
        Finalize(None, directory.close, exitpriority=_AFTER_ITS_USERS)
