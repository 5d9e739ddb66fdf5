"""RunDir: a run's directory, which one driver at a time may write, and its numbered checkpoints.

Layout::

    driver.lock                 which process drives the run, on which host and since when; while it does
    checkpoints/
        000120/, 000130/, …     by training iteration: the newest few and the best are kept
        000140.abandoned/       of an abandoned lineage: the run was rolled back behind it, or it was torn
        .000130.*.tmp           left by a killed write; removed by the next one
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rlzmq.core import faults
from rlzmq.core.checkpoint import (
    is_local,
    local_path,
    move_tree,
    read_checkpoint,
    read_manifest,
    remove_tree,
    store_errors,
    write_checkpoint,
)
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.files import FileLock, holder_of, lock_file, make_directories

__all__ = ["LOCK", "Found", "RunDir", "checkpoints_at", "find_checkpoint", "run_of"]


_log = logging.getLogger("rlzmq.runs")

LOCK = "driver.lock"
"""Name of the file that a run's driver has locked."""

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_NUMBER = re.compile(r"\d{6,}")
_LITTER = re.compile(r"\.\d{6,}\.[0-9a-f]{8}\.(tmp|old)")
_SPARE_BYTES = 1 << 20
_BYTES_PER_VALUE = 64  # upper estimate for a plain value in JSON, and for an array's entry


def run_of(path: Path) -> Path:
    """Return the run directory of a directory of checkpoints, of a checkpoint in one, or of itself."""
    for place in (path, path.parent):
        if place.absolute().name == "checkpoints":
            return place.parent if place.name else place.absolute().parent
    return path


@dataclass(frozen=True)
class Found:
    """Result of `find_checkpoint`.

    Attributes:
        path: The newest complete checkpoint, or None.
        skipped: (directory, reason) of newer ones that cannot be used.
    """

    path: Path | None
    skipped: tuple[tuple[Path, str], ...] = ()


def find_checkpoint(path: str | Path) -> Found:
    """Return the newest valid checkpoint at a path. Every byte is checked.

    Args:
        path: A checkpoint, a directory of numbered ones, or a run directory with ``checkpoints/``.
    """
    skipped: list[tuple[Path, str]] = []
    for candidate in checkpoints_at(path):
        try:
            read_checkpoint(candidate)
        except CheckpointError as error:
            skipped.append((candidate, str(error)))
        else:
            return Found(candidate, tuple(skipped))
    return Found(None, tuple(skipped))


