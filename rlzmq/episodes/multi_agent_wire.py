"""The wire form of multi-agent batches: the agents' batches in their own wire form, and the timelines as arrays.

Header (every field present, no other allowed)::

    {"num_episodes": int, "meta": {...},
     "groups": [{"batch": header of `episode_wire`, "num_frames": int}, ...]}

Frames, in this order:

1. the episode table, int64 [5, num_episodes]: env_t_started, env_t, lookback, flags (1 terminated,
   2 truncated), env_index;
2. a msgpack map: ``episode_ids``, ``leftovers`` by episode, ``tracks`` by group and chunk;
3. per group: int64 [2, num_chunks] (index of the episode, position among its agents), int64 obs_env_ts,
   then the frames of its EpisodeBatch.

As in `episode_wire`, all received data are checked before use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgpack  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from rlzmq.core.errors import ProtocolError, refuses_as
from rlzmq.core.plain import from_plain, to_plain
from rlzmq.episodes.agent_rows import AgentRows
from rlzmq.episodes.agent_timelines import Pending
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.episode_state import plain_infos
from rlzmq.episodes.episode_wire import FrameReader
from rlzmq.episodes.multi_agent_columns import MultiAgentBatchColumns

__all__ = ["from_wire", "to_wire"]

B = TypeVar("B", bound=MultiAgentBatchColumns)

_MAX_GROUPS = 256
_MAX_TIME = 2**61
# Env steps of a chunk take no bytes on the wire, but their lists take memory in the receiver.
_MAX_STEPS = 2**22
_HEADER = frozenset({"num_episodes", "groups", "meta"})
_TEXT = frozenset({"episode_ids", "leftovers", "tracks"})
_LEFTOVERS = frozenset({"departed", "early_rewards", "custom_data", "agent_module_ids", "duration_s"})
_TRACK = frozenset({"pending", "reward", "reward_before_start", "done_env_t", "output_keys"})


# -- out ----------------------------------------------------------------------------------------------


def to_wire(batch: MultiAgentBatchColumns) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """See `MultiAgentEpisodeBatch.to_wire`."""
    table = np.empty((5, len(batch)), np.int64)
    table[0], table[1], table[2] = batch.env_t_started, batch.env_t, batch.lookback
    table[3] = batch.terminated + 2 * batch.truncated
    table[4] = batch.env_index
    leftovers = []
    for e, left in batch.leftovers.items():
        left = dict(left)
        if "custom_data" in left:
            left["custom_data"] = from_plain(plain_infos(left["custom_data"])[0])
        leftovers.append([e, to_plain(left, f"episode {batch.episode_ids[e]}")])
    tracks = [[[c, _plain_track(track)] for c, track in rows.tracks.items() if track] for rows in batch.rows]
    text = {"episode_ids": batch.episode_ids, "leftovers": leftovers, "tracks": tracks}
    frames: list[NDArray[Any]] = [table, np.frombuffer(msgpack.packb(text), np.uint8)]
    groups = []
    for rows in batch.rows:
        header, own = rows.batch.to_wire()
        groups.append({"batch": header, "num_frames": len(own)})
        frames += [np.stack([rows.episode, rows.order]), np.ascontiguousarray(rows.obs_env_ts), *own]
    header = {"num_episodes": len(batch), "groups": groups, "meta": to_plain(batch.meta, "meta")}
    return header, frames


def _plain_track(track: Mapping[str, Any]) -> Any:
    plain = dict(track)
    pending = plain.get("pending")
    if pending is not None:
        plain["pending"] = {"action": pending.action, "outputs": dict(pending.extra_model_outputs)}
    if plain.get("output_keys") is not None:
        plain["output_keys"] = sorted(plain["output_keys"])
    return to_plain(plain, "track")


# -- in -----------------------------------------------------------------------------------------------


@refuses_as(ProtocolError)
def from_wire(
    cls: type[B],
    header: Any,
    frames: Sequence[Any],
    *,
    observation_space: Any = None,
    action_space: Any = None,
) -> B:
    """See `MultiAgentEpisodeBatch.from_wire`."""
    fields = _fields(header, _HEADER, "header")
    num_episodes = _count(fields["num_episodes"], "num_episodes")
    groups = fields["groups"]
    if not isinstance(groups, list | tuple) or len(groups) > _MAX_GROUPS:
        raise ProtocolError(f"groups: expected a list of at most {_MAX_GROUPS}, got {type(groups).__name__}.")
    if not isinstance(fields["meta"], dict):
        raise ProtocolError(f"meta: expected a dict, got {type(fields['meta']).__name__}.")
    reader = FrameReader(frames[:2])
    table = reader.array(np.dtype(np.int64), (5, num_episodes), "episode table")
    _check_table(table)
    text = _text(reader.buffer("text"), num_episodes, len(groups))
    rows = []
    place = 2
    for i, group in enumerate(groups):
        group = _fields(group, frozenset({"batch", "num_frames"}), f"group {i}")
        num_frames = _count(group["num_frames"], f"group {i}, num_frames")
        end = place + 2 + num_frames
        if end > len(frames):
            raise ProtocolError(f"group {i}: expected {end} frames, got {len(frames)}.")
        batch = EpisodeBatch.from_wire(group["batch"], frames[place + 2 : end])
        rows.append(_rows(i, batch, FrameReader(frames[place : place + 2]), table, text["tracks"][i]))
        place = end
    if place != len(frames):
        raise ProtocolError(f"expected {place} frames, got {len(frames)}.")
    _check_agents(rows, num_episodes)
    try:
        meta = from_plain(fields["meta"])
    except (ValueError, TypeError) as error:
        raise ProtocolError(f"meta: {error}") from None
    return cls(
        rows,
        episode_ids=text["episode_ids"],
        env_t_started=table[0],
        env_t=table[1],
        lookback=table[2],
        terminated=(table[3] & 1).astype(np.bool_),
        truncated=(table[3] & 2).astype(np.bool_),
        env_index=table[4],
        leftovers=text["leftovers"],
        observation_space=observation_space,
        action_space=action_space,
        meta=meta,
    )


def _check_table(table: NDArray[np.int64]) -> None:
    started, env_t, lookback, flags, env_index = table
    valid = (
        (started > -_MAX_TIME)  # the lowest int64 has no absolute value
        & (env_t < _MAX_TIME)
        & (env_t >= started)
        & (env_t - started <= _MAX_STEPS)
        & (lookback >= 0)
        & (lookback <= _MAX_STEPS)
        & (flags >= 0)
        & (flags <= 3)
        & (env_index >= -1)
    )
    if not valid.all():
        e = int(np.argmin(valid))
        raise ProtocolError(
            f"episode table, episode {e}: expected 0…{_MAX_STEPS} env steps, as many of lookback, flags "
            "within 0…3, "
            f"got {table[:, e].tolist()}."
        )


def _text(buffer: memoryview, num_episodes: int, num_groups: int) -> dict[str, Any]:
    try:
        text = msgpack.unpackb(buffer, strict_map_key=False)
    except Exception as error:
        raise ProtocolError(f"text: expected msgpack, got {type(error).__name__}: {error}.") from None
    text = _fields(text, _TEXT, "text")
    ids = text["episode_ids"]
    if not isinstance(ids, list) or len(ids) != num_episodes or not all(isinstance(id_, str) for id_ in ids):
        raise ProtocolError(f"text: expected {num_episodes} episode ids of type str.")
    tracks = text["tracks"]
    if not isinstance(tracks, list) or len(tracks) != num_groups:
        raise ProtocolError(f"text: expected the tracks of {num_groups} groups.")
    leftovers = _by_index(text["leftovers"], num_episodes, "leftovers")
    for e, left in leftovers.items():
        if not left.keys() <= _LEFTOVERS:
            raise ProtocolError(f"leftovers of episode {e}: expected some of {sorted(_LEFTOVERS)}.")
        for name in left.keys() - {"duration_s"}:
            if not isinstance(left[name], dict):
                raise ProtocolError(f"leftovers of episode {e}: expected {name} to be a dict.")
        if not isinstance(left.get("duration_s", 0.0), int | float):
            raise ProtocolError(f"leftovers of episode {e}: expected duration_s to be a number.")
        for agent_id, flags in left.get("departed", {}).items():
            if not (isinstance(flags, tuple) and [type(flag) for flag in flags] == [bool, bool, int]):
                raise ProtocolError(
                    f"leftovers of episode {e}: expected two flags and an env step of agent {agent_id!r}."
                )
    return {"episode_ids": ids, "leftovers": leftovers, "tracks": tracks}


def _rows(
    i: int, batch: EpisodeBatch, reader: FrameReader, table: NDArray[np.int64], tracks: Any
) -> AgentRows:
    num_chunks, num_episodes = len(batch), table.shape[1]
    for name in ("agent_ids", "module_ids"):
        ids = getattr(batch, name)
        if ids is None or (name == "module_ids" and not all(isinstance(id_, str) for id_ in ids)):
            raise ProtocolError(f"group {i}: expected {name} of all chunks.")
    places = reader.array(np.dtype(np.int64), (2, num_chunks), f"group {i}, places")
    num_observations = int((batch.lookback + batch.length + 1).sum())
    times = reader.array(np.dtype(np.int64), (num_observations,), f"group {i}, obs_env_ts")
    episode = places[0]
    if num_chunks and not ((episode >= 0) & (episode < num_episodes)).all():
        raise ProtocolError(f"group {i}: expected episodes within 0…{num_episodes - 1}.")
    rows = AgentRows(batch, episode, places[1], times)
    if num_chunks:
        counts = rows.counts
        chunk_of = np.repeat(np.arange(num_chunks), counts)
        same = chunk_of[1:] == chunk_of[:-1]
        if not (times[1:] > times[:-1])[same].all() or not (times > -_MAX_TIME).all():
            raise ProtocolError(f"group {i}, obs_env_ts: expected increasing env steps in each chunk.")
        if not (times <= table[1][episode[chunk_of]]).all():
            raise ProtocolError(f"group {i}, obs_env_ts: expected env steps up to their episode's env_t.")
    for c, track in _by_index(tracks, num_chunks, f"tracks of group {i}").items():
        rows.tracks[c] = _track(track, f"group {i}, track {c}")
    return rows


def _track(track: dict[str, Any], where: str) -> dict[str, Any]:
    if not track.keys() <= _TRACK:
        raise ProtocolError(f"{where}: expected some of {sorted(_TRACK)}, got {sorted(map(str, track))}.")
    fresh = dict(track)
    pending, keys = track.get("pending"), track.get("output_keys")
    if pending is not None:
        if not isinstance(pending, dict) or pending.keys() != {"action", "outputs"}:
            raise ProtocolError(f"{where}: expected a pending action and its outputs.")
        if not isinstance(pending["outputs"], dict) or not all(
            isinstance(k, str) for k in pending["outputs"]
        ):
            raise ProtocolError(f"{where}: expected the outputs to be a dict by name.")
        fresh["pending"] = Pending(pending["action"], pending["outputs"])
    if keys is not None:
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ProtocolError(f"{where}: expected output_keys to be names.")
        fresh["output_keys"] = frozenset(keys)
    for name in ("reward", "reward_before_start", "done_env_t"):
        if name in track and not isinstance(track[name], int | float | np.number):
            raise ProtocolError(f"{where}: expected {name} to be a number, got {type(track[name]).__name__}.")
    return fresh


def _check_agents(rows: Sequence[AgentRows], num_episodes: int) -> None:
    """Check that each agent has one chunk per episode."""
    seen: set[tuple[int, Any]] = set()
    for group in rows:
        for e, agent_id in zip(group.episode.tolist(), group.batch.agent_ids or (), strict=True):
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


def _by_index(value: Any, num: int, where: str) -> dict[int, dict[str, Any]]:
    """Return ``[[index, plain dict], …]`` as a dict."""
    if not isinstance(value, list) or len(value) > num:
        raise ProtocolError(f"{where}: expected a list of at most {num} entries.")
    found: dict[int, dict[str, Any]] = {}
    for entry in value:
        if not isinstance(entry, list) or len(entry) != 2 or type(entry[0]) is not int:
            raise ProtocolError(f"{where}: expected pairs of an index and a dict.")
        index, plain = entry
        if not 0 <= index < num or index in found:
            raise ProtocolError(f"{where}: expected different indices within 0…{num - 1}, got {index}.")
        try:
            data = from_plain(plain)
        except (ValueError, TypeError) as error:
            raise ProtocolError(f"{where}, entry {index}: {error}") from None
        if not isinstance(data, dict):
            raise ProtocolError(f"{where}, entry {index}: expected a dict, got {type(data).__name__}.")
        found[index] = data
    return found


def _fields(value: Any, names: frozenset[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != names:
        actual = sorted(map(str, value))[:16] if isinstance(value, dict) else type(value).__name__
        raise ProtocolError(f"{where}: expected the fields {sorted(names)}, got {actual}.")
    return value


def _count(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_TIME:
        raise ProtocolError(
            f"{where}: expected a count from 0, got {str(value)[:40]} ({type(value).__name__})."
        )
    return value
