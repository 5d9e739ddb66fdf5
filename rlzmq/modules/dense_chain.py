"""The default dense policy as a flat list of layers, the fastest form for few environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule
from rlzmq.modules.default_models.heads import PolicyHead
from rlzmq.modules.default_models.mlp import MLP

__all__ = ["Layer", "dense_chain", "run_chain"]

Layer = tuple[Tensor, Tensor, Callable[[Tensor], Tensor] | None]


def dense_chain(module: Any) -> list[Layer] | None:
    """Return the layers that ``module``'s acting forward pass consists of, if it is nothing but dense layers.

    The tensors are the module's own parameters: loading weights in place shows in the chain at once, and
    ``run_chain`` returns exactly the numbers of the module's forward pass.

    Args:
        module: Any module.

    Returns:
        (weight, bias, activation) of each layer; None for any module but the unchanged default one with a
        dense encoder, no layer norm, no action mask, no memory and no separate log standard deviations.
    """
    if type(module) is not DefaultActorCriticModule or not module._plain or _has_hooks(module):
        return None
    layers: list[Layer] = []
    for part, kind in ((module.encoder, MLP), (module.pi, PolicyHead)):
        if type(part) is not kind or _has_hooks(part):
            return None
        for parameters, _, activation in part.steps():
            if parameters is None:
                return None
            layers.append((parameters["weight"], parameters["bias"], activation))
    head = module.pi
    if head.log_std is not None or head._high is not None:
        return None
    return layers


def run_chain(layers: list[Layer], x: Tensor) -> Tensor:
    """Return the chain's outputs for float32 inputs ``[N, D]``."""
    linear = torch.nn.functional.linear
    for weight, bias, activation in layers:
        x = linear(x, weight, bias)
        if activation is not None:
            x = activation(x)
    return x


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
