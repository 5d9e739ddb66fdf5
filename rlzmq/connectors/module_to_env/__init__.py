"""Pieces for module-to-env pipelines."""

from rlzmq.connectors.module_to_env.get_actions import GetActions
from rlzmq.connectors.module_to_env.normalize_and_clip_actions import NormalizeAndClipActions
from rlzmq.connectors.module_to_env.unbatch import (
    ListifyDataForVectorEnv,
    ModuleToAgentUnmapping,
    RemoveSingleTsTimeRankFromBatch,
    TensorToNumpy,
    UnBatchToIndividualItems,
)

__all__ = [
    "GetActions",
    "ListifyDataForVectorEnv",
    "ModuleToAgentUnmapping",
    "NormalizeAndClipActions",
    "RemoveSingleTsTimeRankFromBatch",
    "TensorToNumpy",
    "UnBatchToIndividualItems",
]
