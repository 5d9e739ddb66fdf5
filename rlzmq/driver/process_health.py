"""Checks of the run's processes by their supervisors."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterable
from typing import Any

from rlzmq.actors.exit_status import ActorLostError
from rlzmq.actors.process_state import is_stopped
from rlzmq.core.errors import PeerLostError

__all__ = [
    "ANSWER_DEADLINE_S",
    "BEAT_DEADLINE_S",
    "first_line",
    "lost_error",
    "wake",
    "watch_stopped",
    "why_hanging",
]

ANSWER_DEADLINE_S = 5.0
"""Seconds without an answer after which a process counts as hanging, if nothing else is known."""

BEAT_DEADLINE_S = 30.0
"""Seconds to wait for a process about which nothing else is known, since an import may hold the GIL."""

_WAKE_S = 1.0
# Time for answers that arrived while this event loop was busy.
_TURN_S = 0.2
_LOOK_S = 0.5


async def why_hanging(handle: Any, method: str = "beat", deadline_s: float = ANSWER_DEADLINE_S) -> str:
    """Return why a process counts as hanging (it is stopped, or does not answer); "" if it answers or has ended.

    Args:
        handle: The process.
        method: The method to call. "beat" checks that its event loop runs.
        deadline_s: Seconds to wait for the answer.
    """
    if is_stopped(handle.pid):
        return "its process is stopped"
    loop = asyncio.get_running_loop()
    start = loop.time()
    answer = asyncio.ensure_future(handle.call(method))
    try:
        if not (await asyncio.wait((answer,), timeout=deadline_s))[0]:
            late_s = loop.time() - start - deadline_s
            await asyncio.wait((answer,), timeout=_TURN_S + late_s)
        if not answer.done():
            return f"no answer within {deadline_s:g} s"
        answer.result()
    except PeerLostError:
        await handle.exited
    finally:
        answer.cancel()
    return ""


async def wake(handle: Any) -> None:
    """Continue a stopped process; return when it runs, or after a second."""
    handle.send_signal(signal.SIGCONT)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_WAKE_S):
            while is_stopped(handle.pid):  # noqa: ASYNC110 (a fact of the kernel's)
                await asyncio.sleep(0.01)


async def watch_stopped(handles: Callable[[], Iterable[Any]], on_stopped: Callable[[Any], None]) -> None:
    """Call ``on_stopped(handle)`` in each check for a local process that was already stopped in the previous check.

    This needs neither the network nor a broker, which may be stopped itself. Two checks are used because a process
    may be continued at once. Never returns.

    Args:
        handles: Returns the processes to check.
        on_stopped: Ends or continues the process. It is called again as long as the process is stopped.
    """
    before: set[int] = set()
    while True:
        await asyncio.sleep(_LOOK_S)
        stopped = {
            handle.pid: handle for handle in handles() if not handle.exited.done() and is_stopped(handle.pid)
        }
        for pid in before & stopped.keys():
            on_stopped(stopped[pid])
        before = set(stopped)


def lost_error(handle: Any) -> ActorLostError:
    """Return the error for an actor that ended unexpectedly."""
    status = handle.exited.result()
    text = f"{handle.name} (pid {handle.pid}) {status}.{status.explanation}"
    return ActorLostError(text, role=handle.name, pid=handle.pid, exit_status=status)


def first_line(error: BaseException) -> str:
    """Return an error's text for a log line, with a summary of the process's last words, if there are any.

    The process's output on stderr has been forwarded already.
    """
    text = str(error).partition("\n")[0]
    status = error.exit_status if isinstance(error, ActorLostError) else None
    if status is None or status.last_words is None:
        return text
    return f"{text.removesuffix('.')}: {status.last_words.summary.removesuffix('.')}."
