"""What people read: error classes, by what the caller can do about them, and texts that are safe to print."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

__all__ = [
    "MAX_ERROR_BYTES",
    "AuthenticationError",
    "CheckpointError",
    "ClosedError",
    "ConfigurationError",
    "DeadlineError",
    "EnvError",
    "ExitRaisedError",
    "Interrupted",
    "MultiAgentEnvError",
    "NotFiniteError",
    "NotPlainError",
    "PeerLostError",
    "Progress",
    "ProtocolError",
    "RemoteError",
    "RlzmqError",
    "StandstillError",
    "StepFailedRecreateEnvError",
    "UnsupportedSpaceError",
    "cut",
    "first_error",
    "printable",
    "refuses_as",
    "short_path",
]

P = ParamSpec("P")
T = TypeVar("T")


def first_error(error: BaseException) -> BaseException:
    """Return the first error of an ExceptionGroup, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class RlzmqError(Exception):
    """Base class of rlzmq's errors.

    Wrong arguments of a call raise a ``ValueError`` or ``TypeError`` (or a subclass that is also one of those), so
    ``except ValueError`` works without this class.
    """


class ConfigurationError(RlzmqError, ValueError):
    """A setting is invalid. Change the configuration and build again."""


class UnsupportedSpaceError(ConfigurationError):
    """A space that no default module or connector supports. The message suggests a solution."""


class ProtocolError(RlzmqError):
    """A message that violates the wire protocol. It was rejected and counted."""


class AuthenticationError(RlzmqError):
    """A peer without the right key. It was rejected before any of its data was read."""


class PeerLostError(RlzmqError, ConnectionError):
    """A process needed by this call died, hangs or is unreachable."""


class StandstillError(RlzmqError, RuntimeError):
    """A run makes no progress for an unknown reason. The message shows what each peer waits for. Resume the run."""


class DeadlineError(RlzmqError, TimeoutError):
    """A call's deadline passed before its answer arrived. The work may still finish remotely."""


class ClosedError(RlzmqError, RuntimeError):
    """The object was stopped or closed before this call."""


class CheckpointError(RlzmqError):
    """A checkpoint is torn, altered, or of a version that this release cannot read."""


class EnvError(RlzmqError):
    """The user's environment raised an error, or returned values outside of its spaces."""


class StepFailedRecreateEnvError(EnvError):
    """Raised by an environment that wants to be recreated. It is counted, but not logged as an error."""


class MultiAgentEnvError(EnvError, ValueError):
    """Multi-agent data that contradict each other, e.g. a step for an agent that is done."""


class ExitRaisedError(RlzmqError, RuntimeError):
    """User code called ``sys.exit``, or raised something else that is no error, such as ``asyncio.CancelledError``."""


class Interrupted(KeyboardInterrupt):
    """A signal, or rlzmq itself, interrupts the current work. A KeyboardInterrupt of user code is no Interrupted."""


class NotFiniteError(RlzmqError, ArithmeticError):
    """Losses or gradients were NaN or infinite in several consecutive updates. Training stops."""


class NotPlainError(RlzmqError, TypeError):
    """A value cannot be stored or sent. The message names its path and type."""


class RemoteError(RlzmqError):
    """An exception of an unknown type, raised in another process.

    Attributes:
        remote_type: The original type's name.
        host, pid, role: The process that raised it.
        traceback_text: The original traceback, formatted in that process.
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
    """Return a decorator for decoders of peers' data that converts unexpected errors to ``kind``.

    Decoders check their input, but a missed case must not stop the caller's loop. Only MemoryError is not converted,
    because the process cannot continue.

    Args:
        kind: Error class raised in place of any other error, which becomes its cause.
        passes: Error classes that are raised unchanged.
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
                # The original message may contain received bytes: long, binary or hostile.
                raise kind(f"the bytes cannot be decoded ({type(error).__name__})") from error

        return decode

    return decorate


# Maximum length of an exception's text when it is stored or sent.
MAX_ERROR_BYTES = 16 * 1024


def printable(text: str, *, keep: str = "") -> str:
    r"""Return `text` with control, format and other invisible characters as escapes, e.g. ``\x1b``.

    Args:
        text: Any text.
        keep: Characters to keep, e.g. ``"\n\t"`` if the text may have several lines.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def short_path(path: str | Path) -> str:
    """Return a path as it is typed in the current directory: relative, if it lies below."""
    path = Path(path)
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return str(path)
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def cut(text: str, max_bytes: int = MAX_ERROR_BYTES) -> str:
    """Return `text`, or its start and the length of the rest: `max_bytes` bytes of UTF-8 and a few words at most."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    kept = encoded[:max_bytes].decode(errors="ignore")
    return f"{kept} … ({len(text) - len(kept)} more characters)"


_FIRST_S, _EVERY_S = 2.0, 5.0  # until a person wonders, and between two lines of a log


class Progress:
    """Says how many of several things are done, if that takes seconds.

    Args:
        text: What it says, with %d for how many are done and for how many there are.
        num: Number of things.
        say: Called with a text; None: nobody listens.
    """

    def __init__(self, text: str, num: int, say: Callable[[str], object] | None) -> None:
        self._text, self._num, self._say = text, num, say
        self._num_done = 0
        self._begun_at = time.monotonic()
        self._due_at = self._begun_at + _FIRST_S

    def add(self, num: int = 1) -> None:
        """Count some more."""
        self._num_done += num
        now = time.monotonic()
        if self._say is not None and now >= self._due_at and self._num_done < self._num:
            self._due_at = now + _EVERY_S
            self._say(f"{self._text % (self._num_done, self._num)} in {now - self._begun_at:.0f} s")
