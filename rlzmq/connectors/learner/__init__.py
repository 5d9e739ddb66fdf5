"""Pieces for learner pipelines."""

from rlzmq.connectors.common.frame_stacking import FrameStackingLearner
from rlzmq.connectors.common.layout import (
    AddColumnsFromEpisodesToTrainBatch,
    AddInfosFromEpisodesToTrainBatch,
    AddNextObservationsFromEpisodesToTrainBatch,
    AddOneTsToEpisodesAndTruncate,
)
from rlzmq.connectors.learner.advantages import (
    ComputeReturnsToGo,
    GeneralAdvantageEstimation,
    WholeBatchEstimator,
)
from rlzmq.connectors.learner.vtrace import VTrace

__all__ = [
    "AddColumnsFromEpisodesToTrainBatch",
    "AddInfosFromEpisodesToTrainBatch",
    "AddNextObservationsFromEpisodesToTrainBatch",
    "AddOneTsToEpisodesAndTruncate",
    "ComputeReturnsToGo",
    "FrameStackingLearner",
    "GeneralAdvantageEstimation",
    "VTrace",
    "WholeBatchEstimator",
]
