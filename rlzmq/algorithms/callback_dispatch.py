"""CallbackDispatch: calls user code with the algorithm object that the user holds, synchronous or not."""

from __future__ import annotations

import inspect
from typing import Any

from rlzmq.actors.loop_thread import in_calling_thread
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.callbacks import CallbackList

__all__ = ["CallbackDispatch"]


class CallbackDispatch:
    """Calls callbacks on a thread where they may call methods of the algorithm they are given.

    Args:
        algorithm: The algorithm object that the user holds.
        config: The config with the callbacks.

    Attributes:
        algorithm: Passed to callbacks; a synchronous Algorithm replaces it with itself.
        callbacks: All callbacks of the config.
    """

    def __init__(self, algorithm: Any, config: BaseConfig) -> None:
        self.algorithm = algorithm
        self.callbacks: CallbackList = CallbackList(config)

    async def call(self, hook: str, **kwargs: Any) -> None:
        """Call all callbacks of a hook."""
        if self.callbacks.has(hook):
            await in_calling_thread(lambda: self.callbacks.call(hook, algorithm=self.algorithm, **kwargs))

    async def log_result(self, result: dict[str, Any]) -> None:
        """Call the algorithm's `log_result`, which may be a coroutine function."""
        outcome = await in_calling_thread(lambda: self.algorithm.log_result(result))
        if inspect.isawaitable(outcome):
            await outcome
