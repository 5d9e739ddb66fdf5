"""Small helpers and types of RLlib that its examples import, so that code copied from them runs.

Those in `__all__` are public names here. The others are imported with a warning that says what to write instead
(``_ACCEPTED`` in `rlzmq.core.synonyms`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlzmq.algorithms.registry import get_config_class
from rlzmq.config.model_config import Catalog
from rlzmq.connectors.learner.vtrace import TARGET_DIST_INPUTS
from rlzmq.core.callbacks import Callback
from rlzmq.core.spaces import leaf_spaces
from rlzmq.core.tree import tree_map, tree_stack
from rlzmq.envs.multi_agent_env import SyncVectorMultiAgentEnv
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.modules.default_models import image_encoders
from rlzmq.modules.default_models.actor_critic import DefaultPPOTorchRLModule
from rlzmq.modules.spec import RLModuleSpec

__all__ = [
    "AgentID",
    "EpisodeType",
    "ModuleID",
    "ResultDict",
    "StateDict",
    "TensorType",
    "get_trainable_cls",
    "try_import_torch",
]

AgentID: TypeAlias = Any
"""Type of an agent's id."""

ModuleID: TypeAlias = str
"""Type of a module's id."""

EpisodeType: TypeAlias = SingleAgentEpisode | MultiAgentEpisode
"""Type of an episode."""

TensorType: TypeAlias = np.ndarray[Any, Any] | torch.Tensor
"""Type of an array or a tensor."""

ResultDict: TypeAlias = dict[str, Any]
"""Type of a result of `Algorithm.train`."""

StateDict: TypeAlias = dict[str, Any]
"""Type of a state, e.g. of `Learner.get_state`."""

NetworkType: TypeAlias = nn.Module
EnvType: TypeAlias = Any

DefaultBCTorchRLModule = PPOTorchRLModule = DefaultPPOTorchRLModule
DefaultCallbacks = Callback
BCCatalog = DQNCatalog = PPOCatalog = SACCatalog = Catalog
SampleBatch = Columns
DEFAULT_POLICY_ID = DEFAULT_MODULE_ID
TARGET_NETWORK_ACTION_DIST_INPUTS = TARGET_DIST_INPUTS
VectorMultiAgentEnv = SyncVectorMultiAgentEnv
batch = tree_stack
ENCODER_OUT = "encoder_out"
ENV_STATE = "state"
FLOAT_MIN = torch.finfo(torch.float32).min
FLOAT_MAX = torch.finfo(torch.float32).max


def get_trainable_cls(name: str) -> Any:
    """Return an algorithm's class by its name, e.g. "PPO" (case is ignored).

    Raises:
        ConfigurationError: There is no such algorithm.
    """
    return get_config_class(name)().algo_class


def try_import_torch(error: bool = False) -> tuple[ModuleType, ModuleType]:
    """Return ``(torch, torch.nn)``, which are always there.

    Args:
        error: Has no effect.
    """
    return torch, torch.nn


def try_import_tf(error: bool = False) -> tuple[None, None, None]:
    """Return (None, None, None): there is no TensorFlow."""
    return None, None, None


# -- modules ------------------------------------------------------------------------------------


