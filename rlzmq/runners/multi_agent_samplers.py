"""The sampling loops of several agents: on rows, and with real episodes. Their results are identical."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch

from rlzmq.connectors.common.agent_to_module_mapping import checked_mapping
from rlzmq.core.timers import ENV_TO_MODULE_TIMER, INFERENCE_TIMER
from rlzmq.core.tree import tree_map, tree_stack, tree_unstack
from rlzmq.envs.observation_check import as_space_dtype
from rlzmq.episodes.agent_timelines import Pending
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.step_values import checked_infos, checked_rewards
from rlzmq.runners.episode_sampler import ACTION_COLUMNS, EpisodeSampler, fill_outputs
from rlzmq.runners.module_step import ModuleStep, to_numpy
from rlzmq.runners.observation_routing import ObservationRouter
from rlzmq.runners.ongoing_agents import AgentRecord, LiveEpisode, ModuleStore, gather_states
from rlzmq.runners.sampler import WEIGHTS_SEQ_NO, EpisodicSampler

if TYPE_CHECKING:
    from rlzmq.runners.env_runner import EnvRunner

__all__ = ["MultiAgentEpisodeSampler", "MultiAgentRowsSampler"]


def new_agents_episode(runner: EnvRunner, mapping_fn: Any) -> MultiAgentEpisode:
    """Return an episode of the runner's agents, not reset yet."""
    return MultiAgentEpisode(
        runner.new_episode_id(),
        agent_to_module_mapping_fn=mapping_fn,
        observation_space=runner.env.single_observation_spaces,
        action_space=runner.env.single_action_spaces,
    )


