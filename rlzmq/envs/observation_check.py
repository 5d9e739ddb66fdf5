"""Checks that observations fit their spaces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rlzmq.core.errors import MultiAgentEnvError
from rlzmq.core.tree import value_kind

__all__ = ["as_space_dtype", "check_agents_observations", "misfit"]


def misfit(space: gym.Space[Any], item: object, path: str) -> str:
    """Describe an error in an observation's structure, shape or kind (number or text); ``""`` if there is none.

    Bounds, other dtypes of the same kind, and spaces without a fixed shape are not checked.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(item, Mapping) or item.keys() != space.spaces.keys():
            return f"{path} is {_shown(item)}, expected a dict with the keys {list(space.spaces)}"
        parts = (misfit(part, item[key], f"{path}[{key!r}]") for key, part in space.spaces.items())
        return next(filter(None, parts), "")
    if isinstance(space, spaces.Tuple):
        if not isinstance(item, (tuple, list)) or len(item) != len(space.spaces):
            return f"{path} is {_shown(item)}, expected a tuple of {len(space.spaces)}"
        parts = (misfit(part, item[i], f"{path}[{i}]") for i, part in enumerate(space.spaces))
        return next(filter(None, parts), "")
    if space.shape is None:
        return ""
    try:
        array = np.asarray(item)
    except ValueError:  # lists of different lengths
        return f"{path} is {_shown(item)}, expected an array of shape {space.shape} ({space})"
    if space.dtype is not None and value_kind(array.dtype) != value_kind(space.dtype):
        return f"{path} is {_shown(item)} of dtype {array.dtype}, expected dtype {space.dtype} ({space})"
    if array.shape != space.shape:
        return f"{path} has shape {array.shape}, expected {space.shape} ({space})"
    return ""


def as_space_dtype(space: gym.Space[Any] | None, item: object) -> Any:
    """Return an observation with the dtypes of its space, as Gymnasium's vector environments store it.

    Numbers that numpy would only convert to another kind (floats to integers) keep their dtype, as does what does not
    fit the space.

    Args:
        space: The space of one environment or agent; None: not known.
        item: One observation, or a batch of them (a tree of arrays).
    """
    if isinstance(item, (np.ndarray, np.generic, int, float, list)):
        dtype = getattr(space, "dtype", None)
        try:
            array = np.asarray(item)
        except ValueError:  # lists of different lengths
            return item
        if dtype is None or array.dtype == dtype or not np.can_cast(array.dtype, dtype, "same_kind"):
            return item
        return array.astype(dtype)
    if isinstance(space, spaces.Dict) and isinstance(item, dict) and item.keys() == space.spaces.keys():
        return {key: as_space_dtype(space.spaces[key], part) for key, part in item.items()}
    if isinstance(space, spaces.Tuple) and isinstance(item, tuple) and len(item) == len(space.spaces):
        return tuple(map(as_space_dtype, space.spaces, item))
    return item


def check_agents_observations(
    observed: Iterable[tuple[str, int, Mapping[Any, Any]]], by_agent: Mapping[Any, gym.Space[Any]]
) -> None:
    """Raise an error if observations do not fit their agents' spaces. Agents without a space may send anything.

    Args:
        observed: (episode id, env step, observations by agent id) of each environment.
        by_agent: The agents' spaces.

    Raises:
        MultiAgentEnvError: An observation does not fit; the first such one is named.
    """
    for episode_id, env_t, observations in observed:
        for agent_id, item in observations.items():
            space = by_agent.get(agent_id)
            if item is None or space is None or (type(item) is np.ndarray and _fits(space, item)):
                continue
            problem = misfit(space, item, "the observation")
            if problem:
                raise MultiAgentEnvError(
                    f"episode {episode_id}, env step {env_t}, agent {agent_id!r}, column 'obs': {problem}. "
                    "Correct the agent's observation space, or what the environment returns."
                )


def _fits(space: gym.Space[Any], item: np.ndarray[Any, Any]) -> bool:
    """Return whether an array certainly fits, a cheap check."""
    return bool(item.shape == space.shape and item.dtype == space.dtype)


def _shown(item: object) -> str:
    return f"{type(item).__name__} {item!r:.80}"