class PolicySpec(RLModuleSpec):
    """A module with the default class.

    Args:
        policy_class: Must be None: classes of the old API stack do not exist here.
        observation_space, action_space: See RLModuleSpec.
        config: Settings of this module, as from ``AlgorithmConfig.overrides(lr=…)``.
    """

    def __init__(
        self,
        policy_class: None = None,
        observation_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        if policy_class is not None:
            raise ValueError(
                f"PolicySpec(policy_class={policy_class!r}): expected None. Use an RLModuleSpec."
            )
        super().__init__(observation_space=observation_space, action_space=action_space)
        self.config: dict[str, Any] = dict(config or {})


def make_target_network(main_net: nn.Module) -> nn.Module:
    """Return a copy of a network that is not trained."""
    return copy.deepcopy(main_net).requires_grad_(False)


def get_activation_fn(name: str | None, framework: str = "torch") -> type[nn.Module] | None:
    """Return the class of an activation by its name, e.g. "relu"; None for "linear"."""
    if name is None or name == "linear":
        return None
    wanted = {"swish": "silu"}.get(name.lower(), name.lower())
    found: type[nn.Module] = {known.lower(): getattr(nn, known) for known in dir(nn)}[wanted]
    return found


def normc_initializer(std: float = 1.0) -> Callable[[Tensor], None]:
    """Return a function that fills a weight with normal numbers, scaled to rows of norm `std`."""

    def fill(weight: Tensor) -> None:
        with torch.no_grad():
            weight.normal_()
            weight.mul_(std / weight.square().sum(1, keepdim=True).sqrt())

    return fill


def same_padding(
    in_size: object, filter_size: object, stride_size: object
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return ((left, right, top, bottom), (height, width) of the output), for an output of ceil(in / stride)."""
    height, width = _pair(in_size)
    pads, height, width = image_encoders.same_padding(height, width, _pair(filter_size), _pair(stride_size))
    return tuple(pads), (height, width)


def valid_padding(in_size: object, filter_size: object, stride_size: object) -> tuple[int, int]:
    """Return (height, width) of the output of a convolution without padding."""
    height, width = _pair(in_size)
    return image_encoders.no_padding(height, width, _pair(filter_size), _pair(stride_size), 0)[1:]


def _pair(size: Any) -> Sequence[int]:
    return (size, size) if isinstance(size, int) else size


# -- arrays -------------------------------------------------------------------------------------


def convert_to_numpy(x: object, reduce_type: bool = False) -> Any:
    """Return the tree with tensors as arrays, and float64 as float32 if `reduce_type`."""

    def converted(leaf: Any) -> Any:
        leaf = leaf.detach().cpu().numpy().copy() if isinstance(leaf, Tensor) else leaf
        is_double = reduce_type and getattr(leaf, "dtype", None) == np.float64
        return leaf.astype(np.float32) if is_double else leaf

    return _of_leaves(converted, x)


def convert_to_torch_tensor(x: Any, device: Any = None, **options: object) -> Any:
    """Return the tree with arrays and numbers as tensors, on the device."""
    return _of_leaves(lambda leaf: leaf if leaf is None else torch.as_tensor(leaf, device=device), x)


def _of_leaves(function: Callable[[Any], Any], tree: object) -> object:
    """Apply a function to the leaves of a tree, in which lists are nodes, too."""
    if type(tree) is list:
        return [_of_leaves(function, part) for part in tree]
    return tree_map(lambda leaf: _of_leaves(function, leaf) if type(leaf) is list else function(leaf), tree)


def one_hot(x: object, space: Any) -> Any:
    """Return the one-hots, float32, of numbers in a Discrete or MultiDiscrete space, or below `space`."""
    numbers = torch.as_tensor(x)
    if isinstance(space, gym.spaces.MultiDiscrete):
        columns = zip(numbers.unbind(-1), space.nvec, strict=True)
        found = torch.cat([nn.functional.one_hot(column.long(), int(n)) for column, n in columns], -1)
    else:
        found = nn.functional.one_hot(numbers.long(), int(getattr(space, "n", space)))
    return found.float() if isinstance(x, Tensor) else found.numpy().astype(np.float32)


def softmax(x: object, axis: int = -1, epsilon: float | None = None) -> Any:
    """Return the softmax of an array."""
    return torch.softmax(torch.as_tensor(np.asarray(x, np.float64)), axis).numpy()


def flatten_space(space: gym.Space[Any]) -> list[gym.Space[Any]]:
    """Return the leaves of a space."""
    return list(leaf_spaces(space))


def resize(img: Any, height: int, width: int) -> Any:
    """Return an image ``[H, W, channels]`` in another size, each pixel the mean of those that it covers."""
    pixels = torch.as_tensor(np.array(img)).movedim(-1, 0).float()
    resized = nn.functional.interpolate(pixels[None], (height, width), mode="area")[0].movedim(0, -1)
    return resized.numpy().astype(img.dtype)


# -- environments, seeds ------------------------------------------------------------------------


def wrap_atari_for_new_api_stack(
    env: Any, dim: int = 64, frameskip: int = 4, framestack: int | None = None, grayscale: bool = True
) -> Any:
    """Return an Atari env with Gymnasium's preprocessing: ``[dim, dim, framestack or 1]`` in [0, 1]."""
    wrappers = gym.wrappers
    env = wrappers.AtariPreprocessing(
        env,
        screen_size=dim,
        frame_skip=frameskip,
        grayscale_obs=grayscale,
        grayscale_newaxis=True,
        scale_obs=True,
    )
    if not framestack:
        return env
    space = gym.spaces.Box(0.0, 1.0, (dim, dim, framestack), np.float32)
    stacked: Any = wrappers.FrameStackObservation(env, framestack)
    return wrappers.TransformObservation(stacked, lambda frames: np.moveaxis(frames[..., 0], 0, -1), space)


def update_global_seed_if_necessary(framework: str | None = None, seed: int | None = None) -> None:
    """Seed the generators of Python, numpy and torch."""
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
