"""Short tracebacks with the user's frames; all frames with ``RLZMQ_TRACEBACK=full``."""

from __future__ import annotations

import functools
import os
import signal
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from rlzmq.core.errors import ExitRaisedError, Interrupted, RlzmqError

__all__ = [
    "FULL",
    "format_error",
    "format_stack",
    "is_interrupt",
    "is_of_rlzmq",
    "is_of_user",
    "origin_parts",
    "place_in",
    "place_of",
    "run_error",
    "short_traceback",
    "shorten",
    "shows_all_frames",
    "user_errors",
]

F = TypeVar("F", bound=Callable[..., Any])

FULL = "RLZMQ_TRACEBACK"
"""The environment variable; ``full`` shows all frames."""

_OURS = str(Path(__file__).parent.parent) + os.sep
_LIBRARIES = tuple(
    {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_PLUMBING = tuple(
    os.path.join(sysconfig.get_path("stdlib"), name)
    for name in ("asyncio", "concurrent", "threading.py", "contextlib.py", "selectors.py")
)


# Classes of exceptions that end a generator, or a future, in good order. By name: importing asyncio takes a while.
_ENDS = {"StopIteration", "StopAsyncIteration", "CancelledError"}


def shows_all_frames() -> bool:
    """Return whether the user asked for all frames."""
    return os.environ.get(FULL) == "full"


def short_traceback(function: F) -> F:
    """Decorate a public function: `shorten` the tracebacks of what it raises."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    return cast(F, call)


def shorten(error: BaseException) -> None:
    """Remove rlzmq's inner frames from an error's traceback, and from those of its causes.

    An error inside of rlzmq that it did not raise on purpose keeps all frames, since it may be a bug. So does any error
    if the user asked for all frames.
    """
    for each in () if shows_all_frames() else _chain(error):
        links = []
        trace = each.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename != __file__:
                links.append(trace)
            trace = trace.tb_next
        following = None
        for index in reversed(_kept([link.tb_frame.f_code.co_filename for link in links], each)):
            link = links[index]
            following = TracebackType(following, link.tb_frame, link.tb_lasti, link.tb_lineno)
        each.__traceback__ = following


def format_error(error: BaseException) -> str:
    """Return the text that Python prints for an error, with the user's frames, to which its traceback is shortened."""
    shorten(error)
    return "".join(traceback.format_exception(error)).rstrip("\n")


def origin_parts(error: BaseException) -> list[str]:
    """Return the lines after an error's type and message: the frames that raised it, and its causes.

    Its traceback is shortened to them.
    """
    shorten(error)
    shown = traceback.TracebackException.from_exception(error)
    if shows_all_frames():
        return list(shown.format())
    cause = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    parts = [] if cause is None else list(cause.format())
    frames = shown.stack.format()
    if parts and frames:
        parts.append("and, because of it, in\n")
    parts += frames
    for part in shown.exceptions or ():
        parts += part.format()
    return [*parts, *(f"{note}\n" for note in shown.__notes__ or ())]


def place_of(error: BaseException) -> str:
    """Return the user's frame that led to an error; see `place_in`."""
    return place_in(traceback.extract_tb(error.__traceback__))


def place_in(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return ``FILE:LINE in FUNCTION`` of the innermost frame of the user's code, or of any code."""
    if not frames:
        return "an unknown place"
    frame = [*frames[-1:], *filter(_is_users, frames)][-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def is_of_user(error: BaseException) -> bool:
    """Return whether code of the user raised an error, or called what raised it."""
    return any(map(_is_users, traceback.extract_tb(error.__traceback__)))


def is_of_rlzmq(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame belongs to rlzmq's own code."""
    return frame.filename.startswith(_OURS)


def format_stack(frames: traceback.StackSummary) -> str:
    """Return the frames of a running thread that belong to the user's code, with those that they called."""
    kept = frames
    if not shows_all_frames():
        indices = _kept([frame.filename for frame in frames], RlzmqError())
        kept = traceback.StackSummary.from_list([frames[index] for index in indices])
    return "".join(kept.format()).rstrip()


def run_error(error: BaseException) -> BaseException:
    """Return the error to report for an exception of user code.

    Exceptions that are no errors (SystemExit, CancelledError, StopIteration, a class derived from BaseException, …)
    would end a loop, or look like an orderly end, so that nobody would learn of them.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, Exception) and not kinds & _ENDS:
        return error
    what = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {_named(error)}"
    explained = ExitRaisedError(
        f"your code {what} at {place_of(error)}. Raise an error instead: it ends the run with its own text."
    )
    explained.__cause__ = error
    return explained


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception interrupts this thread's work (Ctrl-C), rather than being raised by user code."""
    if isinstance(error, Interrupted):
        return True
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    # In a script, the handler is Python's, asyncio's or the user's, and raises this class. Those of rlzmq do not.
    return not str(getattr(signal.getsignal(signal.SIGINT), "__module__", "")).startswith("rlzmq.")


def _named(error: BaseException) -> str:
    try:
        text = str(error).partition("\n")[0]
    except Exception:  # the user's __str__ raises too
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


class user_errors(AbstractContextManager[None]):
    """Raise `run_error` of what user code raises in the block, which must not await. Interrupts stay what they are."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or is_interrupt(error):
            return
        explained = run_error(error)
        if explained is not error:
            raise explained from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes and the members of groups, each once."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        todo += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions


def _kept(files: Sequence[str], error: BaseException) -> list[int]:
    """Return the indices of the frames to show."""
    # The user's frames and those they called, without earlier frames of rlzmq and libraries. Without user frames, the
    # libraries' frames. If the error comes from inside of rlzmq, all frames.
    ours = [file.startswith(_OURS) for file in files]
    theirs = [index for index, file in enumerate(files) if not ours[index] and not _is_library(file)]
    if not theirs:
        if isinstance(error, KeyboardInterrupt):
            return []
        if files and ours[-1] and not _is_explained(error):
            return list(range(len(files)))
        return [
            index for index, file in enumerate(files) if not ours[index] and not file.startswith(_PLUMBING)
        ]
    last = theirs[-1]
    after = list(range(last + 1, len(files)))
    if after and ours[after[0]] and _is_explained(error):  # a call from user code into rlzmq
        after = after[:1]
    return [*_with_libraries_between(theirs, ours), *after]


def _with_libraries_between(theirs: Sequence[int], ours: Sequence[bool]) -> list[int]:
    """Return the user's frames and the libraries' frames between them."""
    kept = [theirs[0]]
    for index in theirs[1:]:
        between = range(kept[-1] + 1, index)
        if not any(ours[other] for other in between):
            kept += between
        kept.append(index)
    return kept


def _is_explained(error: BaseException) -> bool:
    """Return whether the error's message is sufficient: it was raised on purpose, or in another process."""
    if isinstance(error, RlzmqError) or hasattr(error, "remote_origin"):
        return True
    return any(
        (last.line or "").startswith("raise ") for last in traceback.extract_tb(error.__traceback__, limit=-1)
    )


def _is_users(frame: traceback.FrameSummary) -> bool:
    return not _is_library(frame.filename) and not is_of_rlzmq(frame)


def _is_library(file: str) -> bool:
    return (
        file.startswith(_LIBRARIES)
        or file.startswith(("<frozen ", "<__array_function__"))
        or file.endswith((".pyx", ".pxi"))
        or "site-packages" in file
    )
