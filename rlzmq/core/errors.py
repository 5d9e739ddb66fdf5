"""The error family: one base, a few kinds, told apart by what the caller can do about them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = [
    "AuthenticationError",
    "CheckpointError",
    "ClosedError",
    "ConfigurationError",
    "DeadlineError",
    "EnvironmentError_",
    "ExitRaisedError",
    "MultiAgentEnvError",
    "NotFiniteError",
    "PeerLostError",
    "ProtocolError",
    "RemoteError",
    "RlzmqError",
    "StandstillError",
    "StepFailedRecreateEnvError",
    "UnsupportedSpaceError",
    "first_error",
    "refuses_as",
]

P = ParamSpec("P")
T = TypeVar("T")


def first_error(error: BaseException) -> BaseException:
    """Of errors of tasks that ran side by side (an ExceptionGroup) the first; any other error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class RlzmqError(Exception):
    """Base of every error that rlzmq raises on its own account.

    Mistakes in a call's arguments are plain ``ValueError``/``TypeError`` (or a subclass that is
    also one of those), so ``except ValueError`` keeps working for users who know nothing of this
    family.
    """


class ConfigurationError(RlzmqError, ValueError):
    """A setting is wrong: change the configuration and build again."""


class UnsupportedSpaceError(ConfigurationError):
    """A space that no default module or connector handles: the text names the way out."""


class ProtocolError(RlzmqError):
    """A message that breaks the wire protocol: it was refused and counted, nothing was lost."""


class AuthenticationError(RlzmqError):
    """A peer without the right key: it was refused before any of its bytes were read."""


class PeerLostError(RlzmqError, ConnectionError):
    """A process that this call needs died, hangs or cannot be reached."""


class StandstillError(RlzmqError, RuntimeError):
    """A run does not move any more, and nobody knows why: the text says who waits for whom; resume it."""


class DeadlineError(RlzmqError, TimeoutError):
    """A call's deadline passed before its answer came; the work may still finish remotely."""


class ClosedError(RlzmqError, RuntimeError):
    """The object was stopped or closed before this call."""


class CheckpointError(RlzmqError):
    """A checkpoint is torn, altered, or of a version that this release cannot read."""


class EnvironmentError_(RlzmqError):
    """The user's environment raised, or returned what its spaces forbid."""


class StepFailedRecreateEnvError(EnvironmentError_):
    """Raised by an environment to be recreated: counted, but not logged as an error."""


class MultiAgentEnvError(EnvironmentError_, ValueError):
    """Multi-agent data that contradicts itself, e.g. a step for an agent that is done."""


class ExitRaisedError(RlzmqError, RuntimeError):
    """Code of the user's called ``sys.exit``, or raised KeyboardInterrupt, where only an error can end the run."""


class NotFiniteError(RlzmqError, ArithmeticError):
    """Losses or gradients are NaN or infinite, update after update: training does not go on."""


class RemoteError(RlzmqError):
    """An exception of a type unknown here, raised in another process.

    Attributes:
        remote_type: The original type's name.
        host, pid, role: Where it was raised.
        traceback_text: The original traceback, formatted there.
    """

    def __init__(
        self,
        message: str,
        *,
        remote_type: str = "",
        host: str = "",
        pid: int = 0,
        role: str = "",
        traceback_text: str = "",
    ) -> None:
        super().__init__(message)
        self.remote_type = remote_type
        self.host = host
        self.pid = pid
        self.role = role
        self.traceback_text = traceback_text


def refuses_as(
    kind: type[ProtocolError], *, passes: type[ProtocolError] = ProtocolError
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator for decoders of bytes from a peer: whatever they raise is a refusal.

    Each decoder checks what it reads; but a case that it overlooked must not stop its caller, who would wait for
    this message for ever. Only MemoryError passes: this process cannot go on, whatever the bytes were.

    Args:
        kind: What is raised in place of any other error, which is its cause.
        passes: The refusals that are raised as they are.
    """

    def decorate(decoder: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(decoder)
        def decode(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return decoder(*args, **kwargs)
            except (passes, MemoryError):
                raise
            except ProtocolError as error:
                raise kind(str(error)) from error
            except Exception as error:
                # Its text may repeat bytes of the wire: long, binary or hostile.
                raise kind(f"the bytes cannot be decoded ({type(error).__name__})") from error

        return decode

    return decorate