class MultiAgentRowsSampler(EpisodicSampler):
    """Samples fragments for a multi-agent runner whose pipelines run on rows.

    Per vector step and module, one stacked block of observations goes through the module, and one block of acts comes
    out. Agents keep row numbers only. Columns are gathered when the fragment is complete.
    """

    def __init__(self, runner: EnvRunner) -> None:
        env_to_module = runner.env_to_module
        super().__init__(runner, runner.config.episode_lookback_horizon)
        self._mapping_fn = checked_mapping(runner)
        self._own_lookback = env_to_module.required_lookback
        self._normalize = runner.module_to_env.normalize
        action_spaces = runner.env.single_action_spaces
        spaces = list(action_spaces.spaces.values())
        self._one_action_space = all(space == spaces[0] for space in spaces)
        self._spaces = (runner.env.single_observation_spaces, action_spaces)
        stored = env_to_module.stored_observation_space
        self._stored_spaces = (
            stored if isinstance(stored, gym.spaces.Dict) else self._spaces[0],
            action_spaces,
        )
        self._observer = ObservationRouter(env_to_module, self._spaces)
        self._device = env_to_module.device
        self._stores: dict[str, ModuleStore] = {}
        self._find_modules()

    # -- between fragments ---------------------------------------------------------------------

    def reset(self) -> None:
        self._find_modules()
        for module_id in self._stores.keys() - self.runner.multi_rl_module.keys():
            del self._stores[module_id]  # no ongoing episode has rows in it
        for store in self._stores.values():
            store.clear()
            store.templates = {}
        super().reset()
        self._check_agents()
        self._acting = self._observer.observe(self._episodes)

    def _find_modules(self) -> None:
        """Create a store for every module; modules may change between two fragments."""
        for module_id, module in self.runner.multi_rl_module.items():
            store = self._stores.get(module_id)
            if store is None or store.module_step.module is not module:
                module_step = ModuleStep(module, self.runner.generator, self._device)
                if store is None:
                    self._stores[module_id] = ModuleStore(module_id, module_step)
                else:
                    store.set_module_step(module_step)

    def _new_episode(self, index: int) -> LiveEpisode:
        return LiveEpisode(new_agents_episode(self.runner, self._mapping_fn), self._stores)

    # -- one fragment --------------------------------------------------------------------------

    def _begin_fragment(self) -> None:
        self._find_modules()
        self._versions = np.empty(0, np.int64)  # the weights' version, for as many rows as there are at once
        for store in self._stores.values():
            store.module_step.begin(explore=self._request.explore)

    def _begin(self, episode: LiveEpisode, observation: Any, info: Any) -> None:
        episode.begin(observation, info)

    def _grow(self, index: int, episode: LiveEpisode, act: dict[Any, int], row: tuple[Any, ...]) -> int:
        num_agent_steps = episode.step(act, *row)
        timeline = episode.timeline
        if timeline.is_terminated or timeline.is_truncated:
            self.env.needs_reset[index] = self._has_ended = True
        return num_agent_steps

    def _observe(self) -> None:
        start_s = time.perf_counter()
        try:
            self._acting = self._observer.observe(self._episodes)
        except Exception:
            self._check_agents()  # if it is the environment's fault, this call reports it
            raise
        self.runner.timers.add_stage(ENV_TO_MODULE_TIMER, start_s, time.perf_counter())

    def _returns(self, episode: LiveEpisode) -> tuple[Mapping[Any, float], Mapping[Any, str]]:
        return episode.returns()

    def _truncate(self, episode: LiveEpisode) -> None:
        episode.truncate()

    def _act(self, t: int) -> tuple[list[dict[Any, Any]], list[dict[Any, int]]]:
        """Run all modules; return the env's actions by agent, and the rows of the acts, per env."""
        start_s = time.perf_counter()
        acts: list[dict[Any, int]] = [{} for _ in range(self.num_envs)]
        actions: list[dict[Any, Any]] = [{} for _ in range(self.num_envs)]
        with torch.inference_mode():
            computed = [self._compute(*acting, t) for acting in self._acting]
        for (store, _, rows), (columns, state_out) in zip(self._acting, computed, strict=True):
            if state_out is not None:
                for number, (_, record) in enumerate(rows):
                    record.state = (state_out, number, len(rows))
            for_env = columns.pop(Columns.ACTIONS_FOR_ENV, None)
            if for_env is None:
                for_env = self._for_env(columns[Columns.ACTIONS], rows)
            store.remember_outputs(columns)
            first = self._store_columns(store, columns, len(rows))
            for_each = list(for_env) if type(for_env) is np.ndarray else tree_unstack(for_env)
            numbered = zip(rows, for_each, range(first, first + len(rows)), strict=True)
            for (index, record), action, row in numbered:
                agent_id = record.agent_id
                actions[index][agent_id] = action
                acts[index][agent_id] = row
        self.runner.timers.add_stage(INFERENCE_TIMER, start_s, time.perf_counter())
        return actions, acts

    @staticmethod
    def _compute(store: ModuleStore, block: Any, rows: list[tuple[int, AgentRecord]], t: int) -> Any:
        """Return the module's columns and its next state; see `ModuleStep`."""
        is_stateful = store.module_step.is_stateful
        state = gather_states([record.state for _, record in rows]) if is_stateful else None
        return store.module_step.act(block, state, t)

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

    def _random_actions(self) -> tuple[list[dict[Any, Any]], list[dict[Any, int]]]:
        """Return random actions in the form of `_act`; the modules' outputs are zeros, their states do not change."""
        acts: list[dict[Any, int]] = [{} for _ in range(self.num_envs)]
        to_act: list[dict[Any, AgentRecord]] = [{} for _ in range(self.num_envs)]
        for _, _, rows in self._acting:
            for index, record in rows:
                to_act[index][record.agent_id] = record
        spaces = self.runner.env.single_action_spaces
        actions = [
            {agent_id: spaces[agent_id].sample() for agent_id in live.records if agent_id in own}
            for live, own in zip(self._episodes, to_act, strict=True)
        ]
        for store, _, rows in self._acting:
            num_rows = len(rows)
            columns = {
                name: tree_map(
                    lambda leaf, num=num_rows: np.zeros((num, *np.shape(leaf)), np.asarray(leaf).dtype), zeros
                )
                for name, zeros in store.templates.items()
            }
            if Columns.STATE_OUT in columns:
                states = gather_states([record.state for _, record in rows])
                columns[Columns.STATE_OUT] = tree_map(to_numpy, states)
            columns[Columns.ACTIONS] = tree_stack([actions[index][record.agent_id] for index, record in rows])
            for row, (index, record) in enumerate(rows, self._store_columns(store, columns, num_rows)):
                acts[index][record.agent_id] = row
        return actions, acts

    def _store_columns(self, store: ModuleStore, columns: dict[str, Any], num_rows: int) -> int:
        """Store a block of acts with the version of their weights; return the number of its first row."""
        if len(self._versions) < num_rows:
            self._versions = np.empty(num_rows, np.int64)
            self._versions[:] = self.runner.weights_seq_no
        columns[WEIGHTS_SEQ_NO] = self._versions[:num_rows]
        return store.add_acts(num_rows, columns)

    # -- the result ----------------------------------------------------------------------------

    def _batch(
        self, chunks: list[tuple[int, LiveEpisode]], ongoing: list[tuple[int, LiveEpisode]]
    ) -> EpisodeBatch:
        batch = collect_batch(chunks + ongoing, self._stored_spaces, self._mapping_fn)
        records: dict[int, AgentRecord] = {}
        for index, live in ongoing:
            lookback = max(self.lookback, live.timeline.env_steps_back(self._own_lookback))
            self._episodes[index] = chunk = live.cut(lookback)
            records.update((id(live.records[agent_id]), record) for agent_id, record in chunk.records.items())
        self._set_initial_states([record for _, live in ongoing for record in live.records.values()], records)
        self._acting = [
            (store, block, [(index, records.get(id(record), record)) for index, record in rows])
            for store, block, rows in self._acting
        ]
        self._carry_rows()
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

    def _carry_rows(self) -> None:
        """Keep the rows that ongoing chunks refer to."""
        for store in self._stores.values():
            own = [
                record for live in self._episodes for record in live.records.values() if record.store is store
            ]
            observation_rows: list[int] = []
            act_rows: list[int] = []
            for record in own:
                observation_rows += record.observation_rows
                act_rows += record.act_rows
                if record.track.pending is not None:
                    act_rows.append(record.track.pending.action)
            store.keep(observation_rows, act_rows)
            next_observation = next_act = 0
            for record in own:
                num_observations, num_acts = len(record.observation_rows), len(record.act_rows)
                record.observation_rows = list(range(next_observation, next_observation + num_observations))
                record.act_rows = list(range(next_act, next_act + num_acts))
                next_observation += num_observations
                next_act += num_acts
                if record.track.pending is not None:
                    record.track.pending.action = next_act
                    next_act += 1


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


