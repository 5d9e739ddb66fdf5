"""Conversion, copies and checks of rewards and infos, and of an env step's rewards, done flags and infos by agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from rlzmq.core.errors import MultiAgentEnvError
from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer

__all__ = [
    "FLAG_TYPES",
    "NO_INFO",
    "REWARD_TYPES",
    "add_up",
    "as_flag",
    "as_reward",
    "as_rewards",
    "can_add_up",
    "checked_flags",
    "checked_infos",
    "checked_rewards",
    "kept_reward",
    "kept_rewards",
    "own",
    "own_info",
    "sum_of",
]

# Types whose values are all valid rewards. Other types are checked more closely.
REWARD_TYPES: frozenset[type] = frozenset(
    {float, int, bool, np.bool_, np.float16, np.float32, np.float64}
    | {np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64}
)

# Types whose values are all valid infos or flags (None: not given). Other types are checked more closely.
_INFO_TYPES = frozenset({dict, type(None)})
FLAG_TYPES = frozenset({bool, np.bool_, type(None)})
_REWARD_OR_NONE = REWARD_TYPES | {type(None)}


def kept_reward(reward: object) -> Any:
    """Return a reward in the form that episodes store: arrays and tensors with one element become numbers."""
    if type(reward) not in REWARD_TYPES and hasattr(reward, "__array__"):
        array = np.asarray(reward)
        if array.size == 1 and array.dtype.kind in "biuf":
            return array.reshape(())[()]
    return reward


def kept_rewards(rewards: object) -> Any:
    """Return rewards as episodes store them: a list or an array ``[num_items, ...]``, unchanged if possible."""
    if isinstance(rewards, InfiniteLookbackBuffer):
        rewards = rewards.get()
    if isinstance(rewards, (list, tuple, Iterator)):
        items = rewards if isinstance(rewards, list) else list(rewards)
        return items if REWARD_TYPES.issuperset(map(type, items)) else [kept_reward(item) for item in items]
    array = np.asarray(rewards)
    return array.reshape(len(array)) if array.ndim > 1 and array.size == len(array) else array


def as_reward(reward: object) -> Any:
    """Return a reward that is a single number: itself, or the number in an array or tensor with one element.

    Raises:
        ValueError: The reward is not a single number.
    """
    reward = kept_reward(reward)
    if type(reward) in REWARD_TYPES or isinstance(reward, (int, float)):
        return reward
    raise ValueError(f"expected a reward that is one number, got {type(reward).__name__} {reward!r:.80}.")


def as_rewards(rewards: Any) -> Any:
    """Return rewards that are single numbers as a list or an array ``[num_items]``, without changing them in place.

    Raises:
        ValueError: A reward is not a single number; the text names its position.
    """
    rewards = kept_rewards(rewards)
    if isinstance(rewards, np.ndarray):
        if rewards.dtype.kind in "biuf" and rewards.ndim == 1:
            return rewards
        rewards = list(rewards) if rewards.ndim else [rewards]
    if not REWARD_TYPES.issuperset(map(type, rewards)):
        return [_as_reward_at(position, reward) for position, reward in enumerate(rewards)]
    return rewards


def can_add_up(total: object, reward: object) -> bool:
    """Return whether a reward can be added to the sum so far: both are numbers, or the sum is None."""
    return _is_number(total) and (total == 0 or _is_number(reward))


def add_up(total: Any, reward: Any) -> Any:
    """Return the sum of a reward and the sum so far (None: no rewards yet; see `can_add_up`)."""
    return _as_python(total) + _as_python(reward) if total else reward


def sum_of(rewards: Iterable[Any]) -> float:
    """Return the sum of rewards that are single numbers; numpy's small integers would overflow, its bools not count."""
    return float(sum(map(_as_python, rewards)))


def _as_python(number: Any) -> Any:
    return number.item() if isinstance(number, np.generic) else number


def _is_number(reward: object) -> bool:
    return type(reward) in REWARD_TYPES or isinstance(reward, (int, float))


def _as_reward_at(position: int, reward: object) -> object:
    try:
        return as_reward(reward)
    except ValueError as error:
        raise ValueError(f"item {position}: {error}") from None


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
    return _converted(flags, as_flag, where, name)


def _converted(
    values: Mapping[Any, Any], convert: Callable[[Any], Any], where: str, name: str
) -> dict[Any, Any]:
    """Return the converted values by agent id, None as it is."""
    converted = {}
    for agent_id, value in values.items():
        try:
            converted[agent_id] = None if value is None else convert(value)
        except (ValueError, TypeError) as error:
            raise MultiAgentEnvError(f"{where}, agent {agent_id!r}, {name}: {error}") from None
    return converted


def checked_infos(infos: Mapping[Any, Any], where: str) -> Mapping[Any, Any]:
    """Return copies of the infos by agent id (see `own`), each of them a dict or None.

    Raises:
        MultiAgentEnvError: A value has another type.
    """
    if _INFO_TYPES.issuperset(map(type, infos.values())):
        return {agent_id: own_info(info) if info else info for agent_id, info in infos.items()}
    return _converted(infos, own_info, where, "column 'infos'")


def checked_rewards(rewards: Mapping[Any, Any], where: str) -> Mapping[Any, Any]:
    """Return the rewards by agent id, each of them a float or None (not given).

    Raises:
        MultiAgentEnvError: A value has another type.
    """
    if _REWARD_OR_NONE.issuperset(map(type, rewards.values())):
        return {agent_id: None if reward is None else float(reward) for agent_id, reward in rewards.items()}
    return _converted(rewards, lambda reward: float(as_reward(reward)), where, "column 'rewards'")


NO_INFO = "expected an info, a dict"  # how the error about a missing one begins


def own_info(info: object) -> dict[str, Any]:
    """Return a copy of an info that an environment returned (see `own`); raise TypeError if it is none."""
    if type(info) is dict and REWARD_TYPES.issuperset(map(type, info.values())):
        return info.copy()  # of numbers, as most are
    if not isinstance(info, Mapping):
        raise TypeError(f"{NO_INFO}, got {info!r} ({type(info).__name__})")
    return {key: own(value) for key, value in info.items()}


def own(value: Any) -> Any:
    """Return a value of an info with copies of dicts, lists, tuples and arrays: an environment may change its own."""
    kind = type(value)
    if isinstance(value, np.ndarray):
        return value.copy()
    if kind is dict:
        return {key: own(item) for key, item in value.items()}
    return kind(map(own, value)) if kind is list or kind is tuple else value


def as_flag(flag: object) -> bool:
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
