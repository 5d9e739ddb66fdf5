"""Spaces of the modules of a multi-agent env."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from rlzmq.connectors.agents_of_modules import agents_of_modules

__all__ = ["module_spaces"]


def module_spaces(
    module_ids: Sequence[str],
    mapping_fn: Callable[..., str],
    observation_spaces: Any,
    action_spaces: gym.spaces.Dict,
) -> dict[str, tuple[Any, Any]]:
    """(observation space, action space) by module id.

    Args:
        module_ids: The modules.
        mapping_fn: Agent to module; see `agents_of_modules`.
        observation_spaces: After the env-to-module pipeline: a Dict by module id, or by agent id.
        action_spaces: By agent id.

    Returns:
        The modules' spaces; those that cannot be determined are left out.
    """
    by_name = getattr(observation_spaces, "spaces", {})
    of_agents = {agent: (by_name.get(agent), space) for agent, space in action_spaces.spaces.items()}
    agents = agents_of_modules(mapping_fn, of_agents, module_ids)
    return {
        module_id: (by_name.get(module_id, by_name.get(agents[module_id])), action_spaces[agents[module_id]])
        for module_id in module_ids
        if module_id in agents
    }
