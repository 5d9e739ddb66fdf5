"""Detecting changes to episodes that are views on a batch's columns."""

from __future__ import annotations

import operator
from typing import Any

from rlzmq.core.tree import tree_leaves
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["TrackedEpisode", "TrackedMultiAgentEpisode"]


class TrackedEpisode:
    """An item of an `EpisodeBatch` and a record of its state when it was created."""

    __slots__ = ("_buffers", "_facts", "_infos_source", "_objects", "episode")

    def __init__(self, episode: SingleAgentEpisode) -> None:
        self.episode = episode
        self._facts = _facts(episode)
        # References, not ids: ids of freed objects are reused.
        self._objects = _objects(episode)
        self._buffers = list(_buffers(episode))
        self._infos_source = episode._infos_source

    def is_changed(self) -> bool:
        """Return whether the episode differs from the batch's columns and tables."""
        episode = self.episode
        if _facts(episode) != self._facts:
            return True
        if not _are_same(_objects(episode), self._objects):
            return True
        buffers = list(_buffers(episode))
        if len(buffers) != len(self._buffers):
            return True
        for name, buffer in buffers:
            # An untouched buffer is still a view: it owns nothing and has as many items as the episode.
            num = episode.rewards.lookback + len(episode) + (name == "observations")
            if buffer._owned or buffer._items is not None or buffer._num != num:
                return True
        if any(left[1] is not right[1] for left, right in zip(buffers, self._buffers, strict=True)):
            return True
        if episode._infos is None:
            return False
        before = self._infos_source() if self._infos_source is not None else []
        after = episode._infos.data
        return len(before) != len(after) or any(
            info is not old and bool(info or old) for info, old in zip(after, before, strict=True)
        )


class TrackedMultiAgentEpisode:
    """An item of a `MultiAgentEpisodeBatch` and a record of its state when it was created."""

    __slots__ = ("_agents", "_facts", "_objects", "episode")

    def __init__(self, episode: MultiAgentEpisode) -> None:
        self.episode = episode
        self._facts = _multi_agent_facts(episode)
        self._objects = _multi_agent_objects(episode)
        self._agents = [TrackedEpisode(agent) for agent in episode.agent_episodes.values()]

    def is_changed(self) -> bool:
        """Return whether the episode or an agent's episode differs from the batch's columns and tables."""
        return (
            _multi_agent_facts(self.episode) != self._facts
            or not _are_same(_multi_agent_objects(self.episode), self._objects)
            or any(agent.is_changed() for agent in self._agents)
        )


def _facts(episode: SingleAgentEpisode) -> tuple[Any, ...]:
    return (
        episode.id_,
        episode.agent_id,
        episode.module_id,
        episode.multi_agent_episode_id,
        episode.t_started,
        episode.t,
        episode.is_terminated,
        episode.is_truncated,
        episode.rewards.lookback,
        *episode.custom_data,
    )


def _objects(episode: SingleAgentEpisode) -> list[Any]:
    """Return the values outside the columns and `_facts`; they are compared by identity."""
    state = episode.initial_state
    return [*episode.custom_data.values(), state, *tree_leaves(state)]


def _multi_agent_facts(episode: MultiAgentEpisode) -> tuple[Any, ...]:
    return (
        episode.id_,
        episode.env_t_started,
        episode.env_t,
        episode.is_terminated,
        episode.is_truncated,
        *episode.agent_episodes,
        *episode.custom_data,
    )


def _multi_agent_objects(episode: MultiAgentEpisode) -> list[Any]:
    return [*episode.agent_episodes.values(), *episode.custom_data.values()]


def _are_same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _buffers(episode: SingleAgentEpisode) -> Any:
    yield "observations", episode.observations
    yield "actions", episode.actions
    yield "rewards", episode.rewards
    yield from episode.extra_model_outputs.items()
