"""Construction of new columns from episodes, batches, the used slots of a batch, and joined chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from rlzmq.core.spaces import space_filler
from rlzmq.core.tree import tree_flatten, tree_map, tree_stack, tree_zeros_like, value_kind
from rlzmq.episodes.batch_columns import AGENT_LISTS, ID_LISTS, TABLE, BatchColumns
from rlzmq.episodes.columns import Columns, ragged_arange
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.shared_columns import unread_infos
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.episodes.step_values import as_rewards

__all__ = ["compact", "concat", "of_one_agent"]

B = TypeVar("B", bound=BatchColumns)

_DICT = frozenset({dict})


# -- from episodes ------------------------------------------------------------------------------------


def of_one_agent(cls: type[B], episodes: list[SingleAgentEpisode]) -> B:
    """Return a batch of SingleAgentEpisodes; see `EpisodeBatch.from_episodes`."""
    if not episodes:
        empty = np.zeros(0, np.float32)
        columns: dict[str, Any] = {Columns.OBS: empty, Columns.ACTIONS: empty, Columns.REWARDS: empty}
        return cls(columns, start=[], length=[])
    for episode in episodes:
        if not hasattr(episode, "observations"):
            raise TypeError(
                f"expected SingleAgentEpisodes to batch, got {type(episode).__name__} {episode!r:.80}."
            )
        if episode.observations.len_incl_lookback() != episode.rewards.len_incl_lookback() + 1:
            raise ValueError(
                f"Episode {episode.id_!r}: expected one observation more than rewards to batch it, got "
                f"{episode.observations.len_incl_lookback()} and {episode.rewards.len_incl_lookback()}."
            )
    length = np.array([len(episode) for episode in episodes], np.int64)
    lookback = np.array([episode.rewards.lookback for episode in episodes], np.int64)
    num_slots = length + lookback + 1
    offset = np.cumsum(num_slots) - num_slots
    return cls(
        _columns(episodes),
        start=offset + lookback,
        length=length,
        lookback=lookback,
        t_started=[episode.t_started for episode in episodes],
        terminated=[episode.is_terminated for episode in episodes],
        truncated=[episode.is_truncated for episode in episodes],
        episode_ids=[episode.id_ for episode in episodes],
        **{name: _ids(episodes, name.removesuffix("s")) for name in AGENT_LISTS},
        initial_state=_initial_states(episodes),
        infos=_sparse_infos(episodes, offset.tolist()),
        custom_data={
            i: dict(episode.custom_data) for i, episode in enumerate(episodes) if episode.custom_data
        },
        duration_s=[episode.get_duration_s() for episode in episodes],
        observation_space=_common([episode.observation_space for episode in episodes]),
        action_space=_common([episode.action_space for episode in episodes]),
    )


def _ids(episodes: list[SingleAgentEpisode], attribute: str) -> Any:
    values = [getattr(episode, attribute) for episode in episodes]
    return None if all(value is None for value in values) else values


def _common(spaces: list[gym.Space[Any] | None]) -> gym.Space[Any] | None:
    """Return the common space of all that have one; None if they differ."""
    known = [space for space in spaces if space is not None]
    return known[0] if known and all(space is known[0] or space == known[0] for space in known) else None


def _columns(episodes: list[SingleAgentEpisode]) -> dict[str, Any]:
    num_steps = [episode.rewards.len_incl_lookback() for episode in episodes]
    num_observations = [num + 1 for num in num_steps]
    observations = [episode.observations for episode in episodes]
    columns = {Columns.OBS: _gather(episodes, Columns.OBS, observations, num_observations, 0)}
    for name, buffers in (
        (Columns.ACTIONS, [episode.actions for episode in episodes]),
        (Columns.REWARDS, [episode.rewards for episode in episodes]),
    ):
        columns[name] = _gather(episodes, name, buffers, num_steps, 1)
    names: dict[str, None] = {}
    for episode in episodes:
        names.update(dict.fromkeys(episode.extra_model_outputs))
    none = InfiniteLookbackBuffer()
    for name in names:
        buffers = [episode.extra_model_outputs.get(name, none) for episode in episodes]
        columns[name] = _gather(episodes, name, buffers, num_steps, 1)
    return columns


def _gather(
    episodes: list[SingleAgentEpisode],
    name: str,
    buffers: list[InfiniteLookbackBuffer],
    wanted: list[int],
    num_pads: int,
) -> Any:
    """Return one column of all episodes concatenated, with ``num_pads`` unused slots after each."""
    sizes = [buffer.len_incl_lookback() for buffer in buffers]
    for episode, size, num in zip(episodes, sizes, wanted, strict=True) if sizes != wanted else ():
        # An episode without steps may lack a column that others have.
        if size != num and (len(episode) or size):
            raise ValueError(
                f"Episode {episode.id_!r}, column {name!r}: expected {num} items (lookback included), got "
                f"{size}: all episodes of a batch have the same columns."
            )
    if name == Columns.REWARDS:
        for episode, buffer in zip(episodes, buffers, strict=True):
            try:
                as_rewards(buffer.data)
            except ValueError as error:
                raise ValueError(f"Episode {episode.id_!r}, column {name!r}: {error}") from None
    total = sum(wanted) + num_pads * len(episodes)
    first = next((i for i, size in enumerate(sizes) if size), None)
    if first is None:
        space = buffers[0].space
        return np.zeros(total, np.float32) if space is None else space_filler(space, 0, lead=(total,))
    try:
        data = [buffer.data if size else [] for buffer, size in zip(buffers, sizes, strict=True)]
        if all(type(items) is list for items in data):
            return _stack_lists(data, wanted, data[first][0], num_pads)
        return _join_arrays(buffers, wanted, buffers[first], num_pads)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"Episodes {[episode.id_ for episode in episodes][:4]}…, column {name!r}: {error}"
        ) from error


def _stack_lists(lists: list[Any], wanted: list[int], filler: object, num_pads: int) -> Any:
    items: list[Any] = []
    for data, num in zip(lists, wanted, strict=True):
        items += data
        items += [filler] * (num - len(data) + num_pads)
    return tree_stack(items)


def _join_arrays(
    buffers: list[InfiniteLookbackBuffer], wanted: list[int], template: InfiniteLookbackBuffer, num_pads: int
) -> Any:
    first = template.data if template.finalized else tree_stack(template.data)
    zero = tree_zeros_like(tree_map(lambda leaf: leaf[0], first), (1,))
    parts: list[Any] = []
    for buffer, num in zip(buffers, wanted, strict=True):
        size = buffer.len_incl_lookback()
        if size:
            parts.append(buffer.data if buffer.finalized else tree_stack(buffer.data))
        parts.extend([zero] * (num - size + num_pads))
    return _concatenate(parts)


def _concatenate(parts: list[Any]) -> Any:
    """Concatenate trees of arrays along the first axis."""
    if isinstance(parts[0], np.ndarray):
        return _concatenate_leaves(parts)
    leaves, spec = tree_flatten(parts[0])
    columns = [leaves, *(spec.flatten_up_to(part) for part in parts[1:])]
    return spec.unflatten([_concatenate_leaves(leaf) for leaf in zip(*columns, strict=True)])


def _concatenate_leaves(parts: Sequence[np.ndarray]) -> np.ndarray:
    joined = np.concatenate(parts)
    if joined.dtype.hasobject:
        raise ValueError(
            f"expected numbers, strings or arrays of them, got {type(joined[0]).__name__} {joined[0]!r:.80}."
        )
    if joined.dtype.kind in "SUT" and len({value_kind(part.dtype) for part in parts}) > 1:
        # numpy would convert the numbers to strings
        raise ValueError(f"expected items of one kind, got {sorted({str(part.dtype) for part in parts})}.")
    return joined


def _initial_states(episodes: list[SingleAgentEpisode]) -> Any:
    """Return the states before each chunk's first step, leaves [C, ...]; None unless all are known."""
    states = [episode.initial_state for episode in episodes]
    if any(state is None for state in states):
        return None
    return tree_stack(states)


