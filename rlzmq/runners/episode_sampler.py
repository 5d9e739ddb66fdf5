"""EpisodeSampler: the sampling loop with one real episode per environment.

Used when a connector piece or a callback needs episodes. Per vector step: modules -> module-to-env pipeline -> env step
-> each episode grows -> env-to-module pipeline over all episodes -> callbacks. Its results are identical to those of
the samplers on rows. Subclasses implement the differences between single- and multi-agent episodes.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlzmq.core.timers import ENV_TO_MODULE_TIMER, INFERENCE_TIMER, MODULE_TO_ENV_TIMER
from rlzmq.core.tree import tree_map, tree_stack, tree_unstack
from rlzmq.episodes.columns import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID, Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.runners.episode_metrics import recorded_return
from rlzmq.runners.module_step import ModuleStep, to_numpy
from rlzmq.runners.sampler import WEIGHTS_SEQ_NO, EpisodicSampler
from rlzmq.runners.vector_io import VectorStepper

if TYPE_CHECKING:
    from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
    from rlzmq.runners.env_runner import EnvRunner

__all__ = ["ACTION_COLUMNS", "EpisodeSampler", "SingleAgentEpisodeSampler", "fill_outputs"]

ACTION_COLUMNS = (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV)
"""Columns of a module's outputs that are not extra model outputs."""


