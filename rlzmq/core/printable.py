"""Text from elsewhere (a peer, a file), made safe to show: no character of it moves a cursor or forges a line."""

from __future__ import annotations

__all__ = ["MAX_ERROR_BYTES", "cut", "printable"]

# Of the text of one exception, wherever it is kept or sent.
MAX_ERROR_BYTES = 16 * 1024


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


def cut(text: str, max_bytes: int = MAX_ERROR_BYTES) -> str:
    """`text`, or its beginning and how much of it is left out; as UTF-8 no longer than that and a few words."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    kept = encoded[:max_bytes].decode(errors="ignore")
    return f"{kept} … ({len(text) - len(kept)} more characters)"
