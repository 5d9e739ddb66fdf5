"""Default encoders: from observations of any supported space to one feature vector per row."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.core.errors import UnsupportedSpaceError
from rlzmq.modules.default_models.cnn import ImageEncoder, is_image
from rlzmq.modules.default_models.mlp import MLP

__all__ = ["MultiStreamEncoder", "build_encoder", "mismatch"]

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
