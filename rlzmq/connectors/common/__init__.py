"""Default pieces shared by several pipelines."""

from rlzmq.connectors.common.agent_to_module_mapping import AgentToModuleMapping
from rlzmq.connectors.common.frame_stacking import FrameStacking
from rlzmq.connectors.common.layout import (
    AddObservationsFromEpisodesToBatch,
    AddStatesFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
    BatchIndividualItems,
    NumpyToTensor,
)

__all__ = [
    "AddObservationsFromEpisodesToBatch",
    "AddStatesFromEpisodesToBatch",
    "AddTimeDimToBatchAndZeroPad",
    "AgentToModuleMapping",
    "BatchIndividualItems",
    "FrameStacking",
    "NumpyToTensor",
]
