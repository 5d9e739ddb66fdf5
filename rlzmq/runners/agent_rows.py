"""AgentRows: what an EpisodeSampler of several agents holds for pipelines on rows, a block for each module and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlzmq.connectors.rows import window_mask
from rlzmq.core.spaces import space_filler
from rlzmq.core.tree import tree_map, tree_rows, tree_stack, tree_unstack
from rlzmq.envs.observation_check import as_space_dtype, misfit
from rlzmq.episodes.agent_timelines import Pending
from rlzmq.episodes.batch_columns import common_space
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.runners.module_step import ModuleStep, as_chosen
from rlzmq.runners.ongoing_agents import AgentRecord, LiveEpisode, ModuleStore, gather_states

if TYPE_CHECKING:
    from rlzmq.connectors.pipelines import EnvToModulePipeline
    from rlzmq.runners.env_runner import EnvRunner

__all__ = ["AgentRows"]

IntArray = NDArray[np.int64]

Blocks = list[tuple[ModuleStore, Any, list[tuple[int, AgentRecord]]]]
"""For each module: its store, the observations ``[B, ...]`` to act on, and (env index, agent's record) of each."""


class AgentRows:
    """Ongoing episodes of several agents as row numbers, for pipelines that run on rows; see `EpisodeObjects`.

    Per vector step and module, one stacked block of observations goes through the module, and one block of acts comes
    out. Columns are gathered when the fragment is complete.
    """

    def __init__(self, runner: EnvRunner, stepper: Any) -> None:
        self._runner, self._stepper = runner, stepper
        env, env_to_module = stepper.env, runner.env_to_module
        self._own_lookback = env_to_module.required_lookback
        self._normalize = runner.module_to_env.normalize
        observation_spaces, action_spaces = env.single_observation_spaces, env.single_action_spaces
        self._action_spaces = action_spaces
        self._one_action_space = common_space([*action_spaces.spaces.values()]) is not None
        stored = env_to_module.stored_observation_space
        stored_spaces = stored if isinstance(stored, gym.spaces.Dict) else observation_spaces
        self._stored_spaces = (stored_spaces, action_spaces)
        self._observer = ObservationRouter(env_to_module, (observation_spaces, action_spaces))
        self._stores: dict[str, ModuleStore] = {}

    def clear(self) -> None:
        self._find_modules()
        for module_id in self._stores.keys() - self._runner.multi_rl_module.keys():
            del self._stores[module_id]  # no ongoing episode has rows in it
        for store in self._stores.values():
            store.clear()

    def _find_modules(self) -> None:
        """Create a store for every module; modules may change between two fragments."""
        for module_id, module in self._runner.multi_rl_module.items():
            store = self._stores.get(module_id)
            if store is None or store.module_step.module is not module:
                module_step = ModuleStep(module, self._runner.generator, self._runner.env_to_module.device)
                if store is None:
                    self._stores[module_id] = ModuleStore(module_id, module_step)
                else:
                    store.set_module_step(module_step)

    def new_episode(self) -> LiveEpisode:
        return LiveEpisode(self._stepper.new_episode(), self._stores)

    def begin(self, episode: LiveEpisode, observation: Any, info: Any) -> None:
        episode.begin(observation, info)

    def grow(self, index: int, episode: LiveEpisode, act: dict[Any, int], row: tuple[Any, ...]) -> int:
        num_agent_steps = episode.step(act, *row)
        timeline = episode.timeline
        if timeline.is_terminated or timeline.is_truncated:
            self._stepper.env.needs_reset[index] = True
        return num_agent_steps

    # -- acting --------------------------------------------------------------------------------

    def begin_fragment(self, *, explore: bool) -> None:
        self._find_modules()
        self._versions = np.empty(0, np.int64)  # the weights' version, for as many rows as there are at once
        for store in self._stores.values():
            store.module_step.begin(explore=explore)

    def observe(self, episodes: Sequence[LiveEpisode], observations: Sequence[Any]) -> None:
        try:
            self._blocks = self._observer.observe(episodes)
        except Exception:
            # If it is the environment's fault, this call reports it.
            self._stepper.check(episodes, observations)
            raise

    def infer(self, t: int) -> list[dict[str, Any]]:
        """Return the outputs of each module that acts; see `ModuleStep`."""
        outputs = []
        for store, block, rows in self._blocks:
            is_stateful = store.module_step.is_stateful
            state = gather_states([record.state for _, record in rows]) if is_stateful else None
            columns, state_out = store.module_step(block, state, t)
            outputs.append(columns)
            if state_out is not None:
                for number, (_, record) in enumerate(rows):
                    record.state = (state_out, number, len(rows))
        return outputs

    def acts(self, outputs: list[dict[str, Any]]) -> tuple[list[dict[Any, Any]], list[dict[Any, int]]]:
        """Store the acts; return the actions by agent, and the acts' rows by agent, per env."""
        acts: list[dict[Any, int]] = [{} for _ in range(self._runner.num_envs)]
        actions: list[dict[Any, Any]] = [{} for _ in range(self._runner.num_envs)]
        for (store, _, rows), columns in zip(self._blocks, outputs, strict=True):
            for_env = columns.pop(Columns.ACTIONS_FOR_ENV, None)
            if for_env is None:
                for_env = self._for_env(columns[Columns.ACTIONS], rows)
            num_rows = len(rows)
            if len(self._versions) < num_rows:
                self._versions = np.full(num_rows, self._runner.weights_seq_no, np.int64)
            columns[Columns.WEIGHTS_VERSION] = self._versions[:num_rows]
            first = store.add_acts(num_rows, columns)
            for_each = list(for_env) if type(for_env) is np.ndarray else tree_unstack(for_env)
            numbered = zip(rows, for_each, range(first, first + num_rows), strict=True)
            for (index, record), action, row in numbered:
                agent_id = record.agent_id
                actions[index][agent_id] = action
                acts[index][agent_id] = row
        return actions, acts

    def _for_env(self, actions: Any, rows: list[tuple[int, AgentRecord]]) -> Any:
        normalize = self._normalize
        if normalize is None:
            return actions
        if self._one_action_space:
            return normalize.apply_vectorized(actions, rows[0][1].agent_id)
        return [
            normalize.apply_vectorized(action, record.agent_id)
            for action, (_, record) in zip(tree_unstack(actions), rows, strict=True)
        ]

    def random_acts(
        self, episodes: Sequence[LiveEpisode]
    ) -> tuple[list[dict[Any, Any]], list[dict[Any, int]]]:
        to_act: list[set[Any]] = [set() for _ in episodes]
        for _, _, rows in self._blocks:
            for index, record in rows:
                to_act[index].add(record.agent_id)
        actions = [
            {agent_id: self._action_spaces[agent_id].sample() for agent_id in live.records if agent_id in own}
            for live, own in zip(episodes, to_act, strict=True)
        ]
        outputs = []
        for _, _, rows in self._blocks:
            own = [actions[index][record.agent_id] for index, record in rows]
            chosen = [
                as_chosen(self._normalize, self._action_spaces[record.agent_id], action)
                for action, (_, record) in zip(own, rows, strict=True)
            ]
            outputs.append({Columns.ACTIONS: tree_stack(chosen), Columns.ACTIONS_FOR_ENV: own})
        return actions, self.acts(outputs)[1]

    # -- the result ----------------------------------------------------------------------------

    def collect(
        self, ended: list[tuple[int, LiveEpisode]], episodes: list[LiveEpisode], lookback: int
    ) -> EpisodeBatch:
        ongoing = [(index, live) for index, live in enumerate(episodes) if len(live)]
        batch = collect_batch(ended + ongoing, self._stored_spaces, self._stepper.mapping_fn)
        records: dict[int, AgentRecord] = {}
        for index, live in ongoing:
            episodes[index] = chunk = live.cut(
                max(lookback, live.timeline.env_steps_back(self._own_lookback))
            )
            records.update((id(live.records[agent_id]), record) for agent_id, record in chunk.records.items())
        self._set_initial_states([record for _, live in ongoing for record in live.records.values()], records)
        self._blocks = [
            (store, block, [(index, records.get(id(record), record)) for index, record in rows])
            for store, block, rows in self._blocks
        ]
        self._carry_rows(episodes)
        return batch

    def _set_initial_states(self, old: list[AgentRecord], new: dict[int, AgentRecord]) -> None:
        """Set the states before the new chunks' first steps: the states after the old chunks' last steps."""
        for store in self._stores.values():
            own = [
                record for record in old if record.store is store and record.act_rows and id(record) in new
            ]
            if store.module_step.is_stateful and own:
                states = store.acts([record.act_rows[-1] for record in own]).get(Columns.STATE_OUT)
                if states is None:
                    continue  # random actions only: the states are still the initial ones
                for number, record in enumerate(own):
                    new[id(record)].initial_state = tree_map(lambda leaf: leaf[number], states)  # noqa: B023

    def _carry_rows(self, episodes: list[LiveEpisode]) -> None:
        """Keep the rows that ongoing chunks refer to."""
        for store in self._stores.values():
            own = [record for live in episodes for record in live.records.values() if record.store is store]
            observation_rows: list[int] = []
            act_rows: list[int] = []
            for record in own:
                record.observation_rows = _moved(record.observation_rows, observation_rows)
                record.act_rows = _moved(record.act_rows, act_rows)
                pending = record.track.pending
                if pending is not None:
                    (pending.action,) = _moved([pending.action], act_rows)
            store.keep(observation_rows, act_rows)


def _moved(numbers: list[int], to: list[int]) -> list[int]:
    """Append numbers of rows to others; return their places among these."""
    begin = len(to)
    to += numbers
    return list(range(begin, len(to)))


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
        departed = {}
        module_ids = dict(live.face._agent_module_ids)
        order = 0
        for agent_id, record in live.records.items():
            if record.num_steps:
                groups.setdefault(record.store.module_id, []).append((e, order, live, record))
                module_ids.pop(agent_id, None)
                order += 1
            elif record.track.is_done:
                departed[agent_id] = record.track.departure
        left = live.timeline.leftovers(module_ids)
        if departed:
            left["departed"] = {**left.get("departed", {}), **departed}
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
        Columns.REWARDS: np.array(rewards, np.float64),
    }
    initial_state = None
    if store.module_step.is_stateful:
        initial_state = tree_stack([tree_map(np.asarray, record.initial_state) for record in records])
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
        outputs[Columns.WEIGHTS_VERSION] = int(outputs[Columns.WEIGHTS_VERSION])
        left["pending"] = Pending(outputs.pop(Columns.ACTIONS), outputs)


