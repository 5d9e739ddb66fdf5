"""Encoding of a runner's fragment as a message, and its decoding by a learner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rlzmq.core.errors import ProtocolError, refuses_as
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_batch import MultiAgentEpisodeBatch
from rlzmq.wire.codec import Buffer, decode, encode
from rlzmq.wire.errors import ArrayMismatchError, MalformedFrameError, SchemaError, wire_decoder
from rlzmq.wire.messages import Fragment
from rlzmq.wire.ranges import pack_blobs, unpack_blobs
from rlzmq.wire.schema import from_header, to_header
from rlzmq.wire.values import pack_blob

__all__ = ["decode_fragment", "encode_fragment", "fragment_from_bytes", "fragment_to_bytes", "slice_fragment"]


def encode_fragment(fragment: Fragment, arrays: Sequence[npt.NDArray[Any]], meta: Any = None) -> list[Buffer]:
    """Return the frames of a fragment message. The column arrays are not copied.

    Args:
        fragment: The header; ``fragment.batch`` is the header of ``EpisodeBatch.to_wire()``.
        arrays: The arrays of ``EpisodeBatch.to_wire()``. Do not overwrite them until they are sent.
        meta: Any value that `values.pack_value` supports: episode metrics, connector delta, …
    """
    blob = np.frombuffer(pack_blob(meta), np.uint8)
    return encode(Fragment.kind, to_header(fragment), [*arrays, blob])


@wire_decoder
def decode_fragment(
    frames: Sequence[Buffer],
) -> tuple[Fragment, list[npt.NDArray[Any]], npt.NDArray[np.uint8]]:
    """Return the header, column arrays (views) and meta blob (`values.unpack_blob`) of a fragment message.

    Raises:
        WireError: It is not a fragment, or its arrays do not match their frames.
    """
    message = decode(frames)
    if message.kind != Fragment.kind:
        raise SchemaError(f"a fragment is expected, got kind {message.kind}")
    if not message.arrays:
        raise ArrayMismatchError("a fragment has at least its meta frame, got no arrays")
    *arrays, meta = message.arrays
    if meta.dtype != np.uint8 or meta.ndim != 1:
        raise MalformedFrameError(f"a fragment's meta frame is 1-D uint8, got {meta.ndim}-D {meta.dtype}")
    return from_header(Fragment, message.header), arrays, meta


def slice_fragment(frames: Sequence[Buffer], first: int, num_steps: int) -> Sequence[Buffer]:
    """Return the message of a part of a fragment. Its header counts the part's env steps, and it has no meta.

    The columns are views of the frames where most of the slots between a part's first and last one belong to it. A
    message that cannot be cut, because it is malformed, is returned unchanged, for its receiver to refuse.

    Args:
        frames: The fragment message, which is not trusted.
        first, num_steps: Range of env steps, in chunk order.
    """
    try:
        fragment, arrays, _ = decode_fragment(frames)
        header, columns = _cut(fragment.batch, arrays, first, first + num_steps)
    except ProtocolError:
        return frames
    part = replace(fragment, num_env_steps=num_steps, batch=header)
    return encode(Fragment.kind, to_header(part), [*columns, np.empty(0, np.uint8)])


@refuses_as(ProtocolError)
def _cut(
    header: Any, arrays: Sequence[npt.NDArray[Any]], begin: int, end: int
) -> tuple[dict[str, Any], list[npt.NDArray[Any]]]:
    """Return the wire form of the env steps ``begin … end-1`` of a batch in its wire form."""
    kind: Any = MultiAgentEpisodeBatch if "groups" in header else EpisodeBatch
    form: tuple[dict[str, Any], list[npt.NDArray[Any]]] = (
        kind.from_wire(header, arrays).slice_steps(begin, end).to_wire()
    )
    return form


def fragment_to_bytes(frames: Sequence[Buffer]) -> bytes:
    """Return a fragment message as the content of one file, for quarantine."""
    lengths, body = pack_blobs(frames)
    return b"".join([_FILE_MAGIC, len(frames).to_bytes(4, "little"), lengths, body])


@wire_decoder
def fragment_from_bytes(content: bytes) -> list[memoryview]:
    """Return the frames from a result of `fragment_to_bytes`, for `decode_fragment`.

    Raises:
        WireError: It is not a quarantine file, or a truncated one.
    """
    view = memoryview(content)
    start = len(_FILE_MAGIC) + 4
    if bytes(view[: len(_FILE_MAGIC)]) != _FILE_MAGIC or len(view) < start:
        raise MalformedFrameError("not a quarantined fragment: the file does not begin as one")
    num_frames = int.from_bytes(view[len(_FILE_MAGIC) : start], "little")
    return unpack_blobs([view[start : start + 8 * num_frames], view[start + 8 * num_frames :]])


_FILE_MAGIC = b"rlzmq fragment 1\n"
