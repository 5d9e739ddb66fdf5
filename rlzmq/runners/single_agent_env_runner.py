"""SingleAgentEnvRunner: samples SingleAgentEpisodes from a vector env."""

from __future__ import annotations

import time
import uuid
from typing import Any

import numpy as np
from gymnasium.vector.utils import create_empty_array

from rlzmq.core.seeding import derive_seed
from rlzmq.core.tree import tree_map
from rlzmq.envs.registry import EnvContext
from rlzmq.envs.vector import make_vec
from rlzmq.episodes.columns import DEFAULT_MODULE_ID
from rlzmq.runners.env_runner import EnvRunner, sample_limits
from rlzmq.runners.episode_sampler import EpisodeSampler
from rlzmq.runners.fused_sampler import FusedSampler
from rlzmq.runners.module_step import ModuleStep
from rlzmq.runners.request import SampleRequest
from rlzmq.runners.vector_io import VectorStepper

__all__ = ["SingleAgentEnvRunner"]

_EPISODE_HOOKS = ("on_episode_created", "on_episode_start", "on_episode_step", "on_episode_end")


class SingleAgentEnvRunner(EnvRunner):
    """Samples episodes of one agent with one RLModule in ``num_envs_per_env_runner`` environments.

    Two samplers give identical results: the fused one, on whole columns, is used while all connector
    pieces are default or columnar ones, untimed, and no callback wants single episodes; else the one that
    builds real episodes. The choice follows from the pipelines as they are at each call; when it changes,
    unfinished episodes are dropped.

    Example:
        >>> config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=2)
        >>> with SingleAgentEnvRunner(config=config) as runner:
        ...     episodes = runner.sample(num_episodes=3)
        >>> len(episodes)
        3

    Attributes:
        use_fused: Set to False to always build real episodes.
    """

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        self.use_fused = True
        self.shared_data: dict[str, Any] = {}
        self.stepper: VectorStepper
        self.module_step: ModuleStep
        self._sampler: FusedSampler | EpisodeSampler | None = None
        self._chosen_for: tuple[Any, ...] = ()
        self._needs_seed = True
        self._id_prefix = uuid.uuid4().hex[:20]
        self._num_episode_ids = 0
        super().__init__(config=config, **kwargs)

    # -- sampling ------------------------------------------------------------------------------

    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> Any:
        self._assert_running()
        num_timesteps, num_episodes = sample_limits(
            self.config, self.num_envs, self.worker_index, num_timesteps, num_episodes
        )
        if not (num_timesteps or num_episodes):
            return []
        request = SampleRequest(
            explore=self.config.explore if explore is None else explore,
            random_actions=random_actions,
            num_timesteps=num_timesteps,
            num_episodes=num_episodes,
        )
        return self._run(request, force_reset=force_reset or num_episodes is not None)

    def sample_lease(
        self, num_vector_steps: int, *, max_env_steps: int | None = None, explore: bool | None = None
    ) -> Any:
        self._assert_running()
        if num_vector_steps < 1:
            raise ValueError(f"sample_lease: expected num_vector_steps >= 1, got {num_vector_steps}.")
        request = SampleRequest(
            explore=self.config.explore if explore is None else explore,
            num_vector_steps=num_vector_steps,
            max_env_steps=max_env_steps,
        )
        return self._run(request, force_reset=False)

    def _run(self, request: SampleRequest, *, force_reset: bool) -> Any:
        start_s = time.perf_counter()
        sampler = self._choose_sampler()
        if force_reset or not sampler.has_episodes:
            self.shared_data.clear()
            self.shared_data["generator"] = self.generator
            sampler.reset()
        try:
            batch, finished, num_vector_steps = sampler.run(request)
        except BaseException:
            sampler.forget()  # half a step was made: nothing can be continued
            raise
        num_env_steps = batch.num_env_steps
        self._count_steps(num_env_steps, {"default_agent": num_env_steps}, {DEFAULT_MODULE_ID: num_env_steps})
        self.episode_metrics.add_episodes(finished.returns, finished.lengths, finished.durations_s)
        batch.meta = {
            "worker_index": self.worker_index,
            "incarnation": self.incarnation,
            "num_env_steps": num_env_steps,
            "num_vector_steps": num_vector_steps,
            "weights_version": self.weights_seq_no,
            "weights_generation": self.weights_generation,
            "episode_metrics": finished.to_dict(),
        }
        if self.callbacks.has("on_sample_end"):
            self.callbacks.call("on_sample_end", env_runner=self, metrics_logger=self.metrics, samples=batch)
        self._time_sample(start_s)
        return batch

    def _choose_sampler(self) -> FusedSampler | EpisodeSampler:
        """The sampler for the env, module and pipelines as they are now."""
        watched = any(
            pipeline.time_pieces or pipeline.after_piece is not None
            for pipeline in (self.env_to_module, self.module_to_env)
        )
        key = (
            self.module,
            self.use_fused,
            watched,
            *self.env_to_module.connectors,
            self.module_to_env,
            *self.module_to_env.connectors,
        )
        if (
            self._sampler is not None
            and self.env is self.stepper.env
            and len(key) == len(self._chosen_for)
            and all(a is b for a, b in zip(key, self._chosen_for, strict=True))
        ):
            return self._sampler
        self._chosen_for = key
        self.stepper = VectorStepper(self)
        wants_fused = self.use_fused and not watched
        env_plan = self.env_to_module.columnar_plan() if wants_fused else None
        module_plan = self.module_to_env.columnar_plan() if wants_fused else None
        self.module_step = ModuleStep(self.module, self.generator, getattr(env_plan, "device", None))
        wants_episodes = any(self.callbacks.has(hook) for hook in _EPISODE_HOOKS)
        if env_plan is not None and module_plan is not None and not wants_episodes:
            self._sampler = FusedSampler(self, env_plan, module_plan)
        else:
            self._sampler = EpisodeSampler(self)
        return self._sampler

    # -- what samplers ask for -----------------------------------------------------------------

    def take_reset_seed(self) -> int | None:
        """The seed of the coming reset: only a vector env's first reset is seeded."""
        if not self._needs_seed:
            return None
        self._needs_seed = False
        return self.env_seed()

    def new_episode_id(self) -> str:
        """An id that no other episode has, in this process or another."""
        self._num_episode_ids += 1
        return f"{self._id_prefix}{self._num_episode_ids:012x}"

    def sample_random_actions(self) -> Any:
        """One random action per environment, from the seeded action space."""
        return self.env.action_space.sample()

    def example_actions(self) -> Any:
        """Zeros of the shape and dtype in which actions are stored, leaves ``[num_envs, ...]``."""
        zeros = create_empty_array(self.env.single_action_space, n=self.num_envs, fn=np.zeros)

        def as_stored(leaf: Any) -> Any:
            return leaf.astype(np.float32) if np.issubdtype(leaf.dtype, np.floating) else leaf

        return tree_map(as_stored, zeros)

    # -- construction --------------------------------------------------------------------------

    def _make_vector_env(self, context: EnvContext) -> Any:
        env = make_vec(
            self.config.env,
            num_envs=self.num_envs,
            mode=self.config.gym_env_vectorize_mode,
            context=context,
        )
        if self.seed is not None:
            seed = derive_seed(self.seed, "random_actions", self.stream_index, self.incarnation)
            env.action_space.seed(seed)
        return env

    def _make_pipelines(self) -> None:
        spaces = self._env_spaces()
        self.env_to_module = self.config.build_env_to_module_connector(env=self.env, spaces=spaces)
        self.module_to_env = self.config.build_module_to_env_connector(env=self.env, spaces=spaces)

    def _acting_module(self) -> Any:
        return self.multi_rl_module[DEFAULT_MODULE_ID]

    def _forget_episodes(self) -> None:
        self._needs_seed = True
        if self._sampler is not None:
            self._sampler.forget()

    def _env_spaces(self) -> dict[str, tuple[Any, Any]]:
        return {
            "__env__": (self.env.observation_space, self.env.action_space),
            "__env_single__": (self.env.single_observation_space, self.env.single_action_space),
        }

    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        spaces = self._env_spaces()
        spaces[DEFAULT_MODULE_ID] = (
            self.env_to_module.observation_space,
            self.env.single_action_space,
        )
        return spaces
