"""What a reward is: one number. Everything that takes rewards checks them here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer

__all__ = ["REWARD_TYPES", "as_reward", "as_rewards"]

# Types of which every value is a reward: one look-up tells, whatever else comes is looked at closely.
REWARD_TYPES = frozenset(
    {float, int, bool, np.bool_, np.float16, np.float32, np.float64}
    | {np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64}
)


def as_reward(reward: Any) -> Any:
    """A reward as it is kept: itself, or the number in an array or tensor of one element.

    Raises:
        ValueError: It is not one number.
    """
    if type(reward) in REWARD_TYPES or isinstance(reward, (int, float)):
        return reward
    if hasattr(reward, "__array__"):
        array = np.asarray(reward)
        if array.size == 1 and array.dtype.kind in "biuf":
            return array.reshape(())[()]
    raise ValueError(f"expected a reward that is one number, got {type(reward).__name__} {reward!r:.80}.")


def as_rewards(rewards: Any) -> Any:
    """Several rewards as they are kept: a list of them, or an array ``[num_items]``; never changed in place.

    Raises:
        ValueError: One of them is not one number (its position is named).
    """
    if isinstance(rewards, InfiniteLookbackBuffer):
        rewards = rewards.get()
    if isinstance(rewards, (list, tuple, Iterator)):
        checked = rewards if isinstance(rewards, list) else list(rewards)
        if not REWARD_TYPES.issuperset(map(type, checked)):
            checked = [_as_reward_at(position, reward) for position, reward in enumerate(checked)]
        return checked
    array = np.asarray(rewards)
    if array.dtype.kind not in "biuf" or array.ndim == 0 or array.size != len(array):
        raise ValueError(
            f"expected rewards that are one number each, got an array of dtype {array.dtype} and shape "
            f"{array.shape}."
        )
    return array if array.ndim == 1 else array.reshape(len(array))


def _as_reward_at(position: int, reward: Any) -> Any:
    try:
        return as_reward(reward)
    except ValueError as error:
        raise ValueError(f"item {position}: {error}") from None