def _as_arrays(state: object) -> Any:
    return tree_map(np.asarray, state)


def _common(spaces: Any, agent_ids: list[Any]) -> Any:
    """Return the space shared by all agents; None if their spaces differ."""
    own = [spaces[agent_id] for agent_id in dict.fromkeys(agent_ids) if agent_id in spaces.spaces]
    return own[0] if own and all(space == own[0] for space in own) else None


# -- with real episodes -------------------------------------------------------------------------------


class MultiAgentEpisodeSampler(EpisodeSampler):
    """An EpisodeSampler for multi-agent environments and several modules."""

    def __init__(self, runner: EnvRunner) -> None:
        super().__init__(runner, runner.config.episode_lookback_horizon)
        self._mapping_fn = checked_mapping(runner)

    # -- episodes and the vector env -----------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self._check_agents()

    def _make_episode(self) -> MultiAgentEpisode:
        return new_agents_episode(self.runner, self._mapping_fn)

    def _begin(self, episode: MultiAgentEpisode, observation: Any, info: Any) -> None:
        info = checked_infos(info, f"episode {episode.id_}, env step 0")
        episode.add_env_reset(observations=self._own(observation), infos=info)

    def _grow(self, index: int, episode: MultiAgentEpisode, act: Any, row: tuple[Any, ...]) -> int:
        observations, rewards, terminateds, truncateds, infos = row
        num_before = episode.agent_steps() if self._counts_agent_steps else 0
        where = f"episode {episode.id_}, env step {episode.env_t + 1}"
        episode.add_env_step(
            self._own(observations),
            act[0],
            checked_rewards(rewards, where),
            checked_infos(infos, where),
            terminateds=terminateds,
            truncateds=truncateds,
            extra_model_outputs=act[1],
        )
        if episode.is_done:
            self.env.needs_reset[index] = self._has_ended = True
        return episode.agent_steps() - num_before if self._counts_agent_steps else 0

    def _add_step(self, rows: Sequence[tuple[Any, ...]], acts: Sequence[Any]) -> int:
        num_env_steps = super()._add_step(rows, acts)
        self._check_agents()
        return num_env_steps

    def _returns(self, episode: MultiAgentEpisode) -> tuple[Mapping[Any, float], Mapping[Any, str]]:
        by_agent = episode.agent_episodes
        returns = {agent_id: sae.get_return() for agent_id, sae in by_agent.items()}
        return returns, {agent_id: str(sae.module_id) for agent_id, sae in by_agent.items()}

    def _truncate(self, episode: MultiAgentEpisode) -> None:
        episode.truncate()

    # -- acting --------------------------------------------------------------------------------

    def _act(self, t: int) -> tuple[Any, Sequence[Any]]:
        if not self._to_module:  # no agent acts, since all environments are at an episode's end
            return [{} for _ in range(self.num_envs)], [({}, {})] * self.num_envs
        start_s = time.perf_counter()
        modules = self.runner.multi_rl_module
        with torch.inference_mode():
            if self._request.explore:
                outputs = modules.forward_exploration(self._to_module, t=t)
            else:
                outputs = modules.forward_inference(self._to_module)
        acted_s = time.perf_counter()
        columns = self._run_module_to_env(outputs)
        self._time_acting(start_s, acted_s)
        for name, per_env in columns.items():
            if not isinstance(per_env, list) or len(per_env) != self.num_envs:
                raise ValueError(
                    f"Column {name!r} after the module-to-env pipeline: expected a list of "
                    f"{self.num_envs} dicts by "
                    f"agent id, one per environment, got {type(per_env).__name__} of {len(per_env)}."
                )
        actions = columns[Columns.ACTIONS]
        acts = []
        for index, by_agent in enumerate(actions):
            of_env = {name: per_env[index] for name, per_env in columns.items() if name not in ACTION_COLUMNS}
            per_agent = {}
            for agent_id in by_agent:
                own = {name: values[agent_id] for name, values in of_env.items() if agent_id in values}
                self._remember(self._acting[index], agent_id, own)
                own[WEIGHTS_SEQ_NO] = self.runner.weights_seq_no
                per_agent[agent_id] = own
            acts.append((by_agent, per_agent))
        return columns.get(Columns.ACTIONS_FOR_ENV, actions), acts

    def _random_actions(self) -> tuple[Any, Sequence[Any]]:
        spaces = self.env.single_action_spaces
        acts = []
        for episode in self._episodes:
            to_act = episode.get_agents_to_act()
            by_agent = {
                agent_id: spaces[agent_id].sample()
                for agent_id in episode.agent_episodes
                if agent_id in to_act
            }
            per_agent = {}
            for agent_id in by_agent:
                sae = episode.agent_episodes[agent_id]
                own = self._outputs_of_random_actions(sae, str(sae.module_id))
                self._begin_outputs(episode, agent_id, own)
                own[WEIGHTS_SEQ_NO] = self.runner.weights_seq_no
                per_agent[agent_id] = own
            acts.append((by_agent, per_agent))
        return [by_agent for by_agent, _ in acts], acts

    def _remember(self, episode: MultiAgentEpisode, agent_id: object, outputs: dict[str, Any]) -> None:
        """Store zeros with the structure of a module's outputs, for steps in which it does not act."""
        templates = self._templates.setdefault(episode.module_for(agent_id), {})
        if templates.keys() != outputs.keys():
            for name, value in outputs.items():
                templates.setdefault(name, tree_map(np.zeros_like, value))
        self._begin_outputs(episode, agent_id, outputs)

    def _begin_outputs(
        self, episode: MultiAgentEpisode, agent_id: object, outputs: Mapping[str, Any]
    ) -> None:
        """Fill outputs that begin in mid-episode, after random actions, with zeros for the earlier steps."""
        track, sae = episode._timeline.tracks[agent_id], episode.agent_episodes[agent_id]
        if track.output_keys is None or outputs.keys() <= track.output_keys:
            return
        zeros = {
            name: tree_map(np.zeros_like, value)
            for name, value in outputs.items()
            if name not in track.output_keys
        }
        if Columns.STATE_OUT in zeros:  # random actions have left the state as it was
            zeros[Columns.STATE_OUT] = self._state_now(sae)
        fill_outputs(sae, zeros, zeros)
        if track.pending is not None:
            track.pending = Pending(track.pending.action, {**track.pending.extra_model_outputs, **zeros})
        track.output_keys = frozenset((*track.output_keys, *zeros))

    def _complete_outputs(self, episodes: Sequence[MultiAgentEpisode]) -> None:
        """Add zero outputs for agents whose module first acted for others in this fragment."""
        for episode in episodes:
            for agent_id in episode._timeline.tracks:
                self._begin_outputs(episode, agent_id, self._templates.get(episode.module_for(agent_id), {}))

    def _initial_state(self, module_id: object) -> Any:
        module = self.runner.multi_rl_module[module_id]
        return tree_map(to_numpy, module.get_initial_state()) if module.is_stateful() else None

    # -- the result ----------------------------------------------------------------------------

    def _batch(self, chunks: list[tuple[int, Any]], ongoing: list[tuple[int, Any]]) -> Any:
        self._complete_outputs([episode for _, episode in chunks])
        self._complete_outputs(self._episodes)
        return super()._batch(chunks, ongoing)

    def _cut(self, episode: MultiAgentEpisode) -> MultiAgentEpisode:
        back = episode._timeline.env_steps_back(self.runner.env_to_module.required_lookback)
        return episode.cut(max(self.lookback, back))

    def _make_batch(self, episodes: list[MultiAgentEpisode]) -> EpisodeBatch:
        for episode in episodes:
            episode.prune()
            for sae in episode.agent_episodes.values():
                self._give_state(sae)
        return EpisodeBatch.from_episodes(episodes)

    def _own(self, observations: dict[Any, Any]) -> dict[Any, Any]:
        """Return copies in their spaces' dtypes. An env may overwrite its arrays in the next step."""
        spaces = self.env.single_observation_spaces.spaces
        return {
            agent_id: as_space_dtype(spaces.get(agent_id), tree_map(_copy, observation))
            for agent_id, observation in observations.items()
        }


def _copy(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