def _sparse_infos(episodes: list[SingleAgentEpisode], offsets: list[int]) -> dict[int, dict[str, Any]]:
    sparse: dict[int, dict[str, Any]] = {}
    for episode, offset in zip(episodes, offsets, strict=True):
        if (unread := unread_infos(episode)) is not None:
            sparse.update((offset + position, info) for position, info in unread.items())
            continue
        infos = episode.infos.data
        if not _DICT.issuperset(map(type, infos)) or any(infos):
            placed = enumerate(infos, offset)
            sparse.update((slot, info) for slot, info in placed if info or not isinstance(info, dict))
    return sparse


# -- from batches -------------------------------------------------------------------------------------


def concat(cls: type[B], batches: list[B]) -> B:
    """See `EpisodeBatch.concat`."""
    batches = [batch for batch in batches if len(batch)] or batches[:1]
    if not batches:
        return of_one_agent(cls, [])
    if len(batches) == 1:
        return batches[0]
    first = batches[0]
    if len({batch.groups is None for batch in batches}) > 1:
        raise ValueError("expected batches of one agent or batches of several agents, got both.")
    shared = all(batch.columns is first.columns for batch in batches)
    sizes = [0 if shared else batch.num_slots for batch in batches]
    offsets = np.cumsum([0, *sizes[:-1]])
    table: dict[str, Any] = {
        name: np.concatenate([getattr(batch, name) for batch in batches]) for name in TABLE
    }
    table["start"] = np.concatenate([batch.start + k for batch, k in zip(batches, offsets, strict=True)])
    ids: dict[str, Any] = {name: _concat_ids(batches, name) for name in ID_LISTS}
    infos: dict[int, dict[str, Any]] = {}
    custom_data: dict[int, dict[str, Any]] = {}
    leftovers: dict[int, dict[str, Any]] = {}
    groups: list[B] = []
    num_chunks = 0
    for batch, offset in zip(batches, offsets.tolist(), strict=True):
        infos.update((slot + offset, info) for slot, info in batch.infos.items())
        custom_data.update((c + num_chunks, data) for c, data in batch.custom_data.items())
        leftovers.update((c + num_chunks, data) for c, data in batch.leftovers.items())
        for group in batch.groups or ():
            groups.append(cls(**{**group._fields(), "episode": group.links[0] + num_chunks}))
        num_chunks += len(batch)
    return cls(
        first.columns if shared else _concat_columns(batches),
        **table,
        **ids,
        initial_state=None
        if any(batch.initial_state is None for batch in batches)
        else _concatenate([batch.initial_state for batch in batches]),
        infos=infos,
        custom_data=custom_data,
        duration_s=None
        if any(batch.duration_s is None for batch in batches)
        else np.concatenate([batch.duration_s for batch in batches]),
        **(_spaces(batches) if first.groups is None else _of_several(first, groups, leftovers)),
    )


