"""Synchronous interfaces of asynchronous classes, and the calls of user code from coroutines.

Their coroutines run on the caller's stack if nothing waits, otherwise on the thread of an event loop. A class lists the
members that it forwards, with signature and docstring::

    class Algorithm(Synchronous[AsyncAlgorithm]):
        train = blocking(AsyncAlgorithm.train)
        iteration = Forwarded[int](AsyncAlgorithm, "iteration")
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Self, TypeVar, overload

from rlzmq.actors.forkserver import get_fork_server
from rlzmq.actors.loop_thread import get_loop_thread, in_calling_thread
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.callbacks import CallbackList
from rlzmq.core.synonyms import instead_of
from rlzmq.core.tracebacks import shorten

__all__ = [
    "CallbackDispatch",
    "Forwarded",
    "RunCoroutine",
    "Synchronous",
    "blocking",
    "coroutine_runner",
    "drive",
    "has_broker",
    "needs_processes",
]

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")

RunCoroutine = Callable[[Coroutine[Any, Any, Any]], Any]


def needs_processes(config: BaseConfig) -> bool:
    """Return whether a run with this config uses other processes."""
    return bool(has_broker(config) or config.evaluation_num_env_runners)


def has_broker(config: BaseConfig) -> bool:
    """Return whether runners and learners communicate through a broker instead of within this process."""
    return bool(config.num_env_runners or config.num_learners or config.listen)


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that waits for nobody, computed on the caller's stack.

    A serial run therefore needs no event loop, works inside a running one, and can be stepped through with a debugger.

    Raises:
        RuntimeError: The coroutine waited: it uses another process and needs an event loop.
    """
    try:
        while coroutine.send(None) is None:  # it let other tasks go on, of which there are none here
            pass
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    except BaseException as error:
        shorten(error)
        raise
    coroutine.close()
    raise RuntimeError("this coroutine waits for another process: run it on an event loop.")


def coroutine_runner(config: BaseConfig) -> RunCoroutine:
    """Return a function that runs coroutines to completion for a synchronous caller."""
    if not needs_processes(config):
        return drive
    get_fork_server()  # the fork server imports torch while this process builds the run
    return get_loop_thread().run


class Synchronous(Generic[A]):
    """Base class of the synchronous interfaces: the asynchronous object, and the function that runs its coroutines."""

    _async: A
    _run: RunCoroutine

    @classmethod
    def of(cls, target: A, run: RunCoroutine) -> Self:
        """Return the interface to an existing object."""
        new = cls.__new__(cls)
        new._async, new._run = target, run
        return new


@overload
def blocking(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[Any, P], T]: ...


@overload
def blocking(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]: ...


def blocking(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a Synchronous class that calls `method` of its object and waits for the result."""
    name = method.__name__

    def call(self: Synchronous[Any], /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self._async, name)
        try:
            result = method(*args, **kwargs)
        except Exception as error:
            shorten(error)
            if isinstance(error, TypeError) and (problem := _misfit(method, args, kwargs)):
                raise TypeError(f"{type(self).__name__}.{name}(): {problem}") from None
            raise
        return self._run(result) if inspect.iscoroutine(result) else result

    call.__code__ = call.__code__.replace(co_name=name)  # the name in tracebacks
    return functools.wraps(method)(call)


def _misfit(method: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> str:
    """Describe arguments that a method does not take, with what to write instead; ``""`` if it takes them."""
    try:
        inspect.signature(method).bind(*args, **kwargs)
    except TypeError as error:
        instead = next(filter(None, map(instead_of, (*kwargs, method.__name__))), None)
        hint = f". Instead: {instead}." if instead else ""
        return f"{error}{hint}"
    return ""


class Forwarded(Generic[T]):
    """An attribute of a Synchronous class that is read from its object."""

    def __init__(self, owner: type, name: str) -> None:
        self._name = name
        attribute = getattr(owner, name, None)
        self.__doc__ = attribute.__doc__ if attribute is not None else f"See {owner.__name__}."

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(self, instance: Synchronous[Any], owner: type) -> T: ...

    def __get__(self, instance: Synchronous[Any] | None, owner: type) -> Any:
        return self if instance is None else getattr(instance._async, self._name)

    def __set__(self, instance: object, value: Any) -> NoReturn:
        raise AttributeError(f"{type(instance).__name__}.{self._name} can only be read")


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
