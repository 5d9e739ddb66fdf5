"""Face: the algorithm that the user holds, synchronous or not, and the user's code that is called with it."""

from __future__ import annotations

import inspect
from typing import Any

from rlzmq.actors.loop_thread import in_calling_thread
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.callbacks import CallbackList

__all__ = ["Face"]


class Face:
    """Calls callbacks where they may use the algorithm that they are given.

    Args:
        algorithm: What the user holds.
        config: Has the callbacks.

    Attributes:
        algorithm: Callbacks are given it; a synchronous algorithm puts itself here.
        callbacks: All of the config.
    """

    def __init__(self, algorithm: Any, config: BaseConfig) -> None:
        self.algorithm = algorithm
        self.callbacks = CallbackList(config)

    async def call(self, hook: str, **kwargs: Any) -> None:
        """All callbacks of one hook."""
        if self.callbacks.has(hook):
            await in_calling_thread(lambda: self.callbacks.call(hook, algorithm=self.algorithm, **kwargs))

    async def log_result(self, result: dict[str, Any]) -> None:
        """The algorithm's own `log_result`, which may be a coroutine function."""
        outcome = await in_calling_thread(lambda: self.algorithm.log_result(result))
        if inspect.isawaitable(outcome):
            await outcome
