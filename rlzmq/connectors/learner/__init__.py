"""Pieces for learner pipelines."""

from rlzmq.connectors.common.frame_stacking import FrameStackingLearner
from rlzmq.connectors.learner.add_columns import (
    AddColumnsFromEpisodesToTrainBatch,
    AddInfosFromEpisodesToTrainBatch,
    AddNextObservationsFromEpisodesToTrainBatch,
    AddOneTsToEpisodesAndTruncate,
)
from rlzmq.connectors.learner.gae import ComputeReturnsToGo, GeneralAdvantageEstimation
from rlzmq.connectors.learner.vtrace import VTrace
from rlzmq.connectors.learner.whole_batch_estimator import WholeBatchEstimator

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
