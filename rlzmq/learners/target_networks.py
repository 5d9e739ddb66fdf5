"""Target networks: copies that slowly follow the trained networks."""

from __future__ import annotations

import torch

from rlzmq.modules.apis import TargetNetworkAPI
from rlzmq.modules.structure import parameters_of

__all__ = ["update_target_networks"]


@torch.no_grad()
def update_target_networks(module: TargetNetworkAPI, tau: float) -> None:
    """Move a module's target networks towards the trained ones: θ̄ ← τ θ + (1 - τ) θ̄; buffers are copied.

    Args:
        module: The module; its network pairs come from ``get_target_network_pairs()``.
        tau: Update rate in [0, 1]; 1 copies.
    """
    for main, target in module.get_target_network_pairs():
        sources, copies = parameters_of(main), parameters_of(target)
        if sources:
            torch._foreach_lerp_(copies, sources, tau)
        for source, copy in zip(main.buffers(), target.buffers(), strict=True):
            copy.copy_(source)
