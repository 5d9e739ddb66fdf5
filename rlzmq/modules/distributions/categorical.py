"""Discrete actions: one categorical variable, or several independent ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rlzmq.modules.distributions.base import Distribution, SampleShape, flat_actions
from rlzmq.modules.distributions.deterministic import TorchDeterministic

__all__ = ["TorchCategorical", "TorchMultiCategorical", "sample_categorical"]

# An exponential race needs fewer kernels than inverting the distribution function, but samples one variate per logit
# instead of one per row. Below this number of logits, the number of kernels decides. (Measured on one x86 core: equal
# near 100 logits; torch.multinomial costs 1.5 to 5 times as much as either.)
_RACE_MAX_LOGITS = 96


def sample_categorical(log_probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Sample one index per row, never one with log-probability -inf.

    Args:
        log_probs: Normalized log-probabilities, float ``[..., K]``.
        generator: Random generator; None: torch's global generator.

    Returns:
        int64 ``[..., 1]``.
    """
    if log_probs.numel() <= _RACE_MAX_LOGITS:
        # argmin of Exp(1)/p is distributed like p; torch's exponential_ is never 0
        race = torch.empty_like(log_probs).exponential_(generator=generator).log_()
        return torch.sub(log_probs, race).argmax(-1, keepdim=True)
    cumulative = log_probs.exp().cumsum(-1)
    uniform = torch.rand(
        (*log_probs.shape[:-1], 1), generator=generator, dtype=log_probs.dtype, device=log_probs.device
    )
    # Scaled by the rounded total: uniform < 1 then stays below the last entry, and the first entry above it always
    # belongs to an index whose probability is not 0.
    index = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)
    return index.clamp_(max=log_probs.shape[-1] - 1)


