"""Ongoing multi-agent episodes of the sampler on rows: timelines, and row numbers in place of data.

A ModuleStore holds all observations and acts of one module's agents in one fragment. Rows are appended in blocks, one
per vector step. Agents remember row numbers only; columns are gathered once, when the fragment is complete.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlzmq.core.tree import tree_flatten, tree_map, value_kind
from rlzmq.episodes.agent_timelines import (
    ALL_AGENTS,
    LAST_OBSERVATION,
    AgentEvent,
    AgentTrack,
    Timeline,
)
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.step_values import (
    FLAG_TYPES,
    REWARD_TYPES,
    checked_infos,
    checked_rewards,
    own_info,
    sum_of,
)
from rlzmq.runners.module_step import ModuleStep

__all__ = ["AgentRecord", "GrowingColumn", "LiveEpisode", "ModuleStore", "gather_states"]

# Initial capacity of a column, in rows.
_FEWEST_ROWS = 64


class GrowingColumn:
    """A tree of arrays ``[rows, ...]`` with spare capacity, which grows by doubling.

    Args:
        example: A block, leaves ``[B, ...]``, that defines shapes and dtypes. A block of another dtype changes the
            column's dtype to the common one.
        capacity: Number of rows to make room for.
        num_rows: Number of rows of zeros to begin with.
    """

    __slots__ = ("_array", "_capacity", "_leaves", "_row_shape", "_spec", "num_rows")

    def __init__(self, example: object, capacity: int = 0, num_rows: int = 0) -> None:
        self._capacity = max(capacity, _FEWEST_ROWS)
        leaves, self._spec = tree_flatten(example)
        self._leaves = [np.zeros((self._capacity, *np.shape(leaf)[1:]), leaf.dtype) for leaf in leaves]
        # The only leaf, if the column is an array.
        self._array: NDArray[Any] | None = self._leaves[0] if type(example) is np.ndarray else None
        self._row_shape = self._leaves[0].shape[1:] if self._leaves else ()
        self.num_rows: int = num_rows

    def put(self, block: object, num_rows: int) -> bool:
        """Add a block of `num_rows` rows if it is an array like the column, and there is room for it."""
        array, begin = self._array, self.num_rows
        end = begin + num_rows
        if (
            array is None
            or type(block) is not np.ndarray
            or block.dtype is not array.dtype
            or len(block) != num_rows
            or block.shape[1:] != self._row_shape
            or end > self._capacity
        ):
            return False
        array[begin:end] = block
        self.num_rows = end
        return True

    def append(self, block: object, num_rows: int) -> None:
        """Add a block of `num_rows` rows.

        Raises:
            ValueError: The block's structure or shapes differ from the column's.
        """
        begin, end = self.num_rows, self.num_rows + num_rows
        if end > self._capacity:
            self._grow(end)
        if isinstance(block, (dict, tuple)):
            leaves, spec = tree_flatten(block)
            if spec != self._spec:
                raise ValueError(f"expected items like {self._spec}, as in the steps before, got {spec}.")
        else:
            leaves = [block]
        columns = self._leaves
        if len(leaves) != len(columns):
            raise ValueError(f"expected items like {self._spec}, as in the steps before, got {block!r}.")
        for place, leaf in enumerate(leaves):
            column = columns[place]
            if leaf.shape != (num_rows, *column.shape[1:]):
                raise ValueError(
                    f"expected shape {(num_rows, *column.shape[1:])}, the first number being that of the "
                    f"agents, got {leaf.shape}."
                )
            if leaf.dtype != column.dtype:
                if value_kind(leaf.dtype) != value_kind(column.dtype):
                    raise ValueError(f"expected dtype {column.dtype}, got {leaf.dtype}.")
                dtype = np.result_type(column.dtype, leaf.dtype)
                columns[place] = column = column.astype(dtype, copy=False)
            column[begin:end] = leaf
        self.num_rows = end
        if self._array is not None:
            self._array = columns[0]

    def take(self, rows: NDArray[np.int64]) -> Any:
        """Return the given rows, leaves ``[*rows.shape, ...]``."""
        return self._spec.unflatten([leaf.take(rows, axis=0) for leaf in self._leaves])

    def _grow(self, num_rows: int) -> None:
        self._capacity = max(num_rows, 2 * self._capacity)
        for place, leaf in enumerate(self._leaves):
            larger = np.empty((self._capacity, *leaf.shape[1:]), leaf.dtype)
            larger[: self.num_rows] = leaf[: self.num_rows]
            self._leaves[place] = larger


class ModuleStore:
    """The rows of one module.

    Attributes:
        num_observations, num_acts: Number of rows so far.
        initial_block: The module's initial state as a tree of tensors ``[1, ...]``; None if stateless.
    """

    def __init__(self, module_id: str, module_step: ModuleStep) -> None:
        self.module_id = module_id
        self.set_module_step(module_step)
        self.clear()

    def set_module_step(self, module_step: ModuleStep) -> None:
        """Use this module for all further actions."""
        self.module_step = module_step
        self.initial_block: Any = module_step.initial_state(1) if module_step.is_stateful else None

    def clear(self) -> None:
        """Drop all rows."""
        self._observations: GrowingColumn | None = None
        self._acts: dict[str, GrowingColumn] = {}
        self.num_observations: int = 0
        self.num_acts: int = 0
        self._num_kept = 0  # acts of earlier fragments

    def add_observations(self, block: object, num_rows: int) -> None:
        """Append a block of observations, leaves ``[num_rows, ...]``."""
        if self._observations is None:
            self._observations = GrowingColumn(block)
        if not self._observations.put(block, num_rows):
            try:
                self._observations.append(block, num_rows)
            except ValueError as error:
                raise ValueError(f"Observations for module {self.module_id!r}: {error}") from error
        self.num_observations += num_rows

    def add_acts(self, num_rows: int, columns: dict[str, Any]) -> int:
        """Append a block of acts, leaves ``[num_rows, ...]``; return the index of its first row.

        Raises:
            ValueError: It has other columns, shapes or types than the blocks before.
        """
        acts, first = self._acts, self.num_acts
        if first and columns.keys() != acts.keys():
            if first != self._num_kept:
                odd = ", ".join(map(repr, sorted(columns.keys() ^ acts.keys())))
                raise ValueError(
                    f"Module {self.module_id!r} returned the columns {sorted(columns)}, but {sorted(acts)} before: "
                    f"{odd} must be there at every step or never."
                )
            # The earlier fragment explored, and this one does not, or the other way round.
            acts = {name: acts.get(name) or GrowingColumn(of, first, first) for name, of in columns.items()}
            self._acts = acts
        for name, block in columns.items():
            column = acts.get(name)
            if column is not None and column.put(block, num_rows):
                continue
            if column is None:
                column = acts[name] = GrowingColumn(block, num_rows)
            try:
                column.append(block, num_rows)
            except ValueError as error:
                raise ValueError(f"Column {name!r} of module {self.module_id!r}: {error}") from error
        self.num_acts = first + num_rows
        return first

    def observations(self, rows: object) -> Any:
        """Return the observations in the given rows, leaves ``[*rows.shape, ...]``."""
        assert self._observations is not None
        return self._observations.take(np.asarray(rows, np.int64))

    def acts(self, rows: object) -> dict[str, Any]:
        """Return all columns of the acts in the given rows, leaves ``[*rows.shape, ...]``."""
        index = np.asarray(rows, np.int64)
        return {name: column.take(index) for name, column in self._acts.items()}

    def column(self, name: str, rows: NDArray[np.int64]) -> Any:
        """Return observations, or a column of the acts, in the given rows, ``[*rows.shape, ...]``; None if missing."""
        column = self._observations if name == Columns.OBS else self._acts.get(name)
        return None if column is None else column.take(rows)

    def keep(self, observation_rows: Any, act_rows: Any) -> None:
        """Drop all rows but these, which are renumbered from 0 in the given order."""
        observations = self.observations(observation_rows) if len(observation_rows) else None
        acts = self.acts(act_rows) if len(act_rows) else None
        self.clear()
        if observations is not None:
            self.add_observations(observations, len(observation_rows))
        if acts is not None:
            self.add_acts(len(act_rows), acts)
            self._num_kept = self.num_acts


def gather_states(places: Sequence[tuple[Any, int, int]]) -> Any:
    """Return one block of states, leaves ``[len(places), ...]``, gathered from rows of other blocks.

    Args:
        places: (tree of tensors ``[B, ...]``, row in it, B). Agents that acted together share a block.
    """
    first, _, num_rows = places[0]
    if num_rows == len(places) and all(
        block is first and row == n for n, (block, row, _) in enumerate(places)
    ):
        return first
    blocks: dict[int, tuple[Any, int]] = {}  # id -> block, offset of its first row
    total = 0
    index = []
    for block, row, num_rows in places:
        known = blocks.get(id(block))
        if known is None:
            known = blocks[id(block)] = (block, total)
            total += num_rows
        index.append(known[1] + row)
    trees = [block for block, _ in blocks.values()]
    with torch.inference_mode():
        joined = trees[0] if len(trees) == 1 else tree_map(lambda *leaves: torch.cat(leaves), *trees)
        rows = torch.tensor(index)
        return tree_map(lambda leaf: leaf[rows], joined)


_NO_OUTPUTS: dict[Any, Any] = {}
_DICT = frozenset({dict})
_NOT_DONE = frozenset({False, None})


class AgentRecord:
    """An agent's chunk as row numbers of its module's store.

    Attributes:
        agent_id: The agent.
        store: Its module's rows.
        track: Its track; ``track.pending.action`` is the row of a hanging act.
        observation_rows, act_rows, rewards: By position; the lookback part comes first.
        infos: Non-empty infos by position of their observation.
        lookback: Number of steps before the chunk's start.
        t_started: The agent's time step at the chunk's start.
        initial_state: The module's state before the chunk's first step; None if stateless.
        state: The module's current state: (tree of tensors ``[B, ...]``, row in it, B); None if stateless.
    """

    __slots__ = (
        "act_rows",
        "agent_id",
        "infos",
        "initial_state",
        "lookback",
        "observation_rows",
        "rewards",
        "state",
        "store",
        "t_started",
        "track",
    )

    def __init__(self, agent_id: Hashable, store: ModuleStore, track: AgentTrack) -> None:
        self.agent_id: Any = agent_id
        self.store: ModuleStore = store
        self.track: AgentTrack = track
        self.observation_rows: list[int] = []
        self.act_rows: list[int] = []
        self.rewards: list[Any] = []
        self.infos: dict[int, dict[str, Any]] = {}
        self.lookback: int = 0
        self.t_started: int = 0
        self.initial_state: Any = None
        self.state: Any = None

    @property
    def num_steps(self) -> int:
        """The agent's own steps, without the lookback."""
        return len(self.act_rows) - self.lookback

    def carry_on(self, begin: int) -> AgentRecord:
        """Return the record of the next chunk, which stores the observations from position `begin` on."""
        record = AgentRecord(self.agent_id, self.store, self.track.carry_on(begin))
        record.observation_rows = self.observation_rows[begin:]
        record.act_rows = self.act_rows[begin:]
        record.rewards = self.rewards[begin:]
        record.infos = {k - begin: info for k, info in self.infos.items() if k >= begin}
        record.lookback = len(record.act_rows)
        record.t_started = self.t_started + self.num_steps
        record.initial_state, record.state = self.initial_state, self.state
        return record


