"""How the sync faces run coroutines: on the spot where nothing waits, else on a loop's own thread."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from rlzmq.runtime.drive import drive

__all__ = ["Run", "has_broker", "needs_processes", "runner_for"]

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def needs_processes(config: Any) -> bool:
    """Whether a run of this config talks to any other process."""
    return bool(has_broker(config) or config.evaluation_num_env_runners)


def has_broker(config: Any) -> bool:
    """Whether runners and learners meet at a broker, instead of in this process."""
    return bool(config.num_env_runners or config.num_learners or config.listen or config.broker)


def runner_for(config: Any) -> Run:
    """What runs a coroutine to its end for a synchronous caller."""
    if not needs_processes(config):
        return drive
    from rlzmq.actors.loop_thread import get_loop_thread

    return get_loop_thread().run
