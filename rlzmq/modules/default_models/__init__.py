"""Default models: encoders for all common spaces, and the modules made of them."""

from rlzmq.modules.default_models.actor_critic import (
    DefaultActorCriticModule,
    DefaultPPOTorchRLModule,
    PolicyHead,
)
from rlzmq.modules.default_models.encoders import MLP, RecurrentEncoder
from rlzmq.modules.default_models.image_encoders import ImageEncoder, MultiStreamEncoder, build_encoder

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
