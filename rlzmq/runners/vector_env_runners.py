"""SingleAgentEnvRunner and MultiAgentEnvRunner, how each steps its vector env, and what its episodes are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.common.agent_to_module_mapping import checked_mapping
from rlzmq.core.errors import EnvError
from rlzmq.core.metrics import ENV_RESET_TIMER
from rlzmq.core.tree import tree_map, tree_rows, tree_stack, tree_unstack
from rlzmq.envs.multi_agent_env import SyncVectorMultiAgentEnv, make_multi_agent_vec
from rlzmq.envs.observation_check import as_space_dtype, check_agents_observations, misfit
from rlzmq.envs.registry import EnvContext
from rlzmq.envs.sync_vector import LeanSyncVectorEnv, SparseInfos, SparseStep
from rlzmq.envs.vector import make_vec, sparse_infos
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.episodes.step_values import checked_infos, checked_rewards
from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.runners.agent_rows import AgentRows
from rlzmq.runners.env_failures import close_env
from rlzmq.runners.env_runner import EnvRunner
from rlzmq.runners.episode_sampler import EpisodeObjects, EpisodeSampler
from rlzmq.runners.module_step import as_chosen, to_numpy
from rlzmq.runners.sampler import RowsSampler, Sampler

__all__ = ["AgentsStepper", "MultiAgentEnvRunner", "SingleAgentEnvRunner", "VectorStepper", "make_env_runner"]

# Columns of a module's outputs that are not extra model outputs.
_ACTION_COLUMNS = (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV)


class VectorStepper:
    """Resets and steps a runner's vector env of one agent, and makes its SingleAgentEpisodes.

    Observations are trees of arrays ``[num_envs, ...]`` in the space's dtypes, valid until the next call. Infos are
    by env index, without empty ones.

    Args:
        runner: Owner of ``env``; its ``failures`` decide about exceptions.

    Attributes:
        source: The object whose ``step_sparse`` and ``failed`` the hot loop uses directly.
        failed: Indices of the environments that raised an error in the last step and were recreated. Their values are
            from a reset; their actions were not used.
    """

    def __init__(self, runner: EnvRunner) -> None:
        self.env: Any = runner.env
        self.num_envs: int = runner.num_envs
        self._runner = runner
        self._lean: LeanSyncVectorEnv | None = None
        if type(self.env) is LeanSyncVectorEnv:
            self._lean = self.env
            self._lean.recover = runner.failures.recover
        self.source: Any = self if self._lean is None else self._lean
        self._was_checked = False
        self.failed: list[int] = []

    def reset(self, seed: int | None = None) -> tuple[Any, SparseInfos]:
        """Reset all environments.

        Args:
            seed: Environment i gets ``seed + i``; None: the generators continue.

        Raises:
            EnvError: An environment raised an error (see `EnvFailures.count`), or its first
                observation does not fit its space.
        """
        self.failed = []
        start_s = time.perf_counter()
        if self._lean is not None:
            seeds = None if seed is None else [seed + index for index in range(self.num_envs)]
            observations, infos = self._lean.reset_sparse(seeds)
        else:
            while True:
                try:
                    observations, dense = self.env.reset(seed=seed)
                    break
                except Exception as error:
                    self._remake(error, "reset")
            infos = sparse_infos(dense, self.num_envs) if dense else {}
            observations = cast_to_space(self.env.single_observation_space, observations)
        self._runner.timers.add_stage(ENV_RESET_TIMER, start_s, time.perf_counter())
        if not self._was_checked:
            self._check(observations)
            self._was_checked = True
        return observations, infos

    def sample_random_actions(self) -> Any:
        """Return one random action per environment, from the seeded action space."""
        return self.env.action_space.sample()

    def example_actions(self) -> Any:
        """Return zeros with the shape and dtype of stored actions, leaves ``[num_envs, ...]``."""
        zeros = create_empty_array(self.env.single_action_space, n=self.num_envs, fn=np.zeros)

        def as_stored(leaf: Any) -> Any:
            return leaf.astype(np.float32) if np.issubdtype(leaf.dtype, np.floating) else leaf

        return tree_map(as_stored, zeros)

    def step_sparse(self, actions: object) -> SparseStep:
        """Make one vector step; return observations, rewards, terminated, truncated, infos."""
        if self._lean is not None:
            return self._lean.step_sparse(actions)
        if self.failed:
            self.failed = []
        try:
            observations, rewards, terminated, truncated, dense = self.env.step(actions)
        except Exception as error:
            self._remake(error, "step")
            observations, infos = self.reset(self._runner.env_seed(self._runner.failures.num))
            self.failed = list(range(self.num_envs))
            nothing = np.zeros(self.num_envs, np.bool_)
            return observations, np.zeros(self.num_envs), nothing, nothing, infos
        return (
            cast_to_space(self.env.single_observation_space, observations),
            rewards,
            terminated,
            truncated,
            sparse_infos(dense, self.num_envs) if dense else {},
        )

    def reset_rows(self, seed: int | None = None) -> tuple[Sequence[Any], Sequence[dict[str, Any]]]:
        """Reset as `reset` does; return copies of the observations, and the infos, of each environment."""
        observations, infos = self.reset(seed)
        return _items(observations), [infos.get(index, {}) for index in range(self.num_envs)]

    def step_rows(self, actions: object) -> Sequence[tuple[Any, ...]]:
        """Make one vector step; return observation, reward, terminated, truncated and info of each environment."""
        observations, rewards, terminated, truncated, infos = self.source.step_sparse(actions)
        columns = (
            _items(observations),
            np.asarray(rewards, np.float64).tolist(),
            terminated.tolist(),
            truncated.tolist(),
            [infos.get(index, {}) for index in range(self.num_envs)],
        )
        return list(zip(*columns, strict=True))

    # -- episodes ------------------------------------------------------------------------------

    def new_episode(self) -> SingleAgentEpisode:
        """Return an episode that is not reset yet."""
        return SingleAgentEpisode(
            id_=self._runner.new_episode_id(),
            observation_space=self.env.single_observation_space,
            action_space=self.env.single_action_space,
        )

    def begin(self, episode: SingleAgentEpisode, observation: object, info: object) -> None:
        """Add an environment's reset."""
        episode.add_env_reset(observation, info)

    def grow(
        self, index: int, episode: SingleAgentEpisode, act: tuple[Any, Any], row: tuple[Any, ...]
    ) -> int:
        """Add a step of env `index` with its act (see `acts`); return the number of agent steps completed."""
        observation, reward, terminated, truncated, info = row
        action, outputs = act
        episode.add_env_step(
            observation,
            action,
            reward,
            info,
            terminated=terminated,
            truncated=truncated,
            extra_model_outputs=outputs,
        )
        return 1

    def check(self, episodes: Sequence[SingleAgentEpisode], observations: Sequence[Any]) -> None:
        """Do nothing: arrays keep the shape and dtype that the first ones were checked for."""

    def acts(self, batch: dict[str, Any], weights_version: int) -> tuple[Any, list[Any]]:
        """Return the vector env's actions, and each env's act: its action and extra model outputs.

        Args:
            batch: Columns that the module-to-env pipeline returned, with one item for each env.
            weights_version: Becomes one of the outputs.
        """
        batch = {
            name: values if isinstance(values, list) else tree_map(to_numpy, values)
            for name, values in batch.items()
        }
        columns = {
            name: values if isinstance(values, list) else tree_unstack(values)
            for name, values in batch.items()
        }
        for name, items in columns.items():
            if len(items) != self.num_envs:
                raise ValueError(
                    f"Column {name!r} after the module-to-env pipeline has {len(items)} items, expected one for "
                    f"each of the {self.num_envs} environments, in their order."
                )
        actions = columns[Columns.ACTIONS]
        for_env = batch.get(Columns.ACTIONS_FOR_ENV, batch[Columns.ACTIONS])
        # The environment may change what it gets, and the episode has the same arrays.
        for_env = tree_stack(for_env) if isinstance(for_env, list) else tree_map(np.copy, for_env)
        dtype = self.env.single_action_space.dtype
        if isinstance(for_env, np.ndarray) and dtype is not None and for_env.dtype.kind != dtype.kind:
            for_env = for_env.astype(dtype)
        names = [name for name in columns if name not in _ACTION_COLUMNS]
        keys = (*names, Columns.WEIGHTS_VERSION)
        rows = zip(*[columns[name] for name in names], [weights_version] * self.num_envs, strict=True)
        outputs = [dict(zip(keys, row)) for row in rows]  # noqa: B905  (a check would cost a tenth)
        return for_env, list(zip(actions, outputs, strict=True))

    def random_acts(self, episodes: Sequence[Any], weights_version: int) -> tuple[Any, list[Any]]:
        """Return random actions in the form of `acts`, without a module's outputs."""
        actions = self.sample_random_actions()
        chosen = as_chosen(self._runner.module_to_env.normalize, self.env.single_action_space, actions)
        batch = {Columns.ACTIONS: tree_map(np.copy, chosen), Columns.ACTIONS_FOR_ENV: actions}
        return self.acts(batch, weights_version)

    def cut(self, episode: SingleAgentEpisode, lookback: int, agent_lookback: int) -> SingleAgentEpisode:
        """Return the next chunk, which looks back so many env steps, and at so many steps of each agent."""
        return episode.cut(max(lookback, agent_lookback))

    def parts(self, episode: SingleAgentEpisode) -> Sequence[SingleAgentEpisode]:
        """Return the chunks of agents in an episode's chunk."""
        return (episode,)

    def _remake(self, error: Exception, where: str) -> None:
        """Recreate the whole vector env, since it cannot tell which of its environments raised the error."""
        self._runner.failures.count(error, None, where)
        close_env(self.env, self._runner.worker_index)
        self.env = self._runner.remake_env()

    def _check(self, observations: object) -> None:
        space, config = self.env.single_observation_space, self._runner.config
        for index in range(self.num_envs):
            where = f"Environment {index} of env runner {self._runner.worker_index}: the first"
            item = tree_rows(observations, index)
            if problem := misfit(space, item, "observation"):
                raise EnvError(
                    f"{where} {problem}. Correct the environment's observation_space, or what it returns."
                ) from None
            if not config.disable_env_checking and not space.contains(item):
                raise EnvError(
                    f"{where} observation {item!r} is not in observation_space {space}. Correct the environment, or "
                    "set config.environment(disable_env_checking=True)."
                )


