"""The only module that pickles: it sends objects of the user's script from a process to its own child.

The bytes travel over a private pipe that only the two processes hold (`rlzmq.actors.messages`, and Gymnasium's to the
processes of environments). Nothing that came from a zmq socket, a file or another machine is ever unpickled. Classes
and functions defined in ``__main__``, in a notebook or inside a function travel by value, all others by import.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable
from types import CodeType
from typing import Any

__all__ = ["SentByValue", "dumps", "loads"]


@functools.cache
def _pickler() -> Any:
    """Return the class that pickles. Its import takes long, and a run in one process does not need it."""
    import cloudpickle  # type: ignore[import-untyped]

    table = cloudpickle.CloudPickler.dispatch_table

    def reduce_code(code: CodeType) -> tuple[Any, ...]:
        """Keep the file's name, which some versions of cloudpickle replace: a traceback needs it to show its lines."""
        kind, args = table[CodeType](code)
        return kind, tuple(code.co_filename if part == "<dynamic-code>" else part for part in args)

    return type("Pickler", (cloudpickle.CloudPickler,), {"dispatch_table": table | {CodeType: reduce_code}})


def dumps(value: object, what: str) -> bytes:
    """Pickle ``value``.

    Raises:
        TypeError: The value, or something that it refers to, cannot be pickled.
    """
    data = io.BytesIO()
    try:
        _pickler()(data, pickle.HIGHEST_PROTOCOL).dump(value)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise TypeError(
            f"{what} cannot be sent to another process: {error}. Make such objects (locks, open files, "
            "sockets, running environments) inside the actor instead"
        ) from error
    return data.getvalue()


def loads(data: bytes | memoryview) -> Any:
    """Unpickle the result of the parent's :func:`dumps`; only call it with bytes from the private pipe."""
    return pickle.loads(data)


class SentByValue:
    """A function that travels as `dumps` makes it, also where another library pickles it.

    Args:
        function: The function.
        what: Its name in errors.
    """

    def __init__(self, function: Callable[..., Any], what: str) -> None:
        self._function = function
        self._what = what

    def __call__(self, *args: object) -> Any:
        return self._function(*args)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return loads, (dumps(self._function, self._what),)
