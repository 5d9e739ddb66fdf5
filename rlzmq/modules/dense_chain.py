"""The default dense policy as a flat list of layers, with or without memory: the fastest form for few environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule, PolicyHead
from rlzmq.modules.default_models.encoders import MLP, RecurrentEncoder

__all__ = ["Layer", "RecurrentChain", "dense_chain", "recurrent_chain", "run_chain"]

Layer = tuple[Tensor, Tensor, Callable[[Tensor], Tensor] | None]

_LSTM_WEIGHTS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


def dense_chain(module: Any) -> list[Layer] | None:
    """Return the layers of ``module``'s acting forward pass if it consists only of dense layers.

    The tensors are the module's own parameters, so weights loaded in place take effect at once. ``run_chain`` returns
    exactly the numbers of the module's forward pass.

    Returns:
        (weight, bias, activation) of each layer. None for any module except the unchanged default one with a dense
        encoder, no layer norm, no action mask, no memory and no separate log standard deviations.
    """
    if type(module) is not DefaultActorCriticModule or not module._plain or _has_hooks(module):
        return None
    return _joined(_layers(module.encoder, MLP), _head_layers(module))


class RecurrentChain:
    """The default dense policy with an LSTM, one time step for every row.

    Args:
        encoders: The layers before an LSTM and the LSTM, by the key of its part of the state; None: the only one's
            state is the whole. The first one's output is the head's input.
        head: The layers after the LSTM.
    """

    def __init__(
        self, encoders: dict[str | None, tuple[list[Layer], RecurrentEncoder]], head: list[Layer]
    ) -> None:
        self._encoders: list[tuple[str | None, list[Layer], list[Any]]] = [
            (key, layers, [lstm.lstm._parameters[name] for name in _LSTM_WEIGHTS])
            for key, (layers, lstm) in encoders.items()
        ]
        self._head = head
        self._max_rows = min(lstm.max_cell_rows for _, lstm in encoders.values())

    def takes(self, x: Tensor) -> bool:
        """Return whether the chain computes what the module does for these inputs."""
        return x.dim() == 2 and x.dtype is torch.float32 and len(x) <= self._max_rows

    def __call__(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the distribution inputs ``[N, K]`` and the next state.

        Args:
            x: Observations, float32 ``[N, D]``.
            state: The module's state, leaves ``[N, cell]``.
        """
        features: Tensor | None = None
        state_out: Any = {}
        for key, layers, weights in self._encoders:
            before = state if key is None else state[key]
            h, c = torch.lstm_cell(run_chain(layers, x), (before["h"], before["c"]), *weights)
            after = {"h": h, "c": c}
            if key is None:
                state_out = after
            else:
                state_out[key] = after
            if features is None:
                features = h
        assert features is not None
        return run_chain(self._head, features), state_out


def recurrent_chain(module: Any) -> RecurrentChain | None:
    """Return the chain of an unchanged default module with dense encoders and an LSTM; None for any other."""
    if (
        type(module) is not DefaultActorCriticModule
        or not module._recurrent
        or module._mask.is_there
        or _has_hooks(module)
    ):
        return None
    parts = (
        {"actor": module.encoder, "critic": module.vf_encoder} if module._separate else {None: module.encoder}
    )
    encoders: dict[str | None, tuple[list[Layer], RecurrentEncoder]] = {}
    for key, part in parts.items():
        if type(part) is not RecurrentEncoder or _has_hooks(part) or _has_hooks(part.lstm):
            return None
        layers = _layers(part.tokenizer, MLP)
        if layers is None or any(name not in part.lstm._parameters for name in _LSTM_WEIGHTS):
            return None
        encoders[key] = layers, part
    head = _head_layers(module)
    return None if head is None else RecurrentChain(encoders, head)


def run_chain(layers: list[Layer], x: Tensor) -> Tensor:
    """Return the chain's outputs for float32 inputs ``[N, D]``."""
    linear = torch.nn.functional.linear
    for weight, bias, activation in layers:
        x = linear(x, weight, bias)
        if activation is not None:
            x = activation(x)
    return x


def _head_layers(module: DefaultActorCriticModule) -> list[Layer] | None:
    head = module.pi
    return None if head.log_std is not None or head._high is not None else _layers(head, PolicyHead)


def _layers(part: object, kind: type[MLP]) -> list[Layer] | None:
    """Return the layers of an unchanged part of the module that consists of dense layers only, else None."""
    if type(part) is not kind or _has_hooks(part):
        return None
    layers: list[Layer] = []
    for parameters, _, activation in part.steps():
        if parameters is None:
            return None
        layers.append((parameters["weight"], parameters["bias"], activation))
    return layers


def _joined(first: list[Layer] | None, second: list[Layer] | None) -> list[Layer] | None:
    return None if first is None or second is None else first + second


def _has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