def checkpoints_at(path: str | Path) -> list[Path]:
    """Return the checkpoints at a path, newest first, complete or not; see `find_checkpoint`."""
    place = local_path(path)
    if (place / "manifest.json").exists():
        return [place]
    return [path for folder in (place / "checkpoints", place) for _, path in _numbered(folder)]


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints in a directory by iteration, newest first."""
    if not folder.is_dir():
        return []
    found = [(int(path.name), path) for path in folder.iterdir() if _NUMBER.fullmatch(path.name)]
    return sorted(found, reverse=True)


class RunDir:
    """The directory of a run: its driver's lock, and its checkpoints. A context manager that takes it.

    Args:
        path: The directory. Nothing is created before `take` or `write`.
        checkpoints: Directory of its checkpoints; None: ``checkpoints`` in it.
        keep: Number of newest checkpoints to keep, in addition to the one with the best score.

    Attributes:
        path, checkpoints, keep: See above.
    """

    def __init__(self, path: str | Path, checkpoints: Path | None = None, *, keep: int = 3) -> None:
        self.path: Path = local_path(path)
        self.checkpoints: Path = self.path / "checkpoints" if checkpoints is None else checkpoints
        self.keep = keep
        self._lock: FileLock | None = None
        self._num_holders = 0
        self._is_tidy = False

    @classmethod
    def of_checkpoints(cls, directory: str | Path) -> Self:
        """Return the run directory with its checkpoints in `directory`: its parent if it is named ``checkpoints``."""
        place = local_path(directory)
        return cls(run_of(place), place)

    # -- its driver -----------------------------------------------------------------------------

    def take(self) -> None:
        """Take the directory for this process until it ends, or `release` was called as often. Create it if missing.

        In an object store, and (with a warning) on a filesystem without locks, nothing is locked.

        Raises:
            ConfigurationError: Another driver has the directory, or it cannot be written.
        """
        if self._num_holders == 0 and is_local(self.path):
            self._lock = self._locked()
        self._num_holders += 1

    def release(self) -> None:
        """Undo one `take`; once all are undone, another process may take the directory. Idempotent then."""
        self._num_holders = max(self._num_holders - 1, 0)
        if self._num_holders == 0 and self._lock is not None:
            self._lock.release(remove=True)
            self._lock = None

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def _locked(self) -> FileLock | None:
        try:
            make_directories(self.path)
            lock = lock_file(self.path / LOCK, mode=0o664)
            try:
                lock.write(
                    f"pid {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
                )
            except OSError:  # a full disk
                lock.release(remove=True)
                raise
        except BlockingIOError as error:
            raise ConfigurationError(
                f"{self.path} is in use by {error.strerror or 'another process'}: a run has one driver. End that one "
                "first, or name another directory."
            ) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise ConfigurationError(
                    f"cannot write to the run directory {self.path}: {error.strerror}"
                ) from error
            _log.warning(
                "%s: its filesystem has no locks, so a second driver would not be noticed.", self.path
            )
            return None
        return lock

    @property
    def driver(self) -> str | None:
        """Who drives the run, e.g. ``"pid 4711 on gpu3 since …"``; None if nobody does.

        Raises:
            OSError: The filesystem has no locks, or the lock may not be read.
        """
        return holder_of(self.path / LOCK)

    def move_aside(self) -> Path:
        """Rename the directory to ``NAME.old-DATE-TIME``, take a new one of its name, and return the former's path.

        Raises:
            ConfigurationError: It cannot be renamed, e.g. because it is a mount point.
        """
        directory = self.path.absolute()
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
        if self._lock is not None:
            self._lock.release()
        self._lock = self._locked()
        return aside

    # -- its checkpoints ------------------------------------------------------------------------

    def check_continued_from(self, checkpoint: Path | None) -> None:
        """Raise ConfigurationError if there are checkpoints, and a run from `checkpoint` (None: a new one) is another.

        The checkpoints of its own run that are newer would be set aside.
        """
        numbered = _numbered(self.checkpoints)
        if numbered and (checkpoint is None or _real(checkpoint.parents[0]) != _real(self.checkpoints)):
            raise ConfigurationError(
                f"{self.checkpoints} holds the checkpoints of another run, up to {numbered[0][1].name}: continue that "
                "run with Algorithm.resume(RUN_DIR, …), or name another directory."
            )

    def write(self, iteration: int, components: Mapping[str, Any], about: Mapping[str, Any]) -> Path:
        """Write a checkpoint, then remove those that are no longer kept. A failure leaves all others unchanged.

        Args:
            iteration: Its number. Checkpoints with higher numbers predate a rollback and are set aside.
            components: See `write_checkpoint`.
            about: Plain facts for the manifest. A finite ``"score"`` ranks the checkpoint.

        Raises:
            CheckpointError: The checkpoint could not be written, e.g. for lack of space.
            TypeError: A component contains something that cannot be stored.
        """
        target = self.checkpoints / f"{iteration:06d}"
        on_disk = is_local(self.checkpoints)
        try:
            if on_disk:
                make_directories(self.checkpoints)
            if not self._is_tidy:
                with contextlib.nullcontext() if on_disk else store_errors():
                    self._tidy(iteration)
            needed = num_bytes_of(components) + _SPARE_BYTES
            free = shutil.disk_usage(self.checkpoints).free if on_disk else math.inf
        except OSError as error:
            raise CheckpointError(f"Cannot write a checkpoint to {target}: {error}.") from error
        if free < needed:
            raise CheckpointError(
                f"Cannot write a checkpoint to {target}: it needs about {needed} bytes, {free} are free."
            )
        write_checkpoint(target, components, about=about)
        self._is_tidy = True
        self._remove_old()
        return target

    def _tidy(self, iteration: int) -> None:
        """Clean up before the first write: unfinished files, and checkpoints that this run did not resume from."""
        for path in self.checkpoints.iterdir() if self.checkpoints.is_dir() else ():
            if _LITTER.fullmatch(path.name):
                original = self.checkpoints / path.name.split(".")[1]
                if path.suffix == ".old" and not original.exists():
                    path.rename(original)
                else:
                    remove_tree(path)
        for number, path in _numbered(self.checkpoints):
            if number > iteration:
                aside = path.with_name(f"{path.name}.abandoned")
                remove_tree(aside)
                move_tree(path, aside)

    def _remove_old(self) -> None:
        numbered = _numbered(self.checkpoints)
        scores = [(_score(path), path) for _, path in numbered]
        best, best_path = max(scores, key=lambda item: item[0])  # the newest of equal ones
        kept = {path for _, path in numbered[: self.keep]}
        if math.isfinite(best):
            kept.add(best_path)
        for _, path in numbered:
            if path not in kept:
                remove_tree(path)
                faults.at("checkpoint.boundary")


def _real(path: Path) -> Path:
    return path.resolve() if is_local(path) else path


def _score(path: Path) -> float:
    try:
        score = read_manifest(path)["about"].get("score")
    except CheckpointError:
        return -math.inf
    return float(score) if isinstance(score, int | float) and math.isfinite(score) else -math.inf


def num_bytes_of(value: object) -> int:
    """Estimate a state's size on disk in bytes."""
    if isinstance(value, Mapping):
        return sum(len(str(key)) + num_bytes_of(item) for key, item in value.items()) + _BYTES_PER_VALUE
    if isinstance(value, list | tuple):
        return sum(num_bytes_of(item) for item in value) + _BYTES_PER_VALUE
    if isinstance(value, str | bytes):
        return 2 * len(value) + _BYTES_PER_VALUE
    return int(getattr(value, "nbytes", 0)) + _BYTES_PER_VALUE
