"""MultiAgentEnv, the environments of several agents: copies of single-agent ones, groups, PettingZoo games, vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from rlzmq.core.errors import ConfigurationError, MultiAgentEnvError
from rlzmq.core.imports import import_optional
from rlzmq.core.synonyms import did_you_mean
from rlzmq.envs.registry import EnvContext, EnvEntry, MakingEnvs, make_env, resolve_env
from rlzmq.envs.sync_vector import Recover, Reproduction, plain_action, replaced
from rlzmq.episodes.step_values import as_flag

__all__ = [
    "GroupAgentsWrapper",
    "MultiAgentEnv",
    "ParallelPettingZooEnv",
    "PettingZooEnv",
    "SyncVectorMultiAgentEnv",
    "agent_spaces",
    "clip_rewards",
    "make_multi_agent",
    "make_multi_agent_vec",
]

AgentDict = dict[Any, Any]
Row = tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]
"""One step of all agents: observations, rewards, terminateds, truncateds, infos."""


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
        agents: Ids of the current agents.
        observation_spaces, action_spaces: The agents' spaces by id, or None.
    """

    possible_agents: list[Any]
    agents: list[Any]
    observation_spaces: Mapping[Any, gym.Space[Any]] | None
    action_spaces: Mapping[Any, gym.Space[Any]] | None

    def __init__(self) -> None:
        super().__init__()
        # keep what a subclass set before this call
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
        """Start an episode. Subclasses may call this method first: it seeds ``np_random``.

        Args:
            seed: Seed of the environment's random numbers.
            options: Environment-specific.

        Returns:
            (observations, infos) by agent id, for the agents that act first.
        """
        if type(self).reset is MultiAgentEnv.reset:
            raise NotImplementedError(f"{type(self).__name__} must implement reset(*, seed, options).")
        super().reset(seed=seed)
        return {}, {}

    def step(self, action_dict: AgentDict) -> Row:  # type: ignore[override]
        """Run one env step.

        Args:
            action_dict: The actions of exactly those agents that were in the last observations and are not
                done.

        Returns:
            (observations, rewards, terminateds, truncateds, infos) by agent id. An agent that acted may receive
            its next observation later; a truncated one must receive a last observation. ``"__all__"`` in
            terminateds and truncateds ends the episode for all.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement step(action_dict).")

    def get_observation_space(self, agent_id: Any) -> gym.Space[Any]:
        """Return the observation space of one agent."""
        return self._space_of(agent_id, "observation")

    def get_action_space(self, agent_id: Any) -> gym.Space[Any]:
        """Return the action space of one agent."""
        return self._space_of(agent_id, "action")

    def _space_of(self, agent_id: object, kind: str) -> gym.Space[Any]:
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
        """Number of current agents."""
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
        """Return this environment with groups of agents acting as single agents.

        A group observes and acts in tuples, one part per member, and receives the sum of the members' rewards. The
        individual rewards are in ``info["_group_rewards"]``. The members of a group act together.

        Args:
            groups: Group id -> ids of its agents. Agents in no group are unchanged.
            obs_space, act_space: Tuple spaces of each group; None: tuples of the members' spaces.
        """
        return GroupAgentsWrapper(self, groups, obs_space, act_space)

    def __str__(self) -> str:
        return f"<{type(self).__name__} with agents {list(self.possible_agents)[:8]}>"


class GroupAgentsWrapper(MultiAgentEnv):
    """See `MultiAgentEnv.with_agent_groups`.

    A group ends with its last member: as terminated if any member terminated, else as truncated.

    Args:
        env: The environment.
        groups: Group id -> ids of its agents.
        obs_space, act_space: Spaces of each group; None: Tuples of the members' spaces.

    Raises:
        ConfigurationError: An agent is unknown, or is in two groups.
    """

    action_spaces: dict[Any, gym.Space[Any]]
    observation_spaces: dict[Any, gym.Space[Any]]

    def __init__(
        self,
        env: MultiAgentEnv,
        groups: Mapping[Any, Sequence[Any]],
        obs_space: gym.Space[Any] | None = None,
        act_space: gym.Space[Any] | None = None,
    ) -> None:
        super().__init__()
        self.env = env
        self.groups: dict[Any, list[Any]] = {group: list(members) for group, members in groups.items()}
        self._group_of: dict[Any, Any] = {}
        for group, members in self.groups.items():
            for agent_id in members:
                if agent_id in self._group_of:
                    raise ConfigurationError(
                        f"Agent {agent_id!r} is in two groups: {self._group_of[agent_id]!r} and {group!r}."
                    )
                if env.possible_agents and agent_id not in env.possible_agents:
                    raise ConfigurationError(
                        f"Group {group!r}: unknown agent {agent_id!r}; expected some of "
                        f"{list(env.possible_agents)}."
                    )
                self._group_of[agent_id] = group
        singles = [agent_id for agent_id in env.possible_agents if agent_id not in self._group_of]
        self.possible_agents: list[Any] = [*self.groups, *singles]
        self.agents: list[Any] = list(self.possible_agents)
        observation_spaces = {agent_id: env.get_observation_space(agent_id) for agent_id in singles}
        action_spaces = {agent_id: env.get_action_space(agent_id) for agent_id in singles}
        for group, members in self.groups.items():
            observation_spaces[group] = obs_space or gym.spaces.Tuple(
                [env.get_observation_space(agent_id) for agent_id in members]
            )
            action_spaces[group] = act_space or gym.spaces.Tuple(
                [env.get_action_space(agent_id) for agent_id in members]
            )
        self.observation_spaces, self.action_spaces = observation_spaces, action_spaces
        if obs_space is not None:  # those of every group, as in RLlib
            self.observation_space = obs_space
        if act_space is not None:
            self.action_space = act_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[AgentDict, AgentDict]:
        self.agents = list(self.possible_agents)
        self._done: set[Any] = set()
        self._terminated: set[Any] = set()
        self._ended_groups: set[Any] = set()
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._joined(observations), self._joined_infos(infos, {}, observations)

    def step(self, action_dict: AgentDict) -> Row:  # type: ignore[override]
        actions: AgentDict = {}
        for agent_id, action in action_dict.items():
            if agent_id in self.groups:
                parts = zip(self.groups[agent_id], action, strict=True)
                actions.update((member, part) for member, part in parts if member not in self._done)
            else:
                actions[agent_id] = action
        observations, rewards, terminateds, truncateds, infos = self.env.step(actions)
        self._done.update(key for given in (terminateds, truncateds) for key, value in given.items() if value)
        self._terminated.update(key for key, value in terminateds.items() if value)
        flags = []
        for given in (terminateds, truncateds):
            joined = {key: value for key, value in given.items() if key not in self._group_of}
            joined.setdefault("__all__", False)
            flags.append(joined)
        for group, members in self.groups.items():
            ends = group not in self._ended_groups and self._done.issuperset(members)
            flags[0][group] = ends and not self._terminated.isdisjoint(members)
            flags[1][group] = ends and not flags[0][group]
            if ends:
                self._ended_groups.add(group)
        sums: AgentDict = {}
        for agent_id, reward in rewards.items():
            group = self._group_of.get(agent_id, agent_id)
            sums[group] = sums.get(group, 0.0) + reward
        return (
            self._joined(observations),
            sums,
            flags[0],
            flags[1],
            self._joined_infos(infos, rewards, observations),
        )

    def _joined(self, observations: AgentDict) -> AgentDict:
        joined = {key: value for key, value in observations.items() if key not in self._group_of}
        for group, members in self.groups.items():
            present = [agent_id for agent_id in members if agent_id in observations]
            if not present:
                continue
            if len(present) != len(members):
                missing = [agent_id for agent_id in members if agent_id not in observations]
                raise MultiAgentEnvError(
                    f"Group {group!r}: expected observations of all members or of none, but {missing} have "
                    f"none while {present} have. Members of a group act at the same steps."
                )
            joined[group] = tuple(observations[agent_id] for agent_id in members)
        return joined

    def _joined_infos(self, infos: AgentDict, rewards: AgentDict, observations: AgentDict) -> AgentDict:
        joined: AgentDict = {key: value for key, value in infos.items() if key not in self._group_of}
        for group, members in self.groups.items():
            if any(agent_id in observations or agent_id in rewards for agent_id in members):
                joined[group] = {
                    **{agent_id: infos[agent_id] for agent_id in members if infos.get(agent_id)},
                    "_group_rewards": [rewards.get(agent_id, 0.0) for agent_id in members],
                }
        return joined

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


def agent_spaces(env: Any) -> tuple[gym.spaces.Dict, gym.spaces.Dict]:
    """Return (observation spaces, action spaces) of all possible agents of a multi-agent environment.

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


