"""Builds the batch of a complete multi-agent fragment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlzmq.core.tree import tree_map, tree_stack, tree_unstack
from rlzmq.episodes.agent_timelines import Pending
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.runners.multi.module_rows import ModuleStore
from rlzmq.runners.multi.ongoing_episodes import AgentRecord, LiveEpisode
from rlzmq.runners.sampler import WEIGHTS_SEQ_NO

__all__ = ["collect_batch"]


def collect_batch(
    chunks: Sequence[tuple[int, LiveEpisode]], spaces: tuple[Any, Any], mapping_fn: Any
) -> EpisodeBatch:
    """Return the chunks as a batch, without the agents that made no step in them.

    Args:
        chunks: (env index, episode).
        spaces: (observation spaces, action spaces) by agent id.
        mapping_fn: Maps agents to modules.
    """
    groups: dict[str, list[tuple[int, int, LiveEpisode, AgentRecord]]] = {}
    leftovers: dict[int, dict[str, Any]] = {}
    for e, (_, live) in enumerate(chunks):
        departed = dict(live.timeline.departed)
        module_ids = dict(live.face._agent_module_ids)
        order = 0
        for agent_id, record in live.records.items():
            if record.num_steps:
                groups.setdefault(record.store.module_id, []).append((e, order, live, record))
                module_ids.pop(agent_id, None)
                order += 1
            elif record.track.is_done:
                track = record.track
                departed[agent_id] = track.departure
        values = {
            "departed": departed,
            "early_rewards": dict(live.timeline.early_rewards),
            "agent_module_ids": module_ids,
        }
        left = {name: value for name, value in values.items() if value}
        if left:
            leftovers[e] = left
    timelines = [live.timeline for _, live in chunks]
    return EpisodeBatch(
        {},
        groups=[_rows(entries, spaces) for entries in groups.values()],
        episode_ids=[live.id_ for _, live in chunks],
        t_started=[timeline.env_t_started for timeline in timelines],
        length=[timeline.env_t - timeline.env_t_started for timeline in timelines],
        lookback=[timeline.lookback for timeline in timelines],
        terminated=[timeline.is_terminated for timeline in timelines],
        truncated=[timeline.is_truncated for timeline in timelines],
        env_index=[index for index, _ in chunks],
        leftovers=leftovers,
        custom_data={e: dict(data) for e, (_, live) in enumerate(chunks) if (data := live.face.custom_data)},
        observation_space=spaces[0],
        action_space=spaces[1],
        agent_to_module_mapping_fn=mapping_fn,
    )


def _rows(entries: list[tuple[int, int, LiveEpisode, AgentRecord]], spaces: tuple[Any, Any]) -> EpisodeBatch:
    """Return the chunks of one module's agents."""
    store = entries[0][3].store
    observation_rows: list[int] = []
    act_rows: list[int] = []
    rewards: list[Any] = []
    env_ts: list[int] = []
    infos: dict[int, dict[str, Any]] = {}
    leftovers: dict[int, dict[str, Any]] = {}
    start = []
    for number, (_, _, _, record) in enumerate(entries):
        begin = len(observation_rows)
        start.append(begin + record.lookback)
        observation_rows += record.observation_rows
        act_rows += record.act_rows
        act_rows.append(record.act_rows[0])  # the slot of the last observation holds no step
        rewards += record.rewards
        rewards.append(record.rewards[0])
        env_ts += record.track.obs_env_ts
        infos.update((begin + k, info) for k, info in record.infos.items())
        left = record.track.leftovers(len(record.act_rows))
        if left:
            leftovers[number] = left
    _put_hanging_acts(store, leftovers)
    records = [record for _, _, _, record in entries]
    columns = {
        Columns.OBS: store.observations(observation_rows),
        **store.acts(act_rows),
        Columns.REWARDS: np.array(rewards),
    }
    initial_state = None
    if store.module_step.is_stateful:
        initial_state = tree_stack([_as_arrays(record.initial_state) for record in records])
    agent_ids = [record.agent_id for record in records]
    return EpisodeBatch(
        columns,
        start=start,
        length=[record.num_steps for record in records],
        lookback=[record.lookback for record in records],
        t_started=[record.t_started for record in records],
        terminated=[record.track.terminated for record in records],
        truncated=[record.track.truncated for record in records],
        episode_ids=[f"{live.id_}_{record.agent_id}" for _, _, live, record in entries],
        agent_ids=agent_ids,
        module_ids=[store.module_id] * len(records),
        multi_agent_episode_ids=[live.id_ for _, _, live, _ in entries],
        initial_state=initial_state,
        infos=infos,
        observation_space=_common(spaces[0], agent_ids),
        action_space=_common(spaces[1], agent_ids),
        episode=[e for e, _, _, _ in entries],
        order=[order for _, order, _, _ in entries],
        env_ts=env_ts,
        leftovers=leftovers,
    )


def _put_hanging_acts(store: ModuleStore, leftovers: dict[int, dict[str, Any]]) -> None:
    """Replace the row numbers of hanging acts with the acts themselves."""
    hanging = [left for left in leftovers.values() if "pending" in left]
    if not hanging:
        return
    columns = store.acts([left["pending"].action for left in hanging])
    items = {name: tree_unstack(values) for name, values in columns.items()}
    for number, left in enumerate(hanging):
        outputs = {name: values[number] for name, values in items.items()}
        outputs[WEIGHTS_SEQ_NO] = int(outputs[WEIGHTS_SEQ_NO])
        left["pending"] = Pending(outputs.pop(Columns.ACTIONS), outputs)


def _as_arrays(state: Any) -> Any:
    return tree_map(np.asarray, state)


def _common(spaces: Any, agent_ids: list[Any]) -> Any:
    """Return the space shared by all agents; None if their spaces differ."""
    own = [spaces[agent_id] for agent_id in dict.fromkeys(agent_ids) if agent_id in spaces.spaces]
    return own[0] if own and all(space == own[0] for space in own) else None
