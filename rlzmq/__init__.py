"""rlzmq: distributed reinforcement learning on asyncio, ZeroMQ and torch.distributed.

Every public name is importable from here and is loaded when it is first used, so ``import rlzmq``
itself stays quick (torch is not imported by it).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from rlzmq.core.import_errors import MissingNameFinder, import_failure

__version__ = "0.1.0"

# public name -> module that defines it, relative to this package
_EXPORTS: dict[str, str] = {
    name: module
    for module, names in {
        "core.errors": (
            "AuthenticationError CheckpointError ClosedError ConfigurationError DeadlineError "
            "MultiAgentEnvError PeerLostError ProtocolError RemoteError RlzmqError "
            "StepFailedRecreateEnvError UnsupportedSpaceError"
        ),
        "core.metrics": "MetricsLogger StatsBase",
        "core.seeding": "derive_seed",
        "episodes.columns": "Columns DEFAULT_AGENT_ID DEFAULT_MODULE_ID",
        "episodes.lookback_buffer": "InfiniteLookbackBuffer",
        "episodes.single_agent_episode": "SingleAgentEpisode",
        "episodes.multi_agent_episode": "MultiAgentEpisode",
        "episodes.episode_batch": "EpisodeBatch",
        "envs.registry": "EnvContext register_env",
        "envs.multi_agent_env": "MultiAgentEnv make_multi_agent",
        "envs.pettingzoo_env": "ParallelPettingZooEnv PettingZooEnv",
        "connectors.connector_v2": "ConnectorV2",
        "connectors.pipelines": (
            "ConnectorPipelineV2 EnvToModulePipeline LearnerConnectorPipeline ModuleToEnvPipeline"
        ),
        "connectors.common": (
            "AddObservationsFromEpisodesToBatch AddStatesFromEpisodesToBatch AddTimeDimToBatchAndZeroPad "
            "AgentToModuleMapping BatchIndividualItems NumpyToTensor"
        ),
        "connectors.env_to_module": (
            "FlattenObservations FrameStackingEnvToModule MeanStdFilter MultiAgentObservationPreprocessor "
            "PrevActionsPrevRewards SingleAgentObservationPreprocessor WriteObservationsToEpisodes"
        ),
        "connectors.module_to_env": (
            "GetActions ListifyDataForVectorEnv ModuleToAgentUnmapping NormalizeAndClipActions "
            "RemoveSingleTsTimeRankFromBatch TensorToNumpy UnBatchToIndividualItems"
        ),
        "connectors.learner": (
            "AddColumnsFromEpisodesToTrainBatch AddInfosFromEpisodesToTrainBatch "
            "AddNextObservationsFromEpisodesToTrainBatch AddOneTsToEpisodesAndTruncate "
            "ComputeReturnsToGo FrameStackingLearner GeneralAdvantageEstimation"
        ),
        "modules.rl_module": "RLModule TorchRLModule",
        "modules.multi_rl_module": "MultiRLModule MultiRLModuleSpec",
        "modules.spec": "RLModuleSpec",
        "modules.model_config": "DefaultModelConfig",
        "modules.apis": ("InferenceOnlyAPI QNetAPI SelfSupervisedLossAPI TargetNetworkAPI ValueFunctionAPI"),
        "modules.distributions": (
            "TorchCategorical TorchDeterministic TorchDiagGaussian TorchMultiCategorical "
            "TorchMultiDistribution TorchSquashedGaussian"
        ),
        "runners.env_runner": "EnvRunner",
        "runners.single_agent_env_runner": "SingleAgentEnvRunner",
        "runners.multi_agent_env_runner": "MultiAgentEnvRunner",
        "learners.learner": "Learner TorchLearner",
        "learners.ppo_learner": "PPOLearner",
        "actors.system": "ActorHandle ActorSystem",
        "runtime.env_runner_group": "EnvRunnerGroup",
        "runtime.learner_group": "LearnerGroup",
        "algorithms.algorithm_config": "AlgorithmConfig",
        "core.callbacks": "Callback RLlibCallback",
        "algorithms.algorithm": "Algorithm",
        "algorithms.async_algorithm": "AsyncAlgorithm",
        "algorithms.checkpoints": "latest_checkpoint",
        "algorithms.ppo": "PPO PPOConfig",
        "algorithms.policy": "Policy",
    }.items()
    for name in names.split()
}

__all__ = sorted([*_EXPORTS, "__version__"])


_missing = MissingNameFinder(_EXPORTS, __version__)
if not any(isinstance(finder, MissingNameFinder) for finder in sys.meta_path):
    sys.meta_path.append(_missing)


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'rlzmq' has no name {name!r}{_missing.hint(name)}")
    try:
        value = getattr(importlib.import_module(f"rlzmq.{module}"), name)
    except Exception as error:
        if failure := import_failure(f"rlzmq.{name}", error):
            raise failure from error
        raise
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