class EpisodeSampler(EpisodicSampler):
    """Samples for a runner with per-episode connector pieces or callbacks.

    Args:
        runner: Provides env, modules, pipelines, callbacks and counters.
        lookback: Number of steps before each chunk that its columns include.
    """

    def __init__(self, runner: EnvRunner, lookback: int) -> None:
        super().__init__(runner, lookback)
        self._to_module: dict[str, Any] | None = None  # the modules' next inputs; None: not computed yet

    # -- defined by subclasses -----------------------------------------------------------------

    @abc.abstractmethod
    def _make_episode(self) -> Any:
        """Return a new episode."""

    @abc.abstractmethod
    def _initial_state(self, module_id: object) -> Any:
        """Return a module's state at an episode's start, leaves without batch dimension; None if stateless."""

    @abc.abstractmethod
    def _cut(self, episode: Any) -> Any:
        """Return the next chunk of an ongoing episode."""

    @abc.abstractmethod
    def _make_batch(self, episodes: list[Any]) -> Any:
        """Return a batch of chunks, with the modules' states before them (see `_give_state`)."""

    # -- between fragments ---------------------------------------------------------------------

    def reset(self) -> None:
        self._prev_chunks: list[list[Any]] = [[] for _ in range(self.num_envs)]
        super().reset()
        self._acting = list(self._episodes)
        self._to_module = None
        self._templates: dict[Any, dict[str, Any]] = {}  # module id -> output -> zeros of one item

    def _new_episode(self, index: int) -> Any:
        episode = self._make_episode()
        self._call("on_episode_created", episode, index)
        return episode

    # -- one fragment --------------------------------------------------------------------------

    def _begin_fragment(self) -> None:
        if not self._has_observed():
            self._observe()
            for index in sorted(self._starting):
                self._call("on_episode_start", self._episodes[index], index)

    def _has_observed(self) -> bool:
        return self._to_module is not None

    def _begin_episode(self, index: int) -> None:
        super()._begin_episode(index)
        self._prev_chunks[index] = []

    def _finish_episode(self, index: int, episode: Any, last_step: int) -> None:
        self._call("on_episode_end", episode, index, prev_episode_chunks=self._prev_chunks[index])
        super()._finish_episode(index, episode, last_step)

    def _observe(self) -> None:
        """Run the env-to-module pipeline over all episodes; the next actions are computed from its output."""
        timers = self.runner.timers
        self._acting = list(self._episodes)
        num_steps = self._num_steps_in(self._acting)  # no piece changes it
        timers.add("env_to_module_sum_episodes_length_in", num_steps)
        start_s = time.perf_counter()
        self._run_env_to_module()
        timers.add_stage(ENV_TO_MODULE_TIMER, start_s, time.perf_counter())
        timers.add("env_to_module_sum_episodes_length_out", num_steps)

    def _num_steps_in(self, episodes: list[Any]) -> int:
        """Return the env steps of all these chunks."""
        return sum(map(len, episodes))

    def _run_env_to_module(self) -> None:
        self._to_module = self.runner.env_to_module(batch={}, **self._pipeline_arguments())

    def _run_module_to_env(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        batch = self.runner.module_to_env(batch=dict(outputs), **self._pipeline_arguments())
        if Columns.ACTIONS not in batch:
            raise ValueError(
                f"The module-to-env pipeline returned no 'actions', only {sorted(batch)}. Each piece must "
                "return the batch with the columns it does not own left in."
            )
        return batch  # type: ignore[no-any-return]

    def _pipeline_arguments(self) -> dict[str, Any]:
        runner = self.runner
        return {
            "rl_module": runner.module,
            "episodes": self._acting,
            "explore": self._request.explore,
            "shared_data": runner.shared_data,
            "metrics": runner.metrics,
        }

    def _time_acting(self, start_s: float, acted_s: float) -> None:
        """Add the times of the modules (until `acted_s`) and of the module-to-env pipeline (until now)."""
        self.runner.timers.add_stage(INFERENCE_TIMER, start_s, acted_s)
        self.runner.timers.add_stage(MODULE_TO_ENV_TIMER, acted_s, time.perf_counter())

    # -- outputs and states of the modules -----------------------------------------------------

    def _outputs_of_random_actions(self, episode: SingleAgentEpisode, module_id: object) -> dict[str, Any]:
        """Return zeros in place of the outputs that the module gave before; its state does not change."""
        outputs = dict(self._templates.get(module_id, {}))
        if Columns.STATE_OUT in outputs:
            outputs[Columns.STATE_OUT] = self._state_now(episode)
        return outputs

    def _state_now(self, episode: SingleAgentEpisode) -> Any:
        """Return the module's state at an agent's last observation; None if it is stateless."""
        state_out = episode.extra_model_outputs.get(Columns.STATE_OUT)
        if state_out is not None and len(state_out):
            return state_out.get(-1)
        if episode.initial_state is not None:
            return episode.initial_state
        return self._initial_state(episode.module_id)

    def _give_state(self, episode: SingleAgentEpisode) -> None:
        """Set the module's state before the chunk's first step, if the chunk lacks it."""
        if episode.initial_state is None:
            episode.initial_state = self._initial_state(episode.module_id)

    # -- the result ----------------------------------------------------------------------------

    def _batch(self, chunks: list[tuple[int, Any]], ongoing: list[tuple[int, Any]]) -> Any:
        for index, episode in ongoing:
            self._episodes[index] = chunk = self._cut(episode)
            if "on_episode_end" in self.runner.callbacks.hooks:
                self._prev_chunks[index].append(episode)
            self._acting = [chunk if acting is episode else acting for acting in self._acting]
        batch = self._make_batch([episode for _, episode in chunks + ongoing])
        batch.env_index = np.array([index for index, _ in chunks + ongoing], np.int64)
        return batch


def fill_outputs(episode: SingleAgentEpisode, zeros: Mapping[str, Any], names: Iterable[str]) -> None:
    """Add model outputs that begin in mid-episode, after random actions; fill the earlier steps with `zeros`."""
    num_before = episode.rewards.len_incl_lookback()
    for name in names if num_before else ():
        episode.extra_model_outputs[name] = InfiniteLookbackBuffer(
            [zeros[name]] * num_before, episode.rewards.lookback
        )


class SingleAgentEpisodeSampler(EpisodeSampler):
    """An EpisodeSampler for one agent and one module in a vector env.

    If only the user's env-to-module pieces need episodes, the default pieces after them and the module-to-env pieces
    still run on whole columns.

    Attributes:
        stepper: Steps the vector env.
    """

    def __init__(self, runner: EnvRunner) -> None:
        pipeline, module_to_env = runner.env_to_module, runner.module_to_env
        super().__init__(runner, max(runner.config.episode_lookback_horizon, pipeline.required_lookback))
        self.stepper: VectorStepper = VectorStepper(runner)
        self._module_step = ModuleStep(runner.module, runner.generator)
        self._num_user_pieces = pipeline.num_own_pieces if module_to_env.on_rows else None
        self._normalize = module_to_env.normalize
        self._module_observations: Any = None  # the module's next inputs, if the default pieces do not run

    @property
    def env(self) -> Any:
        return self.stepper.env

    # -- episodes and the vector env -----------------------------------------------------------

    def reset(self) -> None:
        super().reset()
        self._module_observations = None

    def _make_episode(self) -> SingleAgentEpisode:
        return SingleAgentEpisode(
            id_=self.runner.new_episode_id(),
            observation_space=self.env.single_observation_space,
            action_space=self.env.single_action_space,
        )

    def _reset_envs(self) -> tuple[Sequence[Any], Sequence[Any]]:
        observations, infos = self.stepper.reset(self.runner.take_reset_seed())
        return _items(observations), [infos.get(index, {}) for index in range(self.num_envs)]

    def _step_envs(self, actions: Any) -> Sequence[tuple[Any, ...]]:
        observations, rewards, terminated, truncated, infos = self.stepper.source.step_sparse(actions)
        columns = (
            _items(observations),
            np.asarray(rewards, np.float64).tolist(),
            terminated.tolist(),
            truncated.tolist(),
            [infos.get(index, {}) for index in range(self.num_envs)],
        )
        return list(zip(*columns, strict=True))

    def _failed(self) -> Sequence[int]:
        return self.stepper.source.failed  # type: ignore[no-any-return]

    def _begin(self, episode: SingleAgentEpisode, observation: Any, info: Any) -> None:
        episode.add_env_reset(observation, info)

    def _grow(self, index: int, episode: SingleAgentEpisode, act: Any, row: tuple[Any, ...]) -> int:
        observation, reward, terminated, truncated, info = row
        episode.add_env_step(
            observation,
            act[0],
            reward,
            info,
            terminated=terminated,
            truncated=truncated,
            extra_model_outputs=act[1],
        )
        if terminated or truncated:
            self._has_ended = True
        return 0

    def _length(self, episode: SingleAgentEpisode) -> int:
        return episode.t

    def _returns(self, episode: SingleAgentEpisode) -> tuple[Mapping[Any, float], Mapping[Any, str]]:
        return {DEFAULT_AGENT_ID: episode.get_return()}, {}

    def _finish_episode(self, index: int, episode: SingleAgentEpisode, last_step: int) -> None:
        super()._finish_episode(index, episode, last_step)
        if len(episode) and (recorded := recorded_return(episode.get_infos(-1))) is not None:
            self._totals[index].agent_returns[DEFAULT_AGENT_ID] = recorded

    def _truncate(self, episode: SingleAgentEpisode) -> None:
        episode.is_truncated = True

    # -- acting --------------------------------------------------------------------------------

    def _begin_fragment(self) -> None:
        self._names: list[str] = []  # outputs of the fragment's last step
        self._module_step.begin(explore=self._request.explore)
        super()._begin_fragment()

    def _has_observed(self) -> bool:
        return self._to_module is not None or self._module_observations is not None

    def _run_env_to_module(self) -> None:
        first_default = self._num_user_pieces
        if first_default is None:
            super()._run_env_to_module()
            return
        pipeline, arguments = self.runner.env_to_module, self._pipeline_arguments()
        batch = pipeline.run_pieces(0, first_default, batch={}, **arguments)
        if batch:  # a piece added columns, and the default pieces do the rest
            self._to_module = pipeline.run_pieces(
                first_default, len(pipeline.connectors), batch=batch, **arguments
            )
        else:
            self._to_module = None
            self._module_observations = tree_stack([episode.observations.get(-1) for episode in self._acting])

    def _act(self, t: int) -> tuple[Any, Sequence[Any]]:
        start_s = time.perf_counter()
        if self._to_module is None:
            outputs, _ = self._module_step(self._module_observations, self._states(), t)
            acted_s = time.perf_counter()
            columns = {name: tree_unstack(values) for name, values in outputs.items()}
            for_env = outputs.get(Columns.ACTIONS_FOR_ENV, outputs[Columns.ACTIONS])
            if Columns.ACTIONS_FOR_ENV not in outputs and self._normalize is not None:
                for_env = self._normalize.apply_vectorized(for_env)
        else:
            module_outputs = self._module_step.forward(self._to_module, t)
            acted_s = time.perf_counter()
            batch = self._run_module_to_env(module_outputs)
            columns = {name: self._per_env(name, values) for name, values in batch.items()}
            for_env = self._for_vector_env(columns.get(Columns.ACTIONS_FOR_ENV, columns[Columns.ACTIONS]))
        self._time_acting(start_s, acted_s)
        names = [name for name in columns if name not in ACTION_COLUMNS]
        versions = [self.runner.weights_seq_no] * self.num_envs
        rows = zip(*[columns[name] for name in names], versions, strict=True)
        keys = (*names, WEIGHTS_SEQ_NO)
        env_outputs = [dict(zip(keys, row)) for row in rows]  # noqa: B905  (a check would cost a tenth)
        if names != self._names:
            self._begin_outputs(names, env_outputs)
        return for_env, list(zip(columns[Columns.ACTIONS], env_outputs, strict=True))

    def _begin_outputs(self, names: list[str], outputs: list[dict[str, Any]]) -> None:
        """Fill outputs that begin in mid-episode, after random actions, with zeros for the earlier steps."""
        template = self._templates.setdefault(DEFAULT_MODULE_ID, {})
        zeros = {name: tree_map(np.zeros_like, outputs[0][name]) for name in names if name not in template}
        for episode in self._episodes:
            new = [name for name in zeros if name not in episode.extra_model_outputs]
            if new and len(episode):
                raise ValueError(
                    f"Episode {episode.id_!r}: the extra model output {new[0]!r} came at step "
                    f"{len(episode)} of a chunk; each output must be there at every step or never."
                )
            fill_outputs(episode, zeros, new)
        template.update(zeros)
        self._names = names

    def _random_actions(self) -> tuple[Any, Sequence[Any]]:
        actions = self.stepper.sample_random_actions()
        items = tree_unstack(tree_map(np.copy, actions))
        version = {WEIGHTS_SEQ_NO: self.runner.weights_seq_no}
        return actions, [
            (item, {**self._outputs_of_random_actions(episode, DEFAULT_MODULE_ID), **version})
            for item, episode in zip(items, self._episodes, strict=True)
        ]

    def _initial_state(self, module_id: object) -> Any:
        return self._module_step.initial_row_numpy if self._module_step.is_stateful else None

    def _states(self) -> Any:
        """Return the module's states of all envs, leaves ``[N, ...]`` tensors; None if stateless."""
        if not self._module_step.is_stateful:
            return None
        return tree_map(torch.from_numpy, tree_stack([self._state_now(episode) for episode in self._acting]))

    def _per_env(self, name: str, values: object) -> list[Any]:
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
        space = self.env.single_action_space
        if (
            isinstance(batched, np.ndarray)
            and space.dtype is not None
            and batched.dtype.kind != space.dtype.kind
        ):
            return batched.astype(space.dtype)
        return batched

    # -- the result ----------------------------------------------------------------------------

    def _num_steps_in(self, episodes: list[SingleAgentEpisode]) -> int:
        steps = [episode.t - episode.t_started for episode in episodes]
        return sum(steps)

    def _cut(self, episode: SingleAgentEpisode) -> SingleAgentEpisode:
        return episode.cut(self.lookback)

    def _make_batch(self, episodes: list[SingleAgentEpisode]) -> EpisodeBatch:
        for episode in episodes:
            self._give_state(episode)
        batch = EpisodeBatch.from_episodes(episodes)
        if not episodes:
            batch.observation_space = self.env.single_observation_space
            batch.action_space = self.env.single_action_space
        return batch


def _items(observations: Any) -> list[Any]:
    """Return one observation per env, as copies, since the env reuses its buffers."""
    if isinstance(observations, np.ndarray):
        return list(observations.copy())
    items: list[Any] = tree_unstack(tree_map(np.copy, observations))
    return items
