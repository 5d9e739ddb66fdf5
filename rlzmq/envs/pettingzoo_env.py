"""PettingZoo environments as MultiAgentEnvs: turn by turn (AEC) and in parallel."""

from __future__ import annotations

from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import import_optional
from rlzmq.envs.multi_agent_env import AgentDict, MultiAgentEnv

__all__ = ["ParallelPettingZooEnv", "PettingZooEnv"]


def _check_kind(env: object, kind: str, other: str) -> None:
    """Raise ConfigurationError unless this is a PettingZoo environment of the right kind."""
    pettingzoo = import_optional("pettingzoo", "A PettingZoo environment", "rlzmq[marl]")
    if isinstance(env, getattr(pettingzoo, kind)):
        return
    other_kind = "ParallelEnv" if kind == "AECEnv" else "AECEnv"
    hint = f" Use {other} for it." if isinstance(env, getattr(pettingzoo, other_kind)) else ""
    raise ConfigurationError(f"Expected a pettingzoo.{kind}, got {type(env).__name__}.{hint}")


def _set_spaces(wrapper: MultiAgentEnv, env: Any) -> None:
    wrapper.possible_agents = list(env.possible_agents)
    wrapper.agents = list(env.possible_agents)
    wrapper.observation_spaces = {agent: env.observation_space(agent) for agent in env.possible_agents}
    wrapper.action_spaces = {agent: env.action_space(agent) for agent in env.possible_agents}


def _end_flags(terminateds: AgentDict, truncateds: AgentDict, is_over: bool) -> None:
    """Add ``"__all__"``: an episode is truncated if all its last agents were truncated, else terminated."""
    last = [key for key in truncateds if key != "__all__"]
    all_truncated = bool(last) and all(truncateds[key] and not terminateds.get(key) for key in last)
    truncateds["__all__"] = is_over and all_truncated
    terminateds["__all__"] = is_over and not all_truncated


class PettingZooEnv(MultiAgentEnv):
    """A PettingZoo AEC environment: one agent acts per step.

    An agent receives its next observation, and the rewards since its last action, at its next turn or when it is done.

    Example:
        >>> from pettingzoo.classic import rps_v2
        >>> env = PettingZooEnv(rps_v2.env())
        >>> observations, infos = env.reset(seed=0)
        >>> list(observations)
        ['player_0']

    Args:
        env: A ``pettingzoo.AECEnv``.

    Raises:
        ImportError: PettingZoo is not installed (``pip install rlzmq[marl]``).
        ConfigurationError: `env` is not an AEC environment.
    """

    def __init__(self, env: Any) -> None:
        _check_kind(env, "AECEnv", "ParallelPettingZooEnv")
        super().__init__()
        self.env = env
        _set_spaces(self, env)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[AgentDict, AgentDict]:
        self.env.reset(seed=seed, options=options)
        self.agents: list[Any] = list(self.env.agents)
        agent = self.env.agent_selection
        observation, _, _, _, info = self.env.last()
        return {agent: observation}, {agent: info}

    def step(  # type: ignore[override]
        self, action_dict: AgentDict
    ) -> tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]:
        env = self.env
        env.step(action_dict[env.agent_selection])
        observations: AgentDict = {}
        rewards: AgentDict = {}
        terminateds: AgentDict = {}
        truncateds: AgentDict = {}
        infos: AgentDict = {}
        while env.agents:
            agent = env.agent_selection
            observations[agent], rewards[agent], terminateds[agent], truncateds[agent], infos[agent] = (
                env.last()
            )
            if not (terminateds[agent] or truncateds[agent]):
                break
            env.step(None)  # at a done agent's turn, this only removes the agent
        self.agents = list(env.agents)
        _end_flags(terminateds, truncateds, not env.agents)
        return observations, rewards, terminateds, truncateds, infos

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


class ParallelPettingZooEnv(MultiAgentEnv):
    """A PettingZoo parallel environment: all current agents act in every step.

    Args:
        par_env: A ``pettingzoo.ParallelEnv``.

    Raises:
        ImportError: PettingZoo is not installed (``pip install rlzmq[marl]``).
        ConfigurationError: `par_env` is not a parallel environment.
    """

    def __init__(self, par_env: Any) -> None:
        _check_kind(par_env, "ParallelEnv", "PettingZooEnv")
        super().__init__()
        self.par_env = par_env
        _set_spaces(self, par_env)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[AgentDict, AgentDict]:
        observations, infos = self.par_env.reset(seed=seed, options=options)
        self.agents: list[Any] = list(self.par_env.agents)
        return observations, infos or {}

    def step(  # type: ignore[override]
        self, action_dict: AgentDict
    ) -> tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]:
        present = set(self.agents)
        observations, rewards, terminateds, truncateds, infos = self.par_env.step(action_dict)
        self.agents = list(self.par_env.agents)
        known = present | set(self.agents)
        observations, rewards, terminateds, truncateds, infos = (
            {agent: value for agent, value in data.items() if agent in known}
            for data in (observations, rewards, terminateds, truncateds, infos)
        )
        _end_flags(terminateds, truncateds, not self.par_env.agents)
        return observations, rewards, terminateds, truncateds, infos

    def render(self) -> Any:
        return self.par_env.render()

    def close(self) -> None:
        self.par_env.close()
