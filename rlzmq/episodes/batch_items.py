"""Batches of episodes, and episodes of batches: columns are stacked from episodes, and items are views of columns.

The parts of an item are created on access (`BatchColumns.part_of`).
"""

from __future__ import annotations

from itertools import chain
from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from rlzmq.core.spaces import space_filler
from rlzmq.core.tree import (
    tree_flatten,
    tree_map,
    tree_stack,
    tree_zeros_like,
)
from rlzmq.episodes.agent_timelines import AgentTrack, Timeline
from rlzmq.episodes.batch_columns import AGENT_LISTS, TABLE, BatchColumns, Row, common_space, concatenated
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_columns import located
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.episodes.step_values import as_rewards

__all__ = ["EPISODE_CLASSES", "from_episodes", "kind_of", "new_items"]

B = TypeVar("B", bound=BatchColumns)

EPISODE_CLASSES = (SingleAgentEpisode, MultiAgentEpisode)


def from_episodes(cls: type[B], episodes: list[Any]) -> B:
    """See `EpisodeBatch.from_episodes`."""
    kinds = set(map(kind_of, episodes))
    if "several agents" not in kinds:
        return _of_one_agent(cls, episodes)
    if len(kinds) > 1:
        raise TypeError("expected SingleAgentEpisodes or MultiAgentEpisodes to batch, got both.")
    return _of_agents(cls, episodes)


def kind_of(episode: object) -> str:
    """Return "several agents" or "one agent" for an episode, or a batch of episodes; "" for anything else."""
    if isinstance(episode, BatchColumns):
        return "one agent" if episode.groups is None else "several agents"
    if isinstance(episode, SingleAgentEpisode):
        return "one agent"
    return "several agents" if isinstance(episode, MultiAgentEpisode) else ""


# -- from episodes ------------------------------------------------------------------------------------


def _of_one_agent(cls: type[B], episodes: list[SingleAgentEpisode]) -> B:
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
        observation_space=common_space(
            [episode.observation_space for episode in episodes if episode.observation_space is not None]
        ),
        action_space=common_space(
            [episode.action_space for episode in episodes if episode.action_space is not None]
        ),
    )


def _ids(episodes: list[SingleAgentEpisode], attribute: str) -> Any:
    values = [getattr(episode, attribute) for episode in episodes]
    return None if all(value is None for value in values) else values


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
) -> object:
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
            missing = [num - size + num_pads for num, size in zip(wanted, sizes, strict=True)]
            padded = [items + [data[first][0]] * num for items, num in zip(data, missing, strict=True)]
            return tree_stack(list(chain.from_iterable(padded)))
        return _join_arrays(buffers, wanted, buffers[first], num_pads)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"Episodes {[episode.id_ for episode in episodes][:4]}…, column {name!r}: {error}"
        ) from error


def _join_arrays(
    buffers: list[InfiniteLookbackBuffer], wanted: list[int], template: InfiniteLookbackBuffer, num_pads: int
) -> object:
    first = template.data if template.finalized else tree_stack(template.data)
    zero = tree_zeros_like(tree_map(lambda leaf: leaf[0], first), (1,))
    parts: list[Any] = []
    for buffer, num in zip(buffers, wanted, strict=True):
        size = buffer.len_incl_lookback()
        if size:
            parts.append(buffer.data if buffer.finalized else tree_stack(buffer.data))
        parts.extend([zero] * (num - size + num_pads))
    return concatenated(parts)


def _initial_states(episodes: list[SingleAgentEpisode]) -> object:
    """Return the states before each chunk's first step, leaves [C, ...]; None unless all are known."""
    states = [episode.initial_state for episode in episodes]
    if any(state is None for state in states):
        return None
    return tree_stack(states)


def _sparse_infos(episodes: list[SingleAgentEpisode], offsets: list[int]) -> dict[int, dict[str, Any]]:
    sparse: dict[int, dict[str, Any]] = {}
    for episode, offset in zip(episodes, offsets, strict=True):
        infos = episode.infos.data
        if not {dict}.issuperset(map(type, infos)) or any(infos):
            placed = enumerate(infos, offset)
            sparse.update((slot, info) for slot, info in placed if info or not isinstance(info, dict))
    return sparse


