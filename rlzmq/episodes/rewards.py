"""Conversion and checks of rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer

__all__ = ["REWARD_TYPES", "add_up", "as_reward", "as_rewards", "can_add_up", "kept_reward", "kept_rewards"]

# Types whose values are all valid rewards. Other types are checked more closely.
REWARD_TYPES: frozenset[type] = frozenset(
    {float, int, bool, np.bool_, np.float16, np.float32, np.float64}
    | {np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64}
)


def kept_reward(reward: Any) -> Any:
    """Return a reward in the form that episodes store: arrays and tensors with one element become numbers."""
    if type(reward) not in REWARD_TYPES and hasattr(reward, "__array__"):
        array = np.asarray(reward)
        if array.size == 1 and array.dtype.kind in "biuf":
            return array.reshape(())[()]
    return reward


def kept_rewards(rewards: Any) -> Any:
    """Return rewards as episodes store them: a list or an array ``[num_items, ...]``, unchanged if possible."""
    if isinstance(rewards, InfiniteLookbackBuffer):
        rewards = rewards.get()
    if isinstance(rewards, (list, tuple, Iterator)):
        items = rewards if isinstance(rewards, list) else list(rewards)
        return items if REWARD_TYPES.issuperset(map(type, items)) else [kept_reward(item) for item in items]
    array = np.asarray(rewards)
    return array.reshape(len(array)) if array.ndim > 1 and array.size == len(array) else array


def as_reward(reward: Any) -> Any:
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


def can_add_up(total: Any, reward: Any) -> bool:
    """Return whether a reward can be added to the sum so far: both are numbers, or the sum is None."""
    return _is_number(total) and (total == 0 or _is_number(reward))


def add_up(total: Any, reward: Any) -> Any:
    """Return the sum of a reward and the sum so far (None: no rewards yet; see `can_add_up`)."""
    return total + reward if total else reward


def _is_number(reward: Any) -> bool:
    return type(reward) in REWARD_TYPES or isinstance(reward, (int, float))


def _as_reward_at(position: int, reward: Any) -> Any:
    try:
        return as_reward(reward)
    except ValueError as error:
        raise ValueError(f"item {position}: {error}") from None
