"""Default distributions of action spaces, and `TorchMultiDistribution` for nested ones."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import gymnasium as gym
import numpy as np
import optree
import torch
from torch import Tensor

from rlzmq.core.errors import ConfigurationError, UnsupportedSpaceError
from rlzmq.modules.distributions.base import Distribution, SampleShape
from rlzmq.modules.distributions.categorical import TorchCategorical, TorchMultiCategorical
from rlzmq.modules.distributions.gaussian import TorchDiagGaussian

__all__ = ["TorchMultiDistribution", "action_dist_cls_for", "num_dist_inputs"]

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
        classes = _map_space(space, lambda leaf: _leaf_cls(leaf, where))
        lens = tuple(optree.tree_leaves(_map_space(space, num_dist_inputs)))
        if not lens:
            raise UnsupportedSpaceError(f"{where}: action space {space} has no parts")
        return TorchMultiDistribution.get_partial_dist_cls(
            child_distribution_cls_struct=classes, input_lens=lens
        )
    return _leaf_cls(space, where)


def num_dist_inputs(space: gym.Space[Any]) -> int:
    """Return the number of inputs per row that the default distribution of ``space`` takes."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        return sum(optree.tree_leaves(_map_space(space, num_dist_inputs)))
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.integer):
        return sum(_integer_box_lens(space, "module"))
    return _leaf_cls(space, "module").required_input_dim(space)


def _map_space(space: gym.Space[Any], leaf: Any) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {key: _map_space(space[key], leaf) for key in sorted(space.spaces)}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_map_space(part, leaf) for part in space.spaces)
    return leaf(space)


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
        return self._treespec.unflatten(values), _sum(logps)

    def logp(self, value: Any) -> Tensor:
        leaves = self._leaves(value)
        return _sum(child.logp(leaf) for child, leaf in zip(self._children, leaves, strict=True))

    def entropy(self) -> Tensor:
        return _sum(child.entropy() for child in self._children)

    def kl(self, other: Self) -> Tensor:
        return _sum(mine.kl(theirs) for mine, theirs in zip(self._children, other._children, strict=True))

    def to_deterministic(self) -> TorchMultiDistribution:
        return TorchMultiDistribution(
            self._treespec.unflatten([child.to_deterministic() for child in self._children])
        )

    @staticmethod
    def required_input_dim(space: gym.Space[Any], model_config: Any = None) -> int:
        return num_dist_inputs(space)


def _sum(terms: Any) -> Tensor:
    total: Tensor | None = None
    for term in terms:
        total = term if total is None else total + term
    assert total is not None, "a distribution tree without leaves"
    return total
