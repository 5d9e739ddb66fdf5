"""MultiAgentSampler: the sampling loop with one real MultiAgentEpisode per environment.

Per vector step: module-to-env pipeline -> env step -> each episode grows -> env-to-module pipeline over
all episodes -> callbacks. Works with any connector piece and callback.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rlzmq.core.stage_timers import (
    ENV_RESET_TIMER,
    ENV_STEP_TIMER,
    ENV_TO_MODULE_TIMER,
    INFERENCE_TIMER,
    MODULE_TO_ENV_TIMER,
)
from rlzmq.core.tree import tree_map
from rlzmq.core.typed_values import decode, encode
from rlzmq.envs.observation_check import check_agents_observations
from rlzmq.episodes.agent_timelines import Pending
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_state import plain_state
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.multi_agent_batch import MultiAgentEpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.step_dicts import checked_infos, checked_rewards
from rlzmq.runners.multi.episode_totals import EpisodeTotals, MultiAgentFinished
from rlzmq.runners.multi.request import StepCount
from rlzmq.runners.sampler_state import check_sampler
from rlzmq.runners.single.fused_sampler import WEIGHTS_SEQ_NO

if TYPE_CHECKING:
    from rlzmq.runners.multi.agents_env_runner import AgentsEnvRunner
    from rlzmq.runners.request import SampleRequest

__all__ = ["MultiAgentSampler"]

_NOT_EXTRA = frozenset({Columns.ACTIONS, Columns.ACTIONS_FOR_ENV})


class MultiAgentSampler:
    """Samples for a multi-agent runner with per-episode connector pieces or callbacks.

    Args:
        runner: Provides env, modules, pipelines, callbacks and counters.
    """

    def __init__(self, runner: AgentsEnvRunner) -> None:
        self.runner = runner
        self.num_envs = runner.num_envs
        self.lookback = runner.config.episode_lookback_horizon
        self.has_episodes = False
        self._has_step_hooks = any(runner.callbacks.has(f"on_episode_{when}") for when in ("step", "start"))

    # -- between fragments ---------------------------------------------------------------------

    def forget(self) -> None:
        """Drop the unfinished episodes: the next ``run`` must come after a ``reset``."""
        self.has_episodes = False

    def reset(self) -> None:
        """Reset all environments and begin an episode in each."""
        num_envs = self.num_envs
        self._episodes = [self._new_episode(index) for index in range(num_envs)]
        self._prev_chunks: list[list[MultiAgentEpisode]] = [[] for _ in range(num_envs)]
        self._totals = [EpisodeTotals() for _ in range(num_envs)]
        start_s = time.perf_counter()
        observations, infos = self.runner.env.reset(seed=self.runner.take_reset_seed())
        self.runner.timers.add(ENV_RESET_TIMER, time.perf_counter() - start_s)
        for index, episode in enumerate(self._episodes):
            own_infos = checked_infos(infos[index], f"episode {episode.id_}, env step 0")
            episode.add_env_reset(observations=_copied(observations[index]), infos=own_infos)
        self._check(observations)
        self._acting = list(self._episodes)
        self._to_module: dict[str, Any] | None = None
        self._templates: dict[str, dict[str, Any]] = {}  # module id -> output -> zeros of one item
        self._starting = set(range(num_envs))
        self.has_episodes = True

    def _new_episode(self, index: int) -> MultiAgentEpisode:
        runner = self.runner
        episode = MultiAgentEpisode(
            runner.new_episode_id(),
            agent_to_module_mapping_fn=runner.mapping_fn,
            observation_space=runner.env.single_observation_spaces,
            action_space=runner.env.single_action_spaces,
        )
        self._call("on_episode_created", episode, index)
        return episode

    def _call(self, hook: str, episode: MultiAgentEpisode, index: int, **more: Any) -> None:
        runner = self.runner
        if runner.callbacks.has(hook):
            runner.callbacks.call(
                hook,
                episode=episode,
                env_runner=runner,
                metrics_logger=runner.metrics,
                env=runner.env,
                env_index=index,
                rl_module=runner.module,
                **more,
            )

    def get_state(self) -> dict[str, Any]:
        """Return the state that the next fragment needs, as plain values and arrays.

        Raises:
            NotPlainError: Something cannot be expressed as plain data.
        """
        return {
            "kind": "agents' episodes",
            "lookback": self.lookback,
            "episodes": [plain_state(episode) for episode in self._episodes],
            # An env that is about to be reset still acts as the episode that ended.
            "acting": [
                None if acting is episode else plain_state(acting)
                for acting, episode in zip(self._acting, self._episodes, strict=True)
            ],
            "prev_chunks": [[plain_state(chunk) for chunk in chunks] for chunks in self._prev_chunks],
            "totals": [totals.get_state() for totals in self._totals],
            "starting": sorted(self._starting),
            "templates": encode(self._templates, "model outputs"),
            "to_module": encode(self._to_module, "the modules' batch"),
        }

    def set_state(self, state: Mapping[str, Any], lost: Collection[int]) -> None:
        """Continue from what `get_state` returned; see `rlzmq.runners.single.fused_sampler.FusedSampler.set_state`."""
        check_sampler(self, state, "agents' episodes", len(state["episodes"]))
        mapping_fn = self.runner.mapping_fn
        self._episodes = [_episode(episode, mapping_fn) for episode in state["episodes"]]
        self._acting = [
            episode if acting is None else _episode(acting, mapping_fn)
            for episode, acting in zip(self._episodes, state["acting"], strict=True)
        ]
        self._prev_chunks = [
            [_episode(chunk, mapping_fn) for chunk in chunks] for chunks in state["prev_chunks"]
        ]
        self._totals = [EpisodeTotals.from_state(totals) for totals in state["totals"]]
        self._starting = set(state["starting"])
        self._templates = decode(state["templates"])
        self._to_module = decode(state["to_module"])
        for index in lost:
            self._begin_episode(index)
        self.has_episodes = True

    # -- one fragment --------------------------------------------------------------------------

    def run(self, request: SampleRequest) -> tuple[MultiAgentEpisodeBatch, MultiAgentFinished, int]:
        """Sample what ``request`` asks for, continuing the ongoing episodes.

        Returns:
            The chunks; statistics of the ended episodes; the number of vector steps made.
        """
        runner = self.runner
        self._request = request
        self._finished = MultiAgentFinished()
        self._done: list[tuple[int, MultiAgentEpisode]] = []
        if self._to_module is None:
            self._observe()
            for index in sorted(self._starting):
                self._call("on_episode_start", self._episodes[index], index)
        count = StepCount(request, runner.counts_agent_steps)
        while not count.is_fulfilled(len(self._done)):
            t = runner.global_env_steps + count.num_env_steps * max(runner.num_workers, 1)
            actions, actions_for_env, outputs = (
                self._random_actions() if request.random_actions else self._act(t)
            )
            step_s = time.perf_counter()
            result = runner.env.step(actions_for_env)
            runner.timers.add(ENV_STEP_TIMER, time.perf_counter() - step_s)
            self._add_step(result, actions, outputs, count)
            count.num_vector_steps += 1
            self._after_step()
        return self._collect(), self._finished, count.num_vector_steps

    def _act(
        self, t: int
    ) -> tuple[list[dict[Any, Any]], list[dict[Any, Any]], list[dict[Any, dict[str, Any]]]]:
        """Run modules and module-to-env pipeline; return, per env and agent: actions, env's actions, "
        "outputs."""
        runner = self.runner
        explore = self._request.explore
        if not self._to_module:  # no agent acts: all environments are at an episode's end
            nobody: list[dict[Any, Any]] = [{} for _ in range(self.num_envs)]
            return nobody, nobody, nobody
        start_s = time.perf_counter()
        outputs = runner.forward(self._to_module, explore, t)
        acted_s = time.perf_counter()
        columns = runner.module_to_env(
            rl_module=runner.module,
            batch=dict(outputs),
            episodes=self._acting,
            explore=explore,
            shared_data=runner.shared_data,
            metrics=runner.metrics,
        )
        runner.timers.add(INFERENCE_TIMER, acted_s - start_s)
        runner.timers.add(MODULE_TO_ENV_TIMER, time.perf_counter() - acted_s)
        if Columns.ACTIONS not in columns:
            raise ValueError(
                f"The module-to-env pipeline returned no 'actions', only {sorted(columns)}. Each piece must "
                "return the batch with the columns it does not own left in."
            )
        for name, per_env in columns.items():
            if not isinstance(per_env, list) or len(per_env) != self.num_envs:
                raise ValueError(
                    f"Column {name!r} after the module-to-env pipeline: expected a list of "
                    f"{self.num_envs} dicts by "
                    f"agent id, one per environment, got {type(per_env).__name__} of {len(per_env)}."
                )
        actions = columns[Columns.ACTIONS]
        extras: list[dict[Any, dict[str, Any]]] = []
        names = [name for name in columns if name not in _NOT_EXTRA]
        for index, by_agent in enumerate(actions):
            per_agent = {}
            for agent_id in by_agent:
                own = {
                    name: columns[name][index][agent_id] for name in names if agent_id in columns[name][index]
                }
                self._remember(index, agent_id, own)
                own[WEIGHTS_SEQ_NO] = runner.weights_seq_no
                per_agent[agent_id] = own
            extras.append(per_agent)
        return actions, columns.get(Columns.ACTIONS_FOR_ENV, actions), extras

    def _remember(self, index: int, agent_id: Any, outputs: dict[str, Any]) -> None:
        """Store zeros with the structure of a module's outputs, for steps in which it does not act."""
        episode = self._acting[index]
        templates = self._templates.setdefault(episode.module_for(agent_id), {})
        if templates.keys() != outputs.keys():
            for name, value in outputs.items():
                templates.setdefault(name, tree_map(np.zeros_like, value))
        track = episode._timeline.tracks[agent_id]
        if track.output_keys is not None and not outputs.keys() <= track.output_keys:
            self._begin_outputs(episode, agent_id, outputs)

    def _begin_outputs(self, episode: MultiAgentEpisode, agent_id: Any, outputs: dict[str, Any]) -> None:
        """Fill outputs that begin in mid-episode, after random actions, with zeros before."""
        track, sae = episode._timeline.tracks[agent_id], episode.agent_episodes[agent_id]
        new = [name for name in outputs if name not in (track.output_keys or ())]
        num_before = sae.rewards.len_incl_lookback()
        zeros = {name: tree_map(np.zeros_like, outputs[name]) for name in new}
        if Columns.STATE_OUT in zeros:  # random actions have left the state as it was
            zeros[Columns.STATE_OUT] = self._state_now(sae)
        for name in new if num_before else ():
            buffer = InfiniteLookbackBuffer([zeros[name]] * num_before, sae.rewards.lookback)
            sae.extra_model_outputs[name] = buffer
        if track.pending is not None:
            track.pending = Pending(track.pending.action, {**track.pending.extra_model_outputs, **zeros})
        track.output_keys = (track.output_keys or frozenset()) | frozenset(new)

    def _complete_outputs(self) -> None:
        """Add zero outputs for agents whose module first acted for others in this fragment."""
        for episode in {id(e): e for e in (*(e for _, e in self._done), *self._episodes)}.values():
            for agent_id, track in episode._timeline.tracks.items():
                outputs = self._templates.get(episode.module_for(agent_id))
                if outputs and track.output_keys is not None and not outputs.keys() <= track.output_keys:
                    self._begin_outputs(episode, agent_id, outputs)

    def _random_actions(
        self,
    ) -> tuple[list[dict[Any, Any]], list[dict[Any, Any]], list[dict[Any, dict[str, Any]]]]:
        """Sample actions; outputs that the modules returned before are zeros, their states do not change."""
        spaces = self.runner.env.single_action_spaces
        actions: list[dict[Any, Any]] = []
        extras: list[dict[Any, dict[str, Any]]] = []
        for episode in self._episodes:
            to_act = episode.get_agents_to_act()
            by_agent = {
                agent_id: spaces[agent_id].sample()
                for agent_id in episode.agent_episodes
                if agent_id in to_act
            }
            outputs = {}
            for agent_id in by_agent:
                sae = episode.agent_episodes[agent_id]
                own = dict(self._templates.get(str(sae.module_id), {}))
                if Columns.STATE_OUT in own:
                    own[Columns.STATE_OUT] = self._state_now(sae)
                track = episode._timeline.tracks[agent_id]
                if track.output_keys is not None and not own.keys() <= track.output_keys:
                    self._begin_outputs(episode, agent_id, own)
                own[WEIGHTS_SEQ_NO] = self.runner.weights_seq_no
                outputs[agent_id] = own
            actions.append(by_agent)
            extras.append(outputs)
        return actions, actions, extras

    def _state_now(self, sae: Any) -> Any:
        """Return the module's state at an agent's last observation."""
        state_out = sae.extra_model_outputs.get(Columns.STATE_OUT)
        if state_out is not None and state_out.len_incl_lookback():
            return state_out.get(-1)
        return self.runner.initial_state(sae.module_id) if sae.initial_state is None else sae.initial_state

    def _add_step(
        self,
        result: Any,
        actions: list[dict[Any, Any]],
        outputs: list[dict[Any, dict[str, Any]]],
        count: StepCount,
    ) -> None:
        """Append the env's results to each episode."""
        observations, rewards, terminateds, truncateds, infos = result
        env = self.runner.env
        self._starting = set()
        for index in env.failed:
            self._restart_failed(index)
        for index, episode in enumerate(self._episodes):
            if env.resetting[index]:
                own_infos = checked_infos(infos[index], f"episode {episode.id_}, env step 0")
                episode.add_env_reset(observations=_copied(observations[index]), infos=own_infos)
                self._totals[index] = EpisodeTotals()
                self._starting.add(index)
                continue
            num_before = episode.agent_steps() if count.counts_agent_steps else 0
            where = f"episode {episode.id_}, env step {episode.env_t + 1}"
            episode.add_env_step(
                _copied(observations[index]),
                actions[index],
                checked_rewards(rewards[index], where),
                checked_infos(infos[index], where),
                terminateds=terminateds[index],
                truncateds=truncateds[index],
                extra_model_outputs=outputs[index],
            )
            env.needs_reset[index] |= episode.is_done
            count.num_env_steps += 1
            if count.counts_agent_steps:
                count.num_agent_steps += episode.agent_steps() - num_before
        self._check(observations)

    def _check(self, observations: list[dict[Any, Any]]) -> None:
        """Refuse observations, of each environment, that their agents' spaces forbid."""
        observed = [
            (episode.id_, episode.env_t, own)
            for episode, own in zip(self._episodes, observations, strict=True)
        ]
        check_agents_observations(observed, self.runner.env.single_observation_spaces.spaces)

    def _restart_failed(self, index: int) -> None:
        """Truncate the episode of env ``index``, which was recreated, before this step."""
        episode = self._episodes[index]
        if not episode.is_reset:
            return  # it failed at its reset: the episode has not begun yet
        if episode.env_t:
            episode.truncate()
            self._finish_episode(index, episode)
        self._begin_episode(index)

    def _begin_episode(self, index: int) -> None:
        self._episodes[index] = self._new_episode(index)
        self._prev_chunks[index] = []
        self._totals[index] = EpisodeTotals()

    def _after_step(self) -> None:
        """Run env-to-module pipeline and callbacks; begin the successors of ended episodes."""
        self._observe()
        for index, episode in enumerate(self._episodes):
            if self._has_step_hooks:
                hook = "on_episode_start" if index in self._starting else "on_episode_step"
                self._call(hook, episode, index)
            if episode.is_done:
                self.runner.forget_env_failures()
                self._finish_episode(index, episode)
                if self._request.num_episodes is not None and len(self._done) >= self._request.num_episodes:
                    break
                self._begin_episode(index)

    def _finish_episode(self, index: int, episode: MultiAgentEpisode) -> None:
        self._call("on_episode_end", episode, index, prev_episode_chunks=self._prev_chunks[index])
        self._add_totals(index, episode)
        self._finished.add(self._totals[index], episode.env_t)
        if len(episode):
            self._done.append((index, episode))

    def _add_totals(self, index: int, episode: MultiAgentEpisode) -> None:
        returns = {agent_id: sae.get_return() for agent_id, sae in episode.agent_episodes.items()}
        module_ids = {agent_id: str(sae.module_id) for agent_id, sae in episode.agent_episodes.items()}
        self._totals[index].add(returns, module_ids)

    def _observe(self) -> None:
        """Run the env-to-module pipeline over all episodes; the next actions are computed from its output."""
        runner = self.runner
        self._acting = list(self._episodes)
        timers = runner.timers
        timers.add_lengths("env_to_module_sum_episodes_length_in", self._acting)
        start_s = time.perf_counter()
        self._to_module = runner.env_to_module(
            rl_module=runner.module,
            batch={},
            episodes=self._acting,
            explore=self._request.explore,
            shared_data=runner.shared_data,
            metrics=runner.metrics,
        )
        timers.add(ENV_TO_MODULE_TIMER, time.perf_counter() - start_s)
        timers.add_lengths("env_to_module_sum_episodes_length_out", self._acting)

    # -- the result ----------------------------------------------------------------------------

    def _collect(self) -> MultiAgentEpisodeBatch:
        """Return finished episodes, then ongoing chunks; the episodes continue in new chunks."""
        request = self._request
        self._complete_outputs()
        if request.num_episodes is not None:
            chunks = self._done[: request.num_episodes]
            self.forget()
        else:
            ongoing = [(index, episode) for index, episode in enumerate(self._episodes) if len(episode)]
            chunks = self._done + ongoing
            for index, episode in ongoing:
                self._add_totals(index, episode)
                back = episode._timeline.env_steps_back(self.runner.env_to_module.required_lookback)
                self._episodes[index] = chunk = episode.cut(max(self.lookback, back))
                if self.runner.callbacks.has("on_episode_end"):
                    self._prev_chunks[index].append(episode)
                self._acting = [chunk if acting is episode else acting for acting in self._acting]
        for _, episode in chunks:
            episode.prune()
            for sae in episode.agent_episodes.values():
                self._give_state(sae)
        batch = MultiAgentEpisodeBatch.from_episodes([episode for _, episode in chunks])
        batch.env_index = np.array([index for index, _ in chunks], np.int64)
        return batch

    def _give_state(self, sae: Any) -> None:
        """The module's state before the chunk's first step, where the chunk does not know it."""
        module = self.runner.multi_rl_module[sae.module_id]
        if sae.initial_state is None and module.is_stateful():
            state_out = sae.extra_model_outputs.get(Columns.STATE_OUT)
            if state_out is not None and state_out.lookback:
                sae.initial_state = state_out.get(-1, neg_index_as_lookback=True)
            else:
                sae.initial_state = self.runner.initial_state(sae.module_id)


def _copied(observations: dict[Any, Any]) -> dict[Any, Any]:
    """Return copies of the observations: an env may overwrite its arrays in the next step."""
    return {agent_id: tree_map(_own, observation) for agent_id, observation in observations.items()}


def _own(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _episode(state: Mapping[str, Any], mapping_fn: Any) -> MultiAgentEpisode:
    episode = MultiAgentEpisode.from_state(dict(state))
    episode.agent_to_module_mapping_fn = mapping_fn
    return episode
