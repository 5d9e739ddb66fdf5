"""IMPALA: importance-weighted actor-learner architecture (Espeholt et al. 2018, arXiv:1802.01561)."""

from rlzmq.algorithms.impala.impala import IMPALA
from rlzmq.algorithms.impala.impala_config import IMPALAConfig
from rlzmq.algorithms.impala.impala_learner import IMPALALearner

__all__ = ["IMPALA", "IMPALAConfig", "IMPALALearner"]
