"""Files with a server's bearer token, readable only by their owner."""

from __future__ import annotations

import secrets
from pathlib import Path

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import read_private_file, write_private_file

__all__ = ["token_in"]

_MIN_TOKEN_CHARS = 16


def token_in(path: Path) -> str:
    """Return the token in a file; write a new one if there is no file.

    Raises:
        ConfigurationError: Others may read the file, it holds no token, or it cannot be written.
    """
    if path.exists():
        token = read_private_file(path).strip()
        if len(token) < _MIN_TOKEN_CHARS or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigurationError(
                f"{path} holds no token: expected at least {_MIN_TOKEN_CHARS} printable ASCII characters without "
                "spaces. Remove it; a new one will be written."
            )
        return token
    token = secrets.token_urlsafe(32)
    try:
        write_private_file(path, token)  # without a line end: programs put it into a header
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}. Name another file.") from error
    return token