def _spaces(batches: list[B]) -> dict[str, Any]:
    return {
        name: _common([getattr(batch, name) for batch in batches])
        for name in ("observation_space", "action_space")
    }


def _of_several(first: B, groups: list[B], leftovers: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return what only a batch of several agents has."""
    return {
        "groups": groups,
        "leftovers": leftovers,
        "observation_space": first.observation_space,
        "action_space": first.action_space,
        "agent_to_module_mapping_fn": first.agent_to_module_mapping_fn,
    }


def _concat_columns(batches: list[B]) -> dict[str, Any]:
    names = list(batches[0].columns)
    for i, batch in enumerate(batches):
        if set(batch.columns) != set(names):
            raise ValueError(f"batch {i}: expected the columns {sorted(names)}, got {sorted(batch.columns)}.")
    columns = {}
    for name in names:
        try:
            columns[name] = _concatenate([batch.columns[name] for batch in batches])
        except (ValueError, TypeError) as error:
            raise ValueError(f"column {name!r} of the batches does not fit together: {error}") from error
    return columns


def _concat_ids(batches: list[B], name: str) -> list[Any] | None:
    if all(getattr(batch, name) is None for batch in batches):
        return None
    ids: list[Any] = []
    for batch in batches:
        values = getattr(batch, name)
        ids.extend([None] * len(batch) if values is None else values)
    return ids


def compact(cls: type[B], batch: BatchColumns) -> B:
    """See `EpisodeBatch.compact`."""
    counts = batch.lookback + batch.length + 1
    slots = ragged_arange(batch.start - batch.lookback, counts)
    infos: dict[int, dict[str, Any]] = {}
    if batch.infos:
        keys = np.fromiter(batch.infos, np.int64, len(batch.infos))
        for place in np.flatnonzero(np.isin(slots, keys)).tolist():
            infos[place] = batch.infos[int(slots[place])]
    table: dict[str, Any] = {name: getattr(batch, name) for name in TABLE}
    table["start"] = np.cumsum(counts) - counts + batch.lookback
    ids: dict[str, Any] = {name: getattr(batch, name) for name in ID_LISTS}
    return cls(
        {
            name: tree_map(lambda leaf: leaf.take(slots, axis=0), column)
            for name, column in batch.columns.items()
        },
        **table,
        **ids,
        initial_state=batch.initial_state,
        infos=infos,
        custom_data=batch.custom_data,
        duration_s=batch.duration_s,
        observation_space=batch.observation_space,
        action_space=batch.action_space,
        meta=batch.meta,
        episode=batch.episode,
        order=batch.order,
        env_ts=None if batch.env_ts is None else batch.env_ts.take(slots),
        leftovers=batch.leftovers,
    )
