"""APPO: PPO's clipped objective on IMPALA's architecture (IMPACT: Luo et al. 2019, arXiv:1912.00167)."""

from rlzmq.algorithms.appo.appo import APPO
from rlzmq.algorithms.appo.appo_config import APPOConfig
from rlzmq.algorithms.appo.appo_learner import APPOLearner

__all__ = ["APPO", "APPOConfig", "APPOLearner"]