def clip_rewards(env: Any, most: float) -> Any:
    """Return the environment with its rewards, those of each agent, clipped to [-most, most]."""
    if not isinstance(env, MultiAgentEnv):
        return gym.wrappers.ClipReward(env, -most, most)
    step = env.step

    def clipped_step(action_dict: AgentDict) -> Row:
        observations, rewards, terminateds, truncateds, infos = step(action_dict)
        clipped = {agent_id: np.clip(reward, -most, most) for agent_id, reward in rewards.items()}
        return observations, clipped, terminateds, truncateds, infos

    env.step = clipped_step  # type: ignore[method-assign]
    return env


def make_multi_agent(env_name_or_creator: str | type | Callable[..., Any]) -> type[MultiAgentEnv]:
    """Return a class of environments in which n agents each act in their own single-agent environment.

    Example:
        >>> MultiAgentCartPole = make_multi_agent("CartPole-v1")
        >>> env = MultiAgentCartPole({"num_agents": 2})
        >>> sorted(env.reset(seed=0)[0])
        [0, 1]

    Args:
        env_name_or_creator: The single-agent environment: a Gymnasium id, a registered name, a
            class or a callable.

    Returns:
        A `MultiAgentEnv` class. Its config: ``num_agents`` (default 1); all other items go to the
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
            self.render_mode, self.metadata = self.envs[0].render_mode, self.envs[0].metadata
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

        def step(self, action_dict: AgentDict) -> Row:  # type: ignore[override]
            row: Row = ({}, {}, {}, {}, {})
            observations, rewards, terminateds, truncateds, infos = row
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
            frames = [env.render() for env in self.envs]
            return np.concatenate(frames, axis=1) if self.render_mode == "rgb_array" else frames[0]

        def close(self) -> None:
            for env in self.envs:
                env.close()

    name = entry.label.replace("-", "").replace("/", "")
    IndependentAgentsEnv.__name__ = IndependentAgentsEnv.__qualname__ = f"MultiAgent[{name}]"
    return IndependentAgentsEnv


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

    def step(self, action_dict: AgentDict) -> Row:  # type: ignore[override]
        env = self.env
        env.step(action_dict[env.agent_selection])
        row: Row = ({}, {}, {}, {}, {})
        observations, rewards, terminateds, truncateds, infos = row
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

    def step(self, action_dict: AgentDict) -> Row:  # type: ignore[override]
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


# -- several environments ------------------------------------------------------------------------------

_DICT = frozenset({dict})
_RESET_PARTS = ("observations", "infos")
_STEP_PARTS = ("observations", "rewards", "terminateds", "truncateds", "infos")

_STEPS_KEPT = 10_000  # actions of one episode


class SyncVectorMultiAgentEnv:
    """N multi-agent environments in this process, with NEXT_STEP autoreset.

    After an episode's end, the next `step` resets that environment: its actions are ignored, and it returns the reset
    observations without rewards and flags. Observations are not copied.

    Args:
        creators: Makes environment i, by index. The agents' spaces must be the same in all environments.

    Attributes:
        envs: The environments.
        num_envs: N.
        single_observation_spaces, single_action_spaces: One environment's spaces by agent id.
        needs_reset: bool[N], whether the next step resets the environment; may be set (e.g. when all known agents are
            done).
        resetting: bool[N], whether the last step reset the environment.
        is_resetting: Whether an environment is being created or reset in a step right now; for other threads.
        failed: Indices of the environments that were recreated in the last step or reset.
        recover: See `LeanSyncVectorEnv`.
    """

    single_action_spaces: gym.spaces.Dict
    single_observation_spaces: gym.spaces.Dict

    def __init__(self, creators: Sequence[Callable[[], Any]]) -> None:
        self.env_fns: list[Callable[[], Any]] = list(creators)
        self.num_envs: int = len(self.env_fns)
        self.envs: list[Any] = [creator() for creator in self.env_fns]
        self.single_observation_spaces, self.single_action_spaces = agent_spaces(self.envs[0])
        for index, env in enumerate(self.envs[1:], 1):
            if agent_spaces(env) != (self.single_observation_spaces, self.single_action_spaces):
                raise ConfigurationError(
                    f"Environment {index} of {self.num_envs} has other agents or spaces than environment 0: "
                    f"{agent_spaces(env)[0]}, expected {self.single_observation_spaces}."
                )
        self.needs_reset: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        self.resetting: NDArray[np.bool_] = np.zeros(self.num_envs, np.bool_)
        self.is_resetting: bool = False
        self.failed: list[int] = []
        self.recover: Recover | None = None
        self._episode_seeds: list[int | None] = [None] * self.num_envs
        self._episode_actions: list[list[AgentDict]] = [[] for _ in range(self.num_envs)]

    @property
    def unwrapped(self) -> SyncVectorMultiAgentEnv:
        """This environment."""
        return self

    @property
    def single_observation_space(self) -> gym.spaces.Dict:
        """`single_observation_spaces`."""
        return self.single_observation_spaces

    @property
    def single_action_space(self) -> gym.spaces.Dict:
        """`single_action_spaces`."""
        return self.single_action_spaces

    @property
    def observation_space(self) -> gym.spaces.Tuple[Any]:
        """One Dict by agent id per environment."""
        return gym.spaces.Tuple([self.single_observation_spaces] * self.num_envs)

    @property
    def action_space(self) -> gym.spaces.Tuple[Any]:
        """One Dict by agent id per environment."""
        return gym.spaces.Tuple([self.single_action_spaces] * self.num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[AgentDict], list[AgentDict]]:
        """Reset all environments.

        Args:
            seed: Environment i gets ``seed + 1000 * i``. The distance is wide because environments may seed their
                parts with the following numbers.

        Returns:
            (observations, infos): one dict by agent id per environment.
        """
        self.failed = []
        results = [
            self._reset_env(index, None if seed is None else seed + 1000 * index, options)
            for index in range(self.num_envs)
        ]
        self.needs_reset[:] = False
        self.resetting[:] = True
        return [observations for observations, _ in results], [infos for _, infos in results]

    def step(
        self, actions: Sequence[AgentDict]
    ) -> tuple[list[AgentDict], list[AgentDict], list[AgentDict], list[AgentDict], list[AgentDict]]:
        """Step all environments; reset those whose episode is over.

        Args:
            actions: One dict by agent id per environment.

        Returns:
            (observations, rewards, terminateds, truncateds, infos): one dict by agent id per environment.
        """
        return tuple(map(list, zip(*self.step_rows(actions), strict=True)))  # type: ignore[return-value]

    def step_rows(self, actions: Sequence[AgentDict]) -> list[Row]:
        """Step as `step` does; return (observations, rewards, terminateds, truncateds, infos) of each environment."""
        if len(actions) != self.num_envs:
            raise ValueError(
                f"step: expected {self.num_envs} action dicts, one per environment, got {len(actions)}."
            )
        rows: list[Row] = []
        self.failed = []
        needs_reset, histories = self.needs_reset, self._episode_actions
        self.resetting[:] = needs_reset
        stepped = zip(self.envs, actions, needs_reset.tolist(), strict=True)
        for index, (env, action_dict, is_over) in enumerate(stepped):
            if is_over:
                observations, infos = self._reset_env(index, None, None)
                needs_reset[index] = False
                rows.append((observations, {}, {}, {}, infos))
                continue
            if len(histories[index]) < _STEPS_KEPT:
                histories[index].append(action_dict)
            try:
                row = env.step(action_dict)
            except Exception as error:
                observations, infos = self._recovered(index, "step", error)
                rows.append((observations, {}, {}, {}, infos))
                continue
            if type(row) is not tuple or len(row) != 5 or not _DICT.issuperset(map(type, row)):
                row = self._checked(index, row, "step", _STEP_PARTS)
            rows.append(row)
            _, _, terminateds, truncateds, _ = row
            is_ongoing = terminateds.get("__all__") is False and truncateds.get("__all__") is False
            if not is_ongoing and (_says_over(terminateds) or _says_over(truncateds)):
                needs_reset[index] = True
        return rows

    def way_of(self, index: int) -> Reproduction | None:
        """Return the reset and the actions of environment ``index`` in its current episode; None for very long ones."""
        actions = self._episode_actions[index]
        if len(actions) == _STEPS_KEPT:
            return None
        plain = [{agent_id: plain_action(action) for agent_id, action in one.items()} for one in actions]
        return Reproduction(self._episode_seeds[index], None, plain)

    # -- inside --------------------------------------------------------------------------------

    def _note_reset(self, index: int, seed: int | None) -> None:
        self._episode_seeds[index] = seed
        self._episode_actions[index] = []

    def _reset_env(
        self, index: int, seed: int | None, options: dict[str, Any] | None
    ) -> tuple[AgentDict, AgentDict]:
        self._note_reset(index, seed)
        self.is_resetting = True
        try:
            row = self.envs[index].reset(seed=seed, options=options)
        except Exception as error:
            return self._recovered(index, "reset", error)
        finally:
            self.is_resetting = False
        return self._checked(index, row, "reset", _RESET_PARTS)  # type: ignore[no-any-return]

    def _checked(self, index: int, row: object, method: str, names: tuple[str, ...]) -> Any:
        """Check the structure of an environment's return value; infos may be None."""
        where = f"Environment {index} of {self.num_envs}: {method}() returned"
        if not isinstance(row, (tuple, list)) or len(row) != len(names):
            got = f"{len(row)}" if isinstance(row, (tuple, list)) else f"{type(row).__name__} {row!r:.80}"
            raise MultiAgentEnvError(f"{where} {got}, expected {len(names)} values ({', '.join(names)}).")
        row = (*row[:-1], {} if row[-1] is None else row[-1])
        for name, part in zip(names, row, strict=True):
            if not isinstance(part, Mapping):
                raise MultiAgentEnvError(
                    f"{where} {name} that are not a dict by agent id, but {type(part).__name__} {part!r:.80}."
                )
        return row

    def _recovered(self, index: int, where: str, error: Exception) -> tuple[AgentDict, AgentDict]:
        """Replace an environment that raised an error, and return the new one's first observations."""
        row = replaced(self, index, where, error, self._note_reset)
        self.failed.append(index)
        self.resetting[index] = True
        self.needs_reset[index] = False
        return self._checked(index, row, "reset", _RESET_PARTS)  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close all environments."""
        for env in self.envs:
            env.close()


def _says_over(flags: Mapping[Any, Any]) -> bool:
    """Return whether the episode is over; the episode rejects invalid flags and names their agent."""
    flag = flags.get("__all__")
    if flag is None or flag is False or flag is True:
        return flag is True
    try:
        return as_flag(flag)
    except ValueError:
        return False


def make_multi_agent_vec(
    env: object, *, num_envs: int = 1, mode: object = "sync", context: EnvContext | None = None
) -> SyncVectorMultiAgentEnv:
    """Make a vector of multi-agent environments.

    Args:
        env: Anything that ``resolve_env`` accepts and that makes a `MultiAgentEnv`.
        num_envs: Number of environments, at least 1.
        mode: Must be ``"sync"``.
        context: ``env_config`` and indices; environment i gets a copy with ``vector_index=i``.

    Raises:
        ConfigurationError: The mode is another, or an environment is not multi-agent.
    """
    entry = resolve_env(env)
    context = EnvContext() if context is None else context
    if not isinstance(num_envs, int) or num_envs < 1:
        raise ConfigurationError(f"num_envs_per_env_runner: expected an int >= 1, got {num_envs!r}.")
    mode_name = getattr(mode, "value", mode)
    if mode_name != "sync":
        raise ConfigurationError(
            f"gym_env_vectorize_mode={mode!r}: multi-agent environments are vectorized in mode 'sync' only."
        )

    making = MakingEnvs(num_envs, context)

    def creator(index: int) -> Callable[[], Any]:
        return making.counting(lambda: _make_checked(entry, context.copy_with_overrides(vector_index=index)))

    return SyncVectorMultiAgentEnv([creator(index) for index in range(num_envs)])


def _make_checked(entry: EnvEntry, context: EnvContext) -> object:
    env = make_env(entry, context)
    if not all(hasattr(env, name) for name in ("get_observation_space", "get_action_space")):
        kind = type(getattr(env, "unwrapped", env)).__name__
        raise ConfigurationError(
            f"{entry.label} made a {kind}, which is not multi-agent: expected a rlzmq.MultiAgentEnv. Wrap "
            "PettingZoo environments in PettingZooEnv or ParallelPettingZooEnv; make_multi_agent(...) puts n "
            "agents into copies of a single-agent one."
        )
    return env
