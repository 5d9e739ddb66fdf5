"""The broker's journal on disk: segments of checksummed records, written and synced by a thread.

A segment, ``INCARNATION-NUMBER.journal``::

    "rlzmq journal 1\\n"   u16 length, the run's id
    record, record, …      see `rlzmq.roles.record_file`

No fragment after an incomplete record was acknowledged. `rlzmq.protocol.journal` decides which records are written and
when segments are removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from rlzmq.core import faults
from rlzmq.core.files import sync_directory
from rlzmq.protocol.events import JournalAppend, JournalRemove
from rlzmq.roles.record_file import create_file, lock_directory, map_file, read_records, write_record

__all__ = ["JournalFile"]

_log = logging.getLogger("rlzmq.broker")

_MAGIC = b"rlzmq journal 1\n"


class JournalFile:
    """Writer of one broker's segments in a directory, which is locked against other runs.

    One thread writes the records in order; all waiting records are synced together.

    Args:
        directory: Created if necessary, for this user only.
        run_id: Id of the run.
        incarnation: Incarnation of the broker.
        on_synced: ``on_synced(number)``, called on the thread: all records up to `number` are on disk.
        on_failed: ``on_failed(detail)``, called on the thread once: no more records are written.

    Raises:
        ConfigurationError: The directory cannot be used, or another run uses it.
    """

    def __init__(
        self,
        directory: str | Path,
        run_id: str,
        incarnation: int,
        on_synced: Callable[[int], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._directory = Path(directory)
        self._run_id = run_id.encode()
        self._prefix = f"{incarnation:016d}-"
        self._on_synced = on_synced
        self._on_failed = on_failed
        self._queue: queue.SimpleQueue[JournalAppend | JournalRemove | str | None] = queue.SimpleQueue()
        self._file: BinaryIO | None = None
        self._segment = -1
        self._has_failed = False
        self._lock = lock_directory(self._directory, "journal_dir")
        self._thread = threading.Thread(target=self._run, name="rlzmq-journal", daemon=True)
        self._thread.start()

    def do(self, instruction: JournalAppend | JournalRemove) -> None:
        """Queue an instruction for the thread."""
        self._queue.put(instruction)

    def remove_others(self) -> None:
        """Remove the segments of earlier runs once all queued records are on disk."""
        self._queue.put("others")

    def read_others(self) -> Iterator[tuple[int, memoryview]]:
        """Yield (kind, payload) of the records of earlier runs; the payloads are views of the files."""
        for path, run_id, content, start in self._segments():
            if run_id != self._run_id:
                yield from _records(path, content, start)

    def close(self) -> None:
        """Write all queued records, and end the thread."""
        self._queue.put(None)
        self._thread.join()
        if self._file is not None:
            self._file.close()
        os.close(self._lock)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            items = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    items.append(self._queue.get_nowait())
            try:
                if not self._has_failed:
                    self._do_all(items)
            except OSError as error:
                self._has_failed = True
                self._on_failed(f"the journal in {self._directory} cannot be written: {error}")
            if None in items:
                return

    def _do_all(self, items: list[JournalAppend | JournalRemove | str | None]) -> None:
        number = -1
        for item in items:
            if isinstance(item, JournalAppend):
                self._write(item)
                number = item.number
            elif item is not None:
                number = self._sync(number)  # sync what replaces the segments before removing them
                self._remove(item)
        self._sync(number)

    def _write(self, item: JournalAppend) -> None:
        if item.segment != self._segment or self._file is None:
            if self._file is not None:
                os.fsync(self._file.fileno())
                self._file.close()
            self._file = self._open(item.segment)
        write_record(self._file, item.kind, item.parts)

    def _open(self, segment: int) -> BinaryIO:
        file = create_file(self._directory / f"{self._prefix}{segment:08d}.journal")
        file.write(_MAGIC + struct.pack("<H", len(self._run_id)) + self._run_id)
        sync_directory(self._directory)
        self._segment = segment
        return file

    def _sync(self, number: int) -> int:
        if number >= 0 and self._file is not None:
            os.fsync(self._file.fileno())
            faults.at("broker.journal_synced")
            self._on_synced(number)
        return -1

    def _remove(self, item: JournalRemove | str) -> None:
        for path, run_id, _, _ in self._segments():
            is_own = run_id == self._run_id
            if item == "others":
                is_due = not is_own
            else:
                assert isinstance(item, JournalRemove)
                number = int(path.stem.rpartition("-")[2])
                is_due = is_own and (not path.name.startswith(self._prefix) or number < item.before)
            if is_due:
                path.unlink(missing_ok=True)
        sync_directory(self._directory)

    def _segments(self) -> Iterator[tuple[Path, bytes, memoryview, int]]:
        """Yield the path, run id, content and position of the first record of every segment."""
        for path in sorted(self._directory.glob("*-*.journal")):
            content, start = map_file(path), len(_MAGIC) + 2
            if bytes(content[: len(_MAGIC)]) != _MAGIC or len(content) < start:  # killed in its first bytes
                yield path, b"", memoryview(b""), 0
                continue
            (length,) = struct.unpack_from("<H", content, len(_MAGIC))
            yield path, bytes(content[start : start + length]), content, start + length


def _records(path: Path, content: memoryview, position: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the records up to the first incomplete one."""
    end = position
    for kind, payload, next_one in read_records(content, position):
        yield kind, payload
        end = next_one
    if end < len(content):
        _log.info("%s ends in the middle of a record, at byte %d", path, end)
