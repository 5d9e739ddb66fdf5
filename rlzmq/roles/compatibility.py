"""Digests that two sides of a run compare: the package version, the config, the env's spaces."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from rlzmq.core import version
from rlzmq.core.space_plain import space_to_plain
from rlzmq.wire.values import pack_blob

__all__ = ["digest_of", "package_version", "spaces_digest"]

_DIGEST_CHARACTERS = 16


def package_version() -> str:
    """Return the version of this rlzmq installation."""
    return version.__version__


def digest_of(data: bytes) -> str:
    """Return a short hex digest of the data."""
    return hashlib.sha256(data).hexdigest()[:_DIGEST_CHARACTERS]


def spaces_digest(spaces: tuple[Any, Any]) -> str:
    """Return a digest of (observation space, action space), each possibly a dict by agent.

    The result is "" if a space is not one of Gymnasium's own.
    """
    try:
        return digest_of(bytes(pack_blob([_plain(space) for space in spaces])))
    except (TypeError, ValueError):
        return ""  # a custom space: the weights' layout is still compared


def _plain(space: Any) -> Any:
    if isinstance(space, Mapping) and not hasattr(space, "sample"):
        return [
            [str(key), space_to_plain(sub)]
            for key, sub in sorted(space.items(), key=lambda item: str(item[0]))
        ]
    return space_to_plain(space)
