"""MultiAgentEnvRunner: samples MultiAgentEpisodes from several multi-agent environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlzmq.core.seeding import derive_seed
from rlzmq.envs.multi_agent_vector import SyncVectorMultiAgentEnv, make_multi_agent_vec
from rlzmq.envs.registry import EnvContext
from rlzmq.episodes.bad_values import BadValue
from rlzmq.episodes.multi_agent_episode import default_agent_to_module_mapping_fn
from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.runners.env_failures import Reproduction
from rlzmq.runners.multi.agents_env_runner import AgentsEnvRunner
from rlzmq.runners.multi.episode_sampler import MultiAgentSampler
from rlzmq.runners.multi.fused_sampler import FusedMultiAgentSampler
from rlzmq.runners.sampling_runner import EPISODE_HOOKS

__all__ = ["MultiAgentEnvRunner"]


class MultiAgentEnvRunner(AgentsEnvRunner):
    """Samples episodes of several agents, whose modules ``config.policy_mapping_fn`` names.

    `sample` returns a `MultiAgentEpisodeBatch`: a sequence of MultiAgentEpisodes, without the agents that made
    no step in their chunk. Its ``num_timesteps`` are agent steps with ``config.count_steps_by="agent_steps"``.

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

    Attributes:
        use_fused: Set to False to always build real episodes.
    """

    def _count(self, batch: Any, finished: Any) -> Mapping[str, Any]:
        agent_steps, module_steps = batch.agent_steps_by("agent_ids"), batch.agent_steps_by("module_ids")
        self._count_steps(batch.num_env_steps, agent_steps, module_steps)
        self.episode_metrics.add_split_returns(finished.agent_returns, finished.module_returns)
        return {
            "num_agent_steps": batch.num_agent_steps,
            "agent_steps": agent_steps,
            "module_steps": module_steps,
        }

    def _choose_sampler(self) -> Any:
        """Return the sampler for the env, modules and pipelines as they are now."""
        key = (
            self.env,
            self.module,
            self.use_fused,
            self.env_to_module,
            *self.env_to_module.connectors,
            self.module_to_env,
            *self.module_to_env.connectors,
        )
        if len(key) == len(self._chosen_for) and all(
            a is b for a, b in zip(key, self._chosen_for, strict=True)
        ):
            return self._sampler
        self._chosen_for = key
        env_plan = self.env_to_module.columnar_plan() if self.use_fused else None
        module_plan = self.module_to_env.columnar_plan() if self.use_fused else None
        has_hooks = any(self.callbacks.has(hook) for hook in EPISODE_HOOKS)
        if (
            env_plan is not None
            and module_plan is not None
            and not has_hooks
            and type(self.multi_rl_module) is MultiRLModule
        ):
            self._sampler = FusedMultiAgentSampler(self, env_plan, module_plan)
        else:
            self._sampler = MultiAgentSampler(self)
        return self._sampler

    def _way_to(self, batch: Any, value: BadValue) -> Reproduction | None:
        e = value.episode
        came = self.env.histories[value.env_index]
        goes_on = not (batch.terminated[e] or batch.truncated[e])
        if not goes_on or len(came.episode_actions) != batch.env_t[e]:
            return None  # of an episode that is over
        return Reproduction.of_agents(came.episode_seed, came.episode_actions[: value.num_env_steps])

    # -- construction --------------------------------------------------------------------------

    def _make_vector_env(self, context: EnvContext) -> SyncVectorMultiAgentEnv:
        env = make_multi_agent_vec(
            self.config.env,
            num_envs=self.num_envs,
            mode=getattr(self.config, "gym_env_vectorize_mode", "sync"),
            context=context,
        )
        env.recover = self._recover_env
        if self.seed is not None:
            env.single_action_spaces.seed(
                derive_seed(self.seed, "random_actions", self.stream_index, self.incarnation)
            )
        return env

    def _recover_env(self, index: int, error: Exception) -> int | None:
        """Return the seed of the environment that replaces a failed one; raise if it must not be replaced."""
        came = self.env.histories[index]
        actions = came.episode_actions
        way = Reproduction.of_agents(came.episode_seed, actions)
        self.count_env_failure(error, index, "step" if actions else "reset", way)
        return self.env_seed(index, self.num_env_failures)

    def _acting_module(self) -> Any:
        return self.multi_rl_module

    def _env_spaces(self) -> dict[str, tuple[Any, Any]]:
        return {
            "__env__": (self.env.observation_space, self.env.action_space),
            "__env_single__": (self.env.single_observation_spaces, self.env.single_action_spaces),
        }

    def get_spaces(self) -> dict[str, tuple[Any, Any]]:
        """See `EnvRunner.get_spaces`; modules whose agents are not known beforehand are left out."""
        from rlzmq.runners.multi.module_spaces import module_spaces

        spaces = self._env_spaces()
        spaces.update(
            module_spaces(
                list(self.config.module_ids),
                getattr(self.config, "policy_mapping_fn", None) or default_agent_to_module_mapping_fn,
                self.env_to_module.observation_space,
                self.env.single_action_spaces,
            )
        )
        return spaces
