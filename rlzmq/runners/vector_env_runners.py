"""SingleAgentEnvRunner and MultiAgentEnvRunner, and how each steps its vector env."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import EnvError
from rlzmq.core.metrics import ENV_RESET_TIMER
from rlzmq.core.tree import tree_map, tree_rows, tree_unstack
from rlzmq.envs.multi_agent_env import SyncVectorMultiAgentEnv, make_multi_agent_vec
from rlzmq.envs.observation_check import misfit
from rlzmq.envs.registry import EnvContext
from rlzmq.envs.sync_vector import LeanSyncVectorEnv, SparseInfos, SparseStep
from rlzmq.envs.vector import make_vec, sparse_infos
from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.runners.agents_rows_sampler import AgentsRowsSampler
from rlzmq.runners.env_failures import close_env
from rlzmq.runners.env_runner import EnvRunner
from rlzmq.runners.episode_sampler import AgentsEpisodeSampler, EpisodeSampler
from rlzmq.runners.rows_sampler import RowsSampler, Sampler

if TYPE_CHECKING:
    from rlzmq.runners.env_runner import EnvRunner

__all__ = ["AgentsStepper", "MultiAgentEnvRunner", "SingleAgentEnvRunner", "VectorStepper", "make_env_runner"]


class VectorStepper:
    """Resets and steps a runner's vector env.

    Observations are trees of arrays ``[num_envs, ...]`` in the space's dtypes, valid until the next call. Infos are
    by env index, without empty ones.

    Args:
        runner: Owner of ``env``; its ``count_env_failure`` handles exceptions.

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
            self._lean.recover = runner.recover_env
        self.source: Any = self if self._lean is None else self._lean
        self._was_checked = False
        self.failed: list[int] = []

    def reset(self, seed: int | None = None) -> tuple[Any, SparseInfos]:
        """Reset all environments.

        Args:
            seed: Environment i gets ``seed + i``; None: the generators continue.

        Raises:
            EnvError: An environment raised an error (see ``EnvRunner.count_env_failure``), or its first
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
            observations, infos = self.reset(self._runner.env_seed(self._runner.num_env_failures))
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

    def _remake(self, error: Exception, where: str) -> None:
        """Recreate the whole vector env, since it cannot tell which of its environments raised the error."""
        self._runner.count_env_failure(error, None, where)
        close_env(self.env, self._runner.worker_index)
        self.env = self._runner.remake_env()

    def _check(self, observations: Any) -> None:
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
    """Resets and steps a runner's vector env of several agents, whose values are dicts by agent id.

    Attributes:
        env, source: The vector env; its ``failed`` has the indices of the environments that were recreated in the last
            step.
    """

    def __init__(self, runner: EnvRunner) -> None:
        self.env: Any = runner.env
        self.source = self.env
        self._timers = runner.timers

    def reset_rows(self, seed: int | None = None) -> tuple[Sequence[Any], Sequence[Any]]:
        """Reset all environments; return the observations and infos of each."""
        start_s = time.perf_counter()
        observations, infos = self.env.reset(seed=seed)
        self._timers.add_stage(ENV_RESET_TIMER, start_s, time.perf_counter())
        return observations, infos

    def step_rows(self, actions: Any) -> Sequence[tuple[Any, ...]]:
        """Step all; return observations, rewards, terminateds, truncateds and infos of each environment."""
        if type(self.env) is SyncVectorMultiAgentEnv:
            return self.env.step_rows(actions)
        return list(zip(*self.env.step(actions), strict=True))


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
        return RowsSampler(self) if on_rows else EpisodeSampler(self)

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
        return AgentsRowsSampler(self) if on_rows else AgentsEpisodeSampler(self)

    # -- construction --------------------------------------------------------------------------

    def _make_vector_env(self, context: EnvContext) -> SyncVectorMultiAgentEnv:
        env = make_multi_agent_vec(
            self.config.env_entry(),
            num_envs=self.num_envs,
            mode=self.config.gym_env_vectorize_mode,
            context=context,
        )
        env.recover = self.recover_env
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
