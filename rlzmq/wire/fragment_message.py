"""Fragments as messages, and ranges of fragments, blobs and sequence numbers as payload frames.

Lists of ranges grow with the number of runners, so they are not in a header.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlzmq.core.errors import ProtocolError, printable, refuses_as
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.wire.codec import (
    ArrayMismatchError,
    BoundExceededError,
    Buffer,
    FragmentId,
    MalformedFrameError,
    SchemaError,
    decode,
    encode,
    from_header,
    to_header,
    wire_decoder,
)
from rlzmq.wire.messages import Fragment
from rlzmq.wire.values import pack_blob

__all__ = [
    "FragmentRange",
    "check_claims",
    "decode_fragment",
    "encode_fragment",
    "fragment_from_bytes",
    "fragment_to_bytes",
    "pack_blobs",
    "pack_ranges",
    "slice_fragment",
    "sorted_by_env",
    "to_spans",
    "unpack_blobs",
    "unpack_ranges",
]


# A range takes 40 bytes. No update has a million of them.
_MAX_RANGES = 1_000_000


class FragmentRange(NamedTuple):
    """Env steps ``first … first + num_steps - 1`` of one fragment."""

    fragment: FragmentId
    first: int
    num_steps: int


def pack_ranges(ranges: Iterable[FragmentRange]) -> list[Buffer]:
    """Return two frames: runner uuids joined by newlines, and ``<i8 [n, 5]``."""
    runners: dict[str, int] = {}
    rows = [
        (runners.setdefault(fragment.runner, len(runners)), fragment.incarnation, fragment.seq, first, num)
        for fragment, first, num in ranges
    ]
    table = np.array(rows, dtype="<i8").reshape(len(rows), 5)
    return ["\n".join(runners).encode(), table.tobytes()]


@wire_decoder
def unpack_ranges(frames: Sequence[Buffer]) -> list[FragmentRange]:
    """Return the ranges from frames of `pack_ranges`.

    Raises:
        WireError: The frames are malformed, or contain an impossible index or number.
    """
    if len(frames) != 2:
        raise MalformedFrameError(f"ranges come in 2 frames, got {len(frames)}")
    names, raw = memoryview(frames[0]).cast("B"), memoryview(frames[1]).cast("B")
    if len(raw) % 40:
        raise ArrayMismatchError(f"a table of ranges has 40 bytes per row, got {len(raw)} bytes")
    if len(raw) // 40 > _MAX_RANGES:
        raise BoundExceededError(f"at most {_MAX_RANGES} ranges, got {len(raw) // 40}")
    if not len(raw):
        return []
    try:
        runners = [printable(name) for name in bytes(names).decode().split("\n")]
    except UnicodeDecodeError:
        raise MalformedFrameError("runner names are UTF-8") from None
    table = np.frombuffer(raw, dtype="<i8").reshape(-1, 5)
    if table.min() < 0 or int(table[:, 0].max()) >= len(runners):
        raise MalformedFrameError("a table of ranges has a negative number or an unknown runner")
    return [
        FragmentRange(FragmentId(runners[index], incarnation, seq), first, num_steps)
        for index, incarnation, seq, first, num_steps in table.tolist()
    ]


def pack_blobs(blobs: Iterable[Buffer]) -> list[Buffer]:
    """Return two frames: ``<i8`` lengths, and the concatenated blobs."""
    parts = [bytes(memoryview(blob).cast("B")) for blob in blobs]
    return [np.array([len(part) for part in parts], dtype="<i8").tobytes(), b"".join(parts)]


@wire_decoder
def unpack_blobs(frames: Sequence[Buffer]) -> list[memoryview]:
    """Return the blobs from frames of `pack_blobs`, as views.

    Raises:
        WireError: The frames are malformed, or the lengths do not match.
    """
    if len(frames) != 2:
        raise MalformedFrameError(f"blobs come in 2 frames, got {len(frames)}")
    raw, body = memoryview(frames[0]).cast("B"), memoryview(frames[1]).cast("B")
    if len(raw) % 8 or len(raw) // 8 > _MAX_RANGES:
        raise MalformedFrameError(f"blob lengths have 8 bytes each, got {len(raw)} bytes")
    lengths = np.frombuffer(raw, dtype="<i8").tolist() if len(raw) else []
    if any(length < 0 for length in lengths) or sum(lengths) != len(body):
        raise ArrayMismatchError(f"blobs of {sum(lengths)} bytes came in {len(body)} bytes")
    blobs, offset = [], 0
    for length in lengths:
        blobs.append(body[offset : offset + length])
        offset += length
    return blobs


def to_spans(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return numbers as sorted spans ``(first, last)``, both included: 1 2 3 7 → ((1, 3), (7, 7))."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return tuple(spans)


def sorted_by_env(batch: EpisodeBatch, num_envs: int) -> tuple[EpisodeBatch, tuple[int, ...]]:
    """Order a batch's chunks by environment and count the env steps of each.

    Args:
        batch: Batches of several agents, and those without environment indices, are returned unchanged.
        num_envs: Number of environments.

    Returns:
        The batch, and its env steps by environment, or ().
    """
    batch = batch.updated()
    if (
        batch.groups is not None
        or not len(batch)
        or batch.env_index.min() < 0
        or batch.env_index.max() >= num_envs
    ):
        return batch, ()
    order = np.argsort(batch.env_index, kind="stable")
    steps = np.bincount(batch.env_index, weights=batch.length, minlength=num_envs).astype(np.int64)
    return batch.select(order), tuple(steps.tolist())


def encode_fragment(
    fragment: Fragment, arrays: Sequence[npt.NDArray[Any]], meta: object = None
) -> list[Buffer]:
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


@wire_decoder
def check_claims(frames: Sequence[Buffer]) -> None:
    """Check that a fragment holds the env steps that its header claims, since these enter the account.

    Raises:
        WireError: It cannot be decoded, or holds another number.
    """
    fragment, arrays, _ = decode_fragment(frames)
    num_steps = EpisodeBatch.from_wire(fragment.batch, arrays).num_env_steps
    claimed = {fragment.num_env_steps, sum(fragment.env_steps) if fragment.env_steps else num_steps}
    if claimed != {num_steps} or min(fragment.env_steps, default=0) < 0:
        raise ArrayMismatchError(f"a fragment of {num_steps} env steps claims {fragment.num_env_steps}")


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
    form: tuple[dict[str, Any], list[npt.NDArray[Any]]] = (
        EpisodeBatch.from_wire(header, arrays).slice_steps(begin, end).to_wire()
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