class AgentsStepper:
    """Resets and steps a runner's vector env of several agents, and makes its MultiAgentEpisodes.

    All values of an environment are dicts by agent id. See `VectorStepper` for the methods.

    Attributes:
        env, source: The vector env; its ``failed`` has the indices of the environments that were recreated in the last
            step.
        mapping_fn: Maps agents to modules.
    """

    def __init__(self, runner: EnvRunner) -> None:
        self.env: Any = runner.env
        self.source: Any = self.env
        self.mapping_fn: Callable[..., Any] = checked_mapping(runner)
        self._runner = runner

    def reset_rows(self, seed: int | None = None) -> tuple[Sequence[Any], Sequence[Any]]:
        """Reset all environments; return the observations and infos of each."""
        start_s = time.perf_counter()
        observations, infos = self.env.reset(seed=seed)
        self._runner.timers.add_stage(ENV_RESET_TIMER, start_s, time.perf_counter())
        return observations, infos

    def step_rows(self, actions: Sequence[dict[Any, Any]]) -> Sequence[tuple[Any, ...]]:
        """Step all; return observations, rewards, terminateds, truncateds and infos of each environment."""
        if type(self.env) is SyncVectorMultiAgentEnv:
            return self.env.step_rows(actions)
        return list(zip(*self.env.step(actions), strict=True))

    # -- episodes ------------------------------------------------------------------------------

    def new_episode(self) -> MultiAgentEpisode:
        return MultiAgentEpisode(
            self._runner.new_episode_id(),
            agent_to_module_mapping_fn=self.mapping_fn,
            observation_space=self.env.single_observation_spaces,
            action_space=self.env.single_action_spaces,
        )

    def begin(
        self, episode: MultiAgentEpisode, observations: dict[Any, Any], infos: Mapping[Any, Any]
    ) -> None:
        infos = checked_infos(infos, f"episode {episode.id_}, env step 0")
        episode.add_env_reset(observations=self._own(observations), infos=infos)

    def grow(self, index: int, episode: MultiAgentEpisode, act: tuple[Any, Any], row: tuple[Any, ...]) -> int:
        observations, rewards, terminateds, truncateds, infos = row
        num_before = episode.agent_steps()
        where = f"episode {episode.id_}, env step {episode.env_t + 1}"
        actions, outputs = act
        episode.add_env_step(
            self._own(observations),
            actions,
            checked_rewards(rewards, where),
            checked_infos(infos, where),
            terminateds=terminateds,
            truncateds=truncateds,
            extra_model_outputs=outputs,
        )
        if episode.is_done:
            self.env.needs_reset[index] = True
        return episode.agent_steps() - num_before

    def _own(self, observations: dict[Any, Any]) -> dict[Any, Any]:
        """Return copies in their spaces' dtypes. An env may overwrite its arrays in the next step."""
        spaces = self.env.single_observation_spaces.spaces
        return {
            agent_id: as_space_dtype(spaces.get(agent_id), tree_map(_copy, observation))
            for agent_id, observation in observations.items()
        }

    def check(self, episodes: Sequence[Any], observations: Sequence[Any]) -> None:
        """Raise an error for the environments' last observations that do not fit their agents' spaces."""
        observed = [
            (episode.id_, episode.env_t, own) for episode, own in zip(episodes, observations, strict=True)
        ]
        check_agents_observations(observed, self.env.single_observation_spaces.spaces)

    def acts(self, batch: dict[str, Any], weights_version: int) -> tuple[Any, list[Any]]:
        for name, values in batch.items():
            if not isinstance(values, list) or len(values) != self._runner.num_envs:
                raise ValueError(
                    f"Column {name!r} after the module-to-env pipeline: expected a list of "
                    f"{self._runner.num_envs} dicts by agent id, one per environment, got {type(values).__name__}."
                )
        extra = {name: values for name, values in batch.items() if name not in _ACTION_COLUMNS}
        acts = []
        for index, actions in enumerate(batch[Columns.ACTIONS]):
            of_env = {name: values[index] for name, values in extra.items()}
            outputs = {
                agent_id: {name: values[agent_id] for name, values in of_env.items() if agent_id in values}
                for agent_id in actions
            }
            for own in outputs.values():
                own[Columns.WEIGHTS_VERSION] = weights_version
            acts.append((actions, outputs))
        for_envs = batch.get(Columns.ACTIONS_FOR_ENV, batch[Columns.ACTIONS])
        # An environment may change what it gets, and the episode has the same arrays.
        return [
            {id_: tree_map(_copy, action) for id_, action in for_env.items()} for for_env in for_envs
        ], acts

    def random_acts(
        self, episodes: Sequence[MultiAgentEpisode], weights_version: int
    ) -> tuple[Any, list[Any]]:
        spaces = self.env.single_action_spaces
        actions = []
        for episode in episodes:
            to_act = episode.get_agents_to_act()
            actions.append(
                {
                    agent_id: spaces[agent_id].sample()
                    for agent_id in episode.agent_episodes
                    if agent_id in to_act
                }
            )
        normalize = self._runner.module_to_env.normalize
        chosen = [
            {agent_id: as_chosen(normalize, spaces[agent_id], action) for agent_id, action in own.items()}
            for own in actions
        ]
        return self.acts({Columns.ACTIONS: chosen, Columns.ACTIONS_FOR_ENV: actions}, weights_version)

    def cut(self, episode: MultiAgentEpisode, lookback: int, agent_lookback: int) -> MultiAgentEpisode:
        return episode.cut(max(lookback, episode._timeline.env_steps_back(agent_lookback)))

    def parts(self, episode: MultiAgentEpisode) -> Sequence[SingleAgentEpisode]:
        """Return the agents' chunks, after leaving out those without a step."""
        episode.prune()
        return list(episode.agent_episodes.values())


