"""Checks that spaces can be stored in columns."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium as gym
from gymnasium import spaces

from rlzmq.core.errors import ConfigurationError, UnsupportedSpaceError

__all__ = ["check_env_spaces", "check_space"]

_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def check_space(space: object, name: str, *, where: str = "") -> None:
    """Raise an error if a space's elements have no fixed shape and dtype.

    Args:
        space: The space of one environment (not of a vector env).
        name: Its name, e.g. ``"observation_space"``; the text names the sub-space within it.
        where: The environment's name, for the text.

    Raises:
        ConfigurationError: It is not a Gymnasium space.
        UnsupportedSpaceError: It is, or contains, a space other than Box, Discrete, MultiDiscrete, MultiBinary, Dict
            and Tuple. The message suggests a solution.
    """
    place = f" of {where}" if where else ""
    if not isinstance(space, gym.Space):
        raise ConfigurationError(
            f"{name}{place}: expected a gymnasium.spaces.Space, got {space!r} ({type(space).__name__}). "
            f"Set self.{name} in the environment's __init__."
        )
    for path, part in _parts(space, name):
        if isinstance(part, spaces.Box) and part.dtype.hasobject:
            _refuse(path, part, place, "its dtype is object")
        if not isinstance(part, _LEAVES):
            _refuse(path, part, place, "its elements have no fixed shape and dtype")


def check_env_spaces(env: object, *, where: str = "") -> None:
    """Check the observation and action space of a single environment (see ``check_space``)."""
    check_space(getattr(env, "observation_space", None), "observation_space", where=where)
    check_space(getattr(env, "action_space", None), "action_space", where=where)


def _parts(space: gym.Space[object], path: str) -> Iterator[tuple[str, gym.Space[object]]]:
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from _parts(part, f"{path}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _parts(part, f"{path}[{index}]")
    else:
        yield path, space


def _refuse(path: str, space: gym.Space[object], place: str, reason: str) -> None:
    if path.startswith("action"):
        way_out = "wrap the environment with gymnasium.wrappers.TransformAction"
    else:
        way_out = "wrap the environment with gymnasium.wrappers.TransformObservation"
    raise UnsupportedSpaceError(
        f"{path}{place} is {type(space).__name__} ({space}), which is not supported: {reason}. Supported: "
        f"Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these. Way out: {way_out} (or "
        "change the environment) to give it one of them, e.g. a Box padded to the longest size plus a mask."
    )
