"""ActorHandle: call and await the methods of an actor."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any

from rlzmq.actors.exit_status import ExitStatus
from rlzmq.actors.links import ActorLink
from rlzmq.core.errors import DeadlineError
from rlzmq.core.stack_channel import STACKS_TO_STDERR
from rlzmq.core.suggest import did_you_mean
from rlzmq.core.tracebacks import ShortTraceback

__all__ = ["ActorHandle", "Exited", "short_name"]


class Exited:
    """An actor's end: await it for the :class:`ExitStatus`, any number of times, from any task."""

    def __init__(self, future: asyncio.Future[ExitStatus]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether the actor has ended."""
        return self._future.done()

    def result(self) -> ExitStatus:
        """Return the exit status.

        Raises:
            asyncio.InvalidStateError: The actor still runs.
        """
        return self._future.result()

    def __await__(self) -> Generator[Any, None, ExitStatus]:
        return asyncio.shield(self._future).__await__()

    def __repr__(self) -> str:
        return f"<Exited: {self._future.result() if self.done() else 'running'}>"


class ActorHandle:
    """Calls the methods of one actor: ``await handle.method(*args, **kwargs)``.

    Made by :meth:`ActorSystem.spawn`. A call runs when it is awaited. Guarantees:

    * Order: blocking methods run one at a time in the order in which their calls were awaited; ``async
      def`` methods run at once, beside them.
    * Cancellation: cancelling the awaiting task cancels an ``async def`` method; a blocking method that
      has not started never runs, one that has started completes and its result is dropped.
    * Loss: a call whose actor ends gets :class:`~rlzmq.actors.exit_status.ActorLostError` (a
      PeerLostError) with exit status, pid, name and last stderr lines, at most 0.1 s after the end.
    * Errors: an exception of the method arrives as the same builtin or rlzmq type, a RemoteError
      otherwise, with the remote traceback as a note and ``remote_origin`` set.

    Arguments and results are what ``rlzmq.wire.values`` carries: plain values, arrays, tensors,
    episodes, spaces. Functions go through :meth:`apply`.

    Example:
        >>> runner = await system.spawn(SingleAgentEnvRunner, config=config)  # doctest: +SKIP
        >>> episodes = await runner.sample(num_episodes=3)  # doctest: +SKIP
    """

    def __init__(self, link: ActorLink, actor_class: type | str, call_deadline_s: float | None) -> None:
        self._link = link
        self._class = actor_class
        self._call_deadline_s = call_deadline_s
        self._exited = Exited(link.exited)

    @property
    def name(self) -> str:
        """The actor's name within its system."""
        return self._link.role

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._link.pid

    @property
    def exited(self) -> Exited:
        """The actor's end: ``await handle.exited`` returns the exit status, ``handle.exited.done()`` tests for it."""
        return self._exited

    async def call(self, method: str, /, *args: Any, deadline_s: float | None = None, **kwargs: Any) -> Any:
        """Call a method like ``await handle.method(*args, **kwargs)``, with a deadline.

        Args:
            method: The method's name.
            args, kwargs: Its arguments.
            deadline_s: Seconds after which DeadlineError is raised and the call is cancelled; the
                system's ``call_deadline_s`` if None.

        Raises:
            AttributeError: The class has no such public method (found before anything is sent).
            TypeError: An argument cannot be sent.
            DeadlineError: No answer in time.
            PeerLostError: The actor ended.
        """
        self._check_method(method)
        deadline_s = self._call_deadline_s if deadline_s is None else deadline_s
        return await self._within(deadline_s, method, self._link.call(method, args, kwargs))

    async def apply(
        self, function: Callable[..., Any], /, *args: Any, deadline_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Run ``function(instance, *args, **kwargs)`` in the actor, queued with its blocking methods.

        The function and its arguments travel by value from this process to its own child; the result
        comes back like a method's.

        Raises:
            TypeError: The function refers to something that cannot be sent.
            Exception: As :meth:`call` otherwise.
        """
        name = getattr(function, "__name__", "apply")
        return await self._within(deadline_s, name, self._link.apply(function, args, kwargs))

    async def stop(self, timeout_s: float = 5.0) -> ExitStatus:
        """Stop the actor: cancel outstanding calls and run its ``stop()`` method if it has one.

        An actor that takes longer than ``timeout_s`` is killed. Idempotent.

        Returns:
            The exit status.

        Raises:
            Exception: The actor's ``stop()`` raised; the actor has ended all the same.
        """
        return await self._link.stop(timeout_s)

    def kill(self, why: str = "") -> None:
        """Kill the actor's process and the processes that it started. Idempotent.

        Args:
            why: Follows the actor's name in errors, e.g. "was replaced".
        """
        self._link.kill(why)

    def kill_hanging(self, why: str) -> None:
        """Kill a process that hangs, once it has written its stacks to stderr; they are among its ``stderr_lines``.

        Args:
            why: How it hangs, for the log and errors.
        """
        self._link.kill_hanging(why)

    @property
    def why_killed(self) -> str:
        """Why this process killed the actor, as far as that was said, or ""."""
        return self._link.why_killed

    @property
    def is_ending(self) -> bool:
        """Whether the actor was killed here, or has ended."""
        return self._link.is_ending

    def dump_stacks(self) -> None:
        """Make the actor's process, which seems to hang, write the stacks of all its threads to stderr."""
        self._link.signal(STACKS_TO_STDERR)

    def send_signal(self, number: int) -> None:
        """Send a signal to the actor's process; do nothing if it has ended."""
        self._link.signal(number)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        self._check_method(name)
        return functools.partial(self.call, name)

    def __dir__(self) -> list[str]:
        methods = [] if isinstance(self._class, str) else _public_methods(self._class)
        return sorted({*object.__dir__(self), *methods})

    def __repr__(self) -> str:
        return f"<ActorHandle {self.name!r}: {short_name(self._class)}, pid {self.pid}, {self._exited!r}>"

    async def _within(self, deadline_s: float | None, method: str, work: Any) -> Any:
        try:
            with ShortTraceback(is_inner=True):
                if deadline_s is None:
                    return await work
                async with asyncio.timeout(deadline_s) as scope:
                    return await work
        except TimeoutError as error:
            if deadline_s is None or not scope.expired():
                raise  # raised by the method
            raise DeadlineError(
                f"actor {self.name!r} ({short_name(self._class)}, pid {self.pid}) gave no answer to {method}() "
                f"within {deadline_s:g} s; a blocking method continues there until it returns"
            ) from error

    def _check_method(self, name: str) -> None:
        if isinstance(self._class, str):
            return  # the class is not imported here: the actor decides
        found = inspect.getattr_static(self._class, name, None)
        if found is None and hasattr(self._class, "__getattr__"):
            return  # methods may be generated on demand: the actor decides
        if name.startswith("_") or not callable(getattr(self._class, name, None)):
            if isinstance(found, property) or (found is not None and not callable(found)):
                hint = f" It is not a method: await handle.apply(lambda actor: actor.{name})."
            else:
                hint = did_you_mean(name, _public_methods(self._class))
            raise AttributeError(f"actor class {short_name(self._class)} has no method {name!r}.{hint}")


def short_name(actor_class: type | str) -> str:
    """Return the name of a class, which may be given as "package.module:Class"."""
    return actor_class.rpartition(":")[2] if isinstance(actor_class, str) else actor_class.__name__


def _public_methods(actor_class: type) -> list[str]:
    public = (name for name in dir(actor_class) if not name.startswith("_"))
    return [name for name in public if callable(getattr(actor_class, name, None))]
