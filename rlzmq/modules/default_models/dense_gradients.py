"""Gradients of dense networks without torch's graph, whose nodes cost small layers as much as their arithmetic.

While a learner records (`recorded`), a dense network's outputs are leaves of torch's graph, and what its layers took
and returned is kept. `backward` lets torch differentiate the loss by these leaves, then takes their gradients through
the layers. The gradients are bit for bit those that torch computes from the same outputs. A loss whose gradient by
the outputs is known (`with_known_gradient`) needs no graph either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "Layer",
    "backward",
    "is_recorded",
    "record",
    "recorded",
    "run_backward",
    "tanh_",
    "with_known_gradient",
]

Layer = tuple[dict[str, Any] | None, Any, Callable[[Tensor], Tensor] | None]
"""(parameters of a dense layer or None, otherwise the module to call, activation)."""

# NumPy's call takes a microsecond more than torch's.
_MIN_NUMPY_ELEMENTS = 512


def tanh_(x: Tensor) -> Tensor:
    """Compute tanh in place; without a graph on the CPU by NumPy, which takes an eighth of torch's time."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return torch.tanh_(x)
    if x.numel() < _MIN_NUMPY_ELEMENTS or not x.is_cpu or x.dtype is not torch.float32:
        return torch.tanh_(x)
    array = x.numpy()
    np.tanh(array, out=array)
    return x


_aten = torch.ops.aten
# torch.no_grad() would take longer than a small layer.
_set_grad_enabled = torch._C._set_grad_enabled

# Activation → function of the output's gradient, which it may overwrite, and the output.
_DERIVATIVES: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    None: lambda gradient, _: gradient,
    tanh_: lambda gradient, output: _aten.tanh_backward.grad_input(gradient, output, grad_input=gradient),
    torch.relu_: lambda gradient, output: _aten.threshold_backward.grad_input(
        gradient, output, 0, grad_input=gradient
    ),
    torch.sigmoid_: _aten.sigmoid_backward.default,
}


class _KnownLoss(NamedTuple):
    loss: Tensor
    outputs: Tensor
    gradient: Tensor


class _Recording(threading.local):
    """A thread's recorded networks and losses.

    Attributes:
        networks: Outputs [N, K]; layers; their inputs [N, D], and the outputs once more.
        losses: Losses with a known gradient.
    """

    is_on = False

    def __init__(self) -> None:
        self.networks: list[tuple[Tensor, Sequence[Layer], list[Tensor]]] = []
        self.losses: list[_KnownLoss] = []


_recording = _Recording()


@contextmanager
def recorded() -> Iterator[None]:
    """Record the dense networks that this thread runs in the block; those recorded before are forgotten.

    The loss must be differentiated with `backward`, once, and not by parameters of the networks.
    """
    _recording.networks.clear()
    _recording.losses.clear()
    _recording.is_on = True
    try:
        yield
    finally:
        _recording.is_on = False


def record(layers: Sequence[Layer], x: Tensor) -> Tensor | None:
    """Return the outputs of layers for inputs float32 [N, D], or None if torch has to make a graph.

    It has to if nothing is recorded, for layers that are not dense, in lower precision, on a GPU, for parameters that
    are fixed or have hooks, and for inputs with a gradient, except the outputs of a recorded network.
    """
    if not (torch.is_grad_enabled() and _recording.is_on and x.dim() == 2 and x.is_cpu):
        return None
    networks = _recording.networks
    if torch.is_autocast_enabled("cpu") or (
        x.requires_grad and not [1 for known in networks if known[0] is x]
    ):
        return None
    for parameters, _, activation in layers:
        if parameters is None or activation not in _DERIVATIVES:
            return None
        for p in parameters.values():
            if p is None or not p.requires_grad or p._backward_hooks or p._post_accumulate_grad_hooks:
                return None
    kept = [x]
    linear = nn.functional.linear
    _set_grad_enabled(False)
    try:
        for parameters, _, activation in layers:
            assert parameters is not None
            x = linear(x, parameters["weight"], parameters["bias"])
            if activation is not None:
                x = activation(x)
            kept.append(x)
    finally:
        _set_grad_enabled(True)
    networks.append((x.requires_grad_(), layers, kept))
    return x


def is_recorded(outputs: Tensor) -> bool:
    """Return whether `with_known_gradient` is allowed: float32 outputs on the CPU, while this thread records."""
    return (
        _recording.is_on
        and outputs.requires_grad
        and outputs.is_cpu
        and outputs.dtype is torch.float32
        and torch.is_grad_enabled()
    )


def with_known_gradient(loss: Tensor, outputs: Tensor, gradient: Tensor) -> Tensor:
    """Return a loss that `backward` differentiates by `outputs` without a graph between the two.

    Args:
        loss: 0-d tensor, without a graph.
        outputs: Outputs of networks, or what follows from them, for which `is_recorded` holds.
        gradient: The loss's gradient by the outputs, of their shape.
    """
    loss.requires_grad_()
    _recording.losses.append(_KnownLoss(loss, outputs, gradient))
    return loss


def run_backward(loss: Tensor, gradient: Tensor | None = None) -> None:
    """Run ``loss.backward(gradient)`` without the caller's context variables in the engine's thread-local state.

    `Tensor.backward` stores them there, and every all-reduce that DistributedDataParallel starts during the call keeps
    them. Their last owner is then a gloo thread, which needs the GIL to release them. If the group is closed at that
    moment, its destructor waits for that thread while holding the GIL: a deadlock.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    if gradient is None:
        gradient = torch.ones_like(loss)
    engine.run_backward((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def backward(loss: Tensor) -> None:
    """Add the loss's gradients to those of all parameters, as ``loss.backward()`` does without recorded networks."""
    networks, _recording.networks = _recording.networks, []
    losses, _recording.losses = _recording.losses, []
    if not any(known.loss is loss for known in losses):
        run_backward(loss)
    is_enabled = torch.is_grad_enabled()
    _set_grad_enabled(False)
    try:
        for part, outputs, gradient in losses:
            if part is not loss:
                if part.grad is None:
                    continue
                gradient = gradient * part.grad
            if outputs.grad_fn is not None:
                run_backward(outputs, gradient)
            else:
                outputs.grad = gradient if outputs.grad is None else outputs.grad + gradient
        for outputs, layers, kept in reversed(networks):
            if outputs.grad is not None:
                _through(layers, kept, outputs.grad)
    finally:
        _set_grad_enabled(is_enabled)


def _through(layers: Sequence[Layer], kept: list[Tensor], gradient: Tensor) -> None:
    """Add the gradients of a network's parameters, and of its inputs if they have one."""
    for index in range(len(layers) - 1, -1, -1):
        parameters, _, activation = layers[index]
        assert parameters is not None
        gradient = _DERIVATIVES[activation](gradient, kept[index + 1])
        inputs, weight, bias = kept[index], parameters["weight"], parameters["bias"]
        of_weight, of_bias = gradient.t().mm(inputs), gradient.sum(0)
        if weight.grad is None:
            weight.grad, bias.grad = of_weight, of_bias
        else:
            weight.grad += of_weight
            bias.grad += of_bias
        if index:
            gradient = gradient.mm(weight)
        elif inputs.requires_grad:
            gradient = gradient.mm(weight)
            inputs.grad = gradient if inputs.grad is None else inputs.grad + gradient
