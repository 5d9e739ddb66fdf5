"""The algorithms' classes. Their training step is the base class's: one update according to `config.update_plan()`.

This file is where an algorithm is registered: its class, and for type checkers its config and learner. The rest follows
from its folder: ``td3/td3_config.py`` has TD3Config, ``td3/td3_learner.py`` TD3Learner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlzmq.algorithms.algorithm import Algorithm

if TYPE_CHECKING:
    from rlzmq.algorithms.appo.appo_config import APPOConfig as APPOConfig
    from rlzmq.algorithms.appo.appo_learner import APPOLearner as APPOLearner
    from rlzmq.algorithms.bc.bc_config import BCConfig as BCConfig
    from rlzmq.algorithms.bc.bc_learner import BCLearner as BCLearner
    from rlzmq.algorithms.cql.cql_config import CQLConfig as CQLConfig
    from rlzmq.algorithms.cql.cql_learner import CQLLearner as CQLLearner
    from rlzmq.algorithms.dqn.dqn_config import DQNConfig as DQNConfig
    from rlzmq.algorithms.dqn.dqn_learner import DQNLearner as DQNLearner
    from rlzmq.algorithms.impala.impala_config import IMPALAConfig as IMPALAConfig
    from rlzmq.algorithms.impala.impala_learner import IMPALALearner as IMPALALearner
    from rlzmq.algorithms.iql.iql_config import IQLConfig as IQLConfig
    from rlzmq.algorithms.iql.iql_learner import IQLLearner as IQLLearner
    from rlzmq.algorithms.marwil.marwil_config import MARWILConfig as MARWILConfig
    from rlzmq.algorithms.marwil.marwil_learner import MARWILLearner as MARWILLearner
    from rlzmq.algorithms.ppo.ppo_config import PPOConfig as PPOConfig
    from rlzmq.algorithms.ppo.ppo_learner import PPOLearner as PPOLearner
    from rlzmq.algorithms.sac.sac_config import SACConfig as SACConfig
    from rlzmq.algorithms.sac.sac_learner import SACLearner as SACLearner
    from rlzmq.algorithms.td3.td3_config import TD3Config as TD3Config
    from rlzmq.algorithms.td3.td3_learner import TD3Learner as TD3Learner
    from rlzmq.algorithms.tqc.tqc_config import TQCConfig as TQCConfig
    from rlzmq.algorithms.tqc.tqc_learner import TQCLearner as TQCLearner


class PPO(Algorithm):
    """PPO (arXiv:1707.06347). An update is of exactly `total_train_batch_size` env steps under the newest weights."""

    config_class = "PPOConfig"


class IMPALA(Algorithm):
    """IMPALA (arXiv:1802.01561). Runners sample ahead of the learner."""

    config_class = "IMPALAConfig"


class APPO(IMPALA):
    """APPO (arXiv:1912.00167, arXiv:1707.06347). Runners sample ahead of the learner, which clips its objective."""

    config_class = "APPOConfig"


class DQN(Algorithm):
    """DQN (arXiv:1312.5602), with a replay buffer."""

    config_class = "DQNConfig"


class SAC(Algorithm):
    """SAC (arXiv:1812.05905), with a replay buffer."""

    config_class = "SACConfig"


class TD3(Algorithm):
    """TD3 (arXiv:1802.09477), with a replay buffer."""

    config_class = "TD3Config"


class TQC(SAC):
    """TQC (arXiv:2005.04269), with a replay buffer."""

    config_class = "TQCConfig"


class BC(Algorithm):
    """Behavior cloning of recorded steps."""

    config_class = "BCConfig"


class MARWIL(Algorithm):
    """MARWIL (Wang et al., NeurIPS 2018), on whole recorded episodes."""

    config_class = "MARWILConfig"


class CQL(Algorithm):
    """CQL (arXiv:2006.04779), on recorded steps."""

    config_class = "CQLConfig"


class IQL(Algorithm):
    """IQL (arXiv:2110.06169), on recorded steps."""

    config_class = "IQLConfig"
