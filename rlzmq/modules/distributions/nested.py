"""Nested actions: a tree of distributions over one tensor of inputs."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import gymnasium as gym
import optree
import torch
from torch import Tensor

from rlzmq.modules.distributions.base import Distribution, SampleShape

__all__ = ["TorchMultiDistribution"]


class TorchMultiDistribution(Distribution):
    """Independent distributions, one per leaf of a Dict or Tuple action space.

    The inputs of all leaves lie side by side in the last dimension, dict keys in sorted order.
    Actions are trees like the space; ``logp``, ``entropy`` and ``kl`` are sums over the leaves.

    Settings (:meth:`get_partial_dist_cls`): ``child_distribution_cls_struct`` (a tree of classes) and
    ``input_lens`` (a tree, or a flat tuple in leaf order, of each leaf's number of inputs), ``space``
    (the action space; what it says follows from the classes, so None does as well).
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
        from rlzmq.modules.distributions.for_space import num_dist_inputs

        return num_dist_inputs(space)


def _sum(terms: Any) -> Tensor:
    total: Tensor | None = None
    for term in terms:
        total = term if total is None else total + term
    assert total is not None, "a distribution tree without leaves"
    return total
