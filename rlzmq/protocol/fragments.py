"""A runner's fragment as a message, and a learner's view of the forwarded message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlzmq.protocol.codec import Buffer, decode, encode
from rlzmq.protocol.errors import ArrayMismatchError, MalformedFrameError, SchemaError
from rlzmq.protocol.messages import Fragment, Kind
from rlzmq.protocol.schema import from_header, to_header
from rlzmq.protocol.values import pack_blob

__all__ = ["decode_fragment", "encode_fragment", "meta_frame"]


def encode_fragment(fragment: Fragment, arrays: Sequence[npt.NDArray[Any]], meta: Any = None) -> list[Buffer]:
    """All frames of a fragment message; the column arrays are not copied.

    Args:
        fragment: The header; ``fragment.batch`` is the header of ``EpisodeBatch.to_wire()``.
        arrays: The arrays of ``EpisodeBatch.to_wire()``, not overwritten until they are sent.
        meta: Any value of `values.pack_value`: episode metrics, connector delta, …
    """
    blob = np.frombuffer(pack_blob(meta), np.uint8)
    return encode(Kind.FRAGMENT, to_header(fragment), [*arrays, blob])


def decode_fragment(
    frames: Sequence[Buffer],
) -> tuple[Fragment, list[npt.NDArray[Any]], npt.NDArray[np.uint8]]:
    """Header, column arrays (views) and the meta blob (`values.unpack_blob`) of a fragment message.

    Raises:
        WireError: Not a fragment, or arrays that do not fit their frames.
    """
    message = decode(frames)
    if message.kind != Kind.FRAGMENT:
        raise SchemaError(f"a fragment is expected, got kind {message.kind}")
    if not message.arrays:
        raise ArrayMismatchError("a fragment has at least its meta frame, got no arrays")
    *arrays, meta = message.arrays
    if meta.dtype != np.uint8 or meta.ndim != 1:
        raise MalformedFrameError(f"a fragment's meta frame is 1-D uint8, got {meta.ndim}-D {meta.dtype}")
    return from_header(Fragment, message.header), arrays, meta


def meta_frame(frames: Sequence[Buffer]) -> Buffer:
    """The meta blob of a fragment message whose first frame was already decoded."""
    return frames[-1]
