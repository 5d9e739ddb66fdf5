"""Default encoders: from observations of any supported space to one feature vector per row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.core.errors import ConfigurationError, UnsupportedSpaceError
from rlzmq.core.suggest import did_you_mean
from rlzmq.modules.default_models.dense_gradients import Layer, record, tanh_

__all__ = [
    "MLP",
    "ImageEncoder",
    "MultiStreamEncoder",
    "RecurrentEncoder",
    "activation_function",
    "build_encoder",
    "default_conv_filters",
    "image_layout",
    "initialize",
    "is_image",
    "mismatch",
]


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
        linear, steps = nn.functional.linear, self.steps()
        lead = x.shape[:-1]
        is_flat = x.ndim == 2
        if not is_flat and len(lead) > 1 and self._is_by_row:
            # Otherwise the layers' results would be views, which in-place activations copy.
            x = x.flatten(0, -2)
        if x.dtype is not torch.float32:
            first = steps[0][0] if steps else None
            x = x.to(torch.float32 if first is None else first["weight"].dtype)
        if is_flat and (outputs := record(steps, x)) is not None:
            return outputs
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
        return x if is_flat or len(lead) < 2 or not self._is_by_row else x.view(*lead, x.shape[-1])


def _step(layer: nn.Module, activation: Callable[[Tensor], Tensor] | None) -> Layer:
    if type(layer) is nn.Linear and "weight" in layer._parameters:
        return layer._parameters, None, activation
    return (
        None,
        layer,
        activation if type(layer) is nn.LayerNorm else _OUT_OF_PLACE.get(activation, activation),
    )


# A 2-D Box of bytes whose sides are both at least this long is a greyscale image, not a table.
_MIN_IMAGE_SIDE = 16
# Filters for frames of Atari agents: Mnih et al. 2015, doi:10.1038/nature14236.
_NATURE_SIZE = (84, 84)
_NATURE_FILTERS = ([32, 8, 4, "valid"], [64, 4, 2, "valid"], [64, 3, 1, "valid"])
# Filters are added until the feature map is at most this wide.
_MAX_MAP_SIDE = 7


def is_image(space: gym.spaces.Box) -> bool:
    """Return whether a Box is encoded with convolutions: it is 3-D, or 2-D, of bytes and large enough."""
    if len(space.shape) == 3:
        return True
    return len(space.shape) == 2 and space.dtype == np.uint8 and min(space.shape) >= _MIN_IMAGE_SIDE


def image_layout(shape: tuple[int, ...]) -> tuple[bool, int, int, int]:
    """Return ``(channels come first, height, width, channels)`` of an image's shape.

    Images are ``[height, width, channels]``, as in Gymnasium. ``[channels, height, width]`` is recognized if the first
    number is at most 16 and the others are larger (stacked grey frames).
    """
    if len(shape) == 2:
        return False, shape[0], shape[1], 1
    first = shape[0] <= 16 < min(shape[1], shape[2])
    return (True, shape[1], shape[2], shape[0]) if first else (False, shape[0], shape[1], shape[2])


def default_conv_filters(height: int, width: int) -> list[list[Any]]:
    """Return ``[[channels, [height, width] of the kernel, stride], …]``, down to at most 7 pixels a side.

    Kernels are odd for odd sizes and even for even sizes. The padding is then equal at both ends and needs no copy of
    the image. Images of 84 × 84 pixels get the filters of Mnih et al. 2015, without padding.
    """
    if (height, width) == _NATURE_SIZE:
        return [list(entry) for entry in _NATURE_FILTERS]
    filters: list[list[Any]] = []

    def add(channels: int, kernel: int, stride: int) -> None:
        nonlocal height, width
        filters.append([channels, [kernel - height % 2, kernel - width % 2], stride])
        height, width = -(-height // stride), -(-width // stride)

    if max(height, width) >= 64:
        add(32, 8, 4)
    elif max(height, width) <= 12:
        filters.append([32, 3, 1])
    while max(height, width) > _MAX_MAP_SIDE:
        add(64 if filters else 32, 4, 2)
    if len(filters) == 1:
        filters.append([64, 3, 1])
    return filters


class ImageEncoder(nn.Module):
    """Encodes images ``[..., *shape]`` to features ``[..., output_dim]``.

    Integer pixels are divided by the space's upper bound. Without ``conv_filters`` in the config, filters are chosen
    for the size, and a dense layer of ``fcnet_hiddens[-1]`` units follows them.
    """

    def __init__(self, space: gym.spaces.Box, config: DefaultModelConfig) -> None:
        super().__init__()
        self._shape = tuple(space.shape)
        self._channels_first, height, width, channels = image_layout(self._shape)
        integer = np.issubdtype(space.dtype, np.integer)
        self._scale = 1.0 / max(float(space.high.max()), 1.0) if integer else 1.0
        self._activation = activation_function(config.conv_activation, "conv_activation")
        filters = config.conv_filters
        if filters is None:
            filters = default_conv_filters(height, width)
        self.convs: nn.ModuleList = nn.ModuleList()
        self._pads: list[list[int] | None] = []
        for index, entry in enumerate(filters):
            out_channels, kernel, stride, pads_image = _checked_filter(entry, index)
            if pads_image:
                pads, height, width = _same_padding(height, width, kernel, stride)
            else:
                pads, height, width = _no_padding(height, width, kernel, stride, index)
            symmetric = pads[0] == pads[1] and pads[2] == pads[3]
            conv = nn.Conv2d(
                channels, out_channels, kernel, stride, padding=(pads[2], pads[0]) if symmetric else 0
            )
            for kind, parameter in (("kernel", conv.weight), ("bias", conv.bias)):
                setting = f"conv_{kind}_initializer"
                assert parameter is not None
                initialize(parameter, getattr(config, setting), getattr(config, setting + "_kwargs"), setting)
            self.convs.append(conv)
            self._pads.append(None if symmetric else pads)
            channels = out_channels
        self.output_dim: int = channels * height * width
        self.dense: MLP | None = None
        if config.conv_filters is None and config.fcnet_hiddens:
            self.dense = MLP(
                self.output_dim,
                config.fcnet_hiddens[-1:],
                config.conv_activation,
                config=config,
                prefix="fcnet",
            )
            self.output_dim = self.dense.output_dim

    def forward(self, image: Tensor) -> Tensor:
        lead = image.shape[: image.dim() - len(self._shape)]
        x = image.reshape(-1, *self._shape) if len(lead) != 1 else image
        if len(self._shape) == 2:
            x = x.unsqueeze(-1)
        if not self._channels_first:
            x = x.permute(0, 3, 1, 2)
        if x.dtype is not torch.float32:
            x = x.float()
        scale = self._scale
        conv: Any
        for conv, pads in zip(self.convs, self._pads, strict=True):
            if pads is not None:
                x = nn.functional.pad(x, pads)
            if scale == 1.0:
                x = conv(x)
            else:
                # the filter is a thousand times smaller than the images
                x = conv._conv_forward(x, conv.weight * scale, conv.bias)
                scale = 1.0
            if self._activation is not None:
                x = self._activation(x)
        x = x.flatten(1)
        if self.dense is not None:
            x = self.dense(x)
        return x if len(lead) == 1 else x.reshape(*lead, self.output_dim)


def _checked_filter(entry: Any, index: int) -> tuple[int, tuple[int, int], tuple[int, int], bool]:
    """Return (channels, kernel, stride, whether to pad)."""
    try:
        channels, kernel, stride, padding = entry if len(entry) == 4 else (*entry, "same")
        if padding not in ("same", "valid"):
            raise ValueError
        pairs = [(v, v) if isinstance(v, int) else (int(v[0]), int(v[1])) for v in (kernel, stride)]
        if int(channels) < 1 or min(*pairs[0], *pairs[1]) < 1:
            raise ValueError
    except (TypeError, ValueError, IndexError):
        raise ConfigurationError(
            f"model_config['conv_filters'][{index}]: expected [channels, kernel, stride] or [channels, "
            f"kernel, stride, 'same' or 'valid'] with kernel and stride an int or [height, width], all from 1, "
            f"got {entry!r}"
        ) from None
    return int(channels), pairs[0], pairs[1], padding == "same"


def _no_padding(
    height: int, width: int, kernel: tuple[int, int], stride: tuple[int, int], index: int
) -> tuple[list[int], int, int]:
    """Return the result of `_same_padding` for outputs only where the whole kernel fits."""
    if height < kernel[0] or width < kernel[1]:
        raise ConfigurationError(
            f"model_config['conv_filters'][{index}]: the kernel {list(kernel)} does not fit into the {height} × "
            f"{width} pixels before it without padding. Use 'same', or a smaller kernel."
        )
    return [0, 0, 0, 0], (height - kernel[0]) // stride[0] + 1, (width - kernel[1]) // stride[1] + 1


def _same_padding(
    height: int, width: int, kernel: tuple[int, int], stride: tuple[int, int]
) -> tuple[list[int], int, int]:
    """Return ``([left, right, top, bottom], new height, new width)`` for ceil(size / stride) outputs."""
    pads, sizes = [], []
    for size, k, s in ((width, kernel[1], stride[1]), (height, kernel[0], stride[0])):
        out = -(-size // s)
        total = max((out - 1) * s + k - size, 0)
        pads += [total // 2, total - total // 2]
        sizes.append(out)
    return pads, sizes[1], sizes[0]


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


# Keys and positions that lead from an observation to one of its parts.
Path = tuple[Any, ...]


def build_encoder(space: gym.Space[Any], config: DefaultModelConfig, *, where: str = "module") -> nn.Module:
    """Build the default encoder of an observation space. Its ``output_dim`` is the number of features.

    ==============================  ============================================================
    Box, 1-D                        dense layers (``fcnet_*``)
    Box, 3-D; large 2-D of bytes    convolutions (``conv_*``)
    Box, 0-D and other 2-D          flattened, then as 1-D
    Discrete, MultiDiscrete         one-hot, then as 1-D
    MultiBinary                     as 1-D
    Dict, Tuple                     all vector parts concatenated, through ``fcnet_*``; each image part
                                    through ``conv_*``; with images, the results through ``fusionnet_*``
    ==============================  ============================================================

    Raises:
        UnsupportedSpaceError: The space, or a part of it, is of another kind.
    """
    if isinstance(space, gym.spaces.Box):
        if len(space.shape) == 1:
            return _vector_mlp(int(space.shape[0]), config)
        if is_image(space):
            return ImageEncoder(space, config)
    return MultiStreamEncoder(space, config, where=where)


def _vector_mlp(input_dim: int, config: DefaultModelConfig) -> MLP:
    return MLP(
        input_dim,
        config.fcnet_hiddens,
        config.fcnet_activation,
        config=config,
        prefix="fcnet",
        use_layernorm=config.fcnet_use_layernorm,
    )


class MultiStreamEncoder(nn.Module):
    """Encodes observations with several parts (or one part that must first become a vector); see build_encoder.

    Observations are trees like the space, each leaf ``[..., *leaf shape]``; the result is ``[..., output_dim]``. Dict
    parts are concatenated in sorted order of their keys.
    """

    def __init__(self, space: gym.Space[Any], config: DefaultModelConfig, *, where: str = "module") -> None:
        super().__init__()
        self._vector_paths: list[Path] = []
        self._image_paths: list[Path] = []
        self.to_vectors: nn.ModuleList = nn.ModuleList()
        self.images: nn.ModuleList = nn.ModuleList()
        num_inputs = 0
        for path, leaf in _leaves(space, ()):
            if isinstance(leaf, gym.spaces.Box) and is_image(leaf):
                self._image_paths.append(path)
                self.images.append(ImageEncoder(leaf, config))
            else:
                to_vector = _to_vector(leaf, path, space, where)
                self._vector_paths.append(path)
                self.to_vectors.append(to_vector)
                num_inputs += to_vector.output_dim
        if not self._vector_paths and not self._image_paths:
            raise UnsupportedSpaceError(f"{where}: the observation space {space} has no parts to learn from")
        self.vectors: MLP | None = _vector_mlp(num_inputs, config) if num_inputs else None
        widths: list[Any] = [image.output_dim for image in self.images]
        if self.vectors is not None:
            widths.insert(0, self.vectors.output_dim)
        self.fusion: MLP | None = None
        if self.images:
            self.fusion = MLP(
                sum(widths),
                config.fusionnet_hiddens,
                config.fusionnet_activation,
                config=config,
                prefix="fusionnet",
            )
        self.output_dim: int = widths[0] if self.fusion is None else self.fusion.output_dim

    def concatenated(self, obs: Any) -> Tensor:
        """Return all vector parts as one vector per row, the input of `vectors`; it depends on no parameter."""
        parts = [
            to_vector(_part(obs, path))
            for to_vector, path in zip(self.to_vectors, self._vector_paths, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def forward(self, obs: Any) -> Tensor:
        streams = []
        if self.vectors is not None:
            streams.append(self.vectors(self.concatenated(obs)))
        if self.fusion is None:
            features: Tensor = streams[0]
            return features
        for image, path in zip(self.images, self._image_paths, strict=True):
            streams.append(image(_part(obs, path)))
        fused: Tensor = self.fusion(streams[0] if len(streams) == 1 else torch.cat(streams, -1))
        return fused


def mismatch(obs: Any, space: gym.Space[Any]) -> str | None:
    """Describe how a batch of observations does not fit its space; None if it fits.

    Args:
        obs: A tree like the space, each leaf ``[..., *leaf shape]``.
        space: The observation space.
    """
    for path, leaf in _leaves(space, ()):
        name = "obs" + "".join(f"[{key!r}]" for key in path)
        try:
            part = _part(obs, path)
        except (KeyError, IndexError, TypeError):
            return f"{name} is missing, but the observation space has it as {leaf}"
        shape = tuple(leaf.shape or ())
        if not isinstance(part, Tensor):
            return f"{name} is a {type(part).__name__}, expected a tensor [..., {leaf}]"
        actual = tuple(part.shape)
        if len(actual) <= len(shape) or actual[len(actual) - len(shape) :] != shape:
            return f"{name} is of shape {actual}, expected [batch, {', '.join(map(str, shape))}] for {leaf}"
    return None


def _part(obs: Any, path: Path) -> Any:
    for key in path:
        obs = obs[key]
    return obs


def _leaves(space: gym.Space[Any], path: Path) -> list[tuple[Path, gym.Space[Any]]]:
    if isinstance(space, gym.spaces.Dict):
        items: list[tuple[Any, Any]] = sorted(space.spaces.items())
    elif isinstance(space, gym.spaces.Tuple):
        items = list(enumerate(space.spaces))
    else:
        return [(path, space)]
    return [leaf for key, sub in items for leaf in _leaves(sub, (*path, key))]


class _Flat(nn.Module):
    """Converts numbers ``[..., *shape]`` to floats ``[..., output_dim]``."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._num_dims = len(shape)
        self.output_dim = int(np.prod(shape))

    def forward(self, x: Tensor) -> Tensor:
        if self._num_dims != 1:
            x = x.reshape(*x.shape[: x.dim() - self._num_dims], self.output_dim)
        return x if x.dtype is torch.float32 else x.float()


