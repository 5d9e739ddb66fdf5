"""Who implements the Protocols of `rlzmq.interfaces`. mypy checks each line; nothing here runs."""

from rlzmq import EpisodeBatch, MultiRLModule, RLModule, interfaces
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.pipelines import ConnectorPipelineV2
from rlzmq.driver.broker_pipeline import BrokerPipeline
from rlzmq.driver.updates import SerialPipeline
from rlzmq.envs.multi_agent_env import SyncVectorMultiAgentEnv
from rlzmq.envs.sync_vector import LeanSyncVectorEnv
from rlzmq.learners.learner import Learner
from rlzmq.runners.sampler import Sampler


def envs(single: LeanSyncVectorEnv, multi: SyncVectorMultiAgentEnv) -> tuple[interfaces.Env, ...]:
    return single, multi


def batches(batch: EpisodeBatch) -> interfaces.Batch:
    return batch


def modules(single: RLModule, multi: MultiRLModule) -> tuple[interfaces.Module, ...]:
    return single, multi


def pipelines(piece: ConnectorV2, pipeline: ConnectorPipelineV2) -> tuple[interfaces.Pipeline, ...]:
    return piece, pipeline


def samplers(sampler: Sampler) -> interfaces.Sampler:
    return sampler


def learners(learner: Learner) -> interfaces.Learner:
    return learner


def update_pipelines(serial: SerialPipeline, broker: BrokerPipeline) -> tuple[interfaces.UpdatePipeline, ...]:
    return serial, broker
