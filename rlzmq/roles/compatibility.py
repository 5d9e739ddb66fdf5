"""What two sides of a run must have in common: the package's version, the config, the env's spaces."""

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
    """Of rlzmq, here."""
    return version.__version__


def digest_of(data: bytes) -> str:
    """A short name for data: equal names mean equal data."""
    return hashlib.sha256(data).hexdigest()[:_DIGEST_CHARACTERS]


def spaces_digest(spaces: tuple[Any, Any]) -> str:
    """The same for (observation space, action space), or a dict of each by agent; "" for spaces of other kinds."""
    try:
        return digest_of(bytes(pack_blob([_plain(space) for space in spaces])))
    except (TypeError, ValueError):
        return ""  # not Gymnasium's own: the weights' layout is compared all the same


def _plain(space: Any) -> Any:
    if isinstance(space, Mapping) and not hasattr(space, "sample"):
        return [
            [str(key), space_to_plain(sub)]
            for key, sub in sorted(space.items(), key=lambda item: str(item[0]))
        ]
    return space_to_plain(space)
