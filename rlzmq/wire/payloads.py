"""What messages carry after their header: plain values, fragments, and ranges of fragments, as frames.

A value (the arguments and results of actor calls, metrics, …) becomes a list of numpy arrays, ready for `codec.encode`:
first one uint8 array with the value's *tree* (`rlzmq.core.plain`) in msgpack, then the arrays it refers to. `TYPES` are
all that a tree holds: no class is imported by name, and pickle is not used.

Supported types: None, bool, int, float, complex, str, bytes, list, tuple, dict, numpy arrays and scalars, torch
tensors (received on the CPU), episodes (`SingleAgentEpisode`, `MultiAgentEpisode`, alone or in a list,
`EpisodeBatch`), gymnasium spaces, and reduced metrics (`ReducedMetrics`). Types are
preserved: a tuple arrives as a tuple.

Lists of ranges grow with the number of runners, so they are not in a header.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rlzmq.core.errors import NotPlainError, ProtocolError, printable, refuses_as
from rlzmq.core.metrics import ReducedMetrics
from rlzmq.core.plain import BYTES, TENSOR, PlainType, TreeReader, TreeWriter, expect_list
from rlzmq.core.spaces import SPACE_TYPES
from rlzmq.episodes.batch_items import EPISODE_CLASSES
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.wire.codec import (
    MAX_ARRAYS,
    ArrayMismatchError,
    BoundExceededError,
    Buffer,
    FragmentId,
    MalformedFrameError,
    SchemaError,
    WireError,
    decode,
    decode_arrays,
    decode_spec,
    encode,
    from_header,
    pack_header,
    to_header,
    unpack_header,
    wire_array,
    wire_decoder,
)
from rlzmq.wire.messages import Fragment

__all__ = [
    "FragmentRange",
    "check_claims",
    "decode_fragment",
    "encode_fragment",
    "fragment_from_bytes",
    "fragment_to_bytes",
    "join_frames",
    "pack_blob",
    "pack_ranges",
    "pack_value",
    "slice_fragment",
    "split_frames",
    "to_spans",
    "unpack_blob",
    "unpack_ranges",
    "unpack_value",
]

# The tree has a separate frame, so it may be larger than a header. It contains no array data.
_MAX_TREE_BYTES = 1024 * 1024
# Maximum number of containers in a value; each takes at most three in its tree.
_MAX_DEPTH = 37
_MAX_TREE_DEPTH = 3 * _MAX_DEPTH + 1
# Arrays below this size share one frame, so a state dict of a thousand small tensors is one message.
_POOL_BELOW_BYTES = 4096
_ALIGNED_BYTES = 16
# A list of at least this many plain floats or ints is sent as one array.
_NUMBER_LIST_FROM = 64
# References may overlap. Without a bound, a tree of 1 MiB could refer to one array a hundred thousand times.
# `pack_value` refers to each byte once, and its result unpacks to at most six times the bytes (a list of numbers).
_MAX_TIMES_UNPACKED = 8
_UNPACKED_FLOOR_BYTES = 1024 * 1024
_LIST_TIMES = 5  # size of Python's numbers, relative to the array's bytes


def pack_value(value: object) -> list[npt.NDArray[Any]]:
    """Return a value as arrays: the tree, the shared frame of small arrays, then each large array.

    Args:
        value: Any nesting of the types in the module docstring. Dict subclasses arrive as dicts.

    Returns:
        Arrays for `rlzmq.wire.codec.encode`; large C-contiguous ones are not copied.

    Raises:
        NotPlainError: A type is not supported; the text names its path, e.g. ``value['a'][2]``.
        ValueError: The value is nested deeper than 37, or its tree (without arrays) is larger than 1 MiB.
    """
    writer = _Writer()
    return writer.finish(writer.write(value))


@wire_decoder
def unpack_value(arrays: Sequence[npt.NDArray[Any]]) -> Any:
    """Return the value from arrays of `pack_value`. Its arrays are views of these.

    Raises:
        WireError: It is not a packed value, its parts are inconsistent, or it would take many times the memory of the
            received frames.
    """
    if len(arrays) < 2:
        raise MalformedFrameError(f"a value has at least 2 arrays (tree, small arrays), got {len(arrays)}")
    tree_array, pool = arrays[0], arrays[1]
    for name, array in (("tree", tree_array), ("small arrays", pool)):
        if array.dtype != np.uint8 or array.ndim != 1:
            raise MalformedFrameError(
                f"a value's {name} frame is 1-D uint8, got {array.ndim}-D {array.dtype}"
            )
    tree = unpack_header(tree_array.data, max_bytes=_MAX_TREE_BYTES, max_depth=_MAX_TREE_DEPTH)
    try:
        return _Reader(pool, arrays[2:]).read(tree)
    except ValueError as error:
        raise MalformedFrameError(f"a value's tree: {error}") from None


_MAX_RANGES = 1_000_000


def join_frames(frames: Iterable[Buffer]) -> bytes:
    """Return frames as one: their number, their lengths, then the frames. They are copied."""
    parts = [memoryview(frame).cast("B") for frame in frames]
    return b"".join([np.array([len(parts), *map(len, parts)], dtype="<u8").tobytes(), *parts])


@wire_decoder
def split_frames(joined: Buffer, max_frames: int = _MAX_RANGES) -> list[memoryview]:
    """Return the frames from a result of `join_frames`, at most so many, as views.

    Raises:
        WireError: It is not such a result, is truncated, or has trailing bytes.
    """
    view = memoryview(joined).cast("B")
    num_frames = int.from_bytes(view[:8], "little")
    if num_frames > max_frames:
        raise BoundExceededError(f"at most {max_frames} joined frames, got {num_frames}")
    end = 8 * (num_frames + 1)
    if len(view) < end:
        raise MalformedFrameError(f"not joined frames: {len(view)} bytes, too few for their lengths")
    frames = []
    for length in np.frombuffer(view[8:end], "<u8").tolist():
        frames.append(view[end : end + length])
        end += length
    if end != len(view):
        raise ArrayMismatchError(f"joined frames of {end} bytes came in {len(view)} bytes")
    return frames


def pack_blob(value: object) -> bytes:
    """Return a value as one frame. Arrays are copied. For small values such as metrics."""
    return join_frames(encode(0, {}, pack_value(value)))


@wire_decoder
def unpack_blob(blob: Buffer) -> Any:
    """Return the value from a blob of `pack_blob`.

    Raises:
        WireError: It is not a packed value, is truncated, or has trailing bytes.
    """
    return unpack_value(decode(split_frames(blob, MAX_ARRAYS + 1)).arrays)


def _write_episodes(writer: _Writer, value: Any, where: str, depth: int) -> list[Any]:
    episodes = value if isinstance(value, list) else [value]
    batch = value if isinstance(value, EpisodeBatch) else EpisodeBatch.from_episodes(episodes)
    header, frames = batch.to_wire()
    return [header, [writer.place(frame, where) for frame in frames]]


def _read_batch(reader: _Reader, content: object, depth: int) -> EpisodeBatch:
    header, places = expect_list(content)
    if not isinstance(header, dict) or not isinstance(places, list):
        raise MalformedFrameError("packed episodes are a header and their arrays")
    return EpisodeBatch.from_wire(header, [reader.fetch(place) for place in places])


def _read_episode(reader: _Reader, content: object, depth: int) -> object:
    episodes = list(_read_batch(reader, content, depth))
    if len(episodes) != 1:
        raise MalformedFrameError(f"one episode was packed, {len(episodes)} came")
    return episodes[0]


def _write_metrics(writer: _Writer, value: ReducedMetrics, where: str, depth: int) -> list[Any]:
    return [writer.write(part, where, depth + 1) for part in (dict(value), value.states)]


def _read_metrics(reader: _Reader, content: object, depth: int) -> ReducedMetrics:
    values, states = (reader.read(part, depth + 1) for part in expect_list(content))
    if not isinstance(values, dict) or not isinstance(states, dict):
        raise MalformedFrameError("packed metrics are two dicts: values and states")
    return ReducedMetrics(values, states)


def _read_numbers(reader: _Reader, content: object, depth: int) -> list[Any]:
    array = reader.fetch(content)
    if array.ndim != 1 or array.dtype not in (np.float64, np.int64):
        raise MalformedFrameError(f"a list of numbers is 1-D, got {array.ndim}-D {array.dtype}")
    reader.spend(_LIST_TIMES * array.nbytes)
    return array.tolist()  # type: ignore[no-any-return]


_NUMBERS = PlainType(
    "__numbers__",
    (),  # a list of at least 64
    lambda w, v, where, _: w.place(np.array(v, np.float64 if type(v[0]) is float else np.int64), where),
    _read_numbers,
)
_EPISODES = PlainType("__episodes__", (), _write_episodes, lambda r, c, depth: list(_read_batch(r, c, depth)))
TYPES = SPACE_TYPES.with_types(
    PlainType("__batch__", EpisodeBatch, _write_episodes, _read_batch),
    PlainType("__episode__", EPISODE_CLASSES, _write_episodes, _read_episode),
    PlainType("__metrics__", ReducedMetrics, _write_metrics, _read_metrics),
    _NUMBERS,
    _EPISODES,
    BYTES,
    TENSOR,
)
"""The types of values in messages, besides those of msgpack."""


class _Writer(TreeWriter):
    """State of one `pack_value` call: the arrays collected so far."""

    types = TYPES
    leaves = frozenset({type(None), bool, str, float})
    max_depth = _MAX_DEPTH
    is_short = False  # what is read takes memory, and is bounded by what was sent

    def __init__(self) -> None:
        self._small: list[bytes] = []
        self._small_bytes = 0
        self._large: list[npt.NDArray[Any]] = []

    def finish(self, tree: object) -> list[npt.NDArray[Any]]:
        try:
            packed = pack_header(tree, max_bytes=_MAX_TREE_BYTES)
        except BoundExceededError as error:
            raise ValueError(
                f"value: its tree is too large ({error}); send numbers as numpy arrays"
            ) from None
        pool = b"".join(self._small)
        return [np.frombuffer(packed, np.uint8), np.frombuffer(pool, np.uint8), *self._large]

    def items(self, value: Any, where: str, depth: int) -> Any:
        kinds = set(map(type, value)) if type(value) is list else ()
        if len(kinds) == 1:
            (kind,) = kinds
            if len(value) >= _NUMBER_LIST_FROM and (
                kind is float or (kind is int and min(value) >= -(2**63) and max(value) < 2**63)
            ):
                return {_NUMBERS.tag: _NUMBERS.write(self, value, where, depth)}
            if kind in EPISODE_CLASSES:
                return {_EPISODES.tag: _EPISODES.write(self, value, where, depth)}
        return super().items(value, where, depth)

    def other(self, value: object, where: str, depth: int) -> Any:
        kind = type(value)
        raise NotPlainError(
            f"{where[:200]}: a {kind.__module__}.{kind.__name__} does not travel. {_way_out(value)}"
        )

    def place(self, array: npt.NDArray[Any], where: str) -> list[Any]:
        """Add an array; return its place: ``[index]`` of a frame, or ``[offset, dtype, *shape]``."""
        if array.dtype.hasobject:
            raise NotPlainError(
                f"{where[:200]}: an array of Python objects (dtype {array.dtype}) does not travel. "
                "Convert it to a numeric or text array, or send a list."
            )
        is_large = array.nbytes >= _POOL_BELOW_BYTES
        if is_large and len(self._large) < MAX_ARRAYS - 2:
            self._large.append(array)
            return [len(self._large) - 1]
        try:
            wire = wire_array(array, 0)
        except WireError as error:
            raise NotPlainError(f"{where[:200]}: {error}") from None
        offset = self._small_bytes
        self._small_bytes = offset + wire.nbytes + -wire.nbytes % _ALIGNED_BYTES
        self._small.append(wire.tobytes().ljust(self._small_bytes - offset, b"\0"))
        return [offset, wire.dtype.str, *wire.shape]


class _Reader(TreeReader):
    """State of one `unpack_value` call."""

    types = TYPES

    def __init__(self, pool: npt.NDArray[Any], large: Sequence[npt.NDArray[Any]]) -> None:
        self._pool = pool.data
        self._large = large
        num_bytes = pool.nbytes + sum(array.nbytes for array in large)
        self._bytes_left = _MAX_TIMES_UNPACKED * num_bytes + _UNPACKED_FLOOR_BYTES

    def spend(self, num_bytes: int) -> None:
        """Count memory about to be allocated against the limit."""
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise BoundExceededError(
                f"a value unpacks to at most {_MAX_TIMES_UNPACKED} times the bytes of its arrays: this one refers to "
                "the same ones again and again"
            )

    def fetch(self, place: object) -> npt.NDArray[Any]:
        if not isinstance(place, list) or not place or type(place[0]) is not int or place[0] < 0:
            raise MalformedFrameError("an array reference is [index] or [offset, dtype, *shape]")
        if len(place) == 1:
            if place[0] >= len(self._large):
                raise ArrayMismatchError(f"array {place[0]} is referred to, {len(self._large)} came")
            array = self._large[place[0]]
            self.spend(array.nbytes)
            return array
        dtype, shape = decode_spec(place[1:], 0)
        num_bytes = math.prod(shape) * dtype.itemsize
        self.spend(num_bytes)
        return decode_arrays([(dtype, shape)], [self._pool[place[0] : place[0] + num_bytes]])[0]


def _way_out(value: object) -> str:
    if isinstance(value, BaseException):
        return "Raise it instead: raised exceptions reach the caller with type and traceback."
    if isinstance(value, (set, frozenset)):
        return "Send a sorted list."
    if callable(value):
        return "Functions and classes stay in their process: send a name that the other side looks up."
    if isinstance(value, (int, float, str, bytes, tuple, list)):
        return "Convert it to its plain type, e.g. int(x), str(x), tuple(x) or x._asdict()."
    return (
        "Send None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays, torch tensors, episodes "
        "or gymnasium spaces, e.g. its get_state()."
    )


# A range takes 40 bytes. No update has a million of them.


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


def to_spans(numbers: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return numbers as sorted spans ``(first, last)``, both included: 1 2 3 7 → ((1, 3), (7, 7))."""
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return tuple(spans)


