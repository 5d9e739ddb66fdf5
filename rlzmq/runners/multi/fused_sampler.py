"""FusedMultiAgentSampler: the multi-agent sampling loop for default and columnar connector pieces.

Per vector step and module, one stacked block of observations goes through the module, and one block of
acts comes out; agents keep row numbers only. Columns are gathered when the fragment is complete. Its
results are those of the MultiAgentSampler, number by number.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from rlzmq.core.plain import from_plain, to_plain
from rlzmq.core.stage_timers import ENV_RESET_TIMER, ENV_STEP_TIMER, ENV_TO_MODULE_TIMER, INFERENCE_TIMER
from rlzmq.core.tree import tree_map, tree_stack, tree_unstack
from rlzmq.core.typed_values import decode, encode
from rlzmq.envs.observation_check import check_agents_observations
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.multi_agent_batch import MultiAgentEpisodeBatch
from rlzmq.runners.module_step import ModuleStep, to_numpy
from rlzmq.runners.multi.episode_totals import EpisodeTotals, MultiAgentFinished
from rlzmq.runners.multi.fragment_batch import collect_batch
from rlzmq.runners.multi.module_rows import ModuleStore, gather_states
from rlzmq.runners.multi.observation_routing import ObservationRouter
from rlzmq.runners.multi.ongoing_episodes import AgentRecord, LiveEpisode, live_state, set_live_state
from rlzmq.runners.multi.request import StepCount
from rlzmq.runners.sampler_state import check_sampler
from rlzmq.runners.single.fused_sampler import WEIGHTS_SEQ_NO

if TYPE_CHECKING:
    from rlzmq.connectors.plans import EnvToModulePlan, ModuleToEnvPlan
    from rlzmq.runners.multi.agents_env_runner import AgentsEnvRunner
    from rlzmq.runners.request import SampleRequest

__all__ = ["FusedMultiAgentSampler"]


class FusedMultiAgentSampler:
    """Samples fragments for a multi-agent runner whose pipelines run on whole columns.

    Args:
        runner: Provides env, modules and counters.
        env_to_module: The env-to-module pipeline's plan.
        module_to_env: The module-to-env pipeline's plan.
    """

    def __init__(
        self, runner: AgentsEnvRunner, env_to_module: EnvToModulePlan, module_to_env: ModuleToEnvPlan
    ) -> None:
        self.runner = runner
        self.num_envs = runner.num_envs
        self.lookback = runner.config.episode_lookback_horizon
        self.has_episodes = False
        self._own_lookback = env_to_module.required_lookback
        self._normalize = module_to_env.normalize
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

    def forget(self) -> None:
        """Drop the unfinished episodes: the next ``run`` must come after a ``reset``."""
        self.has_episodes = False

    def reset(self) -> None:
        """Reset all environments and begin an episode in each."""
        for store in self._stores.values():
            store.clear()
            store.templates = {}
        self._live = [self._new_episode() for _ in range(self.num_envs)]
        start_s = time.perf_counter()
        observations, infos = self.runner.env.reset(seed=self.runner.take_reset_seed())
        self.runner.timers.add(ENV_RESET_TIMER, time.perf_counter() - start_s)
        for live, own_observations, own_infos in zip(self._live, observations, infos, strict=True):
            live.begin(own_observations, own_infos)
        self._check(observations)
        self._acting = self._observer.observe(self._live)
        self.has_episodes = True

    def _check(self, observations: list[dict[Any, Any]]) -> None:
        """Refuse observations, of each environment, that their agents' spaces forbid."""
        observed = [
            (live.id_, live.timeline.env_t, own) for live, own in zip(self._live, observations, strict=True)
        ]
        check_agents_observations(observed, self._spaces[0])

    def _find_modules(self) -> None:
        """A store for every module; modules may come and go between two fragments."""
        for module_id, module in self.runner.multi_rl_module.items():
            store = self._stores.get(module_id)
            if store is None or store.module_step.module is not module:
                module_step = ModuleStep(module, self.runner.generator, self._device)
                if store is None:
                    self._stores[module_id] = ModuleStore(module_id, module_step)
                else:
                    store.set_module_step(module_step)

    def _new_episode(self, id_: str | None = None) -> LiveEpisode:
        runner = self.runner
        id_ = runner.new_episode_id() if id_ is None else id_
        return LiveEpisode(id_, runner.mapping_fn, self._spaces, self._stores)

    def get_state(self) -> dict[str, Any]:
        """Return the state that the next fragment needs, as plain values and arrays.

        Raises:
            NotPlainError: Something cannot be expressed as plain data.
        """
        return {
            "kind": "fused agents",
            "lookback": self.lookback,
            "stores": {module_id: store.get_state() for module_id, store in self._stores.items()},
            "live": [live_state(live) for live in self._live],
            "acting": [
                [
                    store.module_id,
                    encode(block, "observations"),
                    [[index, to_plain(record.agent_id)] for index, record in rows],
                ]
                for store, block, rows in self._acting
            ],
        }

    def set_state(self, state: Mapping[str, Any], lost: Collection[int]) -> None:
        """Continue from what `get_state` returned; see `rlzmq.runners.single.fused_sampler.FusedSampler.set_state`."""
        check_sampler(self, state, "fused agents", len(state["live"]))
        stores = self._stores
        for module_id, own in state["stores"].items():
            if module_id in stores:  # else the module was removed
                stores[module_id].set_state(own)
        self._live = live_episodes = [
            set_live_state(self._new_episode(str(live["id"])), live, stores) for live in state["live"]
        ]
        self._acting = [
            (
                stores[module_id],
                decode(block),
                [(index, live_episodes[index].records[from_plain(agent_id)]) for index, agent_id in rows],
            )
            for module_id, block, rows in state["acting"]
        ]
        for index in lost:
            self._live[index] = self._new_episode()
        self.has_episodes = True

    # -- one fragment --------------------------------------------------------------------------

    def run(self, request: SampleRequest) -> tuple[MultiAgentEpisodeBatch, MultiAgentFinished, int]:
        """Sample what ``request`` asks for, continuing the ongoing episodes.

        Returns:
            The chunks; statistics of the ended episodes; the number of vector steps made.
        """
        runner = self.runner
        self._finished = MultiAgentFinished()
        self._done: list[tuple[int, LiveEpisode]] = []
        self._find_modules()
        for store in self._stores.values():
            store.module_step.begin(explore=request.explore)
        count = StepCount(request, runner.counts_agent_steps)
        clock, timers = time.perf_counter, runner.timers
        env, num_workers, global_steps = runner.env, max(runner.num_workers, 1), runner.global_env_steps
        while not count.is_fulfilled(len(self._done)):
            start_s = clock()
            if request.random_actions:
                actions = self._random_actions()
            else:
                actions = self._act(global_steps + count.num_env_steps * num_workers)
            acted_s = clock()
            observations, rewards, terminateds, truncateds, infos = env.step(actions)
            stepped_s = clock()
            count.num_vector_steps += 1
            for index in env.failed:
                self._restart_failed(index)
            for index, live in enumerate(self._live):
                if env.resetting[index]:
                    live.begin(observations[index], infos[index])
                    continue
                count.num_agent_steps += live.step(
                    observations[index], rewards[index], terminateds[index], truncateds[index], infos[index]
                )
                count.num_env_steps += 1
                if live.is_done:
                    env.needs_reset[index] = True
            try:
                self._acting = self._observer.observe(self._live)
            except Exception:
                self._check(observations)  # then it is the environment's fault, which this call reports
                raise
            timers.add(INFERENCE_TIMER, acted_s - start_s)
            timers.add(ENV_STEP_TIMER, stepped_s - acted_s)
            timers.add(ENV_TO_MODULE_TIMER, clock() - stepped_s)
            if env.needs_reset.any():
                self._replace_done(request)
        return self._collect(request), self._finished, count.num_vector_steps

    def _act(self, t: int) -> list[dict[Any, Any]]:
        """Run all modules; return the env's actions by agent, per env."""
        acts: list[dict[Any, int]] = [{} for _ in range(self.num_envs)]
        actions: list[dict[Any, Any]] = [{} for _ in range(self.num_envs)]
        for store, block, rows in self._acting:
            module_step = store.module_step
            state = None
            if module_step.is_stateful:
                state = gather_states([record.state for _, record in rows])
            columns, state_out = module_step(block, state, t)
            if state_out is not None:
                for number, (_, record) in enumerate(rows):
                    record.state = (state_out, number, len(rows))
            for_env = columns.pop(Columns.ACTIONS_FOR_ENV, None)
            if for_env is None:
                for_env = self._for_env(columns[Columns.ACTIONS], rows)
            store.remember_outputs(columns)
            self._store_acts(store, columns, rows, acts)
            for (index, record), action in zip(rows, tree_unstack(for_env), strict=True):
                actions[index][record.agent_id] = action
        self._set_acted(acts)
        return actions

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

    def _random_actions(self) -> list[dict[Any, Any]]:
        """Sample actions; the modules' earlier outputs are zeros, their states do not change."""
        acts: list[dict[Any, int]] = [{} for _ in range(self.num_envs)]
        to_act: list[dict[Any, AgentRecord]] = [{} for _ in range(self.num_envs)]
        for _, _, rows in self._acting:
            for index, record in rows:
                to_act[index][record.agent_id] = record
        spaces = self.runner.env.single_action_spaces
        actions = [
            {agent_id: spaces[agent_id].sample() for agent_id in live.records if agent_id in own}
            for live, own in zip(self._live, to_act, strict=True)
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
            self._store_acts(store, columns, rows, acts)
        self._set_acted(acts)
        return actions

    def _store_acts(
        self,
        store: ModuleStore,
        columns: dict[str, Any],
        rows: list[tuple[int, AgentRecord]],
        acts: list[dict[Any, int]],
    ) -> None:
        num_rows = len(rows)
        columns[WEIGHTS_SEQ_NO] = np.full(num_rows, self.runner.weights_seq_no, np.int64)
        first = store.add_acts(num_rows, columns)
        for row, (index, record) in enumerate(rows, first):
            acts[index][record.agent_id] = row

    def _set_acted(self, acts: list[dict[Any, int]]) -> None:
        for live, own in zip(self._live, acts, strict=True):
            live.set_acted(own)

    def _restart_failed(self, index: int) -> None:
        """Truncate the episode of env ``index``, which was recreated, before this step."""
        live = self._live[index]
        if not live.is_reset:
            return
        if live.timeline.env_t:
            live.truncate()
            self._finish_episode(index, live)
        self._live[index] = self._new_episode()

    def _replace_done(self, request: SampleRequest) -> None:
        for index, live in enumerate(self._live):
            if live.is_done:
                self.runner.forget_env_failures()
                self._finish_episode(index, live)
                if request.num_episodes is not None and len(self._done) >= request.num_episodes:
                    return
                self._live[index] = self._new_episode()

    def _finish_episode(self, index: int, live: LiveEpisode) -> None:
        live.add_totals()
        self._finished.add(live.totals, live.timeline.env_t)
        live.totals = EpisodeTotals()
        if live.num_env_steps:
            self._done.append((index, live))

    # -- the result ----------------------------------------------------------------------------

    def _collect(self, request: SampleRequest) -> MultiAgentEpisodeBatch:
        """Return finished episodes, then ongoing chunks; the episodes continue in new chunks."""
        if request.num_episodes is not None:
            chunks = self._done[: request.num_episodes]
            batch = collect_batch(chunks, self._stored_spaces, self.runner.mapping_fn)
            self.forget()
            return batch
        ongoing = [(index, live) for index, live in enumerate(self._live) if live.num_env_steps]
        batch = collect_batch(self._done + ongoing, self._stored_spaces, self.runner.mapping_fn)
        records: dict[int, AgentRecord] = {}
        for index, live in ongoing:
            live.add_totals()
            lookback = max(self.lookback, live.timeline.env_steps_back(self._own_lookback))
            self._live[index] = chunk = live.cut(lookback)
            records.update((id(live.records[agent_id]), record) for agent_id, record in chunk.records.items())
        self._set_initial_states([record for _, live in ongoing for record in live.records.values()], records)
        self._acting = [
            (store, block, [(index, records.get(id(record), record)) for index, record in rows])
            for store, block, rows in self._acting
        ]
        self._carry_rows()
        return batch

    def _set_initial_states(self, old: list[AgentRecord], new: dict[int, AgentRecord]) -> None:
        """Set the new chunks' states before their first steps: those after the old ones' last steps."""
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
        """Keep the rows that the ongoing chunks refer to."""
        for store in self._stores.values():
            own = [record for live in self._live for record in live.records.values() if record.store is store]
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