class TorchCategorical(Distribution):
    """One of K choices per row, from unnormalized log-probabilities ``[..., K]``.

    Actions are int64 ``[...]`` in ``start … start + K - 1`` (``start`` is 0 unless the action space defines another). A
    logit of -inf, or of the lowest float, masks its choice.

    Example:
        >>> dist = TorchCategorical.from_logits(torch.tensor([[0.0, float("-inf")]]))
        >>> dist.sample()
        tensor([0])
    """

    __slots__ = ("_log_probs", "logits")

    #: The first action.
    start: ClassVar[int] = 0
    #: Type of the actions.
    dtype: ClassVar[torch.dtype] = torch.int64

    def __init__(self, logits: Tensor | None = None, probs: Tensor | None = None) -> None:
        if logits is None:
            if probs is None:
                raise ValueError("TorchCategorical needs logits or probs, got neither")
            logits = probs.log()
        self.logits: Tensor = logits
        self._log_probs: Tensor | None = None

    @classmethod
    def from_logits(cls, logits: Tensor) -> Self:
        return cls(logits)

    @property
    def log_probs(self) -> Tensor:
        """Normalized log-probabilities, ``[..., K]``."""
        log_probs = self._log_probs
        if log_probs is None:
            log_probs = self._log_probs = torch.log_softmax(self.logits, -1)
        return log_probs

    @property
    def probs(self) -> Tensor:
        """Probabilities, ``[..., K]``."""
        return self.log_probs.exp()

    def _to_action(self, index: Tensor) -> Tensor:
        if self.start:
            index = index + self.start
        return index if self.dtype is torch.int64 else index.to(self.dtype)

    def sample(self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None) -> Tensor:
        log_probs = self.log_probs.detach()
        if sample_shape:
            log_probs = log_probs.expand(*sample_shape, *log_probs.shape)
        index = sample_categorical(log_probs, generator)
        return self._to_action(index.squeeze(-1))

    def sample_and_logp(self, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        log_probs = self.log_probs
        index = sample_categorical(log_probs.detach(), generator)
        action = index.squeeze(-1)
        if self.start or self.dtype is not torch.int64:
            action = self._to_action(action)
        return action, log_probs.gather(-1, index).squeeze(-1)

    def logp(self, value: Tensor) -> Tensor:
        index = value.long()
        if self.start:
            index = index - self.start
        log_probs = self.log_probs
        if index.dim() >= log_probs.dim():
            log_probs = log_probs.expand(*index.shape, -1)
        return log_probs.gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def _bounded(self) -> Tensor:
        # -inf times a probability of 0 would be NaN
        return self.log_probs.clamp(min=torch.finfo(self.logits.dtype).min)

    def entropy(self) -> Tensor:
        log_probs = self._bounded()
        return -(log_probs.exp() * log_probs).sum(-1)

    def kl(self, other: Self) -> Tensor:
        log_probs = self._bounded()
        return (log_probs.exp() * (log_probs - other._bounded())).sum(-1)

    def to_deterministic(self) -> TorchDeterministic:
        return TorchDeterministic(self._to_action(self.logits.argmax(-1)))

    @staticmethod
    def required_input_dim(space: gym.Space[Any], model_config: Any = None) -> int:
        assert isinstance(space, gym.spaces.Discrete)
        return int(space.n)


class TorchMultiCategorical(Distribution):
    """Several independent categorical choices per row, from their concatenated logits.

    All choices are computed together on ``[..., M, max K]``; shorter ones are padded with -inf.

    Settings (:meth:`get_partial_dist_cls`): ``input_lens`` (the K of each of the M choices),
    ``action_shape`` (their layout, ``(M,)`` if None), ``start`` (first action of each choice),
    ``dtype`` (type of the actions).

    Args:
        categoricals: The choices, each with logits ``[..., K]``.
    """

    __slots__ = ("_categorical", "logits")

    input_lens: ClassVar[Sequence[int]] = ()
    action_shape: ClassVar[tuple[int, ...] | None] = None
    start: ClassVar[tuple[int, ...] | None] = None
    dtype: ClassVar[torch.dtype] = torch.int64

    def __init__(self, categoricals: Sequence[TorchCategorical]) -> None:
        parts = [categorical.logits for categorical in categoricals]
        self._set_logits(torch.cat(parts, -1), tuple(part.shape[-1] for part in parts))

    @classmethod
    def from_logits(cls, logits: Tensor, input_lens: Sequence[int] | None = None) -> Self:
        self = cls.__new__(cls)
        lens = cls.input_lens if input_lens is None else input_lens
        self._set_logits(logits, tuple(int(n) for n in lens))
        return self

    def _set_logits(self, logits: Tensor, lens: tuple[int, ...]) -> None:
        if sum(lens) != logits.shape[-1]:
            raise ValueError(
                f"TorchMultiCategorical over choices of {list(lens)} needs {sum(lens)} logits per row, "
                f"got a tensor of shape {tuple(logits.shape)}"
            )
        self.logits: Tensor = logits
        lead, width = logits.shape[:-1], max(lens)
        if min(lens) == width:
            grid = logits.reshape(*lead, len(lens), width)
        else:
            source, padding = _padding(lens, logits.device)
            grid = logits.index_select(-1, source).masked_fill(padding, float("-inf"))
            grid = grid.view(*lead, len(lens), width)
        self._categorical = TorchCategorical(grid)

    def _to_action(self, index: Tensor) -> Tensor:
        """Convert indices ``[..., M]`` to actions ``[..., *action_shape]``."""
        if self.start is not None:
            index = index + torch.tensor(self.start, device=index.device)
        if self.action_shape is not None:
            index = index.reshape(*index.shape[:-1], *self.action_shape)
        return index if self.dtype is torch.int64 else index.to(self.dtype)

    def sample(self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None) -> Tensor:
        return self._to_action(self._categorical.sample(sample_shape=sample_shape, generator=generator))

    def sample_and_logp(self, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        index, logp = self._categorical.sample_and_logp(generator=generator)
        return self._to_action(index), logp.sum(-1)

    def logp(self, value: Tensor) -> Tensor:
        index = flat_actions(value, self.action_shape, self._categorical.logits.shape[:-1]).long()
        if self.start is not None:
            index = index - torch.tensor(self.start, device=index.device)
        return self._categorical.logp(index).sum(-1)

    def entropy(self) -> Tensor:
        return self._categorical.entropy().sum(-1)

    def kl(self, other: Self) -> Tensor:
        return self._categorical.kl(other._categorical).sum(-1)

    def to_deterministic(self) -> TorchDeterministic:
        return TorchDeterministic(self._to_action(self._categorical.logits.argmax(-1)))

    @staticmethod
    def required_input_dim(space: gym.Space[Any], model_config: Any = None) -> int:
        if isinstance(space, gym.spaces.MultiBinary):
            return 2 * int(np.prod(space.shape))
        assert isinstance(space, gym.spaces.MultiDiscrete)
        return int(space.nvec.sum())


def _padding(lens: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the source of each cell of the ``[M * max K]`` grid, and which cells are padding."""
    key = (lens, device)
    cached = _PADDING.get(key)
    if cached is None:
        width = max(lens)
        offsets = np.concatenate([[0], np.cumsum(lens)[:-1]])
        column = np.arange(width)
        padding = column[None, :] >= np.array(lens)[:, None]
        source = np.where(padding, 0, offsets[:, None] + column[None, :])
        with torch.inference_mode(False):
            cached = (
                torch.from_numpy(source.reshape(-1)).to(device),
                torch.from_numpy(padding.reshape(-1)).to(device),
            )
        _PADDING[key] = cached
    return cached


# One small entry per action space in use.
_PADDING: dict[tuple[tuple[int, ...], torch.device], tuple[Tensor, Tensor]] = {}
