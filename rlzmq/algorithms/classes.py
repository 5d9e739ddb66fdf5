"""The algorithms' classes. Their training step is the base class's: one update according to `config.update_plan()`.

A new algorithm is a class here and a folder (``td3/__init__.py`` has TD3Config, ``td3/td3_learner.py`` TD3Learner). The
imports in ``rlzmq/__init__.py`` make their names public.
"""

from __future__ import annotations

from rlzmq.algorithms.algorithm import Algorithm


class PPO(Algorithm):
    """PPO (arXiv:1707.06347). An update is of at least `total_train_batch_size` env steps under the newest weights."""

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
