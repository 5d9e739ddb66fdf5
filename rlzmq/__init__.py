"""rlzmq: distributed reinforcement learning on asyncio, ZeroMQ and torch.distributed.

Every public name is importable from here and is loaded when it is first used, so ``import rlzmq``
itself stays quick (torch is not imported by it).
"""

from __future__ import annotations

import signal
import sys


def _end_silently_at_ctrl_c() -> None:
    """Spare the user of the command a traceback of its imports, until `rlzmq.__main__` handles signals."""
    command = sys.argv[0] if sys.argv[0] != "-m" else " ".join(sys.orig_argv)
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as of a job in a script's background
    if not is_ignored and (command.endswith("/rlzmq") or "-m rlzmq" in command):
        signal.signal(signal.SIGINT, signal.SIG_DFL)


_end_silently_at_ctrl_c()  # before the other imports

import importlib
import logging
from typing import TYPE_CHECKING, Any

from rlzmq.core.imports import MissingNameFinder, import_failure, names_to_load
from rlzmq.core.synonyms import accepted_name
from rlzmq.core.version import __version__ as __version__

if TYPE_CHECKING:  # type checkers and editors read these imports, and so does `names_to_load`
    from rlzmq.actors.system import ActorHandle as ActorHandle, ActorSystem as ActorSystem
    from rlzmq.algorithms.algorithm_config import AlgorithmConfig as AlgorithmConfig
    from rlzmq.algorithms.async_algorithm import AsyncAlgorithm as AsyncAlgorithm
    from rlzmq.algorithms.algorithm import APPO as APPO, BC as BC, CQL as CQL, DQN as DQN, IMPALA as IMPALA
    from rlzmq.algorithms.algorithm import Algorithm as Algorithm, IQL as IQL, MARWIL as MARWIL, PPO as PPO
    from rlzmq.algorithms.algorithm import SAC as SAC, TD3 as TD3, TQC as TQC
    from rlzmq.algorithms.appo import APPOConfig as APPOConfig
    from rlzmq.algorithms.appo.appo_learner import APPOLearner as APPOLearner
    from rlzmq.algorithms.bc import BCConfig as BCConfig
    from rlzmq.algorithms.bc.bc_learner import BCLearner as BCLearner
    from rlzmq.algorithms.cql import CQLConfig as CQLConfig
    from rlzmq.algorithms.cql.cql_learner import CQLLearner as CQLLearner
    from rlzmq.algorithms.dqn import DQNConfig as DQNConfig
    from rlzmq.algorithms.dqn.dqn_learner import DQNLearner as DQNLearner
    from rlzmq.algorithms.impala import IMPALAConfig as IMPALAConfig
    from rlzmq.algorithms.impala.impala_learner import IMPALALearner as IMPALALearner
    from rlzmq.algorithms.iql import IQLConfig as IQLConfig
    from rlzmq.algorithms.iql.iql_learner import IQLLearner as IQLLearner
    from rlzmq.algorithms.marwil import MARWILConfig as MARWILConfig
    from rlzmq.algorithms.marwil.marwil_learner import MARWILLearner as MARWILLearner
    from rlzmq.algorithms.ppo import PPOConfig as PPOConfig
    from rlzmq.algorithms.ppo.ppo_learner import PPOLearner as PPOLearner
    from rlzmq.algorithms.sac import SACConfig as SACConfig
    from rlzmq.algorithms.sac.sac_learner import SACLearner as SACLearner
    from rlzmq.algorithms.td3 import TD3Config as TD3Config
    from rlzmq.algorithms.td3.td3_learner import TD3Learner as TD3Learner
    from rlzmq.algorithms.tqc import TQCConfig as TQCConfig
    from rlzmq.algorithms.tqc.tqc_learner import TQCLearner as TQCLearner
    from rlzmq.algorithms.checkpoint_evaluation import CheckpointScores as CheckpointScores
    from rlzmq.algorithms.checkpoint_evaluation import evaluate_checkpoint as evaluate_checkpoint
    from rlzmq.algorithms.checkpoints import latest_checkpoint as latest_checkpoint
    from rlzmq.algorithms.off_policy import OffPolicyConfig as OffPolicyConfig
    from rlzmq.algorithms.policy import Policy as Policy
    from rlzmq.algorithms.rllib_helpers import (
        AgentID as AgentID,
        EpisodeType as EpisodeType,
        ModuleID as ModuleID,
        ResultDict as ResultDict,
        StateDict as StateDict,
        TensorType as TensorType,
        get_trainable_cls as get_trainable_cls,
        try_import_torch as try_import_torch,
    )
    from rlzmq.learners.optimizers import DEFAULT_OPTIMIZER as DEFAULT_OPTIMIZER
    from rlzmq.algorithms.sac.sac_module import DefaultSACModule as DefaultSACModule
    from rlzmq.config.settings import NotProvided as NotProvided
    from rlzmq.connectors.common import (
        AddObservationsFromEpisodesToBatch as AddObservationsFromEpisodesToBatch,
        AddStatesFromEpisodesToBatch as AddStatesFromEpisodesToBatch,
        AddTimeDimToBatchAndZeroPad as AddTimeDimToBatchAndZeroPad,
        AgentToModuleMapping as AgentToModuleMapping,
        BatchIndividualItems as BatchIndividualItems,
        FrameStacking as FrameStacking,
        NumpyToTensor as NumpyToTensor,
    )
    from rlzmq.connectors.connector_v2 import ConnectorV2 as ConnectorV2, TorchPiece as TorchPiece
    from rlzmq.deploy.export import export_policy as export_policy, ExportError as ExportError
    from rlzmq.deploy.policy_server import AsyncPolicyServer as AsyncPolicyServer
    from rlzmq.deploy.policy_server import PolicyServer as PolicyServer
    from rlzmq.connectors.env_to_module import (
        FlattenObservations as FlattenObservations,
        FrameStackingEnvToModule as FrameStackingEnvToModule,
        MeanStdFilter as MeanStdFilter,
        MultiAgentObservationPreprocessor as MultiAgentObservationPreprocessor,
        PrevActionsPrevRewards as PrevActionsPrevRewards,
        SingleAgentObservationPreprocessor as SingleAgentObservationPreprocessor,
        WriteObservationsToEpisodes as WriteObservationsToEpisodes,
    )
    from rlzmq.connectors.learner import (
        AddColumnsFromEpisodesToTrainBatch as AddColumnsFromEpisodesToTrainBatch,
        AddInfosFromEpisodesToTrainBatch as AddInfosFromEpisodesToTrainBatch,
        AddNextObservationsFromEpisodesToTrainBatch as AddNextObservationsFromEpisodesToTrainBatch,
        AddOneTsToEpisodesAndTruncate as AddOneTsToEpisodesAndTruncate,
        ComputeReturnsToGo as ComputeReturnsToGo,
        FrameStackingLearner as FrameStackingLearner,
        GeneralAdvantageEstimation as GeneralAdvantageEstimation,
        VTrace as VTrace,
        WholeBatchEstimator as WholeBatchEstimator,
    )
    from rlzmq.connectors.module_to_env import (
        GetActions as GetActions,
        ListifyDataForVectorEnv as ListifyDataForVectorEnv,
        ModuleToAgentUnmapping as ModuleToAgentUnmapping,
        NormalizeAndClipActions as NormalizeAndClipActions,
        RemoveSingleTsTimeRankFromBatch as RemoveSingleTsTimeRankFromBatch,
        TensorToNumpy as TensorToNumpy,
        UnBatchToIndividualItems as UnBatchToIndividualItems,
    )
    from rlzmq.connectors.pipelines import (
        ConnectorPipelineV2 as ConnectorPipelineV2,
        EnvToModulePipeline as EnvToModulePipeline,
        LearnerConnectorPipeline as LearnerConnectorPipeline,
        ModuleToEnvPipeline as ModuleToEnvPipeline,
    )
    from rlzmq.core.callbacks import Callback as Callback, RLlibCallback as RLlibCallback
    from rlzmq.core.errors import (
        AuthenticationError as AuthenticationError,
        CheckpointError as CheckpointError,
        ClosedError as ClosedError,
        ConfigurationError as ConfigurationError,
        DeadlineError as DeadlineError,
        EnvError as EnvError,
        ExitRaisedError as ExitRaisedError,
        MultiAgentEnvError as MultiAgentEnvError,
        NotFiniteError as NotFiniteError,
        PeerLostError as PeerLostError,
        ProtocolError as ProtocolError,
        RemoteError as RemoteError,
        RlzmqError as RlzmqError,
        StandstillError as StandstillError,
        StepFailedRecreateEnvError as StepFailedRecreateEnvError,
        UnsupportedSpaceError as UnsupportedSpaceError,
    )
    from rlzmq.core.metrics import MetricsLogger as MetricsLogger, StatsBase as StatsBase
    from rlzmq.core.names import *
    from rlzmq.core.signatures import override as override
    from rlzmq.core.update_plan import derive_seed as derive_seed
    from rlzmq.envs.multi_agent_env import (
        MultiAgentEnv as MultiAgentEnv,
        make_multi_agent as make_multi_agent,
        ParallelPettingZooEnv as ParallelPettingZooEnv,
        PettingZooEnv as PettingZooEnv,
    )
    from rlzmq.envs.registry import EnvContext as EnvContext, register_env as register_env
    from rlzmq.episodes.columns import Columns as Columns
    from rlzmq.episodes.columns import DEFAULT_AGENT_ID as DEFAULT_AGENT_ID
    from rlzmq.episodes.columns import DEFAULT_MODULE_ID as DEFAULT_MODULE_ID
    from rlzmq.episodes.episode_batch import EpisodeBatch as EpisodeBatch
    from rlzmq.episodes.lookback_buffer import InfiniteLookbackBuffer as InfiniteLookbackBuffer
    from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode as MultiAgentEpisode
    from rlzmq.episodes.single_agent_episode import SingleAgentEpisode as SingleAgentEpisode
    from rlzmq.learners.learner import Learner as Learner, TorchLearner as TorchLearner
    from rlzmq.learners.replay_learner import ReplayLearner as ReplayLearner
    from rlzmq.learners.replay_learner import importance_weights as importance_weights
    from rlzmq.learners.batches import BatchSource as BatchSource
    from rlzmq.learners.target_network_learner import (
        TargetNetworkLearner as TargetNetworkLearner,
        discounts as discounts,
        target_outputs as target_outputs,
    )
    from rlzmq.algorithms.ppo.ppo_learner import PPOTorchLearner as PPOTorchLearner
    from rlzmq.modules.rl_module import (
        InferenceOnlyAPI as InferenceOnlyAPI,
        QNetAPI as QNetAPI,
        SelfSupervisedLossAPI as SelfSupervisedLossAPI,
        TargetNetworkAPI as TargetNetworkAPI,
        ValueFunctionAPI as ValueFunctionAPI,
    )
    from rlzmq.modules.default_models.actor_critic import DefaultPPOTorchRLModule as DefaultPPOTorchRLModule
    from rlzmq.modules.distributions import (
        Distribution as Distribution,
        TorchCategorical as TorchCategorical,
        TorchDeterministic as TorchDeterministic,
        TorchDiagGaussian as TorchDiagGaussian,
        TorchMultiCategorical as TorchMultiCategorical,
        TorchMultiDistribution as TorchMultiDistribution,
        TorchSquashedGaussian as TorchSquashedGaussian,
    )
    from rlzmq.config.model_config import DefaultModelConfig as DefaultModelConfig
    from rlzmq.modules.multi_rl_module import MultiRLModule as MultiRLModule
    from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec as MultiRLModuleSpec
    from rlzmq.modules.rl_module import RLModule as RLModule, TorchRLModule as TorchRLModule
    from rlzmq.modules.spec import RLModuleSpec as RLModuleSpec
    from rlzmq.modules.weights import frozen as frozen
    from rlzmq.replay import (
        EpisodeReplayBuffer as EpisodeReplayBuffer,
        HindsightEpisodeReplayBuffer as HindsightEpisodeReplayBuffer,
        MultiAgentEpisodeReplayBuffer as MultiAgentEpisodeReplayBuffer,
        MultiAgentPrioritizedEpisodeReplayBuffer as MultiAgentPrioritizedEpisodeReplayBuffer,
        PrioritizedEpisodeReplayBuffer as PrioritizedEpisodeReplayBuffer,
        ReplayBuffer as ReplayBuffer,
    )
    from rlzmq.runners.env_runner import EnvRunner as EnvRunner
    from rlzmq.runners.vector_env_runners import MultiAgentEnvRunner as MultiAgentEnvRunner
    from rlzmq.runners.vector_env_runners import SingleAgentEnvRunner as SingleAgentEnvRunner
    from rlzmq.driver.sync_groups import EnvRunnerGroup as EnvRunnerGroup
    from rlzmq.driver.sync_groups import LearnerGroup as LearnerGroup
    from rlzmq.driver.sync_groups import synchronous_parallel_sample as synchronous_parallel_sample
    from rlzmq.telemetry.runs import Run as Run, find_runs as find_runs
    from rlzmq.tune.result_grid import ResultGrid as ResultGrid

# public name -> module that defines it, relative to this package
_EXPORTS: dict[str, str] = names_to_load(__name__)

__all__ = sorted([*_EXPORTS, "__version__"])


_missing = MissingNameFinder(_EXPORTS)
if not any(isinstance(finder, MissingNameFinder) for finder in sys.meta_path):
    sys.meta_path.append(_missing)


def _load(name: str) -> Any:
    module, name_there = _EXPORTS.get(name), name
    if module is None:
        accepted = accepted_name(name, _EXPORTS)
        if accepted is None:
            raise AttributeError(f"module 'rlzmq' has no name {name!r}{_missing.hint(name)}")
        logging.getLogger(__name__).warning("%s is RLlib's, and works here%s", name, _missing.hint(name))
        module, name_there = accepted
    try:
        value = getattr(importlib.import_module(f"rlzmq.{module}"), name_there)
    except Exception as error:
        if failure := import_failure(f"rlzmq.{name}", error):
            raise failure from error
        raise
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # a name that is not there is an error to a type checker, too
    __getattr__ = _load


def __dir__() -> list[str]:
    return __all__
