"""FrameStackingEnvToModule: FrameStacking in the env runner."""

from __future__ import annotations

from typing import Any

from rlzmq.connectors.common.frame_stacking import FrameStacking

__all__ = ["FrameStackingEnvToModule"]


class FrameStackingEnvToModule(FrameStacking):
    """FrameStacking for env-to-module pipelines; arguments as there.

    Example:
        >>> import gymnasium as gym
        >>> FrameStackingEnvToModule(gym.spaces.Box(-1, 1, (4,)), num_frames=3).observation_space.shape
        (12,)
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        num_frames: int = 1,
        multi_agent: bool = False,
    ) -> None:
        super().__init__(
            input_observation_space,
            input_action_space,
            num_frames=num_frames,
            multi_agent=multi_agent,
            as_learner_connector=False,
        )
