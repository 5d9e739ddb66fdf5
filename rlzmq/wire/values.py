"""Serialization of Python values, e.g. the arguments and results of actor calls, as arrays.

A value becomes a list of numpy arrays, ready for `codec.encode`: first one uint8 array with the
value's *tree* in msgpack, then the arrays it refers to. The set of types is fixed: no class is imported
by name, and pickle is not used.

Supported types: None, bool, int, float, str, bytes, list, tuple, dict, numpy arrays and scalars, torch
tensors (received on the CPU), episodes (`SingleAgentEpisode`, `MultiAgentEpisode`, alone or in a list,
`EpisodeBatch`, `MultiAgentEpisodeBatch`), gymnasium spaces, and reduced metrics (`ReducedMetrics`). Types are
preserved: a tuple arrives as a tuple.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlzmq.core.metrics import ReducedMetrics
from rlzmq.wire.codec import (
    MAX_ARRAYS,
    Buffer,
    decode,
    decode_arrays,
    decode_spec,
    encode,
    pack_header,
    unpack_header,
)
from rlzmq.wire.errors import (
    ArrayMismatchError,
    BoundExceededError,
    MalformedFrameError,
    WireError,
    wire_decoder,
)
from rlzmq.wire.value_spaces import SPACE_NAMES, pack_space, unpack_space

__all__ = ["pack_blob", "pack_value", "unpack_blob", "unpack_value"]

# The tree has a separate frame, so it may be larger than a header; it holds no array data.
_MAX_TREE_BYTES = 1024 * 1024
_MAX_TREE_DEPTH = 40
# Arrays below this share one frame: a state dict of a thousand small tensors is one message.
_POOL_BELOW_BYTES = 4096
# A list of at least this many plain floats or ints is sent as one array.
_NUMBER_LIST_FROM = 64
# References may overlap: without a bound, a tree of 1 MiB could refer to one array a hundred thousand times.
# `pack_value` refers to each byte once, and its result unpacks to at most six times the bytes (a list of numbers).
_MAX_TIMES_UNPACKED = 8
_UNPACKED_FLOOR_BYTES = 1024 * 1024
_LIST_TIMES, _SPACE_TIMES = 5, 3  # Python's numbers, and a Box's copies, by the array's bytes

# Tags: every container in the tree is a list that starts with one of these.
_LIST, _TUPLE, _DICT, _ARRAY, _SCALAR, _TENSOR, _BFLOAT16, _BIG_INT, _BYTES = range(9)
_FLOATS, _INTS, _EPISODES, _EPISODE, _EPISODE_BATCH, _MULTI_EPISODES, _MULTI_EPISODE, _SPACE = range(9, 17)
_MULTI_EPISODE_BATCH, _METRICS = 17, 18
_EPISODE_TAGS = frozenset(
    {_EPISODES, _EPISODE, _EPISODE_BATCH, _MULTI_EPISODES, _MULTI_EPISODE, _MULTI_EPISODE_BATCH}
)


def pack_value(value: Any) -> list[npt.NDArray[Any]]:
    """Return a value as arrays: the tree, the shared frame of small arrays, then each large array.

    Args:
        value: Any nesting of the types in the module docstring; dict subclasses arrive as dicts.

    Returns:
        Arrays for `rlzmq.wire.codec.encode`; large C-contiguous ones are not copied.

    Raises:
        TypeError: An unsupported type; the text has its path, e.g. ``value['a'][2]``.
        ValueError: Nested deeper than 40, or a tree (without arrays) above 1 MiB.
    """
    packer = _Packer()
    tree = packer.pack(value, "value", 0)
    return packer.finish(tree)


@wire_decoder
def unpack_value(arrays: Sequence[npt.NDArray[Any]]) -> Any:
    """Return the value packed by `pack_value`; its arrays are views of the given ones.

    Raises:
        WireError: Not a packed value, inconsistent parts, or a value that would take many times the memory of
            the received frames.
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
    return _Unpacker(pool, arrays[2:]).unpack(tree)


def pack_blob(value: Any) -> bytes:
    """Return a value as one frame; arrays are copied. For small values such as metrics."""
    frames: list[Buffer] = [memoryview(frame).cast("B") for frame in _frames(value)]
    lengths = np.array([len(frames), *map(len, frames)], dtype="<u8")
    return b"".join([lengths.tobytes(), *frames])


