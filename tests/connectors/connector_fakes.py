"""Hand-made episodes and modules for connector tests."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.modules.distributions import TorchCategorical

OBS_SPACE = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
ACTION_SPACE = gym.spaces.Discrete(3, start=1)


def make_episode(
    length: int,
    *,
    offset: float = 0.0,
    lookback: int = 0,
    numpy: bool = True,
    terminated: bool = False,
    truncated: bool = False,
    t_started: int = 0,
    extras: dict[str, Any] | None = None,
    **kwargs: Any,
) -> SingleAgentEpisode:
    """An episode of `length` steps after `lookback` ones; observation t is [offset + t, -t]."""
    total = length + lookback
    episode = SingleAgentEpisode(
        observations=[np.array([offset + t, -t], np.float32) for t in range(total + 1)],
        observation_space=OBS_SPACE,
        actions=[1 + t % 3 for t in range(total)],
        action_space=ACTION_SPACE,
        rewards=[float(t + 1) for t in range(total)],
        terminated=terminated,
        truncated=truncated,
        t_started=t_started,
        len_lookback_buffer=lookback,
        extra_model_outputs=extras or {},
        **kwargs,
    )
    return episode.to_numpy() if numpy and total else episode


def call(piece: Any, episodes: Any, batch: Any = None, **kwargs: Any) -> dict[str, Any]:
    """Calls a piece as users do."""
    arguments: dict[str, Any] = {
        "rl_module": None,
        "explore": True,
        "shared_data": {},
        "metrics": None,
        **kwargs,
    }
    result: dict[str, Any] = piece(batch={} if batch is None else batch, episodes=episodes, **arguments)
    return result


class PassThrough(ConnectorV2):
    """A custom per-episode piece, which switches off every shortcut, and does nothing."""

    def __call__(self, *, rl_module, batch, episodes, explore=None, shared_data=None, **kwargs):  # type: ignore[no-untyped-def,override]
        return batch


class ValueModule:
    """V(obs) is the sum of the observation's elements."""

    model_config: ClassVar[dict[str, Any]] = {}

    def is_stateful(self) -> bool:
        return False

    def get_exploration_action_dist_cls(self) -> Any:
        return TorchCategorical

    get_inference_action_dist_cls = get_exploration_action_dist_cls

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        return batch["obs"].sum(-1)


class StatefulModule(ValueModule):
    """Has a state of two numbers and sequences of three steps."""

    model_config: ClassVar[dict[str, Any]] = {"max_seq_len": 3}

    def is_stateful(self) -> bool:
        return True

    def get_initial_state(self) -> dict[str, np.ndarray]:
        return {"h": np.full(2, 100.0, np.float32)}
