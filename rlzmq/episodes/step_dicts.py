"""Checks of an env step's done flags, rewards and infos by agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlzmq.core.errors import MultiAgentEnvError
from rlzmq.episodes.rewards import REWARD_TYPES, as_reward

__all__ = ["FLAG_TYPES", "as_flag", "checked_flags", "checked_infos", "checked_rewards"]

# Types whose values are all valid infos or flags (None: not given). Other types are checked more closely.
_INFO_TYPES = frozenset({dict, type(None)})
FLAG_TYPES = frozenset({bool, np.bool_, type(None)})
_REWARD_OR_NONE = REWARD_TYPES | {type(None)}


def checked_flags(flags: Mapping[Any, Any], name: str, where: str) -> Mapping[Any, Any]:
    """Return done flags by agent id, each True, False or None (not given).

    The numbers 0 and 1 count as flags, and so does an array or tensor with one such element.

    Args:
        flags: Flags by agent id; ``"__all__"`` applies to all agents.
        name: ``"terminateds"`` or ``"truncateds"``, for the error message.
        where: Description of the env step, for the error message.

    Raises:
        MultiAgentEnvError: A value has another type.
    """
    if FLAG_TYPES.issuperset(map(type, flags.values())):
        return flags
    checked = {}
    for agent_id, flag in flags.items():
        try:
            checked[agent_id] = as_flag(flag)
        except ValueError as error:
            raise MultiAgentEnvError(f"{where}, agent {agent_id!r}, {name}: {error}") from None
    return checked


def checked_infos(infos: Mapping[Any, Any], where: str) -> Mapping[Any, Any]:
    """Return the infos by agent id, each of them a mapping or None.

    Raises:
        MultiAgentEnvError: A value has another type.
    """
    if not _INFO_TYPES.issuperset(map(type, infos.values())):
        for agent_id, info in infos.items():
            if info is not None and not isinstance(info, Mapping):
                raise MultiAgentEnvError(
                    f"{where}, agent {agent_id!r}, column 'infos': expected a dict or None, got "
                    f"{type(info).__name__} {info!r:.80}."
                )
    return infos


def checked_rewards(rewards: Mapping[Any, Any], where: str) -> Mapping[Any, Any]:
    """Return the rewards by agent id, each of them a single number or None (not given).

    Raises:
        MultiAgentEnvError: A value has another type.
    """
    if _REWARD_OR_NONE.issuperset(map(type, rewards.values())):
        return rewards
    checked = {}
    for agent_id, reward in rewards.items():
        try:
            checked[agent_id] = None if reward is None else as_reward(reward)
        except ValueError as error:
            raise MultiAgentEnvError(f"{where}, agent {agent_id!r}, column 'rewards': {error}") from None
    return checked


def as_flag(flag: Any) -> bool:
    """Return a done flag as a bool; None (not given) is False. See `checked_flags`.

    Raises:
        ValueError: The value is not a flag.
    """
    if flag is None or isinstance(flag, (bool, np.bool_)):
        return bool(flag)
    if isinstance(flag, (int, float, np.number)) or hasattr(flag, "__array__"):
        array = np.asarray(flag)
        if array.size == 1 and array.dtype.kind in "biuf" and array.reshape(())[()] in (0, 1):
            return bool(array.reshape(())[()])
    raise ValueError(f"expected True or False, got {type(flag).__name__} {flag!r:.80}.")
