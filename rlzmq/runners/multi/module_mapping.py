"""The checked mapping of agents to modules, and the modules' spaces that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gymnasium as gym

from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.common.agent_to_module_mapping import agents_of_modules
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.signatures import place_of_code
from rlzmq.core.suggest import did_you_mean
from rlzmq.episodes.columns import default_agent_to_module_mapping_fn

__all__ = ["checked_mapping", "module_spaces"]


class _HasConfig(Protocol):
    config: BaseConfig

    @property
    def multi_rl_module(self) -> Any: ...


def checked_mapping(runner: _HasConfig) -> Callable[[Any, Any], str]:
    """Return a function that maps (agent id, episode) to a module id by the runner's ``config.policy_mapping_fn``.

    The function raises ConfigurationError for an unknown module id.
    """

    def mapping_fn(agent_id: Any, episode: Any) -> str:
        fn = getattr(runner.config, "policy_mapping_fn", None) or default_agent_to_module_mapping_fn
        module_id = fn(agent_id, episode)
        modules = runner.multi_rl_module
        if not isinstance(module_id, str) or module_id not in modules:
            raise ConfigurationError(
                f"policy_mapping_fn({agent_id!r}, episode) returned {module_id!r}, which is not a module"
                f"{place_of_code(fn)}.{did_you_mean(module_id, list(modules.keys()))}"
            )
        return str(module_id)

    return mapping_fn


def module_spaces(
    module_ids: Sequence[str],
    mapping_fn: Callable[..., str],
    observation_spaces: Any,
    action_spaces: gym.spaces.Dict,
) -> dict[str, tuple[Any, Any]]:
    """Return (observation space, action space) by module id.

    Args:
        module_ids: The modules.
        mapping_fn: Maps agents to modules; see `agents_of_modules`.
        observation_spaces: Spaces after the env-to-module pipeline: a Dict by module id, or by agent id.
        action_spaces: Action spaces by agent id.

    Returns:
        The modules' spaces; spaces that cannot be determined are left out.
    """
    by_name = getattr(observation_spaces, "spaces", {})
    of_agents = {agent: (by_name.get(agent), space) for agent, space in action_spaces.spaces.items()}
    agents = agents_of_modules(mapping_fn, of_agents, module_ids)
    return {
        module_id: (by_name.get(module_id, by_name.get(agents[module_id])), action_spaces[agents[module_id]])
        for module_id in module_ids
        if module_id in agents
    }
