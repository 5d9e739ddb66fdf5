"""Finding each module's agent, and so its spaces, before the first episode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

__all__ = ["agents_of_modules"]

# Enough calls for random mapping functions: a module drawn once in 20 calls is missed 6 times in 1,000.
_MAX_ROUNDS = 100


def agents_of_modules(
    mapping_fn: Callable[..., Any],
    spaces: Mapping[Any, Any],
    module_ids: Collection[str],
) -> dict[str, Any]:
    """Return an agent of each module.

    Args:
        mapping_fn: ``fn(agent_id, episode) -> module id``; it may draw. It is asked with episodes that have ``id_`` and
            ``agent_ids`` only. One that needs more of an episode is taken to name any module.
        spaces: Agent id → what tells agents apart, e.g. (observation space, action space).
        module_ids: All modules.

    Returns:
        Module id → agent id. Modules that no agent is known to be mapped to have any agent if all are alike, and else
        are left out.
    """
    agents: dict[str, Any] = {}
    for round_ in range(_MAX_ROUNDS):
        episode = SimpleNamespace(id_=str(round_), agent_ids=list(spaces))
        for agent_id in spaces:
            for module_id in _targets(mapping_fn, agent_id, episode, module_ids):
                agents.setdefault(module_id, agent_id)
        if all(module_id in agents for module_id in module_ids):
            break
        if round_ == 0 and _are_alike(list(spaces.values())):
            for module_id in module_ids:
                agents.setdefault(module_id, next(iter(spaces)))
            break
    return agents


def _targets(
    mapping_fn: Callable[..., Any], agent_id: Any, episode: Any, module_ids: Collection[str]
) -> Collection[str]:
    try:
        return [str(mapping_fn(agent_id, episode))]
    except Exception:  # it reads other attributes of the episode
        return module_ids


def _are_alike(spaces: Sequence[Any]) -> bool:
    return bool(spaces) and all(space == spaces[0] for space in spaces)
