"""ObservationRouter: from agents' latest observations to rows of the stores and the modules' next inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlzmq.core.tree import tree_map, tree_stack, tree_unstack
from rlzmq.envs.observation_check import misfit
from rlzmq.runners.multi.module_rows import ModuleStore
from rlzmq.runners.multi.observed_rows import ObservedRows
from rlzmq.runners.multi.ongoing_episodes import AgentRecord, LiveEpisode

if TYPE_CHECKING:
    from rlzmq.connectors.plans import EnvToModulePlan

__all__ = ["Acting", "ObservationRouter"]

Acting = list[tuple[ModuleStore, Any, list[tuple[int, AgentRecord]]]]
"""By module: its store, the observations ``[B, ...]`` to act on, and (env index, agent's record) of each."""


Items = list[tuple[int, AgentRecord, Any, bool]]
Observed = dict[ModuleStore, Items]
"""By module: (env index, agent's record, observation, whether the agent acts on it) of each."""


class ObservationRouter:
    """The env-to-module pipeline of a `FusedMultiAgentSampler`.

    Args:
        env_to_module: The pipeline's plan.
        spaces: (observation spaces, action spaces) by agent id.
    """

    def __init__(
        self, env_to_module: EnvToModulePlan, spaces: tuple[Mapping[Any, Any], Mapping[Any, Any]]
    ) -> None:
        self._plan = env_to_module
        self._has_pieces = bool(env_to_module.writers or env_to_module.readers)
        self._reads_agent_by_agent = any(piece.agent_by_agent for piece in env_to_module.readers)
        self._spaces, self._action_spaces = spaces
        self._shapes = {agent_id: space.shape for agent_id, space in self._spaces.items()}

    def observe(self, live_episodes: Sequence[LiveEpisode]) -> Acting:
        """Give the latest observations their rows, and determine the next inputs of the modules.

        Raises:
            ValueError: Observations of different shapes for one module (or for a piece, other than the space's).
        """
        observed: Observed = {}
        by_agent: dict[Any, Items] = {}
        next_stores: dict[ModuleStore, None] = {}  # in the order of their first agents that act
        for index, live in enumerate(live_episodes):
            is_over = live.is_done
            for record, observation in live.observed:
                acts = not (is_over or record.track.is_done)
                if acts:
                    next_stores[record.store] = None
                item = (index, record, observation, acts)
                items = observed.get(record.store)
                if items is None:
                    observed[record.store] = [item]
                else:
                    items.append(item)
                if self._has_pieces:
                    by_agent.setdefault(record.agent_id, []).append(item)
            live.observed = []
        for store, items in observed.items():
            if not store.num_observations:  # all later ones are compared with these
                self._check(items)
        blocks = self._through_pieces(observed, by_agent) if by_agent else self._as_they_are(observed)
        acting: Acting = []
        for store in next_stores:
            items, block = observed[store], blocks[store]
            rows = [(index, record) for index, record, _, acts in items if acts]
            if len(rows) != len(items):
                places = np.array([n for n, item in enumerate(items) if item[3]], np.int64)
                block = tree_map(lambda leaf, places=places: leaf[places], block)
            acting.append((store, block, rows))
        return acting

    def _check(self, items: Items) -> None:
        for _, record, observation, _ in items:
            space = self._spaces.get(record.agent_id)
            problem = "" if space is None else misfit(space, observation, "the observation")
            if problem:
                raise ValueError(f"Agent {record.agent_id!r}: {problem}.")

    def _as_they_are(self, observed: Observed) -> dict[ModuleStore, Any]:
        blocks = {}
        for store, items in observed.items():
            blocks[store] = block = tree_stack([item[2] for item in items])
            _store(store, block, items)
        return blocks

    def _through_pieces(self, observed: Observed, by_agent: dict[Any, Items]) -> dict[ModuleStore, Any]:
        """Run the pieces on each agent's observations of all envs at once, as the per-episode pieces take them.

        An agent's module may be another one in each env.
        """
        rows: list[ObservedRows] = []
        stored: list[Any] = []
        for agent_id, own in by_agent.items():
            records = [item[1] for item in own]
            rows.append(ObservedRows(agent_id, records, self._action_spaces.get(agent_id)))
            block = tree_stack([item[2] for item in own])
            if type(block) is np.ndarray and block.shape[1:] != self._shapes.get(agent_id, block.shape[1:]):
                raise ValueError(f"Observations of agent {agent_id!r}: unexpected shape {block.shape[1:]}.")
            stored.append(self._plan.write(block, rows[-1]))
        blocks = self._by_store(observed, rows, stored)
        for store, items in observed.items():
            _store(store, blocks[store], items)
        if not self._plan.readers:
            return blocks
        if not self._reads_agent_by_agent:
            return {store: self._read(blocks[store], items) for store, items in observed.items()}
        return self._by_store(
            observed, rows, [self._plan.read(own, of) for own, of in zip(stored, rows, strict=True)]
        )

    def _read(self, block: Any, items: Items) -> Any:
        """Return the readers' results for all observations for one module."""
        records = [item[1] for item in items]
        return self._plan.read(
            block, ObservedRows(None, records, self._action_spaces.get(records[0].agent_id))
        )

    @staticmethod
    def _by_store(observed: Observed, rows: list[ObservedRows], values: list[Any]) -> dict[ModuleStore, Any]:
        """Arrange values by agent into blocks by store, in the order of `observed`."""
        blocks: dict[ModuleStore, Any] = {}
        by_record: dict[int, Any] = {}
        where = {id(of.records[0]): n for n, of in enumerate(rows)}
        for store, items in observed.items():
            n = where.get(id(items[0][1]))
            if n is not None and rows[n].records == [item[1] for item in items]:
                blocks[store] = values[n]  # the only agent of its module
                continue
            if not by_record:
                for of, own in zip(rows, values, strict=True):
                    by_record.update(
                        (id(record), value)
                        for record, value in zip(of.records, tree_unstack(own), strict=True)
                    )
            blocks[store] = tree_stack([by_record[id(item[1])] for item in items])
        return blocks


def _store(store: ModuleStore, block: Any, items: Items) -> None:
    first = store.num_observations
    store.add_observations(block, len(items))
    for row, item in enumerate(items, first):
        item[1].observation_rows.append(row)
