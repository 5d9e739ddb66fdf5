"""Action distributions: lightweight classes over one tensor of model outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import reduce
from typing import Any, ClassVar, Self

import gymnasium as gym
import numpy as np
import optree
import torch
from torch import Tensor

from rlzmq.core.errors import ConfigurationError, UnsupportedSpaceError
from rlzmq.core.spaces import leaf_spaces, space_tree
from rlzmq.core.tree import tree_map

__all__ = [
    "Distribution",
    "SampleShape",
    "TorchCategorical",
    "TorchDeterministic",
    "TorchDiagGaussian",
    "TorchDistribution",
    "TorchMultiCategorical",
    "TorchMultiDistribution",
    "TorchSquashedGaussian",
    "action_dist_cls_for",
    "num_dist_inputs",
    "sample_categorical",
]


#: Dimensions to add before the batch dimensions.
SampleShape = Sequence[int] | None


def flat_actions(value: Tensor, action_shape: Sequence[int] | None, shape: torch.Size) -> Tensor:
    """Reshape actions ``[*sample_shape, ..., *action_shape]`` to ``[*sample_shape, ..., D]``.

    Args:
        value: The actions.
        action_shape: Shape of one action; None: ``(D,)``.
        shape: ``[..., D]``, for one draw per row.
    """
    if value.numel() == shape.numel():
        return value.reshape(shape)
    num_own = 1 if action_shape is None else len(action_shape)
    return value.reshape(*value.shape[: value.dim() - num_own], shape[-1])


class Distribution(ABC):
    """An action distribution over a batch, made by :meth:`from_logits` from a model's output tensor.

    The classes only hold tensors, without argument validation and with lazy computation, so creating one per vector
    step is cheap.

    Leading dimensions of the inputs are the batch (``[B, ...]`` or ``[B, T, ...]``). ``logp``, ``entropy`` and ``kl``
    have exactly that shape; they are summed over the dimensions of an action.

    Every sampling method takes an optional ``torch.Generator``. The samples depend only on the generator's state and
    the inputs, with rows in batch order. Without a generator, torch's global one is used.
    """

    __slots__ = ()

    #: Whether :meth:`logp` is defined.
    has_logp: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def from_logits(cls, logits: Tensor) -> Self:
        """Return the distribution for a model's output.

        Args:
            logits: Float tensor ``[..., required_input_dim]``.
        """

    def sample(self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None) -> Any:
        """Return sampled actions without gradient, ``[..., *action shape]`` (a tree of them for nested actions).

        By default, they are those of `rsample`.

        Args:
            sample_shape: Number of samples per row: the result is ``[*sample_shape, ..., *action shape]``.
            generator: See the class.
        """
        return self.rsample(sample_shape=sample_shape, generator=generator).detach()

    def rsample(self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None) -> Any:
        """Return actions sampled with the reparameterisation trick, so that gradients flow to the inputs.

        The arguments are those of :meth:`sample`.

        Raises:
            NotImplementedError: The distribution cannot be reparameterised (e.g. discrete ones).
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be reparameterised: use sample()")

    @abstractmethod
    def logp(self, value: Any) -> Tensor:
        """Return log-probabilities (or densities) of actions, ``[...]``; several samples: ``[*sample_shape, ...]``."""

    def sample_and_logp(self, *, generator: torch.Generator | None = None) -> tuple[Any, Tensor]:
        """Return sampled actions and their log-probabilities, cheaper than ``sample`` followed by ``logp``."""
        value = self.sample(generator=generator)
        return value, self.logp(value)

    @abstractmethod
    def entropy(self) -> Tensor:
        """Return the entropy in nats, float ``[...]``."""

    @abstractmethod
    def kl(self, other: Self) -> Tensor:
        """Return the Kullback-Leibler divergence KL(self || other) in nats, float ``[...]``."""

    @abstractmethod
    def to_deterministic(self) -> Distribution:
        """Return a distribution that always returns this one's most likely action."""

    @staticmethod
    def required_input_dim(space: gym.Space[Any], model_config: Any = None) -> int:
        """Return the number of inputs per batch row that an action space needs.

        Args:
            space: The action space.
            model_config: Ignored by the built-in classes.
        """
        return num_dist_inputs(space)

    @classmethod
    def get_partial_dist_cls(cls, **kwargs: Any) -> type[Self]:
        """Return a subclass with class-level settings bound, e.g. ``low`` and ``high`` of a squashed Gaussian.

        The arguments are the class's annotated settings; the subclass is used like any other class:
        ``Partial.from_logits(logits)``.

        Raises:
            TypeError: The class does not have such a setting.
        """
        for name in kwargs:
            if not hasattr(cls, name):
                raise TypeError(f"{cls.__name__} has no setting {name!r}")
        return type(f"{cls.__name__}Partial", (cls,), {"__slots__": (), **kwargs})


