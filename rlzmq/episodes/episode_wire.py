"""The wire form of episode batches: a header of plain values, and frames that are the columns' memory.

Header (every field present, no other allowed)::

    {"num_slots": int, "num_chunks": int, "columns": [[name, spec], ...], "initial_state": spec or None,
     "meta": {...}}

A spec is ``[dtype, item_shape]`` for an array, ``{"dict": [[key, spec], ...]}`` (keys sorted) or
``{"tuple": [spec, ...]}`` for a tree. Frames, in this order:

1. the chunk table, int64 [7, num_chunks]: start, length, lookback, t_started, flags (1 terminated, 2
   truncated), env_index, and the bits of float64 durations in seconds;
2. a msgpack map: ids, and by slot or chunk sparse infos, custom data and leftovers (`rlzmq.core.plain` forms);
3. every column's arrays, ``[num_slots, *item_shape]``; the initial states', ``[num_chunks, *item_shape]``.

Of several agents, the header also has ``"groups"``: a header without meta for each group of agents' chunks. Their
frames follow, each group's with two more after the map: int64 [2, num_chunks], each chunk's episode and its place among
the episode's agents; and int64 [num_slots], the env step of each observation.

Received data is not trusted: each size is checked against the frame's real length before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np
import optree

from rlzmq.core.errors import ProtocolError, refuses_as
from rlzmq.core.plain import NotPlainError, checked_dtype, from_plain, to_plain
from rlzmq.episodes.agent_timelines import Pending
from rlzmq.episodes.batch_columns import ID_LISTS, BatchColumns, ragged_arange
from rlzmq.episodes.columns import Columns

__all__ = ["FrameReader", "from_wire", "to_wire"]

MAX_ARRAYS = 1024
MAX_DEPTH = 16
MAX_NAME = 256
# Far above any real count, but small enough for sums of two to fit into int64.
MAX_COUNT = 2**61
_MAX_DIMS = 32

B = TypeVar("B", bound=BatchColumns)

_MAX_GROUPS = 256
# Env steps of several agents' episodes take no bytes on the wire, but their lists take memory in the receiver.
_MAX_STEPS = 2**22

_FIELDS = frozenset({"num_slots", "num_chunks", "columns", "initial_state", "meta"})
_TEXT_FIELDS = frozenset({*ID_LISTS, "infos", "custom_data", "leftovers"})
_NUM_ROWS = 7


class FrameReader:
    """Reads frames one by one as arrays of an expected dtype and shape, without copies.

    Only a frame that is misaligned for its dtype is copied (a small frame inside a receive buffer).

    Args:
        frames: Buffers: bytes, memoryviews, arrays.

    Raises:
        ProtocolError: There are too many frames. Every method raises it if a frame is not as expected.
    """

    def __init__(self, frames: Sequence[Any]) -> None:
        if len(frames) > MAX_ARRAYS:
            raise ProtocolError(f"expected at most {MAX_ARRAYS} frames, got {len(frames)}.")
        self._frames: Iterator[Any] = iter(frames)
        self._num = len(frames)
        self._num_read = 0

    def buffer(self, where: str) -> memoryview:
        """Return the next frame's bytes."""
        try:
            frame = next(self._frames)
        except StopIteration:
            raise ProtocolError(f"{where}: expected another frame, got only {self._num}.") from None
        self._num_read += 1
        try:
            view = memoryview(frame)
            return view.cast("B") if view.nbytes else memoryview(b"")  # an empty view cannot be cast
        except (TypeError, ValueError) as error:
            raise ProtocolError(
                f"{where}: expected contiguous bytes, got {type(frame).__name__}: {error}."
            ) from None

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> np.ndarray:
        """Return the next frame as an array ``shape`` of ``dtype``."""
        view = self.buffer(where)
        expected = math.prod(shape) * dtype.itemsize
        if view.nbytes != expected:
            raise ProtocolError(
                f"{where}: expected {expected} bytes for shape {shape} of {dtype}, got {view.nbytes}."
            )
        if expected == 0:
            if max(shape, default=0) > MAX_COUNT:
                raise ProtocolError(f"{where}: expected a shape within bounds, got {shape}.")
            try:
                return np.empty(shape, dtype)
            except ValueError as error:
                raise ProtocolError(f"{where}: expected a possible shape, got {shape}: {error}.") from None
        if dtype.kind == "b" and np.frombuffer(view, np.uint8).max() > 1:
            raise ProtocolError(
                f"{where}: expected bools of 0 or 1, got {np.frombuffer(view, np.uint8).max()}."
            )
        array = np.frombuffer(view, dtype).reshape(shape)
        return array if array.flags.aligned else array.copy()

    def tree(self, spec: object, lead: int, where: str, depth: int = 0) -> Any:
        """Return the next frames as the tree of a spec from `_spec`, leaves ``[lead, *item_shape]``."""
        if depth > MAX_DEPTH:
            raise ProtocolError(f"{where}: expected a tree at most {MAX_DEPTH} deep.")
        if isinstance(spec, dict):
            if spec.keys() == {"tuple"}:
                parts = checked_list(spec["tuple"], where)
                return tuple(
                    self.tree(part, lead, f"{where}[{i}]", depth + 1) for i, part in enumerate(parts)
                )
            if spec.keys() != {"dict"}:
                raise ProtocolError(
                    f"{where}: expected a dict or tuple node, got {sorted(map(str, spec))[:8]}."
                )
            tree: dict[str, Any] = {}
            for entry in checked_list(spec["dict"], where):
                key, part = checked_pair(entry, where)
                if not isinstance(key, str) or len(key) > MAX_NAME or key in tree:
                    raise ProtocolError(
                        f"{where}: expected different keys of type str, got {str(key)[:80]!r}."
                    )
                tree[key] = self.tree(part, lead, f"{where}[{key!r}]", depth + 1)
            return tree
        text, shape = checked_pair(spec, where)
        shape = checked_list(shape, where)
        if len(shape) > _MAX_DIMS - 1:
            raise ProtocolError(f"{where}: expected at most {_MAX_DIMS} dimensions, got {len(shape) + 1}.")
        try:
            dtype = checked_dtype(text)
        except ValueError as error:
            raise ProtocolError(f"{where}: {error}") from None
        return self.array(dtype, (lead, *(checked_count(size, where) for size in shape)), where)

    def finish(self) -> None:
        """Check that all frames have been read."""
        if self._num_read != self._num:
            raise ProtocolError(f"expected {self._num_read} frames, got {self._num}.")


