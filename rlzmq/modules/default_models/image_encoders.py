"""Encoders of images and of observations with several parts, and the choice of an encoder for a space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.core.errors import ConfigurationError, UnsupportedSpaceError
from rlzmq.core.spaces import leaf_paths
from rlzmq.modules.default_models.encoders import MLP, activation_function, initialize

__all__ = [
    "ImageEncoder",
    "MultiStreamEncoder",
    "build_encoder",
    "default_conv_filters",
    "image_layout",
    "is_image",
    "mismatch",
    "no_padding",
    "same_padding",
]

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
                pads, height, width = same_padding(height, width, kernel, stride)
            else:
                pads, height, width = no_padding(height, width, kernel, stride, index)
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


def no_padding(
    height: int, width: int, kernel: Sequence[int], stride: Sequence[int], index: int
) -> tuple[list[int], int, int]:
    """Return the result of `same_padding` for outputs only where the whole kernel fits.

    Raises:
        ConfigurationError: It fits nowhere; the text names the filter's `index`.
    """
    if height < kernel[0] or width < kernel[1]:
        raise ConfigurationError(
            f"model_config['conv_filters'][{index}]: the kernel {list(kernel)} does not fit into the {height} × "
            f"{width} pixels before it without padding. Use 'same', or a smaller kernel."
        )
    return [0, 0, 0, 0], (height - kernel[0]) // stride[0] + 1, (width - kernel[1]) // stride[1] + 1


def same_padding(
    height: int, width: int, kernel: Sequence[int], stride: Sequence[int]
) -> tuple[list[int], int, int]:
    """Return ``([left, right, top, bottom], new height, new width)`` for ceil(size / stride) outputs."""
    pads, sizes = [], []
    for size, k, s in ((width, kernel[1], stride[1]), (height, kernel[0], stride[0])):
        out = -(-size // s)
        total = max((out - 1) * s + k - size, 0)
        pads += [total // 2, total - total // 2]
        sizes.append(out)
    return pads, sizes[1], sizes[0]


# Keys and positions that lead from an observation to one of its parts.
Path = tuple[Any, ...]


def build_encoder(space: gym.Space[Any], config: DefaultModelConfig, *, where: str = "module") -> Any:
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
        for path, leaf in leaf_paths(space):
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

    def concatenated(self, obs: object) -> Tensor:
        """Return all vector parts as one vector per row, the input of `vectors`; it depends on no parameter."""
        parts = [
            to_vector(_part(obs, path))
            for to_vector, path in zip(self.to_vectors, self._vector_paths, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def forward(self, obs: object) -> Tensor:
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


def mismatch(obs: object, space: gym.Space[Any]) -> str | None:
    """Describe how a batch of observations does not fit its space; None if it fits.

    Args:
        obs: A tree like the space, each leaf ``[..., *leaf shape]``.
        space: The observation space.
    """
    for path, leaf in leaf_paths(space):
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


def _part(obs: Any, path: Path) -> object:
    for key in path:
        obs = obs[key]
    return obs


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
