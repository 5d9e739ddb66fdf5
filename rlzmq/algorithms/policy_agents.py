"""The episodes of a policy's env: those of its only agent, of one of several agents, or of all of them at once."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tree import tree_map, tree_stack
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, default_agent_to_module_mapping_fn
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = [
    "PolicyAgents",
    "agents_of_policy",
    "agents_with_modules",
    "as_batch_of",
    "as_value_of",
    "modules_of_agents",
]


def agents_of_policy(
    config: BaseConfig, modules: Any, spaces: tuple[Any, Any], module_id: str | None, agent_id: Hashable
) -> PolicyAgents:
    """Return the agents that a policy controls; see `Policy` for the arguments.

    Raises:
        KeyError: There is no such module or agent.
        ConfigurationError: The agent that the module plays cannot be determined.
    """
    if module_id is not None and module_id not in modules:
        raise KeyError(f"no module {module_id!r}.{did_you_mean(module_id, list(modules.keys()))}")
    if not config.is_multi_agent:
        return PolicyAgents(modules[DEFAULT_MODULE_ID], spaces)
    mapping_fn = config.policy_mapping_fn or default_agent_to_module_mapping_fn
    if module_id is None and agent_id is None:
        return _AllAgents(modules, spaces, mapping_fn)
    agent_id = _checked_agent(agent_id, module_id, config, spaces[0])
    return _OneOfAgents(modules, spaces, module_id or mapping_fn(agent_id, None), agent_id)


def agents_with_modules(config: BaseConfig, spaces: tuple[Any, Any]) -> list[tuple[str | None, Any]]:
    """Return (module id, agent id) of each agent whose module is the same in all episodes; None of an only agent."""
    if not config.is_multi_agent:
        return [(None, None)]
    return [(module_id, agent_id) for agent_id, module_id in modules_of_agents(config, spaces[0]).items()]


def modules_of_agents(config: BaseConfig, observation_spaces: Any) -> dict[Any, str]:
    """Return agent id -> module id of those agents of an env whose module does not depend on the episode."""
    mapping_fn = config.policy_mapping_fn or default_agent_to_module_mapping_fn
    found: dict[Any, str] = {}
    for agent_id in getattr(observation_spaces, "spaces", ()):
        with contextlib.suppress(Exception):  # the function reads the episode
            module_ids = {mapping_fn(agent_id, None) for _ in range(2)}
            if len(module_ids) == 1:
                found[agent_id] = module_ids.pop()
    return found


def _checked_agent(agent_id: Hashable, module_id: str | None, config: BaseConfig, spaces: Any) -> object:
    agents = list(spaces.spaces)
    if agent_id is None:
        for agent, own in modules_of_agents(config, spaces).items():
            if own == module_id:
                return agent
        raise ConfigurationError(
            f"Policy: which agent module {module_id!r} plays cannot be determined: pass agent_id, one of {agents}."
        )
    if agent_id not in agents:
        raise KeyError(f"no agent {agent_id!r} in the env.{did_you_mean(agent_id, agents)}")
    return agent_id


class PolicyAgents:
    """The agents that a policy plays, and their episodes: the agent of a single-agent env. Subclasses play others.

    Attributes:
        acting: The acting module.
        spaces: (observation space, action space) of the policy's observations and actions.
        are_all: Whether observations and actions are dicts by agent id.
        on_rows: Whether a batch of observations is a batch of the module's inputs.
    """

    are_all: bool = False
    on_rows: bool = True

    def __init__(self, acting: Any, env_spaces: tuple[Any, Any]) -> None:
        self.acting = acting
        self.spaces = env_spaces
        self._spaces: dict[str, Any] = {"observation_space": env_spaces[0], "action_space": env_spaces[1]}

    def acting_module(self) -> tuple[str, Any, Any]:
        """See `Policy.acting_module`."""
        return DEFAULT_MODULE_ID, self.acting, None

    def new_episode(self, observation: Any, name: str) -> Any:
        """Return an episode with its first observation."""
        episode = SingleAgentEpisode(name, **self._spaces)
        episode.add_env_reset(observation, {})
        return episode

    def add_step(self, episode: Any, observation: Any, actions: Any, reward: Any, outputs: Any) -> None:
        """Add a step to an episode."""
        episode.add_env_step(observation, actions, float(reward), {}, extra_model_outputs=outputs)

    def outputs(self, values: dict[str, Any], actions: Any) -> dict[Any, Any]:
        """Return the extra model outputs of a step, given the values for its episode by output."""
        return values

    def with_known_names(self, known: Any, outputs: dict[Any, Any]) -> dict[Any, Any]:
        """Return the outputs with the names of earlier steps, even if `explore` has changed in between."""
        return _like(known, outputs)

    def checked(self, observation: Any) -> Any:
        """Return an observation of the user as episodes store it.

        Raises:
            ValueError: It does not fit the observation space.
        """
        return self.wrapped(as_value_of(self.spaces[0], observation))

    def wrapped(self, item: Any) -> Any:
        """Return an item of one agent as episodes store it."""
        return item

    def unwrapped(self, item: Any) -> Any:
        """Return one agent's part of an item of episodes."""
        return item


