"""Runs coroutines for synchronous callers: on their own stack if nothing waits, else on an event loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rlzmq.actors.loop_thread import get_loop_thread
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.tracebacks import ShortTraceback

__all__ = ["Run", "drive", "has_broker", "needs_processes", "runner_for"]

T = TypeVar("T")

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def needs_processes(config: BaseConfig) -> bool:
    """Return whether a run with this config uses other processes."""
    return bool(has_broker(config) or config.evaluation_num_env_runners)


def has_broker(config: BaseConfig) -> bool:
    """Return whether runners and learners communicate through a broker instead of within this process."""
    return bool(config.num_env_runners or config.num_learners or config.listen or config.broker)


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits, computed on the caller's stack.

    A serial run thus needs no event loop, works inside a running one, and can be stepped through with a debugger.

    Raises:
        RuntimeError: The coroutine waited: it uses another process and needs a loop.
    """
    try:
        with ShortTraceback(is_inner=True):
            coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    coroutine.close()
    raise RuntimeError("this coroutine waits for another process: run it on an event loop.")


def runner_for(config: BaseConfig) -> Run:
    """Return a function that runs coroutines to completion for a synchronous caller."""
    if not needs_processes(config):
        return drive
    return get_loop_thread().run