def checked_fields(value: object, names: frozenset[str], where: str) -> dict[str, Any]:
    """Return the value after checking that it is a dict with exactly these keys."""
    if not isinstance(value, dict) or value.keys() != names:
        actual = sorted(map(str, value))[:16] if isinstance(value, dict) else type(value).__name__
        raise ProtocolError(f"{where}: expected the fields {sorted(names)}, got {actual}.")
    return value


def checked_list(value: object, where: str) -> list[Any]:
    """Return the value after checking that it is a list."""
    if not isinstance(value, (list, tuple)):
        raise ProtocolError(f"{where}: expected a list, got {type(value).__name__}.")
    return list(value)


def checked_pair(value: object, where: str) -> tuple[Any, Any]:
    """Return the value after checking that it is a list of two items."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ProtocolError(f"{where}: expected a pair, got {str(value)[:80]}.")
    return value[0], value[1]


def checked_count(value: object, where: str) -> int:
    """Return the value after checking that it is a whole number from 0 to `MAX_COUNT`."""
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ProtocolError(
            f"{where}: expected a count from 0, got {str(value)[:40]} ({type(value).__name__})."
        )
    return value


# -- out ----------------------------------------------------------------------------------------------


def to_wire(batch: BatchColumns) -> tuple[dict[str, Any], list[np.ndarray]]:
    """See `EpisodeBatch.to_wire`."""
    frames: list[np.ndarray] = []
    header, num_left_out = _write(batch, frames)
    header["meta"] = meta = to_plain(batch.meta, "meta")
    if batch.groups is not None:
        header["groups"] = []
        for group in batch.groups:
            own, num_more = _write(group, frames)
            header["groups"].append(own)
            num_left_out += num_more
    if num_left_out:
        meta["num_infos_left_out"] = meta.get("num_infos_left_out", 0) + num_left_out
    if len(frames) > MAX_ARRAYS:
        raise ValueError(f"expected at most {MAX_ARRAYS} arrays in a batch to send, got {len(frames)}.")
    return header, frames


def _write(batch: BatchColumns, frames: list[np.ndarray]) -> tuple[dict[str, Any], int]:
    """Append the frames of a batch on its own columns; return its header, and the number of infos left out."""
    batch, low, high = _trimmed(batch)
    text, num_left_out = _text(batch, low, high)
    frames += [_table(batch, low), np.frombuffer(text, np.uint8)]
    if batch.episode is not None:
        episode, order, env_ts = batch.links
        frames += [np.stack([episode, order]), np.ascontiguousarray(env_ts[low:high])]
    columns = []
    for name, column in batch.columns.items():
        try:
            columns.append([name, _spec(column, frames, slice(low, high))])
        except ValueError as error:
            raise ValueError(f"EpisodeBatch, column {name!r}: {error}") from None
    header = {
        "num_slots": high - low,
        "num_chunks": len(batch),
        "columns": columns,
        "initial_state": None if batch.initial_state is None else _spec(batch.initial_state, frames),
    }
    return header, num_left_out


def _trimmed(batch: BatchColumns) -> tuple[BatchColumns, int, int]:
    """Return the batch (compacted if mostly unused) and the range of its chunks' slots."""
    if len(batch) == 0 or batch.groups is not None:
        return batch, 0, 0
    low = int((batch.start - batch.lookback).min())
    high = int((batch.start + batch.length).max()) + 1
    num_used = int((batch.lookback + batch.length).sum()) + len(batch)
    if 2 * num_used < high - low or num_used > 2 * (high - low) or int(batch.length.sum()) > high - low:
        batch = batch.compacted()
        low, high = 0, batch.num_slots
    return batch, low, high