#: RLlib's name for the torch branch of the family, which is the only one here.
TorchDistribution = Distribution


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

    def _noise(self, generator: torch.Generator | None, sample_shape: SampleShape = None) -> Tensor:
        loc = self.loc
        shape = (*sample_shape, *loc.shape) if sample_shape else loc.shape
        return torch.randn(shape, generator=generator, dtype=loc.dtype, device=loc.device)

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
        flat = flat_actions(value, self.action_shape, self.loc.shape)
        return self._logp_of_noise((flat - self.loc) / self.std)

    def entropy(self) -> Tensor:
        return self.log_std.sum(-1) + (0.5 + _HALF_LOG_TWO_PI) * self.log_std.shape[-1]

    def kl(self, other: Self) -> Tensor:
        scale = (self.std / other.std).square()
        shift = ((self.loc - other.loc) / other.std).square()
        return (0.5 * (scale + shift - 1.0) + other.log_std - self.log_std).sum(-1)

    def to_deterministic(self) -> TorchDeterministic:
        return TorchDeterministic(self._to_action(self.loc))


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
        flat = flat_actions(value, self.action_shape, self._gaussian.loc.shape)
        unit = (flat - self._low) * (2.0 / (self._high - self._low)) - 1.0
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


def _log_of(scale: Tensor | float | None, loc: Tensor, name: str) -> Tensor:
    if scale is None:
        raise ValueError(f"{name} needs scale (standard deviations) or log_std, got neither")
    return torch.as_tensor(scale, dtype=loc.dtype, device=loc.device).log().expand_as(loc)


class TorchDeterministic(Distribution):
    """A distribution of a single action. It has samples, but no density, entropy or divergence."""

    __slots__ = ("loc",)

    has_logp = False

    def __init__(self, loc: Tensor) -> None:
        self.loc: Tensor = loc

    @classmethod
    def from_logits(cls, logits: Tensor) -> Self:
        return cls(logits)

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


_TORCH_INTEGERS = {
    np.dtype(np.int8): torch.int8,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int16): torch.int16,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
}


def action_dist_cls_for(space: gym.Space[Any] | None, *, where: str = "module") -> type[Distribution]:
    """Return the default distribution class of an action space.

    ========================  ==========================================================
    Discrete                  :class:`TorchCategorical`
    MultiDiscrete             :class:`TorchMultiCategorical`
    MultiBinary               :class:`TorchMultiCategorical`, two choices each
    Box of floats             :class:`TorchDiagGaussian`
    Box of integers, bounded  :class:`TorchMultiCategorical` over 0 … high - low
    Dict, Tuple               :class:`TorchMultiDistribution` of the above
    ========================  ==========================================================

    Args:
        space: The action space (of one agent, not vectorized).
        where: Name of the user of the distribution, for error messages, e.g. ``"module 'policy_1'"``.

    Raises:
        ConfigurationError: No space was given.
        UnsupportedSpaceError: The space has no default distribution.
    """
    if space is None:
        raise ConfigurationError(
            f"{where} has no action space, so no action distribution can be chosen: give action_space= in "
            "its RLModuleSpec (or in config.environment(...)), or override get_*_action_dist_cls()"
        )
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        classes = tree_map(lambda leaf: _leaf_cls(leaf, where), space_tree(space))
        lens = tuple(map(num_dist_inputs, leaf_spaces(space)))
        if not lens:
            raise UnsupportedSpaceError(f"{where}: action space {space} has no parts")
        return TorchMultiDistribution.get_partial_dist_cls(
            child_distribution_cls_struct=classes, input_lens=lens
        )
    return _leaf_cls(space, where)


