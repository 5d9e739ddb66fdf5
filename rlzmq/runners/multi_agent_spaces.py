"""Which spaces a multi-agent runner's modules have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

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
        mapping_fn: Agent to module; one that needs a real episode is taken to name any module.
        observation_spaces: After the env-to-module pipeline: a Dict by module id, or by agent id.
        action_spaces: By agent id.

    Returns:
        The modules' spaces. Modules that no agent is known to be mapped to have those of all agents, if
        these are equal, and else are left out.
    """
    by_name = getattr(observation_spaces, "spaces", {})
    known: dict[str, tuple[Any, Any]] = {}
    pairs = []
    for agent_id, action_space in action_spaces.spaces.items():
        try:
            targets = [mapping_fn(agent_id, None)]
        except Exception:  # it reads the episode
            targets = list(module_ids)
        for target in targets:
            pair = (by_name.get(target, by_name.get(agent_id)), action_space)
            pairs.append(pair)
            known.setdefault(target, pair)
    if pairs and all(pair == pairs[0] for pair in pairs):
        for module_id in module_ids:
            known.setdefault(module_id, pairs[0])
    return {module_id: known[module_id] for module_id in module_ids if module_id in known}