def _table(batch: BatchColumns, low: int) -> np.ndarray:
    table = np.empty((_NUM_ROWS, len(batch)), np.int64)
    np.subtract(batch.start, low, out=table[0])
    table[1] = batch.length
    table[2] = batch.lookback
    table[3] = batch.t_started
    table[4] = batch.terminated + 2 * batch.truncated
    table[5] = batch.env_index
    table[6] = 0 if batch.duration_s is None else batch.duration_s.view(np.int64)
    return table


def _text(batch: BatchColumns, low: int, high: int) -> tuple[bytes, int]:
    infos, num_left_out = [], 0
    for slot, info in batch.infos.items():
        if low <= slot < high:
            plain, left_out = _plain_infos(info) if isinstance(info, dict) else ({}, 1)
            num_left_out += left_out
            if plain:
                infos.append([slot - low, plain])
    custom_data = []
    for chunk, data in batch.custom_data.items():
        plain, left_out = _plain_infos(data)
        num_left_out += left_out
        if plain:
            custom_data.append([chunk, plain])
    text = {
        **{name: None if (ids := getattr(batch, name)) is None else to_plain(ids, name) for name in ID_LISTS},
        "infos": infos,
        "custom_data": custom_data,
        "leftovers": [[c, _plain_leftovers(left)] for c, left in batch.leftovers.items() if left],
    }
    return msgpack.packb(text), num_left_out


def _plain_infos(infos: dict[Any, Any]) -> tuple[Any, int]:
    """Return the entries of an info dict that have a plain form, and the number of those left out."""
    try:
        return to_plain(infos, "infos"), 0
    except NotPlainError:
        kept: dict[Any, Any] = {}
        for key, value in infos.items():
            try:
                to_plain({key: value}, "infos")
            except NotPlainError:
                continue
            kept[key] = value
        return to_plain(kept), len(infos) - len(kept)


def _plain_leftovers(left: dict[str, Any]) -> object:
    plain = dict(left)
    if (pending := left.get("pending")) is not None:
        plain["pending"] = {"action": pending.action, "outputs": dict(pending.extra_model_outputs)}
    if (keys := left.get("output_keys")) is not None:
        plain["output_keys"] = sorted(keys)
    return to_plain(plain, "leftovers")