@wire_decoder
def unpack_blob(blob: Buffer) -> Any:
    """Return the value packed by `pack_blob`.

    Raises:
        WireError: Not a packed value, truncated, or with trailing bytes.
    """
    view = memoryview(blob).cast("B")
    num_frames = int.from_bytes(view[:8], "little")
    if len(view) < 8 or num_frames > MAX_ARRAYS + 1 or len(view) < 8 * (num_frames + 1):
        raise MalformedFrameError(f"not a packed value: {len(view)} bytes that declare {num_frames} frames")
    offset = 8 * (num_frames + 1)
    frames = []
    for index in range(num_frames):
        length = int.from_bytes(view[8 * (index + 1) : 8 * (index + 2)], "little")
        frames.append(view[offset : offset + length])
        offset += length
    if offset != len(view):
        raise ArrayMismatchError(f"a packed value of {offset} bytes came in {len(view)} bytes")
    return unpack_value(decode(frames).arrays)


def _frames(value: Any) -> list[Buffer]:
    return encode(0, {}, pack_value(value))


class _Packer:
    """State of one `pack_value` call: the arrays collected so far."""

    def __init__(self) -> None:
        self._small: list[npt.NDArray[Any]] = []
        self._small_bytes = 0
        self._large: list[npt.NDArray[Any]] = []

    def finish(self, tree: Any) -> list[npt.NDArray[Any]]:
        try:
            packed = pack_header(tree, max_bytes=_MAX_TREE_BYTES)
        except BoundExceededError as error:
            raise ValueError(
                f"value: its tree is too large ({error}); send numbers as numpy arrays"
            ) from None
        pool = np.zeros(self._small_bytes, np.uint8)
        offset = 0
        for array in self._small:
            end = offset + array.nbytes
            pool[offset:end] = np.frombuffer(array.tobytes(), np.uint8)
            offset = _aligned(end)
        return [np.frombuffer(packed, np.uint8), pool, *self._large]

    def pack(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if depth >= _MAX_TREE_DEPTH - 3:
            raise ValueError(f"{path[:200]}: nested deeper than {_MAX_TREE_DEPTH - 3}, or contains itself")
        if kind is int:
            return value if -(2**63) <= value < 2**63 else [_BIG_INT, str(value)]
        if kind is bytes:
            return (
                value
                if len(value) < _POOL_BELOW_BYTES
                else [_BYTES, *self._ref(np.frombuffer(value, np.uint8))]
            )
        if kind is ReducedMetrics:
            return [_METRICS, *(self.pack(part, path, depth + 1) for part in (dict(value), value.states))]
        if isinstance(value, dict):
            items: list[Any] = [_DICT]
            for key, item in value.items():
                items.append(self.pack(key, f"{path}: key {key!r}", depth + 1))
                items.append(self.pack(item, f"{path}[{key!r}]", depth + 1))
            return items
        if kind is list or kind is tuple:
            return self._pack_sequence(value, path, depth)
        if isinstance(value, np.ndarray):
            return [_ARRAY, *self._ref(value, path)]
        if isinstance(value, np.generic):
            return [_SCALAR, *self._ref(np.asarray(value), path)]
        return self._pack_object(value, path)

    def _pack_sequence(self, value: list[Any] | tuple[Any, ...], path: str, depth: int) -> Any:
        if type(value) is list and value:
            kinds = set(map(type, value))
            if len(kinds) == 1 and len(value) >= _NUMBER_LIST_FROM:
                if kinds == {float}:
                    return [_FLOATS, *self._ref(np.array(value, np.float64))]
                if kinds == {int} and min(value) >= -(2**63) and max(value) < 2**63:
                    return [_INTS, *self._ref(np.array(value, np.int64))]
            names = {kind.__name__ for kind in kinds}
            if names <= {"SingleAgentEpisode"} and _is_episode_type(next(iter(kinds))):
                return [_EPISODES, *self._pack_episodes(value)]
            if names <= {"MultiAgentEpisode"} and _is_episode_type(next(iter(kinds))):
                return [_MULTI_EPISODES, *self._pack_multi_agent(value)]
        tag = _LIST if type(value) is list else _TUPLE
        return [tag, *[self.pack(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]]

    def _pack_object(self, value: Any, path: str) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            tensor = value.detach().cpu()
            if tensor.dtype is torch.bfloat16:
                return [_BFLOAT16, *self._ref(tensor.contiguous().view(torch.int16).numpy(), path)]
            return [_TENSOR, *self._ref(tensor.numpy(), path)]
        name = type(value).__name__
        if name == "EpisodeBatch" and _is_episode_type(type(value)):
            return [_EPISODE_BATCH, *self._pack_wire(value.to_wire())]
        if name == "MultiAgentEpisodeBatch" and _is_episode_type(type(value)):
            return [_MULTI_EPISODE_BATCH, *self._pack_wire(value.to_wire())]
        if name == "SingleAgentEpisode" and _is_episode_type(type(value)):
            return [_EPISODE, *self._pack_episodes([value])]
        if name == "MultiAgentEpisode" and _is_episode_type(type(value)):
            return [_MULTI_EPISODE, *self._pack_multi_agent([value])]
        if name in SPACE_NAMES:
            packed = pack_space(value)
            if packed is not None:
                return [_SPACE, self.pack(packed, path, 0)]
        raise TypeError(f"{path[:200]}: a {type(value).__module__}.{name} does not travel. {_way_out(value)}")

    def _pack_episodes(self, episodes: Sequence[Any]) -> list[Any]:
        from rlzmq.episodes.episode_batch import EpisodeBatch

        return self._pack_wire(EpisodeBatch.from_episodes(list(episodes)).to_wire())

    def _pack_multi_agent(self, episodes: Sequence[Any]) -> list[Any]:
        from rlzmq.episodes.multi_agent_batch import MultiAgentEpisodeBatch

        return self._pack_wire(MultiAgentEpisodeBatch.from_episodes(list(episodes)).to_wire())

    def _pack_wire(self, wire: tuple[dict[str, Any], list[npt.NDArray[Any]]]) -> list[Any]:
        header, frames = wire
        return [header, [self._ref(frame) for frame in frames]]

    def _ref(self, array: npt.NDArray[Any], path: str = "value") -> list[Any]:
        """Add an array; return its reference: ``[index]`` of a frame, or ``[offset, dtype, *shape]``."""
        if array.dtype.hasobject:
            raise TypeError(
                f"{path[:200]}: an array of Python objects (dtype {array.dtype}) does not travel. "
                "Convert it to a numeric or text array, or send a list."
            )
        is_large = array.nbytes >= _POOL_BELOW_BYTES
        if is_large and len(self._large) < MAX_ARRAYS - 2:
            self._large.append(array)
            return [len(self._large) - 1]
        try:
            spec = unpack_header(memoryview(encode(0, {}, [array])[0])[2:])[1][0]
        except WireError as error:
            raise TypeError(f"{path[:200]}: {error}") from None
        wire = np.ascontiguousarray(array, dtype=spec[0])
        offset = self._small_bytes
        self._small.append(wire)
        self._small_bytes = _aligned(offset + wire.nbytes)
        return [offset, *spec]


class _Unpacker:
    """State of one `unpack_value` call."""

    def __init__(self, pool: npt.NDArray[Any], large: Sequence[npt.NDArray[Any]]) -> None:
        self._pool = pool.data
        self._large = large
        num_bytes = pool.nbytes + sum(array.nbytes for array in large)
        self._bytes_left = _MAX_TIMES_UNPACKED * num_bytes + _UNPACKED_FLOOR_BYTES

    def unpack(self, node: Any) -> Any:
        if type(node) is not list:
            if type(node) is dict:
                raise MalformedFrameError("a value's tree holds tagged lists, got a map")
            return node
        if not node or type(node[0]) is not int or not 0 <= node[0] <= _METRICS:
            raise MalformedFrameError("a value's tree holds tagged lists, got an unknown tag")
        tag, body = node[0], node[1:]
        if tag == _LIST:
            return [self.unpack(item) for item in body]
        if tag == _TUPLE:
            return tuple(self.unpack(item) for item in body)
        if tag == _DICT:
            return self._dict(body)
        if tag in _EPISODE_TAGS:
            return self._episodes(tag, body)
        if tag == _BIG_INT:
            return _big_int(body)
        if tag == _SPACE:
            return self._space(body)
        if tag == _METRICS:
            return self._metrics(body)
        return self._array_like(tag, self._array(body))

    def _space(self, body: list[Any]) -> Any:
        if len(body) != 1:
            raise MalformedFrameError("a packed space has one part")
        parts = self.unpack(body[0])
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, np.ndarray):
                self._spend(_SPACE_TIMES * part.nbytes)
        return unpack_space(parts)

    def _metrics(self, body: list[Any]) -> ReducedMetrics:
        parts = [self.unpack(part) for part in body]
        if len(parts) != 2 or not all(isinstance(part, dict) for part in parts):
            raise MalformedFrameError("packed metrics are two dicts: values and states")
        return ReducedMetrics(parts[0], parts[1])

    def _spend(self, num_bytes: int) -> None:
        """Count memory about to be allocated against the limit."""
        self._bytes_left -= num_bytes
        if self._bytes_left < 0:
            raise BoundExceededError(
                f"a value unpacks to at most {_MAX_TIMES_UNPACKED} times the bytes of its arrays: this one refers to "
                "the same ones again and again"
            )

    def _dict(self, body: list[Any]) -> dict[Any, Any]:
        if len(body) % 2:
            raise MalformedFrameError("a dict has as many values as keys")
        keys = [self.unpack(key) for key in body[::2]]
        try:
            return dict(zip(keys, map(self.unpack, body[1::2]), strict=True))
        except TypeError:
            raise MalformedFrameError("a dict key that cannot be a key") from None

    def _array_like(self, tag: int, array: npt.NDArray[Any]) -> Any:
        if tag == _ARRAY:
            return array
        if tag == _SCALAR:
            if array.ndim:
                raise MalformedFrameError(f"a scalar has no dimensions, got {array.ndim}")
            return array[()]
        if tag in (_FLOATS, _INTS):
            if array.ndim != 1 or array.dtype != (np.float64 if tag == _FLOATS else np.int64):
                raise MalformedFrameError(f"a list of numbers is 1-D, got {array.ndim}-D {array.dtype}")
            self._spend(_LIST_TIMES * array.nbytes)
            return array.tolist()
        if tag == _BYTES:
            return array.tobytes()
        return _tensor(array, bfloat16=tag == _BFLOAT16)

    def _episodes(self, tag: int, body: list[Any]) -> Any:
        if len(body) != 2 or not isinstance(body[0], dict) or not isinstance(body[1], list):
            raise MalformedFrameError("packed episodes are a header and their arrays")
        arrays = [self._array(ref) for ref in body[1]]
        batch: Any
        if tag in (_MULTI_EPISODES, _MULTI_EPISODE, _MULTI_EPISODE_BATCH):
            from rlzmq.episodes.multi_agent_batch import MultiAgentEpisodeBatch

            batch = MultiAgentEpisodeBatch.from_wire(body[0], arrays)
            if tag == _MULTI_EPISODE_BATCH:
                return batch
        else:
            from rlzmq.episodes.episode_batch import EpisodeBatch

            batch = EpisodeBatch.from_wire(body[0], arrays)
            if tag == _EPISODE_BATCH:
                return batch
        episodes = list(batch)
        if tag in (_EPISODES, _MULTI_EPISODES):
            return episodes
        if len(episodes) != 1:
            raise MalformedFrameError(f"one episode was packed, {len(episodes)} came")
        return episodes[0]

    def _array(self, ref: Any) -> npt.NDArray[Any]:
        if not isinstance(ref, list) or not ref or type(ref[0]) is not int or ref[0] < 0:
            raise MalformedFrameError("an array reference is [index] or [offset, dtype, *shape]")
        if len(ref) == 1:
            if ref[0] >= len(self._large):
                raise ArrayMismatchError(f"array {ref[0]} is referred to, {len(self._large)} came")
            array = self._large[ref[0]]
            self._spend(array.nbytes)
            return array
        dtype, shape = decode_spec(ref[1:], 0)
        num_bytes = math.prod(shape) * dtype.itemsize
        self._spend(num_bytes)
        return decode_arrays([(dtype, shape)], [self._pool[ref[0] : ref[0] + num_bytes]])[0]


def _tensor(array: npt.NDArray[Any], *, bfloat16: bool) -> Any:
    import torch

    try:
        tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
        return tensor.view(torch.bfloat16) if bfloat16 else tensor
    except (TypeError, RuntimeError):
        raise MalformedFrameError(f"no torch tensor has dtype {array.dtype}") from None


def _big_int(body: list[Any]) -> int:
    if len(body) == 1 and isinstance(body[0], str) and len(body[0]) <= 4000:
        try:
            return int(body[0])
        except ValueError:
            pass
    raise MalformedFrameError("a large int is decimal text")


def _is_episode_type(kind: type) -> bool:
    return kind.__module__.startswith("rlzmq.episodes.")


def _aligned(offset: int) -> int:
    return (offset + 15) & ~15


def _way_out(value: Any) -> str:
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


_PLAIN = frozenset({type(None), bool, float, str})
