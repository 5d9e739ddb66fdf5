"""Pieces for learner pipelines."""

from rlzmq.connectors.learner.add_columns import AddColumnsFromEpisodesToTrainBatch
from rlzmq.connectors.learner.add_infos import AddInfosFromEpisodesToTrainBatch
from rlzmq.connectors.learner.add_next_observations import AddNextObservationsFromEpisodesToTrainBatch
from rlzmq.connectors.learner.add_one_ts import AddOneTsToEpisodesAndTruncate
from rlzmq.connectors.learner.frame_stacking import FrameStackingLearner
from rlzmq.connectors.learner.general_advantage_estimation import GeneralAdvantageEstimation
from rlzmq.connectors.learner.returns_to_go import ComputeReturnsToGo
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