class LiveEpisode:
    """One environment's ongoing episode.

    Args:
        face: The episode that policy mapping functions get: id, agents, time; no data.
        stores: Module id -> store.

    Attributes:
        records: Agent id -> record, in order of appearance.
        timeline: The agents' tracks.
        observed: The agents with a new observation at the latest env step, with the observation, in the order of
            `records`. Rows are assigned later.
    """

    def __init__(self, face: Any, stores: Mapping[str, ModuleStore]) -> None:
        self.id_: str = face.id_
        self._stores = stores
        self.face = face
        self.timeline: Timeline = face._timeline
        self.records: dict[Any, AgentRecord] = {}
        self.is_reset: bool = False
        self.observed: list[tuple[AgentRecord, Any]] = []
        self._find_acting()

    @property
    def is_done(self) -> bool:
        return self.timeline.is_done

    @property
    def env_t(self) -> int:
        """Number of env steps of the whole episode."""
        return self.timeline.env_t

    def __len__(self) -> int:
        """Return the number of env steps of this chunk."""
        return self.timeline.env_t - self.timeline.env_t_started

    def begin(self, observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> None:
        """Begin the episode with its reset observations."""
        infos = checked_infos(infos, f"episode {self.id_}, env step {self.timeline.env_t}")
        events = self.timeline.reset(observations, infos)
        self.is_reset = True
        self.observed = []
        self._apply(events)

    def step(
        self,
        rows: Mapping[Any, int],
        observations: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        terminateds: Mapping[Any, Any],
        truncateds: Mapping[Any, Any],
        infos: Mapping[Any, Any],
    ) -> int:
        """Add one env step with the rows of the agents' acts; return the number of completed agent steps.

        Raises:
            MultiAgentEnvError: See `MultiAgentEpisode.add_env_step`.
        """
        acting = self._acting
        self.observed = observed = []
        try:
            # Most steps are complete: every agent that can act did, and got its outcome. The timeline handles all other
            # steps, including invalid ones.
            is_complete = len(rows) == len(acting) == len(observations) == len(rewards) and (
                not infos or infos == self._no_infos or self._are_plain(infos)
            )
            is_ongoing = _NOT_DONE.issuperset(terminateds.values()) and _NOT_DONE.issuperset(
                truncateds.values()
            )
            if is_complete and (
                is_ongoing or (acting and _are_flags(terminateds) and _are_flags(truncateds))
            ):
                for agent_id, record in acting.items():
                    observation = observations[agent_id]
                    if observation is None or type(rewards[agent_id]) not in REWARD_TYPES:
                        is_complete = False
                        break
                    observed.append((record, observation))
            else:
                is_complete = False
        except (KeyError, TypeError, ValueError):  # other agents, or values that cannot be hashed or compared
            is_complete = False
        if not is_complete:
            return self._step_by_timeline(rows, observations, rewards, terminateds, truncateds, infos)
        self.timeline.env_t = env_t = self.timeline.env_t + 1
        for record, _ in observed:
            agent_id, track = record.agent_id, record.track
            record.rewards.append(rewards[agent_id])
            record.act_rows.append(rows[agent_id])
            track.obs_env_ts.append(env_t)
            if track.output_keys is None:
                track.output_keys = frozenset()
            if infos and (info := infos.get(agent_id)):
                record.infos[len(record.act_rows)] = own_info(info)
        if not is_ongoing:
            self._end(terminateds, truncateds)
        return len(observed)

    def _end(self, terminateds: Mapping[Any, Any], truncateds: Mapping[Any, Any]) -> None:
        """End the agents that flags name, after a complete step."""
        timeline = self.timeline
        all_terminated, all_truncated = bool(terminateds.get(ALL_AGENTS)), bool(truncateds.get(ALL_AGENTS))
        for agent_id, record in self._acting.items():
            terminated = all_terminated or bool(terminateds.get(agent_id))
            truncated = all_truncated or bool(truncateds.get(agent_id))
            record.track.end(terminated, truncated, timeline.env_t)
        self._find_acting()
        timeline.repeated = set()
        timeline.end(all_terminated, all_truncated, any_alive=bool(self._acting))

    def _step_by_timeline(
        self,
        rows: Mapping[Any, int],
        observations: Mapping[Any, Any],
        rewards: Mapping[Any, Any],
        terminateds: Mapping[Any, Any],
        truncateds: Mapping[Any, Any],
        infos: Mapping[Any, Any],
    ) -> int:
        self.observed = []
        timeline = self.timeline
        where = f"episode {self.id_}, env step {timeline.env_t + 1}"
        events = timeline.advance(
            observations,
            rows,
            checked_rewards(rewards, where),
            checked_infos(infos, where),
            terminateds,
            truncateds,
            _NO_OUTPUTS,
            where=f"episode {self.id_}",
        )
        self._apply(events)
        return sum(event.kind == "step" for event in events)

    def _are_plain(self, infos: Mapping[Any, Any]) -> bool:
        """Return whether infos are dicts, and all non-empty ones are for agents that act."""
        if not _DICT.issuperset(map(type, infos.values())):
            return False
        if len(self._acting) == len(self.timeline.tracks) and not self.timeline.departed:
            return True
        return all(agent_id in self._acting for agent_id, info in infos.items() if info)

    def _find_acting(self) -> None:
        """Note the agents that are not done, after a change of them."""
        self._acting = {
            agent_id: record
            for agent_id, record in self.records.items()
            if not (record.track.terminated or record.track.truncated)
        }
        self._no_infos: dict[Any, dict[str, Any]] = {agent_id: {} for agent_id in self._acting}

    def _apply(self, events: list[AgentEvent]) -> None:
        for event in events:
            if event.kind == "reset":
                store = self._stores[self.face.module_for(event.agent_id)]
                record = AgentRecord(event.agent_id, store, self.timeline.tracks[event.agent_id])
                if store.module_step.is_stateful:
                    record.initial_state = store.module_step.initial_arrays
                    record.state = (store.initial_block, 0, 1)
                self.records[event.agent_id] = record
            elif event.kind == "step":
                record = self.records[event.agent_id]
                record.rewards.append(event.reward)
                record.act_rows.append(event.action)
            else:
                continue
            position = len(record.act_rows)
            info = event.info
            if event.observation is LAST_OBSERVATION:
                record.observation_rows.append(record.observation_rows[-1])
                info = record.infos.get(position - 1) if info is None else info
            else:
                self.observed.append((record, event.observation))
            if info:
                record.infos[position] = info
        self._find_acting()

    def truncate(self) -> None:
        """See `MultiAgentEpisode.truncate`."""
        self.timeline.truncate()

    def returns(self) -> tuple[dict[Any, float], dict[Any, str]]:
        """Return this chunk's return by agent id, and module id by agent id."""
        returns = {
            agent_id: sum_of(record.rewards[record.lookback :]) for agent_id, record in self.records.items()
        }
        return returns, {agent_id: record.store.module_id for agent_id, record in self.records.items()}

    def cut(self, lookback: int) -> LiveEpisode:
        """Return the continuation of the episode, like `MultiAgentEpisode.cut`. Agents that are done are left out."""
        old = self.timeline
        chunk = LiveEpisode.__new__(LiveEpisode)
        chunk.id_, chunk._stores, chunk.face = self.id_, self._stores, self.face
        chunk.is_reset = self.is_reset
        chunk.observed = []
        chunk.timeline = chunk.face._timeline = new = old.carry_on(lookback)
        chunk.records = {}
        first = new.env_t_started - new.lookback
        for agent_id, record in self.records.items():
            track = record.track
            if track.is_done:
                new.departed[agent_id] = track.departure
                continue
            begin = min(bisect_left(track.obs_env_ts, first), len(track.obs_env_ts) - 1)
            chunk.records[agent_id] = carried = record.carry_on(begin)
            new.tracks[agent_id] = carried.track
        chunk._find_acting()
        return chunk


def _are_flags(flags: Mapping[Any, Any]) -> bool:
    return FLAG_TYPES.issuperset(map(type, flags.values()))
