"""Small helpers and types of RLlib that its examples import, so that code copied from them runs."""

from __future__ import annotations

from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from rlzmq.algorithms.registry import get_config_class
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

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
