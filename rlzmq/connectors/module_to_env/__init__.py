"""Pieces for module-to-env pipelines."""

from rlzmq.connectors.module_to_env.get_actions import GetActions
from rlzmq.connectors.module_to_env.listify_data_for_vector_env import ListifyDataForVectorEnv
from rlzmq.connectors.module_to_env.module_to_agent_unmapping import ModuleToAgentUnmapping
from rlzmq.connectors.module_to_env.normalize_and_clip_actions import NormalizeAndClipActions
from rlzmq.connectors.module_to_env.remove_single_ts_time_rank import RemoveSingleTsTimeRankFromBatch
from rlzmq.connectors.module_to_env.tensor_to_numpy import TensorToNumpy
from rlzmq.connectors.module_to_env.unbatch_to_individual_items import UnBatchToIndividualItems

__all__ = [
    "GetActions",
    "ListifyDataForVectorEnv",
    "ModuleToAgentUnmapping",
    "NormalizeAndClipActions",
    "RemoveSingleTsTimeRankFromBatch",
    "TensorToNumpy",
    "UnBatchToIndividualItems",
]