def _common(spaces: Any, agent_ids: list[Any]) -> object:
    """Return the space shared by all agents; None if their spaces differ."""
    return common_space(
        [spaces[agent_id] for agent_id in dict.fromkeys(agent_ids) if agent_id in spaces.spaces]
    )


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
    """The env-to-module pipeline of `AgentRows`."""

    def __init__(
        self, env_to_module: EnvToModulePipeline, spaces: tuple[Mapping[Any, Any], Mapping[Any, Any]]
    ) -> None:
        self._env_to_module = env_to_module
        self._has_pieces = bool(env_to_module.writers or env_to_module.readers)
        self._reads_agent_by_agent = any(piece.agent_by_agent for piece in env_to_module.readers)
        self._spaces, self._action_spaces = spaces
        self._shapes = {agent_id: space.shape for agent_id, space in self._spaces.items()}

    def observe(self, live_episodes: Sequence[LiveEpisode]) -> Blocks:
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
                if not record.observation_rows:  # columns compare the agent's later ones with this one
                    self._check(record.agent_id, observation)
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
        blocks = self._through_pieces(observed, by_agent) if by_agent else self._as_they_are(observed)
        acting: Blocks = []
        for store in next_stores:
            own, block = observed[store], blocks[store]
            rows = own.rows
            if own.done:
                places = [place for place in range(len(rows)) if place not in own.done]
                block = tree_rows(block, places)
                rows = [rows[place] for place in places]
            acting.append((store, block, rows))
        return acting

    def _check(self, agent_id: Any, observation: object) -> None:
        space = self._spaces.get(agent_id)
        problem = "" if space is None else misfit(space, observation, "the observation")
        if problem:
            raise ValueError(f"Agent {agent_id!r}: {problem}.")

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
        """Run the pieces on each agent's observations of all envs at once, in the form that per-episode pieces take."""
        # An agent's module may differ between envs.
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

    def _read(self, block: object, observed: Observed) -> object:
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


def _store(store: ModuleStore, block: object, observed: Observed) -> None:
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
            part = self.records[own[0]].store.column(column, rows[own])
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
