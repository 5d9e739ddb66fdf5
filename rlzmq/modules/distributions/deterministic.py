"""Deterministic distribution for greedy policies."""

from __future__ import annotations

from typing import Any, Self

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rlzmq.modules.distributions.base import Distribution, SampleShape

__all__ = ["TorchDeterministic"]


class TorchDeterministic(Distribution):
    """A distribution of a single action. It has samples, but no density, entropy or divergence."""

    __slots__ = ("loc",)

    has_logp = False

    def __init__(self, loc: Tensor) -> None:
        self.loc: Tensor = loc

    @classmethod
    def from_logits(cls, logits: Tensor) -> Self:
        return cls(logits)

    def sample(self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None) -> Tensor:
        return self.rsample(sample_shape=sample_shape).detach()

    def rsample(
        self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None
    ) -> Tensor:
        return self.loc.expand(*sample_shape, *self.loc.shape) if sample_shape else self.loc

    def logp(self, value: Any) -> Tensor:
        raise ValueError("a deterministic action has no log-probability: ask the original distribution")

    def entropy(self) -> Tensor:
        raise ValueError("a deterministic action has no entropy: ask the original distribution")

    def kl(self, other: Distribution) -> Tensor:
        raise ValueError("a deterministic action has no KL divergence: ask the original distribution")

    def to_deterministic(self) -> Self:
        return self

    @staticmethod
    def required_input_dim(space: gym.Space[Any], model_config: Any = None) -> int:
        assert isinstance(space, gym.spaces.Box)
        return int(np.prod(space.shape))
