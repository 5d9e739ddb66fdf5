"""Flattening of nested spaces to float vectors."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlzmq.core.errors import UnsupportedSpaceError
from rlzmq.core.tree import one_hot

__all__ = ["flat_size", "flatten_tensors", "flatten_values"]


def flat_size(space: gym.Space[Any]) -> int:
    """Return the number of floats that `flatten_values` makes of one element.

    Raises:
        UnsupportedSpaceError: The space has no fixed size.
    """
    if isinstance(space, gym.spaces.Dict):
        return sum(flat_size(part) for part in space.spaces.values())
    if isinstance(space, gym.spaces.Tuple):
        return sum(flat_size(part) for part in space.spaces)
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gym.spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, (gym.spaces.Box, gym.spaces.MultiBinary)):
        return int(np.prod(space.shape, dtype=np.int64))
    raise UnsupportedSpaceError(
        f"expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them, got {space}: it "
        "has no fixed size to flatten to. Convert it with a SingleAgentObservationPreprocessor first."
    )


def flatten_values(space: gym.Space[Any], values: Any, num_lead: int = 0) -> npt.NDArray[np.float32]:
    """Flatten elements of a space to float32 vectors: Dict parts in sorted key order, discrete parts one-hot.

    Args:
        space: The space of one element.
        values: An element, or a batch of elements with `num_lead` leading axes in every leaf.
        num_lead: Number of leading axes.

    Returns:
        float32 ``[*lead, flat_size(space)]``.

    Raises:
        ValueError: A discrete value is outside of its space.
    """
    parts: list[npt.NDArray[np.float32]] = []
    _collect(space, values, num_lead, parts)
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _collect(space: gym.Space[Any], values: Any, num_lead: int, parts: list[npt.NDArray[np.float32]]) -> None:
    if isinstance(space, gym.spaces.Dict):
        for key in sorted(space.spaces):
            _collect(space.spaces[key], values[key], num_lead, parts)
    elif isinstance(space, gym.spaces.Tuple):
        for part, value in zip(space.spaces, values, strict=True):
            _collect(part, value, num_lead, parts)
    elif isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        parts.append(one_hot(space, values))
    else:
        array = np.asarray(values, np.float32)
        parts.append(array.reshape(*array.shape[:num_lead], flat_size(space)))


def flatten_tensors(space: gym.Space[Any], values: Any) -> Any:
    """Return `flatten_values` of a batch of tensors, float32 ``[B, flat_size(space)]``. Values are not checked."""
    import torch

    parts: list[Any] = []
    _collect_tensors(space, values, parts)
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _collect_tensors(space: gym.Space[Any], values: Any, parts: list[Any]) -> None:
    import torch

    if isinstance(space, gym.spaces.Dict):
        for key in sorted(space.spaces):
            _collect_tensors(space.spaces[key], values[key], parts)
    elif isinstance(space, gym.spaces.Tuple):
        for part, value in zip(space.spaces, values, strict=True):
            _collect_tensors(part, value, parts)
    elif isinstance(space, gym.spaces.Discrete):
        choices = torch.arange(int(space.start), int(space.start) + int(space.n))
        parts.append((values.unsqueeze(-1) == choices).to(torch.float32))
    elif isinstance(space, gym.spaces.MultiDiscrete):
        lens, first = space.nvec.reshape(-1), space.start.reshape(-1)
        columns = values.flatten(1)
        for index, (start, num) in enumerate(zip(first, lens, strict=True)):
            choices = torch.arange(int(start), int(start + num))
            parts.append((columns[:, index, None] == choices).to(torch.float32))
    else:
        parts.append(values.reshape(values.shape[0], flat_size(space)).to(torch.float32))
