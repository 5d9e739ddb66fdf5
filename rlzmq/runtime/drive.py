"""Running coroutines from synchronous code: on the spot when nothing waits, else on a loop's thread."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from rlzmq.core.tracebacks import ShortTraceback

__all__ = ["drive"]

T = TypeVar("T")


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, computed in the caller's own stack.

    So a serial run needs no event loop, works inside one that runs already, and a debugger steps
    through it like through any function.

    Raises:
        RuntimeError: The coroutine did wait: it talks to another process and needs a loop.
    """
    try:
        with ShortTraceback(is_inner=True):
            coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("this coroutine waits for another process: run it on an event loop.")
