"""Episodes on a batch's columns. Their parts are created on access, and changes to them are detected."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.episodes.agent_timelines import AgentTrack, Timeline
from rlzmq.episodes.batch_columns import BatchColumns
from rlzmq.episodes.columns import TABLE, Columns
from rlzmq.episodes.episode_columns import REWARD_SPACE, InfosBuffer
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = [
    "SharedColumns",
    "is_changed",
    "is_changed_of_agents",
    "new_episode",
    "new_episode_of_agents",
    "unread_infos",
]

# One chunk's values of `columns.TABLE`.
Row = tuple[int, int, int, int, bool, bool, int]


class SharedColumns:
    """The data that a batch's episodes are views of, without the batch (which refers to its episodes).

    An episode gets its ids, time steps and done flags at once, and each other attribute at its first use
    (`SingleAgentEpisode.__getattr__`).
    """

    __slots__ = (
        "_action_space",
        "_agent_ids",
        "_columns",
        "_custom_data",
        "_duration_s",
        "_extra_names",
        "_infos",
        "_initial_state",
        "_module_ids",
        "_multi_agent_episode_ids",
        "_observation_space",
        "episode_ids",
    )

    def __init__(self, batch: BatchColumns) -> None:
        self._columns = dict(batch.columns)
        self._extra_names = batch.extra_names
        self._infos = batch.infos
        self._initial_state = batch.initial_state
        self._custom_data = batch.custom_data
        self._duration_s = batch.duration_s
        self._observation_space = batch.observation_space
        self._action_space = batch.action_space
        self._agent_ids = batch.agent_ids
        self._module_ids = batch.module_ids
        self._multi_agent_episode_ids = batch.multi_agent_episode_ids
        self.episode_ids: list[str] = batch.episode_ids

    def episode(self, position: int, row: Row) -> SingleAgentEpisode:
        """Return a chunk as an episode."""
        episode = SingleAgentEpisode.__new__(SingleAgentEpisode)
        _, length, _, t_started, episode.is_terminated, episode.is_truncated, _ = row
        episode.id_ = self.episode_ids[position]
        episode.t_started = t_started
        episode.t = t_started + length
        episode.agent_id, episode.module_id, episode.multi_agent_episode_id = self._ids(position)
        episode._source = (self, position, row)
        episode._created = {}
        return episode

    def _ids(self, position: int) -> tuple[Any, Any, Any]:
        if self._agent_ids is self._module_ids is self._multi_agent_episode_ids is None:
            return None, None, None
        lists = (self._agent_ids, self._module_ids, self._multi_agent_episode_ids)
        agent_id, module_id, multi_id = (None if ids is None else ids[position] for ids in lists)
        return agent_id, module_id, multi_id

    def create(self, episode: SingleAgentEpisode, name: str) -> Any:
        """Create the attribute ``name`` of an episode. Buffers are views of the columns.

        Raises:
            AttributeError: Episodes have no such attribute.
        """
        _, position, row = episode._source
        value: Any
        created: Any
        match name:
            case "observations":
                value = created = self._view(Columns.OBS, row, 1, self._observation_space)
            case "actions":
                value = created = self._view(Columns.ACTIONS, row, 0, self._action_space)
            case "rewards":
                value = created = self._view(Columns.REWARDS, row, 0, REWARD_SPACE)
            case "extra_model_outputs":
                created = {extra: self._view(extra, row, 0, None) for extra in self._extra_names}
                value = dict(created)
            case "initial_state":
                state = self._initial_state
                value = None if state is None else tree_map(lambda leaf: leaf[position], state)
                created = [value, *tree_leaves(value)]
            case _:
                value, created = self._fact(name, position, row), None
        if created is not None:
            episode._created[name] = created
        setattr(episode, name, value)
        return value

    def _fact(self, name: str, position: int, row: Row) -> Any:
        match name:
            case "custom_data":
                return dict(self._custom_data.get(position, ()))
            case "infos":
                return InfosBuffer._of_list(self._dense_infos(row), row[2], None)
            case "_observation_space":
                return self._observation_space
            case "_action_space":
                return self._action_space
            case "_duration_s":
                return 0.0 if self._duration_s is None else float(self._duration_s[position])
            case "_last_step_time":
                return None
        raise AttributeError(f"'SingleAgentEpisode' object has no attribute {name!r}")

    def _view(self, name: str, row: Row, further: int, space: Any) -> InfiniteLookbackBuffer:
        start, length, lookback, *_ = row
        first, num, column = start - lookback, lookback + length + further, self._columns[name]
        end = first + num
        if isinstance(column, np.ndarray):
            arrays = column[first:end]
        else:
            arrays = tree_map(lambda leaf: leaf[first:end], column)
        return InfiniteLookbackBuffer._of_view(arrays, num, lookback, space)

    def _dense_infos(self, row: Row) -> list[Any]:
        sparse = self._infos
        slots = range(row[0] - row[2], row[0] + row[1] + 1)
        return [sparse.get(slot, {}) for slot in slots] if sparse else [{} for _ in slots]

    def sparse_infos(self, row: Row) -> dict[int, dict[str, Any]]:
        """Return the non-empty infos of a chunk by position, counted from the first one including the lookback part."""
        begin, end = row[0] - row[2], row[0] + row[1] + 1
        return {slot - begin: self._infos[slot] for slot in self._infos if begin <= slot < end}

    def differs(self, episode: SingleAgentEpisode, position: int, row: Row) -> bool:
        """Return whether an episode created here has changed."""
        _, length, lookback, t_started, terminated, truncated, _ = row
        facts = (self.episode_ids[position], *self._ids(position), t_started, t_started + length)
        if (terminated, truncated) != (episode.is_terminated, episode.is_truncated) or facts != (
            episode.id_,
            episode.agent_id,
            episode.module_id,
            episode.multi_agent_episode_id,
            episode.t_started,
            episode.t,
        ):
            return True
        read = _values(episode)
        created = episode._created
        for name in ("observations", "actions", "rewards"):
            if name in read and (
                read[name] is not created.get(name)
                or not _is_view(read[name], lookback, length + (name == "observations"))
            ):
                return True
        if "extra_model_outputs" in read:
            extras, created_extras = read["extra_model_outputs"], created.get("extra_model_outputs", {})
            if extras.keys() != created_extras.keys() or any(
                buffer is not created_extras[name] or not _is_view(buffer, lookback, length)
                for name, buffer in extras.items()
            ):
                return True
        if "initial_state" in read:
            state = read["initial_state"]
            if not _are_same([state, *tree_leaves(state)], created.get("initial_state", [None])):
                return True
        if "custom_data" in read:
            before = self._custom_data.get(position, {})
            if not _are_same(
                [*read["custom_data"], *read["custom_data"].values()], [*before, *before.values()]
            ):
                return True
        if "infos" not in read:
            return False
        infos, infos_before = read["infos"].data, self._dense_infos(row)
        return len(infos) != len(infos_before) or any(
            info is not old and bool(info or old) for info, old in zip(infos, infos_before, strict=True)
        )


_PARTS = (
    "observations",
    "actions",
    "rewards",
    "extra_model_outputs",
    "initial_state",
    "custom_data",
    "infos",
)
_SLOTS: dict[str, Any] = {name: getattr(SingleAgentEpisode, name) for name in _PARTS}


def _values(episode: SingleAgentEpisode) -> dict[str, Any]:
    """Return the parts of an episode that have been read or set."""
    values = {}
    for name, slot in _SLOTS.items():
        try:
            values[name] = slot.__get__(episode)
        except AttributeError:
            continue
    return values


def is_changed(episode: SingleAgentEpisode) -> bool:
    """Return whether an item of an `EpisodeBatch` differs from the batch's columns and tables."""
    shared, position, row = episode._source
    return shared.differs(episode, position, row)


def unread_infos(episode: SingleAgentEpisode) -> dict[int, dict[str, Any]] | None:
    """Return an episode's non-empty infos by position if they are still the batch's, otherwise None."""
    try:
        _SLOTS["infos"].__get__(episode)
    except AttributeError:
        shared, _, row = episode._source
        return shared.sparse_infos(row)
    return None


def new_episode(batch: BatchColumns, position: int) -> SingleAgentEpisode:
    """Return a chunk of a batch of one agent as an episode."""
    row: Any = tuple(getattr(batch, name).item(position) for name in TABLE)
    return SharedColumns(batch).episode(position, row)


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
        or not _are_same(objects_now, objects)
        or any(map(is_changed, episode.agent_episodes.values()))
    )


def _is_view(buffer: InfiniteLookbackBuffer, lookback: int, num: int) -> bool:
    """Return whether a buffer is still a view: it owns nothing and has as many items as at its creation."""
    return (
        not buffer._owned
        and buffer._items is None
        and buffer.lookback == lookback
        and buffer._num == lookback + num
    )


def _are_same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(map(operator.is_, left, right))
