"""Episodes of several agents on columns: batches of MultiAgentEpisodes, and MultiAgentEpisodes of batches."""

from __future__ import annotations

from typing import Any, TypeVar

import gymnasium as gym
import numpy as np

from rlzmq.core.tree import tree_leaves
from rlzmq.episodes.agent_timelines import AgentTrack, Timeline
from rlzmq.episodes.batch_columns import BatchColumns
from rlzmq.episodes.episode_columns import located
from rlzmq.episodes.episode_gather import of_one_agent
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.shared_columns import are_same, is_changed, new_episode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["from_episodes", "is_changed_of_agents", "kind_of", "new_episode_of_agents"]

B = TypeVar("B", bound=BatchColumns)


def from_episodes(cls: type[B], episodes: list[Any]) -> B:
    """See `EpisodeBatch.from_episodes`."""
    kinds = set(map(kind_of, episodes))
    if "several agents" not in kinds:
        return of_one_agent(cls, episodes)
    if len(kinds) > 1:
        raise TypeError("expected SingleAgentEpisodes or MultiAgentEpisodes to batch, got both.")
    return _of_agents(cls, episodes)


def kind_of(episode: object) -> str:
    """Return "several agents" for a MultiAgentEpisode, "one agent" for a SingleAgentEpisode, "" for anything else."""
    if isinstance(episode, SingleAgentEpisode):
        return "one agent"
    return "several agents" if isinstance(episode, MultiAgentEpisode) else ""


# -- from episodes ------------------------------------------------------------------------------------


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
        batch = of_one_agent(cls, self.saes)
        batch.episode, batch.order = np.array(self.episode, np.int64), np.array(self.order, np.int64)
        batch.env_ts, batch.leftovers = np.array(self.env_ts, np.int64), self.leftovers
        return batch


def _of_agents(cls: type[B], episodes: list[MultiAgentEpisode]) -> B:
    groups: dict[Any, _Group] = {}
    empty: list[tuple[Any, int, int, SingleAgentEpisode, AgentTrack]] = []
    for e, episode in enumerate(episodes):
        for order, (agent_id, sae) in enumerate(episode.agent_episodes.items()):
            track = episode._timeline.tracks[agent_id]
            kind = (sae.module_id, str(_structure(sae.observations)))
            if sae.rewards.len_incl_lookback() == 0:
                empty.append((kind, e, order, sae, track))
                continue
            outputs = sorted(
                (name, str(_structure(column))) for name, column in sae.extra_model_outputs.items()
            )
            key = (kind, str(_structure(sae.actions)), str(outputs))
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
    values: dict[str, Any] = {
        "departed": dict(episode._timeline.departed),
        "early_rewards": dict(episode._timeline.early_rewards),
        "agent_module_ids": {
            agent_id: module_id
            for agent_id, module_id in episode._agent_module_ids.items()
            if agent_id not in episode.agent_episodes
        },
    }
    return {name: value for name, value in values.items() if value}


def _observation_spaces(episodes: list[MultiAgentEpisode]) -> Any:
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


def _structure(buffer: Any) -> Any:
    """Return the shapes and kinds of one item of a column, without its number of items."""
    if not buffer.len_incl_lookback():
        return None
    item = buffer.get(-buffer.lookback if buffer.lookback else 0, neg_index_as_lookback=True)
    return _keys(item), _signature(item)


def _keys(item: object) -> Any:
    if isinstance(item, dict):
        return {key: _keys(item[key]) for key in sorted(item, key=str)}
    if isinstance(item, tuple):
        return tuple(_keys(part) for part in item)
    return None


def _signature(tree: Any) -> tuple[Any, ...]:
    """Return the shapes and kinds of a tree's leaves. Items with equal signatures can be stacked into one column."""
    return tuple((np.shape(leaf), np.asarray(leaf).dtype.str) for leaf in tree_leaves(tree))


# -- to episodes --------------------------------------------------------------------------------------


def new_episode_of_agents(batch: BatchColumns, e: int) -> MultiAgentEpisode:
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
    for group in batch.groups or ():
        of_episode, order, env_ts = group.links
        for c in np.flatnonzero(of_episode == e).tolist():
            sae = new_episode(group, c)
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
    episode._source = _facts_of_agents(episode)
    return episode


def _facts_of_agents(episode: MultiAgentEpisode) -> tuple[list[Any], list[Any]]:
    """Return what tells whether an episode of several agents was changed: values, and objects (ids are reused)."""
    values = [
        episode.id_,
        episode.env_t_started,
        episode.env_t,
        episode.is_terminated,
        episode.is_truncated,
        *episode.agent_episodes,
        *episode.custom_data,
    ]
    return values, [*episode.agent_episodes.values(), *episode.custom_data.values()]


def is_changed_of_agents(episode: MultiAgentEpisode) -> bool:
    """Return whether an item of a batch of several agents, or an agent's episode, differs from the columns."""
    values, objects = episode._source
    values_now, objects_now = _facts_of_agents(episode)
    return (
        values_now != values
        or not are_same(objects_now, objects)
        or any(map(is_changed, episode.agent_episodes.values()))
    )
