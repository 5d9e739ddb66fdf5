"""MultiAgentEnvRunner: samples MultiAgentEpisodes from several multi-agent environments."""

from __future__ import annotations

from typing import Any

from rlzmq.envs.multi_agent_vector import SyncVectorMultiAgentEnv, make_multi_agent_vec
from rlzmq.envs.registry import EnvContext
from rlzmq.episodes.bad_values import BadValue
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.runners.env_failures import Reproduction
from rlzmq.runners.env_runner import EnvRunner
from rlzmq.runners.multi.episode_sampler import MultiAgentEpisodeSampler
from rlzmq.runners.multi.fused_sampler import FusedMultiAgentSampler

__all__ = ["MultiAgentEnvRunner"]


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

    def _make_sampler(
        self, plans: tuple[Any, Any] | None
    ) -> FusedMultiAgentSampler | MultiAgentEpisodeSampler:
        if plans is None or type(self.multi_rl_module) is not MultiRLModule:
            return MultiAgentEpisodeSampler(self)
        return FusedMultiAgentSampler(self, *plans)

    def _way_there(self, index: int) -> Reproduction:
        return Reproduction.of_agents(self.env.episode_seeds[index], self.env.episode_actions[index])

    def _way_to(self, batch: EpisodeBatch, value: BadValue) -> Reproduction | None:
        e = value.episode
        seed, actions = self.env.episode_seeds[value.env_index], self.env.episode_actions[value.env_index]
        goes_on = not (batch.terminated[e] or batch.truncated[e])
        if not goes_on or len(actions) != batch.t_started[e] + batch.length[e]:
            return None  # the episode is over
        return Reproduction.of_agents(seed, actions[: value.num_env_steps])

    # -- construction --------------------------------------------------------------------------

    def _make_vector_env(self, context: EnvContext) -> SyncVectorMultiAgentEnv:
        env = make_multi_agent_vec(
            self.config.env_entry(),
            num_envs=self.num_envs,
            mode=getattr(self.config, "gym_env_vectorize_mode", "sync"),
            context=context,
        )
        env.recover = self.recover_env
        return env

    def _acting_module(self) -> Any:
        return self.multi_rl_module
