"""SingleAgentEpisodeSampler: samples single-agent environments with real episodes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
from rlzmq.core.tree import tree_map, tree_stack, tree_unstack
from rlzmq.episodes.columns import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID, Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.runners.episode_sampler import ACTION_COLUMNS, EpisodeSampler, fill_outputs
from rlzmq.runners.module_step import ModuleStep, to_numpy
from rlzmq.runners.sampler import WEIGHTS_SEQ_NO
from rlzmq.runners.vector_io import VectorStepper

if TYPE_CHECKING:
    from rlzmq.connectors.pipelines import EnvToModulePipeline
    from rlzmq.runners.env_runner import EnvRunner

__all__ = ["SingleAgentEpisodeSampler"]

_DEFAULT_PIECES = [
    AddObservationsFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
    AddStatesFromEpisodesToBatch,
    BatchIndividualItems,
    NumpyToTensor,
]


class SingleAgentEpisodeSampler(EpisodeSampler):
    """An EpisodeSampler for one agent and one module in a vector env.

    If only the user's env-to-module pieces need episodes, the default pieces after them and the module-to-env pieces
    still run on whole columns.

    Attributes:
        stepper: Steps the vector env.
    """

    def __init__(self, runner: EnvRunner) -> None:
        pipeline, plan = runner.env_to_module, runner.module_to_env.columnar_plan()
        super().__init__(runner, max(runner.config.episode_lookback_horizon, pipeline.required_lookback))
        self.stepper: VectorStepper = VectorStepper(runner)
        self._module_step = ModuleStep(runner.module, runner.generator)
        self._num_user_pieces = None if plan is None else _num_user_pieces(pipeline)
        self._normalize = None if plan is None else plan.normalize
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
        outputs_by_env = [dict(zip(keys, row)) for row in rows]  # noqa: B905  (a check would cost a tenth)
        if names != self._names:
            self._begin_outputs(names, outputs_by_env)
        return for_env, list(zip(columns[Columns.ACTIONS], outputs_by_env, strict=True))

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

    def _initial_state(self, module_id: Any) -> Any:
        return self._module_step.initial_row_numpy if self._module_step.is_stateful else None

    def _states(self) -> Any:
        """Return the module's states of all envs, leaves ``[N, ...]`` tensors; None if stateless."""
        if not self._module_step.is_stateful:
            return None
        return tree_map(torch.from_numpy, tree_stack([self._state_now(episode) for episode in self._acting]))

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


def _num_user_pieces(pipeline: EnvToModulePipeline) -> int | None:
    """Return the number of pieces before the default ones; None if all must run, e.g. because they are timed."""
    if pipeline.watches_pieces:
        return None
    types = [type(piece) for piece in pipeline.connectors]
    num = len(types) - len(_DEFAULT_PIECES)
    return num if num >= 0 and types[num:] == _DEFAULT_PIECES else None
