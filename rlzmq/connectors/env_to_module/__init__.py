"""Pieces for env-to-module pipelines."""

from rlzmq.connectors.common.frame_stacking import FrameStackingEnvToModule
from rlzmq.connectors.env_to_module.flatten_observations import FlattenObservations
from rlzmq.connectors.env_to_module.mean_std_filter import MeanStdFilter
from rlzmq.connectors.env_to_module.observation_preprocessors import (
    MultiAgentObservationPreprocessor,
    SingleAgentObservationPreprocessor,
    WriteObservationsToEpisodes,
)
from rlzmq.connectors.env_to_module.prev_actions_prev_rewards import PrevActionsPrevRewards

__all__ = [
    "FlattenObservations",
    "FrameStackingEnvToModule",
    "MeanStdFilter",
    "MultiAgentObservationPreprocessor",
    "PrevActionsPrevRewards",
    "SingleAgentObservationPreprocessor",
    "WriteObservationsToEpisodes",
]
