"""ObservationRouter: moves agents' latest observations into rows of the stores and the modules' next inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.connectors.rows import window_mask
from rlzmq.core.spaces import space_filler
from rlzmq.core.tree import tree_map, tree_rows, tree_stack, tree_unstack
from rlzmq.envs.observation_check import as_space_dtype, misfit
from rlzmq.episodes.columns import Columns
from rlzmq.runners.ongoing_agents import AgentRecord, LiveEpisode, ModuleStore

if TYPE_CHECKING:
    from rlzmq.connectors.pipelines import EnvToModulePipeline

__all__ = ["Acting", "ObservationRouter"]

IntArray = NDArray[np.int64]

Acting = list[tuple[ModuleStore, Any, list[tuple[int, AgentRecord]]]]
"""For each module: its store, the observations ``[B, ...]`` to act on, and (env index, agent's record) of each."""


class Observed:
    """Latest observations of some agents, in order.

    Attributes:
        rows: (env index, agent's record) of each.
        observations: The observations.
        done: Positions of agents that are done, which do not act on it.
    """

    __slots__ = ("done", "observations", "rows")

    def __init__(self) -> None:
        self.rows: list[tuple[int, AgentRecord]] = []
        self.observations: list[Any] = []
        self.done: set[int] = set()

    @property
    def records(self) -> list[AgentRecord]:
        """The agents' records."""
        return [record for _, record in self.rows]


class ObservationRouter:
    """The env-to-module pipeline of a `MultiAgentRowsSampler`."""

    def __init__(
        self, env_to_module: EnvToModulePipeline, spaces: tuple[Mapping[Any, Any], Mapping[Any, Any]]
    ) -> None:
        self._env_to_module = env_to_module
        self._has_pieces = bool(env_to_module.writers or env_to_module.readers)
        self._reads_agent_by_agent = any(piece.agent_by_agent for piece in env_to_module.readers)
        self._spaces, self._action_spaces = spaces
        self._shapes = {agent_id: space.shape for agent_id, space in self._spaces.items()}

    def observe(self, live_episodes: Sequence[LiveEpisode]) -> Acting:
        """Assign rows to the latest observations, and determine the next inputs of the modules.

        Raises:
            ValueError: Observations of one module have different shapes (or, for a piece, shapes other than the
                space's).
        """
        observed: dict[ModuleStore, Observed] = {}
        by_agent: dict[Any, Observed] = {}
        next_stores: dict[ModuleStore, None] = {}  # in the order of their first agents that act
        for index, live in enumerate(live_episodes):
            timeline = live.timeline
            is_over = timeline.is_terminated or timeline.is_truncated
            for record, observation in live.observed:
                track, store = record.track, record.store
                of_store = observed.get(store)
                if of_store is None:
                    of_store = observed[store] = Observed()
                if is_over or track.terminated or track.truncated:
                    of_store.done.add(len(of_store.rows))
                else:
                    next_stores[store] = None
                of_store.rows.append((index, record))
                of_store.observations.append(observation)
                if self._has_pieces:
                    of_agent = by_agent.setdefault(record.agent_id, Observed())
                    of_agent.rows.append((index, record))
                    of_agent.observations.append(observation)
            live.observed = []
        for store, own in observed.items():
            if not store.num_observations:  # all later ones are compared with these
                self._check(own)
        blocks = self._through_pieces(observed, by_agent) if by_agent else self._as_they_are(observed)
        acting: Acting = []
        for store in next_stores:
            own, block = observed[store], blocks[store]
            rows = own.rows
            if own.done:
                places = [place for place in range(len(rows)) if place not in own.done]
                block = tree_rows(block, places)
                rows = [rows[place] for place in places]
            acting.append((store, block, rows))
        return acting

    def _check(self, observed: Observed) -> None:
        for record, observation in zip(observed.records, observed.observations, strict=True):
            space = self._spaces.get(record.agent_id)
            problem = "" if space is None else misfit(space, observation, "the observation")
            if problem:
                raise ValueError(f"Agent {record.agent_id!r}: {problem}.")

    def _as_they_are(self, observed: dict[ModuleStore, Observed]) -> dict[ModuleStore, Any]:
        blocks = {}
        for store, own in observed.items():
            space = self._spaces.get(own.rows[0][1].agent_id)
            blocks[store] = block = as_space_dtype(space, tree_stack(own.observations))
            _store(store, block, own)
        return blocks

    def _through_pieces(
        self, observed: dict[ModuleStore, Observed], by_agent: dict[Any, Observed]
    ) -> dict[ModuleStore, Any]:
        """Run the pieces on each agent's observations of all envs at once, in the form that per-episode pieces take.

        An agent's module may differ between envs.
        """
        rows: list[ObservedRows] = []
        stored: list[Any] = []
        for agent_id, own in by_agent.items():
            rows.append(ObservedRows(agent_id, own.records, self._action_spaces.get(agent_id)))
            block = as_space_dtype(self._spaces.get(agent_id), tree_stack(own.observations))
            if type(block) is np.ndarray and block.shape[1:] != self._shapes.get(agent_id, block.shape[1:]):
                raise ValueError(f"Observations of agent {agent_id!r}: unexpected shape {block.shape[1:]}.")
            stored.append(self._env_to_module.write(block, rows[-1]))
        blocks = self._by_store(observed, rows, stored)
        for store, of_store in observed.items():
            _store(store, blocks[store], of_store)
        if not self._env_to_module.readers:
            return blocks
        if not self._reads_agent_by_agent:
            return {store: self._read(blocks[store], of_store) for store, of_store in observed.items()}
        return self._by_store(
            observed, rows, [self._env_to_module.read(own, of) for own, of in zip(stored, rows, strict=True)]
        )

    def _read(self, block: Any, observed: Observed) -> Any:
        """Return the readers' results for all observations of one module."""
        records = observed.records
        return self._env_to_module.read(
            block, ObservedRows(None, records, self._action_spaces.get(records[0].agent_id))
        )

    @staticmethod
    def _by_store(
        observed: dict[ModuleStore, Observed], rows: list[ObservedRows], values: list[Any]
    ) -> dict[ModuleStore, Any]:
        """Arrange values by agent into blocks by store, in the order of `observed`."""
        blocks: dict[ModuleStore, Any] = {}
        by_record: dict[int, Any] = {}
        where = {id(of.records[0]): n for n, of in enumerate(rows)}
        for store, of_store in observed.items():
            records = of_store.records
            n = where.get(id(records[0]))
            if n is not None and rows[n].records == records:
                blocks[store] = values[n]  # the only agent of its module
                continue
            if not by_record:
                for of, own in zip(rows, values, strict=True):
                    by_record.update(
                        (id(record), value)
                        for record, value in zip(of.records, tree_unstack(own), strict=True)
                    )
            blocks[store] = tree_stack([by_record[id(record)] for record in records])
        return blocks


def _store(store: ModuleStore, block: Any, observed: Observed) -> None:
    first = store.num_observations
    store.add_observations(block, len(observed.rows))
    for number, (_, record) in enumerate(observed.rows, first):
        record.observation_rows.append(number)


class ObservedRows:
    """A `RowsContext`: agents' latest observations in several environments.

    Args:
        agent_id: The agent; None: several agents.
        records: The agents' chunks, row by row.
        action_space: Their action space; defines the structure of the actions before the first one.

    Attributes:
        num_rows, is_first, num_previous, agent_id: See `RowsContext`.
        records: The argument.
    """

    def __init__(self, agent_id: Any, records: Sequence[AgentRecord], action_space: Any) -> None:
        self.agent_id = agent_id
        self.records = records
        self.num_rows: int = len(records)
        self.num_previous: IntArray = np.array([len(record.act_rows) for record in records], np.int64)
        self.is_first: NDArray[np.bool_] = np.array(
            [record.t_started + record.num_steps == 0 for record in records], np.bool_
        )
        self._action_space = action_space

    def window(self, column: str, num: int, *, current: bool) -> Any:
        """See `RowsContext.window`.

        Raises:
            ValueError: The window should end with the current, unfinished step.
            KeyError: No module has provided the column yet.
        """
        if current and column != Columns.OBS:
            raise ValueError(
                f"window({column!r}, current=True): the step at an agent's latest observation "
                "is not made yet. Pass current=False."
            )
        if column == Columns.REWARDS:
            return self._rewards(num)
        missing = window_mask(self.num_previous, num, current=current)
        rows = np.zeros((self.num_rows, num), np.int64)
        for own, record in zip(rows, self.records, strict=True):
            listed = record.act_rows
            if column == Columns.OBS:
                listed = record.observation_rows[: len(listed) + current]
            latest = listed[-num:]
            own[num - len(latest) :] = latest
        values = self._take(column, rows)
        if missing is not None:
            tree_map(lambda leaf: leaf.__setitem__(missing, 0), values)
        return values

    def _rewards(self, num: int) -> NDArray[np.float64]:
        rewards = np.zeros((self.num_rows, num))
        for own, record in zip(rewards, self.records, strict=True):
            latest = record.rewards[-num:]
            own[num - len(latest) :] = latest
        return rewards

    def _take(self, column: str, rows: IntArray) -> Any:
        """Return a column's values in the given rows ``[N, num]`` of the records' stores."""
        by_store: dict[int, list[int]] = {}
        for n, record in enumerate(self.records):
            by_store.setdefault(id(record.store), []).append(n)
        parts, places = [], []
        for own in by_store.values():
            part = _column(self.records[own[0]].store, column, rows[own])
            if part is not None:
                parts.append(part)
                places.append(own)
        if not parts:
            if column != Columns.ACTIONS or self._action_space is None:
                raise KeyError(column)
            return space_filler(self._action_space, 0, lead=rows.shape)
        if len(by_store) == 1:
            return parts[0]

        def joined(*leaves: NDArray[Any]) -> NDArray[Any]:
            dtype = np.result_type(*leaves)
            whole = np.zeros((*rows.shape, *leaves[0].shape[2:]), dtype)
            for own, leaf in zip(places, leaves, strict=True):
                whole[own] = leaf
            return whole

        return tree_map(joined, *parts)


def _column(store: ModuleStore, column: str, rows: IntArray) -> Any:
    if column == Columns.OBS:
        return store.observations(rows) if store.num_observations else None
    return store.act_column(column, rows)
