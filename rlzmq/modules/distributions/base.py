"""Base class of action distributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import gymnasium as gym
import torch
from torch import Tensor

__all__ = ["Distribution", "SampleShape", "TorchDistribution", "check_dist_inputs", "flat_actions"]

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
    step is cheap. Learners detect NaN inputs (:func:`check_dist_inputs`).

    Leading dimensions of the inputs are the batch (``[B, ...]`` or ``[B, T, ...]``). ``logp``, ``entropy`` and ``kl``
    have exactly that shape; they are summed over the dimensions of an action.

    Every sampling method takes an optional ``torch.Generator``. The samples depend only on the generator's state and
    the inputs, with rows in batch order. Without a generator, torch's global one is used.
    """

    __slots__ = ()

    #: Whether :meth:`logp` is defined.
    has_logp: ClassVar[bool] = True

    #: Settings that :meth:`get_partial_dist_cls` bound to this class.
    partial_kwargs: ClassVar[dict[str, Any]] = {}

    @classmethod
    @abstractmethod
    def from_logits(cls, logits: Tensor) -> Self:
        """Return the distribution for a model's output.

        Args:
            logits: Float tensor ``[..., required_input_dim]``.
        """

    @abstractmethod
    def sample(self, *, sample_shape: SampleShape = None, generator: torch.Generator | None = None) -> Any:
        """Return sampled actions without gradient, ``[..., *action shape]`` (a tree of them for nested actions).

        Args:
            sample_shape: Number of samples per row: the result is ``[*sample_shape, ..., *action shape]``.
            generator: See the class.
        """

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
    @abstractmethod
    def required_input_dim(space: gym.Space[Any], model_config: Any = None) -> int:
        """Return the number of inputs per batch row that an action space needs.

        Args:
            space: The action space.
            model_config: Ignored by the built-in classes.
        """

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
        bound = {"__slots__": (), "partial_kwargs": {**cls.partial_kwargs, **kwargs}, **kwargs}
        return type(f"{cls.__name__}Partial", (cls,), bound)


#: RLlib's name for the torch branch of the family, which is the only one here.
TorchDistribution = Distribution


def check_dist_inputs(logits: Tensor, *, module_id: str, column: str = "action_dist_inputs") -> None:
    """Raise an error if a model's distribution inputs contain NaN. For learners, not for every sampling step.

    Raises:
        ValueError: The inputs contain NaN; the text names the module, the column and the first bad row.
    """
    bad = torch.isnan(logits).flatten(0, -2).any(-1) if logits.dim() > 1 else torch.isnan(logits)
    num_bad = int(bad.sum())
    if num_bad:
        first = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"module {module_id!r}: column {column!r} holds NaN in {num_bad} of {bad.numel()} rows, "
            f"first in row {first}; expected finite values (or -inf for a masked action). "
            "Look for NaN in the observations or rewards, a learning rate too high, or missing grad_clip."
        )
