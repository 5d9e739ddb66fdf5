"""Suggestions for mistyped names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from rlzmq.core.synonyms import renamed

__all__ = ["did_you_mean"]

_MAX_CHARS = 200


def did_you_mean(name: object, valid: Iterable[object], *, num_listed: int = 12) -> str:
    """Return the last sentence of an error message: what to write instead.

    Args:
        name: The name that the user wrote.
        valid: The accepted names.
        num_listed: Largest number of valid names that is listed if none is close.

    Returns:
        ``" Instead: 'x'."`` of a word that other libraries have for it, or ``" Did you mean 'x'?"``, or
        ``" Valid: …."``; ``""`` if there are none or too many to list.
    """
    names = sorted({str(item) for item in valid})
    if here := renamed(str(name)[:_MAX_CHARS], names):
        return f" Instead: {here!r}."
    # Comparing takes as long as the name, which may be a peer's, is long.
    close = difflib.get_close_matches(str(name)[:_MAX_CHARS], names, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Valid: {', '.join(names)}." if 0 < len(names) <= num_listed else ""
