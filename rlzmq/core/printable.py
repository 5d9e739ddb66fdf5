"""Text from elsewhere (a peer, a file), made safe to show: no character of it moves a cursor or forges a line."""

from __future__ import annotations

__all__ = ["MAX_ERROR_CHARS", "cut", "printable"]

# Of the text of one exception, wherever it is kept or sent.
MAX_ERROR_CHARS = 16 * 1024


def printable(text: str, *, keep: str = "") -> str:
    r"""`text` with its control, format and other invisible characters as escapes, e.g. ``\x1b``.

    Args:
        text: Any.
        keep: Characters that stay: ``"\n\t"`` where the text may have lines.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def cut(text: str, max_chars: int = MAX_ERROR_CHARS) -> str:
    """`text`, or its beginning and how much of it is left out."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]} … ({len(text) - max_chars} more characters)"
