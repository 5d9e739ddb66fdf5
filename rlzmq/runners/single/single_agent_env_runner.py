"""SingleAgentEnvRunner: samples SingleAgentEpisodes from a vector env."""

from __future__ import annotations

from typing import Any

from rlzmq.envs.registry import EnvContext
from rlzmq.envs.vector import make_vec
from rlzmq.episodes.bad_values import BadValue
from rlzmq.runners.env_failures import Reproduction
from rlzmq.runners.env_runner import EnvRunner
from rlzmq.runners.single.episode_sampler import SingleAgentEpisodeSampler
from rlzmq.runners.single.fused_sampler import FusedSampler

__all__ = ["SingleAgentEnvRunner"]


class SingleAgentEnvRunner(EnvRunner):
    """Samples episodes of one agent with one RLModule in ``num_envs_per_env_runner`` environments.

    Two samplers give identical results. The fused one, on whole columns, is used if all connector pieces are default or
    columnar ones, untimed, and no callback needs single episodes. Otherwise, the one that builds real episodes is
    used. The choice is made at each call; when it changes, unfinished episodes are dropped.

    Example:
        >>> config = PPOConfig().environment("CartPole-v1").env_runners(num_envs_per_env_runner=2)
        >>> with SingleAgentEnvRunner(config=config) as runner:
        ...     episodes = runner.sample(num_episodes=3)
        >>> len(episodes)
        3
    """

    def _make_sampler(self, plans: tuple[Any, Any] | None) -> FusedSampler | SingleAgentEpisodeSampler:
        return SingleAgentEpisodeSampler(self) if plans is None else FusedSampler(self, *plans)

    def _way_there(self, index: int) -> Reproduction | None:
        known = self.env.history.way_of(index)
        return None if known is None else Reproduction.of_way(known, known.actions)

    def _way_to(self, batch: Any, value: BadValue) -> Reproduction | None:
        steps = value.num_env_steps - int(batch.t_started[value.episode])
        way: Reproduction | None = self._sampler.stepper.way_to(batch, value.episode, steps)
        return way

    # -- construction --------------------------------------------------------------------------

    def _make_vector_env(self, context: EnvContext) -> Any:
        return make_vec(
            self.config.env_entry(),
            num_envs=self.num_envs,
            mode=self.config.gym_env_vectorize_mode,
            context=context,
        )
