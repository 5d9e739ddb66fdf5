"""Target networks: copies that slowly follow the trained networks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlzmq.modules.apis import TargetNetworkAPI
from rlzmq.modules.structure import StructureCache, parameters_of

__all__ = ["TargetNetworks"]


class TargetNetworks:
    """Updates a module's target networks.

    The tensors are listed once, and again when the networks' structure has changed: listing them takes longer than an
    update of small networks.
    """

    def __init__(self) -> None:
        self._tensors = StructureCache(_tensors_of)

    def update(self, module: TargetNetworkAPI, tau: float) -> None:
        """Move the target networks towards the trained ones: θ̄ ← τ θ + (1 - τ) θ̄; buffers are copied.

        Args:
            module: The module, the same in each call; its network pairs come from ``get_target_network_pairs()``.
            tau: Update rate in [0, 1]; 1 copies.
        """
        sources, copies, buffers = self._tensors.of(chain.from_iterable(module.get_target_network_pairs()))
        with torch.no_grad():
            if sources:
                torch._foreach_lerp_(copies, sources, tau)
            for source, copy in buffers:
                copy.copy_(source)


def _tensors_of(networks: list[Any]) -> tuple[list[Tensor], list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Return the parameters of trained networks, those of their target networks, and pairs of buffers.

    Args:
        networks: A trained network, its target network, and so on.
    """
    sources: list[Tensor] = []
    copies: list[Tensor] = []
    buffers: list[tuple[Tensor, Tensor]] = []
    for main, target in zip(networks[::2], networks[1::2], strict=True):
        sources += parameters_of(main)
        copies += parameters_of(target)
        buffers += zip(main.buffers(), target.buffers(), strict=True)
    return sources, copies, buffers