def _spec(tree: object, frames: list[np.ndarray], slots: slice = slice(None), depth: int = 0) -> object:
    """Return the spec of a tree of arrays, and append their contiguous memory to ``frames``.

    Raises:
        ValueError: A dtype, key or depth cannot be sent.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"expected trees nested at most {MAX_DEPTH} deep to send.")
    if isinstance(tree, dict):
        if not all(isinstance(key, str) for key in tree):
            raise ValueError(f"expected keys of type str in a tree to send, got {list(tree)}.")
        return {"dict": [[key, _spec(tree[key], frames, slots, depth + 1)] for key in sorted(tree)]}
    if isinstance(tree, tuple):
        return {"tuple": [_spec(part, frames, slots, depth + 1) for part in tree]}
    array = np.asarray(tree)[slots]
    text = array.dtype.str
    checked_dtype(text)
    frames.append(np.ascontiguousarray(array.view(np.int64) if array.dtype.kind in "mM" else array))
    return [text, list(array.shape[1:])]


# -- in -----------------------------------------------------------------------------------------------


@refuses_as(ProtocolError)
def from_wire(
    cls: type[B],
    header: object,
    frames: Sequence[Any],
    *,
    observation_space: object = None,
    action_space: object = None,
) -> B:
    """See `EpisodeBatch.from_wire`."""
    of_agents = isinstance(header, dict) and "groups" in header
    fields = checked_fields(header, _FIELDS | {"groups"} if of_agents else _FIELDS, "header")
    reader = FrameReader(frames)
    batch = _read(cls, fields, reader, None, of_agents=of_agents)
    if of_agents:
        headers = checked_list(fields["groups"], "groups")
        if len(headers) > _MAX_GROUPS:
            raise ProtocolError(f"groups: expected at most {_MAX_GROUPS}, got {len(headers)}.")
        fields_of_groups = [checked_fields(own, _FIELDS - {"meta"}, "groups") for own in headers]
        batch.groups = [_read(cls, own, reader, batch, of_agents=False) for own in fields_of_groups]
        _check_agents(batch.groups)
    reader.finish()
    batch.observation_space, batch.action_space = observation_space, action_space
    batch.meta = meta = _plain(fields["meta"], "meta")
    if not isinstance(meta, dict):
        raise ProtocolError(f"meta: expected a dict, got {type(meta).__name__}.")
    return batch


def _read(
    cls: type[B],
    fields: dict[str, Any],
    reader: FrameReader,
    episodes: BatchColumns | None,
    *,
    of_agents: bool,
) -> B:
    """Return the batch of the next frames; `episodes` are those of a group's chunks."""
    num_slots = checked_count(fields["num_slots"], "num_slots")
    num_chunks = checked_count(fields["num_chunks"], "num_chunks")
    table = reader.array(np.dtype(np.int64), (_NUM_ROWS, num_chunks), "chunk table")
    _check_table(table, num_slots, of_agents=of_agents)
    text = _decode_text(reader.buffer("text"), num_chunks, num_slots)
    links: dict[str, Any] = {}
    if episodes is not None:
        places = reader.array(np.dtype(np.int64), (2, num_chunks), "places")
        env_ts = reader.array(np.dtype(np.int64), (num_slots,), "env steps")
        _check_links(table, text, places[0], env_ts, episodes)
        links = {"episode": places[0], "order": places[1], "env_ts": env_ts}
    columns: dict[str, Any] = {}
    for entry in checked_list(fields["columns"], "columns"):
        name, spec = checked_pair(entry, "columns")
        if not isinstance(name, str) or len(name) > MAX_NAME or name in columns:
            raise ProtocolError(
                f"columns: expected different names of at most {MAX_NAME} characters, got {str(name)[:80]!r}."
            )
        columns[name] = reader.tree(spec, num_slots, f"column {name!r}")
    if not of_agents:
        _check_columns(columns)
    elif columns or num_slots:
        raise ProtocolError(f"columns: expected those of several agents in groups, got {sorted(columns)}.")
    state = fields["initial_state"]
    initial_state = None if state is None else reader.tree(state, num_chunks, "initial_state")
    if initial_state is not None and Columns.STATE_OUT in columns:
        _check_same_form(initial_state, columns[Columns.STATE_OUT])
    return cls(
        columns,
        start=table[0],
        length=table[1],
        lookback=table[2],
        t_started=table[3],
        terminated=(table[4] & 1).astype(np.bool_),
        truncated=(table[4] & 2).astype(np.bool_),
        env_index=table[5],
        duration_s=table[6].view(np.float64),
        initial_state=initial_state,
        **text,
        **links,
    )