def _copy(leaf: object) -> object:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def cast_to_space(space: gym.Space[Any], values: Any) -> Any:
    """Return batched values as row-major arrays of the space's dtypes, without a copy if they match.

    Row-major, because matrix products may round differently for other memory layouts.
    """
    if isinstance(values, np.ndarray):
        if values.dtype == space.dtype and values.flags.c_contiguous:
            return values
        return np.ascontiguousarray(values, dtype=space.dtype)
    if isinstance(space, spaces.Dict):
        return {key: cast_to_space(part, values[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(cast_to_space(part, item) for part, item in zip(space.spaces, values, strict=True))
    return np.ascontiguousarray(values, dtype=space.dtype)


def _items(observations: object) -> list[Any]:
    """Return one observation per env, as copies, since the env reuses its buffers."""
    if isinstance(observations, np.ndarray):
        return list(observations.copy())
    items: list[Any] = tree_unstack(tree_map(np.copy, observations))
    return items


class SingleAgentEnvRunner(EnvRunner):
    """Samples episodes of one agent with one RLModule in ``num_envs_per_env_runner`` environments.

    Two samplers give identical results. The one on rows is used if all connector pieces work on rows, untimed, and no
    callback needs single episodes. Otherwise, the one that builds real episodes is used. When env, module or pipelines
    change, unfinished episodes are dropped.

    Example:
        >>> config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=2)
        >>> with SingleAgentEnvRunner(config=config) as runner:
        ...     episodes = runner.sample(num_episodes=3)
        >>> len(episodes)
        3
    """

    def make_stepper(self) -> VectorStepper:
        return VectorStepper(self)

    def _make_sampler(self, *, on_rows: bool) -> Sampler:
        if on_rows:
            return RowsSampler(self)
        return EpisodeSampler(self, partial(EpisodeObjects, acts_on_columns=self.module_to_env.on_rows))

    # -- construction --------------------------------------------------------------------------

    def _make_vector_env(self, context: EnvContext) -> object:
        return make_vec(
            self.config.env_entry(),
            num_envs=self.num_envs,
            mode=self.config.gym_env_vectorize_mode,
            context=context,
        )


class MultiAgentEnvRunner(EnvRunner):
    """Samples episodes of several agents. ``config.policy_mapping_fn`` maps agents to modules.

    `sample` returns an `EpisodeBatch`: a list of MultiAgentEpisodes, without agents that made no step in
    their chunk. With ``config.count_steps_by="agent_steps"``, its ``num_timesteps`` counts agent steps.

    Example:
        >>> config = (
        ...     PPOConfig()
        ...     .environment(MultiAgentCartPole, env_config={"num_agents": 2})
        ...     .multi_agent(policies={"p0", "p1"}, policy_mapping_fn=lambda agent, episode: f"p{agent}")
        ... )
        >>> with MultiAgentEnvRunner(config=config) as runner:
        ...     episodes = runner.sample(num_episodes=3)
        >>> len(episodes)
        3
    """

    def make_stepper(self) -> AgentsStepper:
        return AgentsStepper(self)

    def _make_sampler(self, *, on_rows: bool) -> Sampler:
        on_rows = on_rows and type(self.multi_rl_module) is MultiRLModule
        return EpisodeSampler(self, AgentRows if on_rows else EpisodeObjects)

    # -- construction --------------------------------------------------------------------------

    def _make_vector_env(self, context: EnvContext) -> SyncVectorMultiAgentEnv:
        env = make_multi_agent_vec(
            self.config.env_entry(),
            num_envs=self.num_envs,
            mode=self.config.gym_env_vectorize_mode,
            context=context,
        )
        env.recover = self.failures.recover
        return env

    @property
    def random_action_space(self) -> Any:
        return self._env_spaces()["__env_single__"][1]

    def _acting_module(self) -> Any:
        return self.multi_rl_module


def make_env_runner(config: BaseConfig, worker_index: int, incarnation: int = 0) -> Any:
    """Return an EnvRunner of the class given by the config."""
    runner_class: Any = config.env_runner_cls
    if runner_class is None:
        runner_class = MultiAgentEnvRunner if config.is_multi_agent else SingleAgentEnvRunner
    return runner_class(config=config, worker_index=worker_index, incarnation=incarnation)
