"""Default models: encoders for all common spaces, and the modules made of them."""

from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule, DefaultPPOTorchRLModule
from rlzmq.modules.default_models.cnn import ImageEncoder
from rlzmq.modules.default_models.heads import PolicyHead
from rlzmq.modules.default_models.mlp import MLP
from rlzmq.modules.default_models.recurrent import RecurrentEncoder
from rlzmq.modules.default_models.streams import MultiStreamEncoder, build_encoder

__all__ = [
    "MLP",
    "DefaultActorCriticModule",
    "DefaultPPOTorchRLModule",
    "ImageEncoder",
    "MultiStreamEncoder",
    "PolicyHead",
    "RecurrentEncoder",
    "build_encoder",
]