# -- from episodes of several agents -----------------------------------------------------------------


class _Group:
    """Agents' chunks that share columns."""

    def __init__(self) -> None:
        self.saes: list[SingleAgentEpisode] = []
        self.episode: list[int] = []
        self.order: list[int] = []
        self.env_ts: list[int] = []
        self.leftovers: dict[int, dict[str, Any]] = {}

    def add(self, e: int, order: int, sae: SingleAgentEpisode, track: AgentTrack) -> None:
        try:
            left = track.leftovers(sae.rewards.len_incl_lookback())
        except ValueError as error:
            raise located(error, f"Episode {sae.id_!r}", "rewards") from None
        if left:
            self.leftovers[len(self.saes)] = left
        self.saes.append(sae)
        self.episode.append(e)
        self.order.append(order)
        self.env_ts += track.obs_env_ts

    def batch(self, cls: type[B]) -> B:
        batch = _of_one_agent(cls, self.saes)
        batch.episode, batch.order = np.array(self.episode, np.int64), np.array(self.order, np.int64)
        batch.env_ts, batch.leftovers = np.array(self.env_ts, np.int64), self.leftovers
        return batch


def _of_agents(cls: type[B], episodes: list[MultiAgentEpisode]) -> B:
    groups: dict[Any, _Group] = {}
    empty: list[tuple[Any, int, int, SingleAgentEpisode, AgentTrack]] = []
    for e, episode in enumerate(episodes):
        for order, (agent_id, sae) in enumerate(episode.agent_episodes.items()):
            track = episode._timeline.tracks[agent_id]
            kind = (sae.module_id, _kind_of(sae.observations))
            if sae.rewards.len_incl_lookback() == 0:
                empty.append((kind, e, order, sae, track))
                continue
            outputs = frozenset((name, _kind_of(column)) for name, column in sae.extra_model_outputs.items())
            key = (kind, _kind_of(sae.actions), outputs)
            groups.setdefault(key, _Group()).add(e, order, sae, track)
    by_kind = {key[0]: group for key, group in groups.items()}
    for kind, e, order, sae, track in empty:  # without steps, it fits any columns of its module
        group = by_kind.get(kind)
        if group is None:
            group = by_kind[kind] = groups[kind] = _Group()
        group.add(e, order, sae, track)
    left = {e: _leftovers(episode) for e, episode in enumerate(episodes)}
    return cls(
        {},
        length=[len(episode) for episode in episodes],
        lookback=[episode.len_lookback_buffer for episode in episodes],
        t_started=[episode.env_t_started for episode in episodes],
        terminated=[episode.is_terminated for episode in episodes],
        truncated=[episode.is_truncated for episode in episodes],
        episode_ids=[episode.id_ for episode in episodes],
        custom_data={
            e: dict(episode.custom_data) for e, episode in enumerate(episodes) if episode.custom_data
        },
        duration_s=[episode.get_duration_s() for episode in episodes],
        observation_space=_observation_spaces(episodes),
        action_space=episodes[0].action_space,
        groups=[group.batch(cls) for group in groups.values()],
        leftovers={e: values for e, values in left.items() if values},
        agent_to_module_mapping_fn=episodes[0].agent_to_module_mapping_fn,
    )


def _leftovers(episode: MultiAgentEpisode) -> dict[str, Any]:
    """Return the data of an episode that is not in the table."""
    known = episode._agent_module_ids.items()
    return episode._timeline.leftovers({a: module for a, module in known if a not in episode.agent_episodes})


def _observation_spaces(episodes: list[MultiAgentEpisode]) -> object:
    """Return the observation spaces by agent id, including those changed by connector pieces."""
    spaces = episodes[0].observation_space
    own = {
        agent_id: sae.observation_space
        for episode in episodes
        for agent_id, sae in episode.agent_episodes.items()
        if sae.observation_space is not None and sae.observation_space is not spaces.get(agent_id)
    }
    if not own:
        return spaces
    merged = {**dict(spaces), **own}
    return gym.spaces.Dict(merged) if isinstance(spaces, gym.spaces.Dict) else merged


