"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]

_MAX_CHARS = 200


def did_you_mean(name: object, valid: Iterable[object], *, num_listed: int = 12) -> str:
    """Return the last sentence of an error message: the closest valid name, or the list of valid names.

    Args:
        name: The name that the user wrote.
        valid: The accepted names.
        num_listed: Maximum number of valid names to list if none is close.

    Returns:
        ``" Did you mean 'x'?"``, or ``" Valid: …."``, or ``""`` if there is no valid name.
    """
    names = sorted({str(item) for item in valid})
    # Comparing takes as long as the name, which may be a peer's, is long.
    close = difflib.get_close_matches(str(name)[:_MAX_CHARS], names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    if not names:
        return ""
    listed = ", ".join(names[:num_listed]) + (", …" if len(names) > num_listed else "")
    return f" Valid: {listed}."
