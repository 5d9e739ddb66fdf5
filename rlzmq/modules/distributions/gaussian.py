"""Continuous actions: diagonal Gaussians, plain and squashed into an interval."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from rlzmq.modules.distributions.base import Distribution, SampleShape, flat_actions
from rlzmq.modules.distributions.deterministic import TorchDeterministic

__all__ = ["TorchDiagGaussian", "TorchSquashedGaussian"]

_HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)
_LOG_TWO = math.log(2.0)

# Beyond these bounds the density of a squashed sample underflows or its gradient explodes.
_SQUASHED_LOG_STD = (-20.0, 2.0)


class TorchDiagGaussian(Distribution):
    """Independent normal variables, from inputs ``[..., 2 D]``: D means, then D log standard deviations.

    Settings (:meth:`get_partial_dist_cls`): ``action_shape``, the shape of the D values in an action, ``(D,)`` if None.

    Args:
        loc: Means, ``[..., D]``.
        scale: Standard deviations, ``[..., D]`` or one number.
        log_std: Log standard deviations, ``[..., D]``, instead of `scale`.
    """

    __slots__ = ("_std", "loc", "log_std")

    action_shape: ClassVar[tuple[int, ...] | None] = None

    def __init__(
        self, loc: Tensor, scale: Tensor | float | None = None, *, log_std: Tensor | None = None
    ) -> None:
        self.loc: Tensor = loc
        self.log_std: Tensor = _log_of(scale, loc, "TorchDiagGaussian") if log_std is None else log_std
        self._std: Tensor | None = None

    @classmethod
    def from_logits(cls, logits: Tensor) -> Self:
        loc, log_std = logits.chunk(2, -1)
        return cls(loc, log_std=log_std)

    @property
    def std(self) -> Tensor:
        """Standard deviations, ``[..., D]``."""
        std = self._std
        if std is None:
            std = self._std = self.log_std.exp()
        return std

    def _to_action(self, flat: Tensor) -> Tensor:
        shape = self.action_shape
        return flat if shape is None else flat.reshape(*flat.shape[:-1], *shape)

    def _from_action(self, value: Tensor) -> Tensor:
        return value if self.action_shape is None else flat_actions(value, self.action_shape, self.loc.shape)

    def _noise(self, generator: torch.Generator | None, sample_shape: SampleShape = None) -> Tensor:
        loc = self.loc
        shape = (*sample_shape, *loc.shape) if sample_shape else loc.shape
        return torch.randn(shape, generator=generator, dtype=loc.dtype, device=loc.device)

    def sample(self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None) -> Tensor:
        return self.rsample(sample_shape=sample_shape, generator=generator).detach()

    def rsample(
        self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None
    ) -> Tensor:
        return self._to_action(torch.addcmul(self.loc, self.std, self._noise(generator, sample_shape)))

    def sample_and_logp(self, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        noise = self._noise(generator)
        value = torch.addcmul(self.loc, self.std, noise).detach()
        return self._to_action(value), self._logp_of_noise(noise)

    def _logp_of_noise(self, noise: Tensor) -> Tensor:
        terms = torch.addcmul(self.log_std, noise, noise, value=0.5)
        return terms.sum(-1).neg_().sub_(_HALF_LOG_TWO_PI * noise.shape[-1])

    def logp(self, value: Tensor) -> Tensor:
        return self._logp_of_noise((self._from_action(value) - self.loc) / self.std)

    def entropy(self) -> Tensor:
        return self.log_std.sum(-1) + (0.5 + _HALF_LOG_TWO_PI) * self.log_std.shape[-1]

    def kl(self, other: Self) -> Tensor:
        scale = (self.std / other.std).square()
        shift = ((self.loc - other.loc) / other.std).square()
        return (0.5 * (scale + shift - 1.0) + other.log_std - self.log_std).sum(-1)

    def to_deterministic(self) -> TorchDeterministic:
        return TorchDeterministic(self._to_action(self.loc))

    @staticmethod
    def required_input_dim(space: gym.Space[Any], model_config: Any = None) -> int:
        assert isinstance(space, gym.spaces.Box)
        return 2 * int(np.prod(space.shape))


class TorchSquashedGaussian(Distribution):
    """A diagonal Gaussian through tanh, scaled into ``(low, high)``; with the inputs of :class:`TorchDiagGaussian`.

    Log standard deviations are clamped to [-20, 2]. ``sample_and_logp`` and ``rsample_and_logp`` keep the value before
    tanh, so their log-densities are exact for any value. ``logp`` has to invert tanh, and treats values at the border
    as if they were 1e-6 inside.

    Settings (:meth:`get_partial_dist_cls`): ``low`` and ``high`` (floats or tuples of D floats; -1
    and 1 by default, which fits ``normalize_actions``), ``action_shape``.

    Args:
        loc, scale, log_std: See :class:`TorchDiagGaussian`; before tanh.
        low, high: Bounds of this distribution, instead of the settings.
    """

    __slots__ = ("_gaussian", "_high", "_low")

    low: ClassVar[float | tuple[float, ...]] = -1.0
    high: ClassVar[float | tuple[float, ...]] = 1.0
    action_shape: ClassVar[tuple[int, ...] | None] = None

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor | float | None = 1.0,
        low: float | tuple[float, ...] | Tensor | None = None,
        high: float | tuple[float, ...] | Tensor | None = None,
        *,
        log_std: Tensor | None = None,
    ) -> None:
        if log_std is None:
            log_std = _log_of(scale, loc, "TorchSquashedGaussian")
        self._gaussian = TorchDiagGaussian(loc, log_std=log_std.clamp(*_SQUASHED_LOG_STD))
        self._low = self._bound(self.low if low is None else low)
        self._high = self._bound(self.high if high is None else high)

    def _bound(self, bound: float | tuple[float, ...] | Tensor) -> float | Tensor:
        if isinstance(bound, int | float):
            return float(bound)
        loc = self._gaussian.loc
        return torch.as_tensor(bound, dtype=loc.dtype, device=loc.device)

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        low: float | tuple[float, ...] | Tensor | None = None,
        high: float | tuple[float, ...] | Tensor | None = None,
    ) -> Self:
        loc, log_std = logits.chunk(2, -1)
        return cls(loc, None, low, high, log_std=log_std)

    def _squash(self, raw: Tensor) -> Tensor:
        value = self._low + (torch.tanh(raw) + 1.0) * (0.5 * (self._high - self._low))
        shape = self.action_shape
        return value if shape is None else value.reshape(*value.shape[:-1], *shape)

    def _logp_of_raw(self, raw: Tensor, gaussian_logp: Tensor) -> Tensor:
        # log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2 x)), without cancellation
        log_slope = 2.0 * (_LOG_TWO - raw - torch.nn.functional.softplus(-2.0 * raw))
        half_width = 0.5 * (self._high - self._low)
        if isinstance(half_width, Tensor):
            log_slope = log_slope + half_width.log()
        else:
            log_slope = log_slope + math.log(half_width)
        return gaussian_logp - log_slope.sum(-1)

    def sample(self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None) -> Tensor:
        return self._squash(self._gaussian.sample(sample_shape=sample_shape, generator=generator))

    def rsample(
        self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None
    ) -> Tensor:
        return self._squash(self._gaussian.rsample(sample_shape=sample_shape, generator=generator))

    def sample_and_logp(self, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        raw, gaussian_logp = self._gaussian.sample_and_logp(generator=generator)
        return self._squash(raw), self._logp_of_raw(raw, gaussian_logp)

    def rsample_and_logp(self, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Like ``sample_and_logp``, with gradients through both the actions and their log-densities."""
        gaussian = self._gaussian
        noise = gaussian._noise(generator)
        raw = torch.addcmul(gaussian.loc, gaussian.std, noise)
        return self._squash(raw), self._logp_of_raw(raw, gaussian._logp_of_noise(noise))

    def logp(self, value: Tensor) -> Tensor:
        if self.action_shape is not None:
            value = flat_actions(value, self.action_shape, self._gaussian.loc.shape)
        unit = (value - self._low) * (2.0 / (self._high - self._low)) - 1.0
        raw = torch.atanh(unit.clamp(-1.0 + 1e-6, 1.0 - 1e-6))
        return self._logp_of_raw(raw, self._gaussian.logp(raw))

    def entropy(self) -> Tensor:
        raise ValueError(
            "a squashed Gaussian's entropy has no closed form: estimate it by the negative log-density "
            "of samples, -rsample_and_logp()[1]"
        )

    def kl(self, other: Self) -> Tensor:
        """Return the exact divergence, which squashing with the same bounds does not change."""
        return self._gaussian.kl(other._gaussian)

    def to_deterministic(self) -> TorchDeterministic:
        return TorchDeterministic(self._squash(self._gaussian.loc))

    @staticmethod
    def required_input_dim(space: gym.Space[Any], model_config: Any = None) -> int:
        return TorchDiagGaussian.required_input_dim(space, model_config)


def _log_of(scale: Tensor | float | None, loc: Tensor, name: str) -> Tensor:
    if scale is None:
        raise ValueError(f"{name} needs scale (standard deviations) or log_std, got neither")
    return torch.as_tensor(scale, dtype=loc.dtype, device=loc.device).log().expand_as(loc)
