"""Default pieces shared by several pipelines."""

from rlzmq.connectors.common.add_observations import AddObservationsFromEpisodesToBatch
from rlzmq.connectors.common.add_states import AddStatesFromEpisodesToBatch
from rlzmq.connectors.common.add_time_dim import AddTimeDimToBatchAndZeroPad
from rlzmq.connectors.common.agent_to_module_mapping import AgentToModuleMapping
from rlzmq.connectors.common.batch_individual_items import BatchIndividualItems
from rlzmq.connectors.common.frame_stacking import FrameStacking
from rlzmq.connectors.common.numpy_to_tensor import NumpyToTensor

__all__ = [
    "AddObservationsFromEpisodesToBatch",
    "AddStatesFromEpisodesToBatch",
    "AddTimeDimToBatchAndZeroPad",
    "AgentToModuleMapping",
    "BatchIndividualItems",
    "FrameStacking",
    "NumpyToTensor",
]
