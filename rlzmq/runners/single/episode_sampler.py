"""EpisodeSampler: the sampling loop with one real SingleAgentEpisode per environment.

Used when a connector piece or a callback wants single episodes. Per vector step: module-to-env pipeline ->
env step -> each episode grows -> env-to-module pipeline over all episodes -> callbacks. Its results are
those of the FusedSampler, number by number.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlzmq.connectors.common import (
    AddObservationsFromEpisodesToBatch,
    AddStatesFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
    BatchIndividualItems,
    NumpyToTensor,
)
from rlzmq.core.stage_timers import (
    ENV_STEP_TIMER,
    ENV_TO_MODULE_TIMER,
    INFERENCE_TIMER,
    MODULE_TO_ENV_TIMER,
)
from rlzmq.core.tree import tree_map, tree_stack, tree_unstack
from rlzmq.core.typed_values import decode, encode
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.episode_state import plain_state
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.runners.module_step import to_numpy
from rlzmq.runners.sampler_state import by_env, check_sampler, keep_actions
from rlzmq.runners.single.fused_sampler import WEIGHTS_SEQ_NO
from rlzmq.runners.single.ongoing_episodes import FinishedEpisodes

if TYPE_CHECKING:
    from rlzmq.connectors.pipelines import EnvToModulePipeline
    from rlzmq.runners.request import SampleRequest
    from rlzmq.runners.single.vector_env_runner import VectorEnvRunner

__all__ = ["EpisodeSampler"]

# Actions and what they led to are stored by themselves; all other outputs are extra model outputs.
_NOT_EXTRA = frozenset({Columns.ACTIONS, Columns.ACTIONS_FOR_ENV})

_DEFAULT_PIECES = [
    AddObservationsFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
    AddStatesFromEpisodesToBatch,
    BatchIndividualItems,
    NumpyToTensor,
]


class EpisodeSampler:
    """Samples for a runner with per-episode connector pieces or callbacks.

    Args:
        runner: Provides env stepper, module, pipelines, callbacks and counters.
    """

    def __init__(self, runner: VectorEnvRunner) -> None:
        self.runner = runner
        self.num_envs = runner.num_envs
        self.lookback = max(runner.config.episode_lookback_horizon, runner.env_to_module.required_lookback)
        self.has_episodes = False
        callbacks = runner.callbacks
        self._has_step_hooks = callbacks.has("on_episode_step") or callbacks.has("on_episode_start")
        # Where only the user's env-to-module pieces need episodes, the default ones after them and the
        # module-to-env pieces still run on whole columns.
        plan = runner.module_to_env.columnar_plan()
        self._num_user_pieces = _num_user_pieces(runner.env_to_module) if plan is not None else None
        self._normalize = None if plan is None else plan.normalize

    # -- between fragments ---------------------------------------------------------------------

    def forget(self) -> None:
        """Drop the unfinished episodes: the next ``run`` must come after a ``reset``."""
        self.has_episodes = False

    def reset(self) -> None:
        """Reset all environments and begin an episode in each."""
        num_envs = self.num_envs
        self._episodes = [self._new_episode(index) for index in range(num_envs)]
        self._prev_chunks: list[list[SingleAgentEpisode]] = [[] for _ in range(num_envs)]
        self._chunk_states: list[Any] = [None] * num_envs
        self._returns = [0.0] * num_envs
        self._started_s = [time.perf_counter()] * num_envs
        observations, infos = self.runner.stepper.reset(self.runner.take_reset_seed())
        for index, observation in enumerate(self._items(observations)):
            self._episodes[index].add_env_reset(observation, infos.get(index, {}))
        self._needs_reset = np.zeros(num_envs, np.bool_)
        self._acting = list(self._episodes)
        self._to_module: dict[str, Any] | None = None
        self._module_observations: Any = None
        self._extra_names: tuple[str, ...] = ()
        self._last_extras: dict[str, Any] = {}
        self._starting = set(range(num_envs))
        self.has_episodes = True

    def _new_episode(self, index: int) -> SingleAgentEpisode:
        runner = self.runner
        episode = SingleAgentEpisode(
            id_=runner.new_episode_id(),
            observation_space=runner.env.single_observation_space,
            action_space=runner.env.single_action_space,
        )
        self._call("on_episode_created", episode, index)
        return episode

    def _call(self, hook: str, episode: SingleAgentEpisode, index: int, **more: Any) -> None:
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
        now = time.perf_counter()
        same = [a is b for a, b in zip(self._acting, self._episodes, strict=True)]
        return {
            "kind": "episodes",
            "lookback": self.lookback,
            "episodes": [plain_state(episode) for episode in self._episodes],
            # An env that is about to be reset still acts on the last observation of the episode that ended.
            "acting": [
                None if is_same else plain_state(episode)
                for episode, is_same in zip(self._acting, same, strict=True)
            ],
            "prev_chunks": [[plain_state(chunk) for chunk in chunks] for chunks in self._prev_chunks],
            "chunk_states": encode(self._chunk_states, "the modules' states"),
            "returns": list(self._returns),
            "ages_s": [now - start for start in self._started_s],
            "needs_reset": self._needs_reset.copy(),
            "starting": sorted(self._starting),
            "extra_names": list(self._extra_names),
            "last_extras": encode(self._last_extras, "model outputs"),
            "to_module": encode(self._to_module, "the module's batch"),
            "module_observations": encode(self._module_observations, "observations"),
        }

    def set_state(self, state: Mapping[str, Any], lost: Collection[int]) -> None:
        """Continue from what `get_state` returned; see `FusedSampler.set_state`."""
        check_sampler(self, state, "episodes", len(state["episodes"]))
        now = time.perf_counter()
        self._episodes = [SingleAgentEpisode.from_state(episode) for episode in state["episodes"]]
        self._acting = [
            episode if acting is None else SingleAgentEpisode.from_state(acting)
            for episode, acting in zip(self._episodes, state["acting"], strict=True)
        ]
        self._prev_chunks = [
            [SingleAgentEpisode.from_state(chunk) for chunk in chunks] for chunks in state["prev_chunks"]
        ]
        self._chunk_states = decode(state["chunk_states"])
        self._returns = [float(value) for value in state["returns"]]
        self._started_s = [now - age for age in state["ages_s"]]
        self._needs_reset = np.array(state["needs_reset"], np.bool_)
        self._starting = set(state["starting"])
        self._extra_names = tuple(state["extra_names"])
        self._last_extras = decode(state["last_extras"])
        self._to_module = decode(state["to_module"])
        self._module_observations = decode(state["module_observations"])
        for index in lost:
            self._needs_reset[index] = True
            self._begin_anew(index)
        self.has_episodes = True

    # -- one fragment --------------------------------------------------------------------------

    def run(self, request: SampleRequest) -> tuple[EpisodeBatch, FinishedEpisodes, int]:
        """Sample what ``request`` asks for, continuing the ongoing episodes.

        Returns:
            The chunks; statistics of the ended episodes; the number of vector steps made.
        """
        runner, num_envs = self.runner, self.num_envs
        self._request = request
        self._finished = FinishedEpisodes()
        # (vector step, env, return, length, duration in s, its last chunk) of the episodes that ended
        self._ended: list[tuple[int, int, float, int, float, SingleAgentEpisode]] = []
        self._num_done = self._step = 0
        module_step = runner.module_step
        module_step.begin(explore=request.explore)
        if self._to_module is None and self._module_observations is None:
            self._observe()
            for index in sorted(self._starting):
                self._call("on_episode_start", self._episodes[index], index)
        num_env_steps = 0
        self._actions_for_env: list[Any] = []
        while request.num_more_vector_steps(self._step, num_env_steps, self._num_done, num_envs, 1):
            t = runner.global_env_steps + num_env_steps * max(runner.num_workers, 1)
            actions, actions_for_env, extras = (
                self._random_actions() if request.random_actions else self._act(t)
            )
            self._actions_for_env.append(actions_for_env)
            step_s = time.perf_counter()
            result = runner.stepper.source.step_sparse(actions_for_env)
            runner.timers.add(ENV_STEP_TIMER, time.perf_counter() - step_s)
            num_env_steps += self._add_step(result, actions, extras)
            self._after_step()
            self._step += 1
        return self._collect(), self._finished, self._step

    def _act(self, t: int) -> tuple[list[Any], Any, list[dict[str, Any]]]:
        """Run the module once; return, per env, actions and extra outputs, and the vector env's actions."""
        runner = self.runner
        start_s = time.perf_counter()
        if self._to_module is None:
            outputs, _ = runner.module_step(self._module_observations, self._states(), t)
            acted_s = time.perf_counter()
            columns = {name: tree_unstack(values) for name, values in outputs.items()}
            for_env = outputs.get(Columns.ACTIONS_FOR_ENV, outputs[Columns.ACTIONS])
            if Columns.ACTIONS_FOR_ENV not in outputs and self._normalize is not None:
                for_env = self._normalize.apply_vectorized(for_env)
        else:
            module_outputs = runner.module_step.forward(self._to_module, t)
            acted_s = time.perf_counter()
            columns = self._run_module_to_env(module_outputs)
            for_env = self._for_vector_env(columns.get(Columns.ACTIONS_FOR_ENV, columns[Columns.ACTIONS]))
        runner.timers.add(INFERENCE_TIMER, acted_s - start_s)
        runner.timers.add(MODULE_TO_ENV_TIMER, time.perf_counter() - acted_s)
        names = tuple(name for name in columns if name not in _NOT_EXTRA)
        version = runner.weights_seq_no
        rows = zip(*(columns[name] for name in names), strict=True) if names else [()] * self.num_envs
        extras = [{**dict(zip(names, row, strict=True)), WEIGHTS_SEQ_NO: version} for row in rows]
        if names != self._extra_names:
            self._begin_extras(names, extras)
        self._last_extras = columns
        return columns[Columns.ACTIONS], for_env, extras

    def _run_module_to_env(self, outputs: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Run the full module-to-env pipeline; return, per column, one item per env."""
        runner = self.runner
        to_env = runner.module_to_env(
            rl_module=runner.module,
            batch=dict(outputs),
            episodes=self._acting,
            explore=self._request.explore,
            shared_data=runner.shared_data,
            metrics=runner.metrics,
        )
        if Columns.ACTIONS not in to_env:
            raise ValueError(
                f"The module-to-env pipeline returned no 'actions', only {sorted(to_env)}. Each piece must "
                "return the batch with the columns it does not own left in."
            )
        return {name: self._per_env(name, values) for name, values in to_env.items()}

    def _states(self) -> Any:
        """Return the module's states of all envs, leaves ``[N, ...]`` tensors; None if stateless."""
        if not self.runner.module_step.is_stateful:
            return None
        states = [self._state_now(index, episode) for index, episode in enumerate(self._acting)]
        return tree_map(torch.from_numpy, tree_stack(states))

    def _per_env(self, name: str, values: Any) -> list[Any]:
        """Return one item per env, from a list or a batched tree."""
        items = values if isinstance(values, list) else tree_unstack(tree_map(to_numpy, values))
        if len(items) != self.num_envs:
            raise ValueError(
                f"Column {name!r} after the module-to-env pipeline has {len(items)} items, expected one for "
                f"each of the {self.num_envs} environments, in their order."
            )
        return items

    def _for_vector_env(self, actions: list[Any]) -> Any:
        batched = tree_stack(actions)
        space = self.runner.env.single_action_space
        if (
            isinstance(batched, np.ndarray)
            and space.dtype is not None
            and batched.dtype.kind != space.dtype.kind
        ):
            return batched.astype(space.dtype)
        return batched

    def _random_actions(self) -> tuple[list[Any], Any, list[dict[str, Any]]]:
        """Sample actions; the module's outputs of earlier steps are zeros, its state does not change."""
        actions = self.runner.sample_random_actions()
        extras = []
        for index, episode in enumerate(self._episodes):
            row: dict[str, Any] = {}
            for name in self._extra_names:
                if name == Columns.STATE_OUT:
                    row[name] = self._state_now(index, episode)
                else:
                    row[name] = tree_map(lambda leaf: np.zeros_like(leaf), self._last_extras[name][index])
            row[WEIGHTS_SEQ_NO] = self.runner.weights_seq_no
            extras.append(row)
        return tree_unstack(tree_map(np.copy, actions)), actions, extras

    def _begin_extras(self, names: tuple[str, ...], extras: list[dict[str, Any]]) -> None:
        """Fill columns that begin in mid-episode (after random actions) with zeros before."""
        new = [name for name in names if name not in self._extra_names]
        for episode, row in zip(self._episodes, extras, strict=True):
            num_before = episode.rewards.len_incl_lookback()
            if not num_before:
                continue
            for name in new:
                if name in episode.extra_model_outputs:
                    continue
                if len(episode):
                    raise ValueError(
                        f"Episode {episode.id_!r}: the extra model output {name!r} came at step "
                        f"{len(episode)} of a chunk; each output must be there at every step or never."
                    )
                zeros = tree_map(np.zeros_like, row[name])
                episode.extra_model_outputs[name] = InfiniteLookbackBuffer(
                    [zeros] * num_before, episode.rewards.lookback
                )
        self._extra_names = tuple(dict.fromkeys((*self._extra_names, *names)))

    def _add_step(self, result: Any, actions: list[Any], extras: list[dict[str, Any]]) -> int:
        """Append the env's results to each episode; return the number of env steps."""
        observations, rewards, terminated, truncated, infos = result
        items = self._items(observations)
        self._stepped = ~self._needs_reset
        for index in self.runner.stepper.source.failed:
            self._restart_failed(index)
        reward_list = np.asarray(rewards, np.float64).tolist()
        terminated_list, truncated_list = terminated.tolist(), truncated.tolist()
        self._starting = set()
        returns, no_info = self._returns, not infos
        for index, (episode, stepped) in enumerate(zip(self._episodes, self._stepped.tolist(), strict=True)):
            info = {} if no_info else infos.get(index, {})
            if not stepped:
                episode.add_env_reset(items[index], info)
                self._starting.add(index)
                returns[index] = 0.0
                self._started_s[index] = time.perf_counter()
                continue
            reward = reward_list[index]
            episode.add_env_step(
                items[index],
                actions[index],
                reward,
                info,
                terminated=terminated_list[index],
                truncated=truncated_list[index],
                extra_model_outputs=extras[index],
            )
            returns[index] += reward
        self._needs_reset = np.asarray(terminated | truncated)
        return int(np.count_nonzero(self._stepped))

    def _restart_failed(self, index: int) -> None:
        """Truncate the episode of env ``index``, which was recreated, before this step."""
        episode = self._episodes[index]
        self._stepped[index] = False
        if not episode.is_reset:
            return
        if episode.t:
            episode.is_truncated = True
            self._finish_episode(index, episode, self._step - 1)
        self._begin_anew(index)

    def _begin_anew(self, index: int) -> None:
        """Continue env ``index`` with a new episode, which its reset will begin."""
        self._episodes[index] = self._new_episode(index)
        self._prev_chunks[index] = []
        self._chunk_states[index] = None

    def _after_step(self) -> None:
        """Run env-to-module pipeline and callbacks; begin the successors of ended episodes."""
        self._observe()
        if not self._has_step_hooks and not self._needs_reset.any():
            return
        for index, episode in enumerate(self._episodes):
            if self._has_step_hooks:
                hook = "on_episode_start" if index in self._starting else "on_episode_step"
                self._call(hook, episode, index)
            if episode.is_done:
                self.runner.forget_env_failures()
                self._finish_episode(index, episode, self._step)
                if self._request.num_episodes is not None and self._num_done >= self._request.num_episodes:
                    break
                self._begin_anew(index)

    def _finish_episode(self, index: int, episode: SingleAgentEpisode, last_step: int) -> None:
        self._call("on_episode_end", episode, index, prev_episode_chunks=self._prev_chunks[index])
        duration_s = time.perf_counter() - self._started_s[index]
        self._ended.append((last_step, index, self._returns[index], episode.t, duration_s, episode))
        if len(episode):
            self._give_state(index, episode)
            self._num_done += 1

    def _observe(self) -> None:
        """Run the env-to-module pipeline over all episodes; the next actions are computed from its output."""
        runner = self.runner
        pipeline, timers = runner.env_to_module, runner.timers
        self._acting = list(self._episodes)
        timers.add_lengths("env_to_module_sum_episodes_length_in", self._acting)
        start_s = time.perf_counter()
        self._run_env_to_module(pipeline)
        timers.add(ENV_TO_MODULE_TIMER, time.perf_counter() - start_s)
        timers.add_lengths("env_to_module_sum_episodes_length_out", self._acting)

    def _run_env_to_module(self, pipeline: EnvToModulePipeline) -> None:
        runner = self.runner
        arguments = {
            "rl_module": runner.module,
            "episodes": self._acting,
            "explore": self._request.explore,
            "shared_data": runner.shared_data,
            "metrics": runner.metrics,
        }
        first_default = self._num_user_pieces
        if first_default is None:
            self._to_module = pipeline(batch={}, **arguments)
            return
        batch = pipeline.run_pieces(0, first_default, batch={}, **arguments)
        if batch:  # a piece added columns: the default pieces do the rest
            self._to_module = pipeline.run_pieces(
                first_default, len(pipeline.connectors), batch=batch, **arguments
            )
        else:
            self._to_module = None
            self._module_observations = tree_stack([episode.observations.get(-1) for episode in self._acting])

    def actions_so_far(self) -> tuple[Any, int, Any] | None:
        """As FusedSampler's."""
        actions = self._actions_for_env
        return (by_env(actions), len(actions), None) if actions else None

    # -- the result ----------------------------------------------------------------------------

    def _collect(self) -> EpisodeBatch:
        """Return finished episodes, then ongoing chunks; the episodes continue in new chunks."""
        request, finished = self._request, self._finished
        self._ended.sort(key=lambda entry: entry[:2])  # a failure shows one step late
        if request.num_episodes is not None:
            del self._ended[request.num_episodes :]
        for _, _, episode_return, length, duration_s, _ in self._ended:
            finished.returns.append(episode_return)
            finished.lengths.append(length)
            finished.durations_s.append(duration_s)
        chunks = [(index, episode) for _, index, _, _, _, episode in self._ended if len(episode)]
        if request.num_episodes is not None:
            self.forget()
        else:
            if self._actions_for_env:
                keep_actions(self.runner.env, by_env(self._actions_for_env), len(self._actions_for_env))
            ongoing = [(index, episode) for index, episode in enumerate(self._episodes) if len(episode)]
            for index, episode in ongoing:
                self._give_state(index, episode)
            chunks += ongoing
            for index, episode in ongoing:
                self._episodes[index] = chunk = episode.cut(self.lookback)
                self._chunk_states[index] = self._state_now(index, episode)
                if self.runner.callbacks.has("on_episode_end"):
                    self._prev_chunks[index].append(episode)
                self._acting = [chunk if acting is episode else acting for acting in self._acting]
        batch = EpisodeBatch.from_episodes([episode for _, episode in chunks])
        batch.env_index = np.array([index for index, _ in chunks], np.int64)
        if not chunks:
            batch.observation_space = self.runner.env.single_observation_space
            batch.action_space = self.runner.env.single_action_space
        return batch

    def _give_state(self, index: int, episode: SingleAgentEpisode) -> None:
        if self.runner.module_step.is_stateful and episode.initial_state is None:
            state = self._chunk_states[index]
            episode.initial_state = self.runner.module_step.initial_row_numpy if state is None else state

    def _state_now(self, index: int, episode: SingleAgentEpisode) -> Any:
        """Return the module's state at the episode's last observation; None if stateless."""
        if not self.runner.module_step.is_stateful:
            return None
        state_out = episode.extra_model_outputs.get(Columns.STATE_OUT)
        if state_out is not None and len(state_out):
            return state_out.get(-1)
        state = self._chunk_states[index]
        return self.runner.module_step.initial_row_numpy if state is None else state

    def _items(self, observations: Any) -> list[Any]:
        """Return one observation per env, as copies, since the env reuses its buffers."""
        items: list[Any] = tree_unstack(tree_map(np.copy, observations))
        return items


def _num_user_pieces(pipeline: EnvToModulePipeline) -> int | None:
    """Return how many pieces come before the default ones; None if all must run, e.g. since they are timed."""
    if pipeline.time_pieces or pipeline.after_piece is not None:
        return None
    types = [type(piece) for piece in pipeline.connectors]
    num = len(types) - len(_DEFAULT_PIECES)
    return num if num >= 0 and types[num:] == _DEFAULT_PIECES else None
