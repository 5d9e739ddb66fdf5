"""EventLog: appends a run's warnings and errors, with their tracebacks, to its ``events.jsonl``."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

from rlzmq.core.files import opener
from rlzmq.core.printable import printable
from rlzmq.core.tracebacks import format_error

__all__ = ["EVENTS", "EventLog"]

EVENTS = "events.jsonl"
"""Name of the file in a run directory."""

_LOGGER = "rlzmq"
_MAX_EVENTS = 10_000
_MAX_CHARS = 20_000


class EventLog(logging.Handler):
    """A logging handler that appends rlzmq's log records of this process, from level WARNING, to a file.

    A line has ``time`` (seconds since 1970), ``level``, ``source`` (the logger), ``text``, and ``trace`` if there is a
    traceback: from the record's ``exc_info``, or from the error given as ``extra={"error": error}``. The file is
        created
    with the first event. Events that cannot be written are dropped.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self._num_events = 0
        self._file_lock = threading.Lock()
        self._logger = logging.getLogger(_LOGGER)
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        error = getattr(record, "error", None)
        if error is None and record.exc_info:
            error = record.exc_info[1]
        try:
            self._write(record.created, record.levelname.lower(), record.name, record.getMessage(), error)
        except Exception:
            self.handleError(record)
        # Without this handler, logging would have printed them.
        if logging.lastResort is not None and not self._has_others():
            logging.lastResort.handle(record)

    def add_error(self, error: BaseException) -> None:
        """Write the error that ends the run."""
        self._write(time.time(), "error", "run", f"{type(error).__name__}: {error}", error)

    def close(self) -> None:
        """Stop recording."""
        self._logger.removeHandler(self)
        super().close()

    def _write(self, at: float, level: str, source: str, text: str, error: BaseException | None) -> None:
        with self._file_lock:
            if self._num_events >= _MAX_EVENTS:
                return
            self._num_events += 1
            if self._num_events == _MAX_EVENTS:
                text, error = f"{_MAX_EVENTS:,} events are written: later ones are left out.", None
            event = {"time": round(at, 3), "level": level, "source": source, "text": _shown(text)}
            if error is not None:
                event["trace"] = _shown(format_error(error))
            try:
                with open(self._path, "ab", buffering=0, opener=opener) as file:
                    file.write(json.dumps(event).encode() + b"\n")
            except OSError:  # the disk is full; the text has been printed
                pass

    def _has_others(self) -> bool:
        logger: logging.Logger | None = self._logger
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def _shown(text: str) -> str:
    return printable(text, keep="\n\t")[:_MAX_CHARS]