class _OneHot(nn.Module):
    """Converts whole numbers ``[..., *shape]`` to concatenated one-hots, floats ``[..., output_dim]``."""

    index: Tensor
    value: Tensor

    def __init__(self, lens: np.ndarray, start: np.ndarray, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._num_dims = len(shape)
        self._num_choices = lens.size
        self.output_dim = int(lens.sum())
        index = np.repeat(np.arange(lens.size), lens.reshape(-1))
        pairs = zip(lens.reshape(-1), start.reshape(-1), strict=True)
        value = np.concatenate([first + np.arange(n) for n, first in pairs])
        self.register_buffer("index", torch.from_numpy(index), persistent=False)
        self.register_buffer("value", torch.from_numpy(value), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        lead = x.shape[: x.dim() - self._num_dims]
        if self._num_choices == 1:
            x = x.reshape(*lead, 1)
        else:
            x = x.reshape(*lead, self._num_choices).index_select(-1, self.index)
        return (x == self.value).float()


def _to_vector(leaf: gym.Space[Any], path: Path, whole: gym.Space[Any], where: str) -> Any:
    if isinstance(leaf, gym.spaces.Discrete):
        return _OneHot(np.array([int(leaf.n)]), np.array([int(leaf.start)]), ())
    if isinstance(leaf, gym.spaces.MultiDiscrete):
        return _OneHot(leaf.nvec.astype(np.int64), np.asarray(leaf.start, np.int64), tuple(leaf.shape))
    if isinstance(leaf, gym.spaces.MultiBinary):
        return _Flat(tuple(leaf.shape))
    if isinstance(leaf, gym.spaces.Box) and len(leaf.shape) <= 2:
        return _Flat(tuple(leaf.shape))
    part = "".join(f"[{key!r}]" for key in path)
    what = f"part {part} of the observation space" if path else "the observation space"
    kind = f"Box of {len(leaf.shape)} dimensions" if isinstance(leaf, gym.spaces.Box) else type(leaf).__name__
    raise UnsupportedSpaceError(
        f"{where}: {what} is {leaf}, and the default models have no encoder for a {kind}. Either turn it "
        "into a Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them, e.g. with a connector "
        "piece config.env_runners(env_to_module_connector=lambda env, spaces, device: MyPreprocessor()) that "
        "subclasses SingleAgentObservationPreprocessor, or write your own TorchRLModule and give it by "
        f"config.rl_module(rl_module_spec=RLModuleSpec(module_class=…)). Whole space: {whole}"
    )