def _check_columns(columns: dict[str, Any]) -> None:
    for name in (Columns.OBS, Columns.ACTIONS, Columns.REWARDS):
        if name not in columns:
            raise ProtocolError(f"columns: expected one named {name!r}, got {sorted(columns)}.")
    rewards = columns[Columns.REWARDS]
    # With this check, num_slots is not larger than the number of bytes received.
    if not isinstance(rewards, np.ndarray) or rewards.ndim != 1 or rewards.dtype.kind not in "biuf":
        actual = f"{rewards.dtype} {rewards.shape}" if isinstance(rewards, np.ndarray) else "a tree"
        raise ProtocolError(f"column 'rewards': expected one number per slot, got {actual}.")


def _check_links(
    table: np.ndarray, text: dict[str, Any], episode: np.ndarray, env_ts: np.ndarray, episodes: BatchColumns
) -> None:
    """Check the ids of agents' chunks, their episodes, and the env steps of their observations."""
    for name in ("agent_ids", "module_ids"):
        ids = text[name]
        if ids is None or (name == "module_ids" and not all(isinstance(id_, str) for id_ in ids)):
            raise ProtocolError(f"{name}: expected those of all agents' chunks.")
    if not len(episode):
        return
    if not ((episode >= 0) & (episode < len(episodes))).all():
        raise ProtocolError(f"places: expected episodes within 0…{len(episodes) - 1}.")
    start, length, lookback = table[:3]
    counts = lookback + length + 1
    times = env_ts[ragged_arange(start - lookback, counts)]
    chunk_of = np.repeat(np.arange(len(counts)), counts)
    same = chunk_of[1:] == chunk_of[:-1]
    if not (times[1:] > times[:-1])[same].all() or not (times > -MAX_COUNT).all():
        raise ProtocolError("env steps: expected increasing ones in each chunk.")
    if not (times <= (episodes.t_started + episodes.length)[episode[chunk_of]]).all():
        raise ProtocolError("env steps: expected none after the end of their episode's chunk.")


def _check_agents(groups: Sequence[BatchColumns]) -> None:
    """Check that each agent has one chunk per episode."""
    seen: set[tuple[int, Any]] = set()
    for group in groups:
        for e, agent_id in zip(group.links[0].tolist(), group.agent_ids or (), strict=True):
            try:
                key = (e, agent_id)
                is_double = key in seen
            except TypeError:
                raise ProtocolError(
                    f"agent ids: expected hashable ones, got {type(agent_id).__name__}."
                ) from None
            if is_double:
                raise ProtocolError(f"episode {e}: expected one chunk of agent {agent_id!r}, got several.")
            seen.add(key)


def _check_same_form(initial_state: Any, state_out: Any) -> None:
    """Check that ``state_out`` has the form of an initial state, which it becomes when a chunk is split."""
    forms = [
        [(path, leaf.shape[1:]) for path, leaf in zip(*optree.tree_flatten_with_path(tree)[:2], strict=True)]
        for tree in (initial_state, state_out)
    ]
    if forms[0] != forms[1]:
        raise ProtocolError("initial_state: expected the form of the column 'state_out', got another one.")


def _check_table(table: np.ndarray, num_slots: int, *, of_agents: bool) -> None:
    if table.shape[1] == 0:
        return
    start, length, lookback, t_started, flags, env_index, durations = table

    def check(valid: Any, what: str) -> None:
        if not valid.all():
            c = int(np.argmin(valid))
            raise ProtocolError(
                f"chunk table, chunk {c}: expected {what}, got start {start[c]}, length {length[c]}, "
                f"lookback {lookback[c]}, t_started {t_started[c]}, flags {flags[c]}, env index "
                f"{env_index[c]}."
            )

    counts, most = table[:3], _MAX_STEPS if of_agents else num_slots
    check(((counts >= 0) & (counts <= most)).all(axis=0), f"counts within 0…{most}")
    if not of_agents:
        check((start >= lookback) & (start + length < num_slots), f"slots within 0…{num_slots - 1}")
    check((t_started >= 0) & (t_started <= MAX_COUNT), "a t_started from 0")
    check((flags >= 0) & (flags <= 3), "flags within 0…3")
    check((env_index >= -1) & (env_index <= MAX_COUNT), "an env index from -1")
    seconds = durations.view(np.float64)
    check(np.isfinite(seconds) & (seconds >= 0), "a finite duration from 0")
    # Sums are Python ints: malicious counts must not wrap around, nor cause larger allocations than the data received.
    num_steps, num_used = sum(length.tolist()), sum((lookback + length + 1).tolist())
    if not of_agents and (num_steps > num_slots or num_used > 2 * num_slots):
        raise ProtocolError(
            f"chunk table: expected at most {num_slots} steps and {2 * num_slots} slots in all chunks, got "
            f"{num_steps} and {num_used}."
        )


