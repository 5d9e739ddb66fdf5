"""The only module that pickles: it sends objects of the user's script from a process to its own child.

The bytes travel over a private socketpair that only the two processes hold. Nothing that came from
a zmq socket, a file or another machine is ever unpickled. Classes and functions defined in
``__main__``, in a notebook or inside a function travel by value, all others by import.
"""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["dumps", "loads"]


def dumps(value: Any, what: str) -> bytes:
    """Pickle ``value``.

    Args:
        value: Any picklable object.
        what: How error texts name it.

    Raises:
        TypeError: The value, or something that it refers to, cannot be pickled.
    """
    import cloudpickle  # type: ignore[import-untyped]

    try:
        data: bytes = cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise TypeError(
            f"{what} cannot be sent to another process: {error}. Make such objects (locks, open files, "
            "sockets, running environments) inside the actor instead"
        ) from error
    return data


def loads(data: bytes) -> Any:
    """Unpickle the result of the parent's :func:`dumps`; only call it with bytes from the private pipe."""
    return pickle.loads(data)