class _AllAgents(PolicyAgents):
    """All agents of a multi-agent env."""

    are_all = True
    on_rows = False

    def __init__(self, modules: Any, spaces: tuple[Any, Any], mapping_fn: Any) -> None:
        super().__init__(modules, spaces)
        self._mapping_fn = mapping_fn

    def acting_module(self) -> tuple[str, Any, Any]:
        raise ConfigurationError(
            f"this policy plays several agents: choose one of its modules, {sorted(self.acting.keys())}, with "
            "module_id=… (--module)."
        )

    def checked(self, observation: Any) -> Any:
        refuse_tuple(self.spaces[0], observation)
        return {agent_id: as_value_of(self.spaces[0][agent_id], own) for agent_id, own in observation.items()}

    def new_episode(self, observation: Any, name: str) -> MultiAgentEpisode:
        episode = MultiAgentEpisode(name, agent_to_module_mapping_fn=self._mapping_fn, **self._spaces)
        episode.add_env_reset(observations=observation, infos={})
        return episode

    def add_step(self, episode: Any, observation: Any, actions: Any, reward: Any, outputs: Any) -> None:
        given = reward if isinstance(reward, Mapping) else dict.fromkeys(actions, reward)
        rewards = {agent_id: float(given.get(agent_id, 0.0)) for agent_id in actions}
        episode.add_env_step(observation, actions, rewards, {}, extra_model_outputs=outputs)

    def outputs(self, values: dict[str, Any], actions: Any) -> dict[Any, Any]:
        return {
            agent_id: {
                name: of_agents[agent_id] for name, of_agents in values.items() if agent_id in of_agents
            }
            for agent_id in actions
        }

    def with_known_names(self, known: Any, outputs: dict[Any, Any]) -> dict[Any, Any]:
        known = known or {}
        return {**known, **{agent: _like(known.get(agent), own) for agent, own in outputs.items()}}


class _OneOfAgents(_AllAgents):
    """One agent of a multi-agent env, played by one module."""

    are_all = False

    def __init__(self, modules: Any, spaces: tuple[Any, Any], module_id: str, agent_id: Hashable) -> None:
        super().__init__(modules, spaces, lambda agent_id, episode, **kwargs: module_id)
        self.spaces = spaces[0][agent_id], spaces[1][agent_id]
        self._module_id, self._agent_id = module_id, agent_id

    def acting_module(self) -> tuple[str, Any, Any]:
        return self._module_id, self.acting[self._module_id], self._agent_id

    def checked(self, observation: Any) -> Any:
        return PolicyAgents.checked(self, observation)

    def wrapped(self, item: Any) -> Any:
        return {self._agent_id: item}

    def unwrapped(self, item: Any) -> Any:
        return item[self._agent_id]


def _like(known: Mapping[str, Any] | None, extras: dict[str, Any]) -> dict[str, Any]:
    if known is None or known.keys() == extras.keys():
        return extras
    zeros = {name: tree_map(lambda leaf: leaf * 0, value) for name, value in known.items()}
    return {name: extras.get(name, zero) for name, zero in zeros.items()}


# -- values of spaces ---------------------------------------------------------------------------------

_ARRAYS = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)


def as_value_of(space: gym.Space[Any], value: Any) -> Any:
    """Return one value of a space, with its parts as arrays of the space's dtypes.

    Raises:
        ValueError: The shape or structure differs; the text names the part, the expected and the actual one.
    """
    refuse_tuple(space, value)
    return _converted(space, value, (), "observation")


def refuse_tuple(space: gym.Space[Any], value: Any) -> None:
    """Raise ValueError if a value is all that ``reset`` or ``step`` returned."""
    names = {2: "observation, info", 5: "observation, reward, terminated, truncated, info"}
    if not isinstance(value, tuple) or isinstance(space, gym.spaces.Tuple) or len(value) not in names:
        return
    if isinstance(value[-1], dict):
        call = "env.reset()" if len(value) == 2 else "env.step(…)"
        raise ValueError(
            f"expected an observation, but you passed ({names[len(value)]}), which is what {call} returns. "
            f"Pass {call}[0]."
        )


def as_batch_of(space: gym.Space[Any], values: Any) -> Any:
    """Return many values of a space, or a list of single ones, as one tree of arrays ``[N, ...]``.

    Raises:
        ValueError: See `as_value_of`.
    """
    if isinstance(values, list):
        if not values:
            raise ValueError("expected at least one observation, got an empty list.")
        return tree_stack([as_value_of(space, value) for value in values])
    return _converted(space, values, (None,), "observations")


def _converted(space: gym.Space[Any], value: Any, lead: tuple[None, ...], where: str) -> object:
    if isinstance(space, gym.spaces.Dict):
        if not isinstance(value, dict) or value.keys() != space.spaces.keys():
            got = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise ValueError(f"{where}: expected a dict with the keys {sorted(space.spaces)}, got {got}.")
        return {key: _converted(part, value[key], lead, f"{where}[{key!r}]") for key, part in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        if not isinstance(value, tuple | list) or len(value) != len(space):
            raise ValueError(f"{where}: expected a tuple of {len(space)} parts, got {value!r:.80}.")
        parts = zip(space, value, strict=True)
        return tuple(_converted(part, own, lead, f"{where}[{i}]") for i, (part, own) in enumerate(parts))
    if not isinstance(space, _ARRAYS):
        return value
    given = array = np.asarray(value)
    if given.dtype != space.dtype:
        try:
            array = given.astype(space.dtype)
        except (TypeError, ValueError):
            raise ValueError(f"{where}: expected numbers, got {value!r:.80}; the space is {space}.") from None
        if array.dtype.kind in "iu" and given.dtype.kind == "f" and not np.array_equal(array, given):
            raise ValueError(
                f"{where}: expected whole numbers ({space.dtype}), got {value!r:.80}; the space is {space}."
            )
    if array.ndim < len(lead) or array.shape[len(lead) :] != space.shape:
        shape = tuple(space.shape or ())
        expected = ("N", *shape) if lead else shape
        raise ValueError(f"{where}: expected shape {expected}, got {array.shape}; the space is {space}.")
    return array
