"""MLP and RecurrentEncoder: encoders of vectors, and of sequences of features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean

__all__ = ["MLP", "Layer", "RecurrentEncoder", "activation_function", "initialize"]

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


# In place if the derivative follows from the output, since nothing else uses the layer's output.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "tanh": tanh_,
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid_,
    "swish": nn.functional.silu,
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "elu": nn.functional.elu,
    "leaky_relu": nn.functional.leaky_relu,
    "linear": None,
}

# Used after layers that may return their input, like nn.Identity.
_OUT_OF_PLACE: dict[Any, Any] = {
    tanh_: torch.tanh,
    torch.relu_: torch.relu,
    torch.sigmoid_: torch.sigmoid,
}


def activation_function(name: str | None, setting: str = "activation") -> Callable[[Tensor], Tensor] | None:
    """Return the function of an activation's name; None for the linear one.

    Raises:
        ConfigurationError: There is no such activation; names the setting and the closest one.
    """
    if name is None:
        return None
    if not isinstance(name, str) or name.lower() not in _ACTIVATIONS:
        raise ConfigurationError(
            f"model_config[{setting!r}]: unknown activation {name!r}.{did_you_mean(name, _ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name.lower()]


def initialize(tensor: Tensor, initializer: Any, kwargs: dict[str, Any] | None, setting: str) -> None:
    """Initialize a parameter: by a name in ``torch.nn.init``, by a function, or (None) not at all.

    Raises:
        ConfigurationError: There is no such initializer.
    """
    if initializer is None:
        return
    function = initializer
    if isinstance(initializer, str):
        name = initializer if initializer.endswith("_") else initializer + "_"
        function = getattr(nn.init, name, None)
        if function is None or name.startswith("_"):
            names = [n for n in dir(nn.init) if n.endswith("_") and not n.startswith("_")]
            raise ConfigurationError(
                f"model_config[{setting!r}]: torch.nn.init has no {initializer!r}.{did_you_mean(name, names)}"
            )
    elif not callable(initializer):
        raise ConfigurationError(
            f"model_config[{setting!r}]: expected a name in torch.nn.init or a function, got {initializer!r}"
        )
    with torch.no_grad():
        function(tensor, **(kwargs or {}))


class MLP(nn.Module):
    """Dense layers, ``[..., input_dim]`` → ``[..., output_dim]``. Inputs may have any number type.

    The dense layers are called without torch's per-layer module call, which would cost more than their arithmetic at
    batch size 8. Register forward hooks on the MLP, not on its layers.

    A subclass may replace layers with other modules, ``self.pi.layers[-1] = MyLayer()``. The activation after that
    position remains.

    Under ``torch.autocast`` the additional linear layer (`output_dim`) computes in float32: what heads return should
    not be rounded to 8 bits.

    Args:
        input_dim: Number of features per row.
        hiddens: Widths of the layers.
        activation: Name of the activation after each layer.
        use_layernorm: Whether to normalize before each activation.
        output_dim: Width of an additional linear layer; None: no such layer.
        output_scale: Factor for that layer's initial weights.
        config: Provides the initializers, under ``prefix``.
        prefix: "fcnet", "head_fcnet", "fusionnet".
    """

    def __init__(
        self,
        input_dim: int,
        hiddens: Sequence[int],
        activation: str | None,
        *,
        config: DefaultModelConfig,
        prefix: str,
        use_layernorm: bool = False,
        output_dim: int | None = None,
        output_scale: float = 1.0,
    ) -> None:
        super().__init__()
        function = activation_function(activation, f"{prefix}_activation")
        self.layers: nn.ModuleList = nn.ModuleList()
        self._activations: list[Callable[[Tensor], Tensor] | None] = []  # one after each layer
        width = input_dim
        for hidden in hiddens:
            self._add(self._linear(width, hidden, config, prefix), None if use_layernorm else function)
            if use_layernorm:
                self._add(nn.LayerNorm(hidden), function)
            width = hidden
        self._has_output = output_dim is not None
        if output_dim is not None:
            layer = self._linear(width, output_dim, config, prefix)
            if output_scale != 1.0:
                with torch.no_grad():
                    layer.weight.mul_(output_scale)
                    layer.bias.zero_()
            self._add(layer, None)
            width = output_dim
        self._steps: list[Layer] = []
        self._steps_of: list[nn.Module] = []  # the layers from which the steps were built
        self._is_by_row = False
        self.input_dim = input_dim
        self.output_dim = width

    def _add(self, layer: nn.Module, activation: Callable[[Tensor], Tensor] | None) -> None:
        self.layers.append(layer)
        self._activations.append(activation)

    @staticmethod
    def _linear(inputs: int, outputs: int, config: DefaultModelConfig, prefix: str) -> nn.Linear:
        layer = nn.Linear(inputs, outputs)
        for kind, parameter in (("kernel", layer.weight), ("bias", layer.bias)):
            setting = f"{prefix}_{kind}_initializer"
            initialize(parameter, getattr(config, setting), getattr(config, setting + "_kwargs"), setting)
        return layer

    def steps(self) -> list[Layer]:
        """Return the steps of the forward pass, rebuilt if a layer was replaced.

        Raises:
            RuntimeError: A layer was added or taken out.
        """
        layers = [*self._modules["layers"]._modules.values()]  # type: ignore[union-attr]
        if layers != self._steps_of:
            if len(layers) != len(self._activations):
                raise RuntimeError(
                    f"the MLP was built of {len(self._activations)} layers and now has {len(layers)}: layers "
                    "can be replaced, but not added or taken out. Put a module of your own in the whole MLP's "
                    "place, e.g. self.vf = torch.nn.Sequential(…)"
                )
            self._steps = [_step(*pair) for pair in zip(layers, self._activations, strict=True)]
            self._steps_of = layers
            self._is_by_row = all(type(layer) in (nn.Linear, nn.LayerNorm) for layer in layers)
        return self._steps

    def forward(self, x: Tensor) -> Tensor:
        linear, steps = nn.functional.linear, self._steps
        if [*self._modules["layers"]._modules.values()] != self._steps_of:  # type: ignore[union-attr]
            steps = self.steps()
        lead = () if x.ndim == 2 else x.shape[:-1]
        if len(lead) > 1 and self._is_by_row:
            # Otherwise the layers' results would be views, which in-place activations copy.
            x = x.flatten(0, -2)
        if x.dtype is not torch.float32:
            first = steps[0][0] if steps else None
            x = x.to(torch.float32 if first is None else first["weight"].dtype)
        is_mixed = self._has_output and torch.is_autocast_enabled(x.device.type)
        for parameters, module, activation in steps[:-1] if is_mixed else steps:
            if parameters is not None:
                x = linear(x, parameters["weight"], parameters["bias"])
            else:
                x = module(x)
            if activation is not None:
                x = activation(x)
        if is_mixed:
            with torch.autocast(x.device.type, enabled=False):
                x = self.layers[-1](x.float())
        return x.view(*lead, x.shape[-1]) if len(lead) > 1 and self._is_by_row else x


def _step(layer: nn.Module, activation: Callable[[Tensor], Tensor] | None) -> Layer:
    if type(layer) is nn.Linear and "weight" in layer._parameters:
        return layer._parameters, None, activation
    return (
        None,
        layer,
        activation if type(layer) is nn.LayerNorm else _OUT_OF_PLACE.get(activation, activation),
    )


# torch.lstm_cell computes a single step of at most this many rows times units. torch's sequence kernel costs three
# times as much at 8 rows of 64 units, and half as much at 256. (Measured on one x86 core.)
_CELL_MAX_UNITS = 4096


class RecurrentEncoder(nn.Module):
    """Maps observations ``[B, T, ...]`` and state to features ``[B, T, output_dim]`` and the next state.

    The state is ``{"h": [B, cell], "c": [B, cell]}``.
    """

    def __init__(self, tokenizer: Any, config: DefaultModelConfig) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.output_dim: int = config.lstm_cell_size
        self.lstm: nn.LSTM = nn.LSTM(tokenizer.output_dim, config.lstm_cell_size, batch_first=True)
        for kind, tag in (("kernel", "weight"), ("bias", "bias")):
            setting = f"lstm_{kind}_initializer"
            for name, parameter in self.lstm.named_parameters():
                if name.startswith(tag):
                    kwargs = getattr(config, setting + "_kwargs")
                    initialize(parameter, getattr(config, setting), kwargs, setting)

    @property
    def max_cell_rows(self) -> int:
        """Maximum number of rows for which torch.lstm_cell computes a single step."""
        return _CELL_MAX_UNITS // self.output_dim

    def initial_state(self) -> dict[str, Tensor]:
        """Return zeros, without batch dimension."""
        return {"h": torch.zeros(self.output_dim), "c": torch.zeros(self.output_dim)}

    def forward(self, obs: Any, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        tokens = self.tokenizer(obs)
        if tokens.dim() != 3:
            raise ValueError(
                "an LSTM takes observations with a time dimension, [B, T, ...], got a batch whose encoding "
                f"is of shape {tuple(tokens.shape)}; the piece AddTimeDimToBatchAndZeroPad adds it"
            )
        # An exported graph has any number of rows, so it uses the cell.
        if tokens.shape[1] == 1 and (torch.compiler.is_exporting() or tokens.shape[0] <= self.max_cell_rows):
            weights: dict[str, Any] = self.lstm._parameters
            h, c = torch.lstm_cell(
                tokens.squeeze(1),
                (state["h"], state["c"]),
                weights["weight_ih_l0"],
                weights["weight_hh_l0"],
                weights["bias_ih_l0"],
                weights["bias_hh_l0"],
            )
            return h.unsqueeze(1), {"h": h, "c": c}
        features, (h, c) = self.lstm(tokens, (state["h"].unsqueeze(0), state["c"].unsqueeze(0)))
        # stored step by step, which each head would have to transpose
        return features.contiguous(), {"h": h.squeeze(0), "c": c.squeeze(0)}
