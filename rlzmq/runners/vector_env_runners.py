"""SingleAgentEnvRunner and MultiAgentEnvRunner: sample from vector envs of one agent, or of several."""

from __future__ import annotations

from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.envs.multi_agent_vector import SyncVectorMultiAgentEnv, make_multi_agent_vec
from rlzmq.envs.registry import EnvContext
from rlzmq.envs.vector import make_vec
from rlzmq.episodes.bad_values import BadValue
from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.runners.agents_rows_sampler import AgentsRowsSampler
from rlzmq.runners.env_failures import Reproduction
from rlzmq.runners.env_runner import EnvRunner
from rlzmq.runners.episode_sampler import AgentsEpisodeSampler, EpisodeSampler
from rlzmq.runners.rows_sampler import RowsSampler
from rlzmq.runners.sampler import Sampler
from rlzmq.runners.vector_io import AgentsStepper, VectorStepper

__all__ = ["MultiAgentEnvRunner", "SingleAgentEnvRunner", "make_env_runner"]


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

    def _way_there(self, index: int) -> Reproduction:
        return Reproduction.of_agents(self.env.episode_seeds[index], self.env.episode_actions[index])

    def _way_to(self, batch: Any, value: BadValue) -> Reproduction | None:
        e = value.episode
        seed, actions = self.env.episode_seeds[value.env_index], self.env.episode_actions[value.env_index]
        is_ongoing = not (batch.terminated[e] or batch.truncated[e])
        if not is_ongoing or len(actions) != batch.t_started[e] + batch.length[e]:
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
