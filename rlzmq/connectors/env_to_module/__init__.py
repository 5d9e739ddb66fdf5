"""Pieces for env-to-module pipelines."""

from rlzmq.connectors.common.frame_stacking import FrameStackingEnvToModule
from rlzmq.connectors.env_to_module.flatten_observations import FlattenObservations, PrevActionsPrevRewards
from rlzmq.connectors.env_to_module.mean_std_filter import MeanStdFilter
from rlzmq.connectors.observation_pieces import (
    MultiAgentObservationPreprocessor,
    SingleAgentObservationPreprocessor,
    WriteObservationsToEpisodes,
)

__all__ = [
    "FlattenObservations",
    "FrameStackingEnvToModule",
    "MeanStdFilter",
    "MultiAgentObservationPreprocessor",
    "PrevActionsPrevRewards",
    "SingleAgentObservationPreprocessor",
    "WriteObservationsToEpisodes",
]