def encode_fragment(
    fragment: Fragment, arrays: Sequence[npt.NDArray[Any]], meta: object = None
) -> list[Buffer]:
    """Return the frames of a fragment message. The column arrays are not copied.

    Args:
        fragment: The header; ``fragment.batch`` is the header of ``EpisodeBatch.to_wire()``.
        arrays: The arrays of ``EpisodeBatch.to_wire()``. Do not overwrite them until they are sent.
        meta: Any value that `payloads.pack_value` supports: episode metrics, connector delta, …
    """
    blob = np.frombuffer(pack_blob(meta), np.uint8)
    return encode(Fragment.kind, to_header(fragment), [*arrays, blob])


@wire_decoder
def decode_fragment(
    frames: Sequence[Buffer],
) -> tuple[Fragment, list[npt.NDArray[Any]], npt.NDArray[np.uint8]]:
    """Return the header, column arrays (views) and meta blob (`payloads.unpack_blob`) of a fragment message.

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
    return _FILE_MAGIC + join_frames(frames)


@wire_decoder
def fragment_from_bytes(content: bytes) -> list[memoryview]:
    """Return the frames from a result of `fragment_to_bytes`, for `decode_fragment`.

    Raises:
        WireError: It is not a quarantine file, or a truncated one.
    """
    if not content.startswith(_FILE_MAGIC):
        raise MalformedFrameError("not a quarantined fragment: the file does not begin as one")
    return split_frames(memoryview(content)[len(_FILE_MAGIC) :])


_FILE_MAGIC = b"rlzmq fragment 2\n"
