"""Conversion of texts and paths to a form that is safe, or short, to print."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MAX_ERROR_BYTES", "cut", "printable", "short_path"]

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
    here, path = Path.cwd(), Path(path) if isinstance(path, str) else path
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def cut(text: str, max_bytes: int = MAX_ERROR_BYTES) -> str:
    """Return `text`, or its start and the length of the rest: `max_bytes` bytes of UTF-8 and a few words at most."""
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    kept = encoded[:max_bytes].decode(errors="ignore")
    return f"{kept} … ({len(text) - len(kept)} more characters)"