def num_dist_inputs(space: gym.Space[Any]) -> int:
    """Return the number of inputs per row that the default distribution of ``space`` takes."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        return sum(map(num_dist_inputs, leaf_spaces(space)))
    if isinstance(space, gym.spaces.Discrete):
        return int(space.n)
    if isinstance(space, gym.spaces.Box) and not np.issubdtype(space.dtype, np.integer):
        return 2 * int(np.prod(space.shape))
    choices: Any = _leaf_cls(space, "module")
    return sum(choices.input_lens)


def _leaf_cls(space: gym.Space[Any], where: str) -> type[Distribution]:
    if isinstance(space, gym.spaces.Discrete):
        settings: dict[str, Any] = {}
        if space.start:
            settings["start"] = int(space.start)
        if space.dtype != np.int64:
            settings["dtype"] = _TORCH_INTEGERS.get(np.dtype(space.dtype), torch.int64)
        return TorchCategorical.get_partial_dist_cls(**settings) if settings else TorchCategorical
    if isinstance(space, gym.spaces.MultiDiscrete | gym.spaces.MultiBinary):
        if isinstance(space, gym.spaces.MultiDiscrete):
            lens = tuple(int(n) for n in space.nvec.reshape(-1))
            start = tuple(int(n) for n in np.asarray(space.start).reshape(-1))
        else:
            lens, start = (2,) * int(np.prod(space.shape)), ()
        return TorchMultiCategorical.get_partial_dist_cls(
            input_lens=lens,
            action_shape=None if len(space.shape) == 1 else tuple(space.shape),
            start=start if any(start) else None,
            dtype=_TORCH_INTEGERS.get(np.dtype(space.dtype), torch.int64),
        )
    if isinstance(space, gym.spaces.Box):
        shape = None if len(space.shape) == 1 else tuple(space.shape)
        if np.issubdtype(space.dtype, np.integer):
            lens = _integer_box_lens(space, where)
            return TorchMultiCategorical.get_partial_dist_cls(input_lens=lens, action_shape=shape)
        if shape is None:
            return TorchDiagGaussian
        return TorchDiagGaussian.get_partial_dist_cls(action_shape=shape)
    raise UnsupportedSpaceError(
        f"{where}: no default action distribution for {type(space).__name__} (action space {space}). "
        "Supported: Discrete, MultiDiscrete, MultiBinary, Box, and Dict or Tuple of these. Either wrap the "
        "environment so that its actions are one of them, or override get_inference_action_dist_cls(), "
        "get_exploration_action_dist_cls() and get_train_action_dist_cls() in your TorchRLModule."
    )


# More choices than this in one integer would mean a policy head of that width.
_MAX_INTEGER_CHOICES = 65_536


def _integer_box_lens(space: gym.spaces.Box, where: str) -> tuple[int, ...]:
    lens = (space.high.astype(object) - space.low.astype(object) + 1).reshape(-1)
    if any(n > _MAX_INTEGER_CHOICES for n in lens):
        raise UnsupportedSpaceError(
            f"{where}: an integer Box action is chosen by one logit per value, and {space} has "
            f"{max(lens)} values in one element (at most {_MAX_INTEGER_CHOICES}). Use a Box of floats and "
            "round in the environment, or narrow its bounds."
        )
    return tuple(int(n) for n in lens)


class TorchMultiDistribution(Distribution):
    """Independent distributions, one per leaf of a Dict or Tuple action space.

    The inputs of all leaves are concatenated in the last dimension, with dict keys in sorted order.
    Actions are trees like the space; ``logp``, ``entropy`` and ``kl`` are sums over the leaves.

    Settings (:meth:`get_partial_dist_cls`): ``child_distribution_cls_struct`` (a tree of classes) and
    ``input_lens`` (a tree, or a flat tuple in leaf order, of each leaf's number of inputs), ``space``
    (the action space; optional, as it follows from the classes).
    """

    __slots__ = ("_children", "_treespec")

    child_distribution_cls_struct: ClassVar[Any] = None
    input_lens: ClassVar[Any] = None
    space: ClassVar[gym.Space[Any] | None] = None

    def __init__(self, child_distribution_struct: Any) -> None:
        """Args:
        child_distribution_struct: A tree of distributions.
        """
        leaves: list[Any]
        leaves, self._treespec = optree.tree_flatten(child_distribution_struct)
        self._children: list[Distribution] = leaves

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        child_distribution_cls_struct: Any = None,
        input_lens: Any = None,
        space: gym.Space[Any] | None = None,
    ) -> Self:
        if child_distribution_cls_struct is None:
            child_distribution_cls_struct = cls.child_distribution_cls_struct
        lens = optree.tree_leaves(cls.input_lens if input_lens is None else input_lens)
        classes, treespec = optree.tree_flatten(child_distribution_cls_struct)
        self = cls.__new__(cls)
        pieces = torch.split(logits, lens, -1)
        self._children = [
            child_cls.from_logits(piece) for child_cls, piece in zip(classes, pieces, strict=True)
        ]
        self._treespec = treespec
        return self

    def _leaves(self, value: Any) -> list[Tensor]:
        leaves: list[Any] = self._treespec.flatten_up_to(value)
        return leaves

    def sample(self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None) -> Any:
        return self._treespec.unflatten(
            [child.sample(sample_shape=sample_shape, generator=generator) for child in self._children]
        )

    def rsample(self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None) -> Any:
        return self._treespec.unflatten(
            [child.rsample(sample_shape=sample_shape, generator=generator) for child in self._children]
        )

    def sample_and_logp(self, *, generator: torch.Generator | None = None) -> tuple[Any, Tensor]:
        values, logps = zip(
            *(child.sample_and_logp(generator=generator) for child in self._children), strict=True
        )
        return self._treespec.unflatten(values), reduce(torch.add, logps)

    def logp(self, value: Any) -> Tensor:
        leaves = self._leaves(value)
        pairs = zip(self._children, leaves, strict=True)
        return reduce(torch.add, [child.logp(leaf) for child, leaf in pairs])

    def entropy(self) -> Tensor:
        return reduce(torch.add, [child.entropy() for child in self._children])

    def kl(self, other: Self) -> Tensor:
        pairs = zip(self._children, other._children, strict=True)
        return reduce(torch.add, [mine.kl(theirs) for mine, theirs in pairs])

    def to_deterministic(self) -> TorchMultiDistribution:
        return TorchMultiDistribution(
            self._treespec.unflatten([child.to_deterministic() for child in self._children])
        )
