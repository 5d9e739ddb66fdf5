"""MultiAgentEnv: the interface of environments with several agents, and two ways to make one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import gymnasium as gym

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean
from rlzmq.envs.registry import EnvContext, make_env, resolve_env

__all__ = ["MultiAgentEnv", "agent_spaces", "make_multi_agent"]

AgentDict = dict[Any, Any]


class MultiAgentEnv(gym.Env[Any, Any]):
    """Base class of environments with several agents that may act at different times.

    An agent that is in the observations of `reset` or `step` acts in the next `step`; all others do not.
    Set ``possible_agents``, ``observation_spaces`` and ``action_spaces`` (dicts by agent id) in
    ``__init__``; or one ``observation_space`` and ``action_space`` for every agent.

    Example::

        class Countdown(MultiAgentEnv):
            def __init__(self, config=None):
                super().__init__()
                self.agents = self.possible_agents = ["a", "b"]
                self.observation_spaces = {a: gym.spaces.Discrete(10) for a in self.agents}
                self.action_spaces = {a: gym.spaces.Discrete(2) for a in self.agents}

            def reset(self, *, seed=None, options=None):
                self.t = 9
                return {a: self.t for a in self.agents}, {}

            def step(self, action_dict):
                self.t -= 1
                observations = {a: self.t for a in self.agents}
                rewards = {a: float(action) for a, action in action_dict.items()}
                return observations, rewards, {"__all__": self.t == 0}, {"__all__": False}, {}

    Attributes:
        possible_agents: Ids of all agents that may ever appear.
        agents: Ids of the agents that are there now.
        observation_spaces, action_spaces: The agents' spaces by id, or None.
    """

    possible_agents: list[Any]
    agents: list[Any]
    observation_spaces: Mapping[Any, gym.Space[Any]] | None
    action_spaces: Mapping[Any, gym.Space[Any]] | None

    def __init__(self) -> None:
        super().__init__()
        # what a subclass set before calling this stays
        for name, default in (
            ("possible_agents", []),
            ("agents", []),
            ("observation_spaces", None),
            ("action_spaces", None),
            ("observation_space", None),
            ("action_space", None),
        ):
            if not hasattr(self, name):
                setattr(self, name, default)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[AgentDict, AgentDict]:
        """Begins an episode. Subclasses may call this one first: it seeds ``np_random``.

        Args:
            seed: Seed of the environment's random numbers.
            options: Environment-specific.

        Returns:
            (observations, infos) by agent id, of the agents that act first.
        """
        if type(self).reset is MultiAgentEnv.reset:
            raise NotImplementedError(f"{type(self).__name__} must implement reset(*, seed, options).")
        super().reset(seed=seed)
        return {}, {}

    def step(  # type: ignore[override]
        self, action_dict: AgentDict
    ) -> tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]:
        """One env step.

        Args:
            action_dict: The actions of exactly the agents that were in the last observations and are not
                done.

        Returns:
            (observations, rewards, terminateds, truncateds, infos) by agent id. An agent that acted may get
            its next observation later; one that is truncated must get a last observation. ``"__all__"`` in
            terminateds and truncateds ends the episode for all.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement step(action_dict).")

    def get_observation_space(self, agent_id: Any) -> gym.Space[Any]:
        """The observation space of one agent."""
        return self._space_of(agent_id, "observation")

    def get_action_space(self, agent_id: Any) -> gym.Space[Any]:
        """The action space of one agent."""
        return self._space_of(agent_id, "action")

    def _space_of(self, agent_id: Any, kind: str) -> gym.Space[Any]:
        by_agent = getattr(self, f"{kind}_spaces", None)
        common = getattr(self, f"{kind}_space", None)
        if by_agent is None and isinstance(common, gym.spaces.Dict) and agent_id in common.spaces:
            by_agent = common.spaces
        if by_agent is not None:
            if agent_id in by_agent:
                return cast("gym.Space[Any]", by_agent[agent_id])
            raise ConfigurationError(
                f"{type(self).__name__}.{kind}_spaces has no agent "
                f"{agent_id!r}.{did_you_mean(agent_id, by_agent)}"
            )
        if common is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no spaces: set self.{kind}_spaces = {{agent_id: space}} in "
                "__init__."
            )
        return cast("gym.Space[Any]", common)

    @property
    def num_agents(self) -> int:
        """Number of agents that are there now."""
        return len(self.agents)

    @property
    def max_num_agents(self) -> int:
        """Number of agents that may ever appear."""
        return len(self.possible_agents)

    def with_agent_groups(
        self,
        groups: Mapping[Any, Sequence[Any]],
        obs_space: gym.Space[Any] | None = None,
        act_space: gym.Space[Any] | None = None,
    ) -> MultiAgentEnv:
        """This environment with some agents seen as one.

        A group observes and acts in tuples, one part per member, and gets the sum of the members' rewards;
        the single ones are in ``info["_group_rewards"]``. The members of a group act together.

        Args:
            groups: Group id -> the ids of its agents. Agents in no group stay as they are.
            obs_space, act_space: Tuple spaces of each group; None: tuples of the members' spaces.
        """
        from rlzmq.envs.agent_groups import GroupAgentsWrapper

        return GroupAgentsWrapper(self, groups, obs_space, act_space)

    def __str__(self) -> str:
        return f"<{type(self).__name__} with agents {list(self.possible_agents)[:8]}>"


