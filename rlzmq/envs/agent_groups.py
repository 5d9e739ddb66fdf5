"""GroupAgentsWrapper: several agents seen as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym

from rlzmq.core.errors import ConfigurationError, MultiAgentEnvError
from rlzmq.envs.multi_agent_env import AgentDict, MultiAgentEnv

__all__ = ["GroupAgentsWrapper"]


class GroupAgentsWrapper(MultiAgentEnv):
    """See `MultiAgentEnv.with_agent_groups`.

    A group ends with the last of its members: terminated if any of them was, else truncated.

    Args:
        env: The environment.
        groups: Group id -> ids of its agents.
        obs_space, act_space: Spaces of each group; None: Tuples of the members' spaces.

    Raises:
        ConfigurationError: An agent is unknown, or is in two groups.
    """

    def __init__(
        self,
        env: MultiAgentEnv,
        groups: Mapping[Any, Sequence[Any]],
        obs_space: gym.Space[Any] | None = None,
        act_space: gym.Space[Any] | None = None,
    ) -> None:
        super().__init__()
        self.env = env
        self.groups = {group: list(members) for group, members in groups.items()}
        self._group_of: dict[Any, Any] = {}
        for group, members in self.groups.items():
            for agent_id in members:
                if agent_id in self._group_of:
                    raise ConfigurationError(
                        f"Agent {agent_id!r} is in two groups: {self._group_of[agent_id]!r} and {group!r}."
                    )
                if agent_id not in env.possible_agents:
                    raise ConfigurationError(
                        f"Group {group!r}: unknown agent {agent_id!r}; expected some of "
                        f"{list(env.possible_agents)}."
                    )
                self._group_of[agent_id] = group
        singles = [agent_id for agent_id in env.possible_agents if agent_id not in self._group_of]
        self.possible_agents = [*self.groups, *singles]
        self.agents = list(self.possible_agents)
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

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[AgentDict, AgentDict]:
        self.agents = list(self.possible_agents)
        self._done: set[Any] = set()
        self._terminated: set[Any] = set()
        self._ended_groups: set[Any] = set()
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._joined(observations), self._joined_infos(infos, {}, observations)

    def step(  # type: ignore[override]
        self, action_dict: AgentDict
    ) -> tuple[AgentDict, AgentDict, AgentDict, AgentDict, AgentDict]:
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
                    f"Group {group!r}: expected observations of all members or of none, but {missing} "
                    "have none while "
                    f"{present} have. Members of a group act at the same steps."
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