def _kind_of(buffer: InfiniteLookbackBuffer) -> object:
    """Return structure, shapes and kinds of one item of a column. Items of equal forms can be stacked into one."""
    if not buffer.len_incl_lookback():
        return None
    leaves, spec = tree_flatten(buffer._at(0))
    return spec, tuple((np.shape(leaf), np.asarray(leaf).dtype.str) for leaf in leaves)


# -- items ------------------------------------------------------------------------------------------


def new_items(batch: BatchColumns) -> list[Any]:
    """See `EpisodeBatch.new_items`."""
    if batch.groups is not None:
        groups = list(map(_shared, batch.groups))
        return [_new_episode_of_agents(batch, groups, e) for e in range(len(batch.start))]
    shared = _shared(batch)
    rows = zip(*(getattr(batch, name).tolist() for name in TABLE), strict=True)
    return [_new_episode(shared, position, row) for position, row in enumerate(rows)]


def _shared(batch: BatchColumns) -> BatchColumns:
    """Return the same chunks for episodes to refer to; the batch refers to its episodes."""
    return BatchColumns(**batch._fields())


def _new_episode(batch: BatchColumns, position: int, row: Row) -> SingleAgentEpisode:
    """Return a chunk as an episode. It has its ids, time steps and done flags at once; see `BatchColumns.part_of`."""
    episode = SingleAgentEpisode.__new__(SingleAgentEpisode)
    _, length, _, t_started, episode.is_terminated, episode.is_truncated, _ = row
    episode.id_ = batch.episode_ids[position]
    episode.t_started = t_started
    episode.t = t_started + length
    episode.agent_id = None if batch.agent_ids is None else batch.agent_ids[position]
    episode.module_id = None if batch.module_ids is None else batch.module_ids[position]
    episode.multi_agent_episode_id = None
    episode._source = (batch, position, row)
    return episode


# -- items of several agents --------------------------------------------------------------------------


def _new_episode_of_agents(batch: BatchColumns, groups: list[BatchColumns], e: int) -> MultiAgentEpisode:
    """Return a chunk of a batch of several agents as an episode."""
    left = batch.leftovers.get(e, {})
    episode = MultiAgentEpisode(
        batch.episode_ids[e],
        left.get("agent_module_ids"),
        batch.agent_to_module_mapping_fn,
        observation_space=batch.observation_space,
        action_space=batch.action_space,
    )
    timeline = Timeline(int(batch.t_started[e]), int(batch.lookback[e]))
    timeline.env_t += int(batch.length[e])
    timeline.is_terminated, timeline.is_truncated = bool(batch.terminated[e]), bool(batch.truncated[e])
    timeline.departed = dict(left.get("departed", ()))
    timeline.early_rewards = dict(left.get("early_rewards", ()))
    found = []
    for group in groups:
        of_episode, order, env_ts = group.links
        for c in np.flatnonzero(of_episode == e).tolist():
            row: Any = tuple(getattr(group, name).item(c) for name in TABLE)
            sae = _new_episode(group, c, row)
            sae.multi_agent_episode_id = episode.id_
            first = int(group.start[c])
            times = env_ts[first - int(group.lookback[c]) : first + int(group.length[c]) + 1].tolist()
            track = AgentTrack.of_chunk(
                times, sae.is_terminated, sae.is_truncated, group.leftovers.get(c, {})
            )
            if track.output_keys is None and len(times) > 1:
                track.output_keys = frozenset(sae.extra_model_outputs)
            if batch.observation_space:
                sae.observation_space = batch.observation_space.get(sae.agent_id)
            if batch.action_space:
                sae.action_space = batch.action_space.get(sae.agent_id)
            found.append((int(order[c]), sae, track))
    for _, sae, track in sorted(found, key=lambda item: item[0]):
        timeline.tracks[sae.agent_id] = track
        episode.agent_episodes[sae.agent_id] = sae
        episode._agent_module_ids.setdefault(sae.agent_id, sae.module_id or episode.module_for(sae.agent_id))
    episode._timeline = timeline
    episode.custom_data = dict(batch.custom_data.get(e, ()))
    episode._duration_s = 0.0 if batch.duration_s is None else float(batch.duration_s[e])
    return episode