def agent_spaces(env: Any) -> tuple[gym.spaces.Dict, gym.spaces.Dict]:
    """(observation spaces, action spaces) of all possible agents of a multi-agent environment.

    Raises:
        ConfigurationError: An agent has no space, or no agents are known.
    """
    agents = list(getattr(env, "possible_agents", None) or getattr(env, "agents", None) or ())
    by_agent = getattr(env, "observation_spaces", None) or getattr(env, "observation_space", None)
    if not agents and isinstance(by_agent, Mapping):
        agents = list(by_agent)
    if not agents:
        raise ConfigurationError(
            f"{type(env).__name__} names no agents: set self.possible_agents = [...] and "
            "self.observation_spaces / self.action_spaces = {agent_id: space} in __init__."
        )
    return tuple(  # type: ignore[return-value]
        gym.spaces.Dict({agent_id: getattr(env, f"get_{kind}_space")(agent_id) for agent_id in agents})
        for kind in ("observation", "action")
    )


def make_multi_agent(env_name_or_creator: str | type | Callable[..., Any]) -> type[MultiAgentEnv]:
    """A class of environments in which n agents each play in a single-agent environment of their own.

    Example:
        >>> MultiAgentCartPole = make_multi_agent("CartPole-v1")
        >>> env = MultiAgentCartPole({"num_agents": 2})
        >>> sorted(env.reset(seed=0)[0])
        [0, 1]

    Args:
        env_name_or_creator: What makes one single-agent environment: a Gymnasium id, a registered name, a
            class or a callable.

    Returns:
        A `MultiAgentEnv` class. Its config: ``num_agents`` (default 1); everything else goes to the
        single environments. Agents are 0 … n-1; the episode ends when all of them are done.
    """
    entry = resolve_env(env_name_or_creator)

    class IndependentAgentsEnv(MultiAgentEnv):
        __doc__ = f"n agents, each in its own {entry.label}."

        def __init__(self, config: EnvContext | Mapping[str, Any] | None = None) -> None:
            context = config if isinstance(config, EnvContext) else EnvContext(config)
            num_agents = context.get("num_agents", 1)
            if not isinstance(num_agents, int) or num_agents < 1:
                raise ConfigurationError(
                    f"env_config['num_agents']: expected an int >= 1, got {num_agents!r}."
                )
            own = {key: value for key, value in context.items() if key != "num_agents"}
            self.envs = [make_env(entry, context.copy_with_overrides(own)) for _ in range(num_agents)]
            self.possible_agents = list(range(num_agents))
            self.agents = list(self.possible_agents)
            self.observation_spaces = {i: env.observation_space for i, env in enumerate(self.envs)}
            self.action_spaces = {i: env.action_space for i, env in enumerate(self.envs)}
            self._terminated: set[int] = set()
            self._truncated: set[int] = set()
            super().__init__()

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[AgentDict, AgentDict]:
            self._terminated, self._truncated = set(), set()
            self.agents = list(self.possible_agents)
            observations, infos = {}, {}
            for i, env in enumerate(self.envs):
                own_seed = None if seed is None else seed + i
                observations[i], infos[i] = env.reset(seed=own_seed, options=options)
            return observations, infos

        def step(  # type: ignore[override]
            self, action_dict: AgentDict
        ) -> tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]:
            observations: AgentDict = {}
            rewards: AgentDict = {}
            terminateds: AgentDict = {}
            truncateds: AgentDict = {}
            infos: AgentDict = {}
            for i, action in action_dict.items():
                observations[i], rewards[i], terminateds[i], truncateds[i], infos[i] = self.envs[i].step(
                    action
                )
                if terminateds[i]:
                    self._terminated.add(i)
                elif truncateds[i]:
                    self._truncated.add(i)
            done = self._terminated | self._truncated
            self.agents = [i for i in self.possible_agents if i not in done]
            truncateds["__all__"] = len(self._truncated) == len(self.envs)
            terminateds["__all__"] = not self.agents and not truncateds["__all__"]
            return observations, rewards, terminateds, truncateds, infos

        def render(self) -> Any:
            return self.envs[0].render()

        def close(self) -> None:
            for env in self.envs:
                env.close()

    name = entry.label.replace("-", "").replace("/", "")
    IndependentAgentsEnv.__name__ = IndependentAgentsEnv.__qualname__ = f"MultiAgent[{name}]"
    return IndependentAgentsEnv
