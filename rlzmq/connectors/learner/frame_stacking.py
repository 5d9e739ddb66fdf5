"""FrameStackingLearner: FrameStacking on the learner."""

from __future__ import annotations

from typing import Any

from rlzmq.connectors.common.frame_stacking import FrameStacking

__all__ = ["FrameStackingLearner"]


class FrameStackingLearner(FrameStacking):
    """The learner's twin of FrameStackingEnvToModule; arguments as of FrameStacking."""

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
            as_learner_connector=True,
        )
