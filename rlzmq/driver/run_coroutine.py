"""Run coroutines for synchronous callers: in their own stack where nothing waits, else on a loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.tracebacks import ShortTraceback

__all__ = ["Run", "drive", "has_broker", "needs_processes", "runner_for"]

T = TypeVar("T")

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def needs_processes(config: BaseConfig) -> bool:
    """Whether a run of this config talks to any other process."""
    return bool(has_broker(config) or config.evaluation_num_env_runners)


def has_broker(config: BaseConfig) -> bool:
    """Whether runners and learners meet at a broker, instead of in this process."""
    return bool(config.num_env_runners or config.num_learners or config.listen or config.broker)


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


def runner_for(config: BaseConfig) -> Run:
    """What runs a coroutine to its end for a synchronous caller."""
    if not needs_processes(config):
        return drive
    from rlzmq.actors.loop_thread import get_loop_thread

    return get_loop_thread().run
