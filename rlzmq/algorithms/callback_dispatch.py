"""CallbackDispatch: calls user code with the algorithm object that the user holds, synchronous or not."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from rlzmq.actors.loop_thread import in_calling_thread
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.callbacks import CallbackList

__all__ = ["CallbackDispatch"]


class CallbackDispatch:
    """Calls callbacks on a thread where they may call methods of the algorithm they are given.

    Args:
        algorithm: The algorithm object that the user holds.
        config: The config with the callbacks.
        watch: Watches the calls.

    Attributes:
        algorithm: Passed to callbacks; a synchronous Algorithm replaces it with itself.
        callbacks: All callbacks of the config.
    """

    def __init__(self, algorithm: Any, config: BaseConfig, watch: CallWatch) -> None:
        self.algorithm = algorithm
        self._watch = watch
        self.callbacks: CallbackList = CallbackList(config)

    async def call(self, hook: str, **kwargs: Any) -> None:
        """Call all callbacks of a hook, which may be coroutine functions."""
        for function in self.callbacks.hooks.get(hook, ()):
            await self.run(hook, function, algorithm=self.algorithm, **kwargs)

    async def log_result(self, result: dict[str, Any]) -> None:
        """Call the algorithm's `log_result`, which may be a coroutine function."""
        await self.run("log_result", self.algorithm.log_result, result)

    async def run(self, what: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of user code, which may be a coroutine function; `what` names it in messages."""

        def call() -> Any:
            with self._watch.call(what):
                result = function(*args, **kwargs)
            return wait(result) if inspect.isawaitable(result) else result

        async def wait(coroutine: Awaitable[Any]) -> Any:
            with self._watch.call(what, coroutine):
                return await coroutine

        return await in_calling_thread(call)
