"""SingleAgentEnvRunner: samples SingleAgentEpisodes from a vector env."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlzmq.core.seeding import derive_seed
from rlzmq.envs.registry import EnvContext
from rlzmq.envs.vector import make_vec
from rlzmq.episodes.bad_values import BadValue
from rlzmq.episodes.columns import DEFAULT_MODULE_ID
from rlzmq.runners.env_failures import Reproduction
from rlzmq.runners.module_step import ModuleStep
from rlzmq.runners.sampling_runner import EPISODE_HOOKS
from rlzmq.runners.single.episode_sampler import EpisodeSampler
from rlzmq.runners.single.fused_sampler import FusedSampler
from rlzmq.runners.single.vector_env_runner import VectorEnvRunner
from rlzmq.runners.vector_io import VectorStepper

__all__ = ["SingleAgentEnvRunner"]


class SingleAgentEnvRunner(VectorEnvRunner):
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

    def _count(self, batch: Any, finished: Any) -> Mapping[str, Any]:
        num_env_steps = batch.num_env_steps
        self._count_steps(num_env_steps, {"default_agent": num_env_steps}, {DEFAULT_MODULE_ID: num_env_steps})
        return {}

    def _choose_sampler(self) -> Any:
        """Return the sampler for the env, module and pipelines as they are now."""
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
        wants_episodes = any(self.callbacks.has(hook) for hook in EPISODE_HOOKS)
        if env_plan is not None and module_plan is not None and not wants_episodes:
            self._sampler = FusedSampler(self, env_plan, module_plan)
        else:
            self._sampler = EpisodeSampler(self)
        return self._sampler

    def _way_to(self, batch: Any, value: BadValue) -> Reproduction | None:
        steps = value.num_env_steps - int(batch.t_started[value.episode])
        return self.stepper.way_to(batch, value.episode, steps)

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

    def _acting_module(self) -> Any:
        return self.multi_rl_module[DEFAULT_MODULE_ID]

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
