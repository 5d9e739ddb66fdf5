"""The names of Ray Tune's registry, which are public names of rlzmq, too."""

from rlzmq.algorithms.rllib_helpers import get_trainable_cls
from rlzmq.envs.registry import register_env
from rlzmq.tune.tuner import register_trainable

__all__ = ["get_trainable_cls", "register_env", "register_trainable"]