def _decode_text(data: memoryview, num_chunks: int, num_slots: int) -> dict[str, Any]:
    try:
        text = msgpack.unpackb(data, raw=False, strict_map_key=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"text: expected msgpack, got {len(data)} other bytes: {error!r}.") from None
    text = checked_fields(text, _TEXT_FIELDS, "text")
    ids: dict[str, Any] = {}
    for name in ID_LISTS:
        if text[name] is None and name != "episode_ids":
            ids[name] = None
            continue
        values = [_plain(value, name) for value in checked_list(text[name], name)]
        if len(values) != num_chunks:
            raise ProtocolError(f"{name}: expected {num_chunks}, got {len(values)}.")
        ids[name] = values
    if not all(isinstance(id_, str) for id_ in ids["episode_ids"]):
        raise ProtocolError("episode_ids: expected strings, got another type.")
    return {
        **ids,
        "infos": _sparse(text["infos"], num_slots, "infos"),
        "custom_data": _sparse(text["custom_data"], num_chunks, "custom_data"),
        "leftovers": {
            c: _checked_leftovers(left, f"leftovers of chunk {c}")
            for c, left in _sparse(text["leftovers"], num_chunks, "leftovers").items()
        },
    }


_NUMBERS = ("reward", "reward_before_start", "done_env_t")
_DICTS = ("departed", "early_rewards", "agent_module_ids")
_LEFTOVERS = frozenset({"pending", "output_keys", *_NUMBERS, *_DICTS})


def _checked_leftovers(left: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the leftovers of an episode of several agents, or of an agent's chunk."""
    if not left.keys() <= _LEFTOVERS:
        raise ProtocolError(f"{where}: expected some of {sorted(_LEFTOVERS)}, got {sorted(map(str, left))}.")
    for name, value in left.items():
        if (name in _DICTS and not isinstance(value, dict)) or (
            name in _NUMBERS and not isinstance(value, int | float | np.number)
        ):
            raise ProtocolError(
                f"{where}: expected another {name} than {type(value).__name__} {value!r:.80}."
            )
    for agent_id, flags in left.get("departed", {}).items():
        if not (isinstance(flags, tuple) and [type(flag) for flag in flags] == [bool, bool, int]):
            raise ProtocolError(f"{where}: expected two flags and an env step of agent {agent_id!r}.")
    pending, keys = left.get("pending"), left.get("output_keys")
    if pending is not None:
        outputs = checked_fields(pending, frozenset({"action", "outputs"}), where)["outputs"]
        if not isinstance(outputs, dict) or not all(isinstance(name, str) for name in outputs):
            raise ProtocolError(f"{where}: expected the outputs to be a dict by name.")
        left = {**left, "pending": Pending(pending["action"], outputs)}
    if keys is not None:
        if not all(isinstance(key, str) for key in checked_list(keys, where)):
            raise ProtocolError(f"{where}: expected output_keys to be names.")
        left = {**left, "output_keys": frozenset(keys)}
    return left


def _sparse(value: object, size: int, where: str) -> dict[int, dict[str, Any]]:
    sparse: dict[int, dict[str, Any]] = {}
    for entry in checked_list(value, where):
        place, plain = checked_pair(entry, where)
        data = _plain(plain, where)
        if not isinstance(data, dict) or type(place) is not int or not 0 <= place < size:
            raise ProtocolError(
                f"{where}: expected a dict at a place within 0…{size - 1}, got {type(data).__name__} at "
                f"{str(place)[:40]}."
            )
        sparse[place] = data
    return sparse


def _plain(value: object, where: str) -> Any:
    try:
        return from_plain(value)
    except ValueError as error:
        raise ProtocolError(f"{where}: {error}") from None
