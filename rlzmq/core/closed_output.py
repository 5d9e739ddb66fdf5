"""Standard output and errors of a process that goes on when nobody can read them any more."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["outlive_readers"]


def outlive_readers(on_broken_pipe: Callable[[], None] = lambda: None) -> None:
    """Drop what is written to stdout and stderr once their terminal or reader is gone, instead of raising OSError.

    Args:
        on_broken_pipe: Called when the reader of a pipe is found to be gone, e.g. ``tee`` after Ctrl-C.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue  # closed from the start, or replaced by somebody
        stream.flush()
        raw = _Outliving(stream.fileno(), on_broken_pipe)
        buffer = io.BufferedWriter(raw)
        outliving = io.TextIOWrapper(
            buffer,
            stream.encoding,
            stream.errors,
            # With PYTHONUNBUFFERED a stream has no line buffering, since nothing is kept.
            line_buffering=stream.line_buffering or stream.write_through,
        )
        setattr(sys, name, outliving)


class _Outliving(io.FileIO):
    def __init__(self, fd: int, on_broken_pipe: Callable[[], None]) -> None:
        super().__init__(fd, "w", closefd=False)
        self._on_broken_pipe = on_broken_pipe

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.fileno())
            if error.errno == errno.EPIPE:
                self._on_broken_pipe()
            return len(data)
