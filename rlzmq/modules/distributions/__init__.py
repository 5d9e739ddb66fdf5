"""Action distributions: lightweight classes over one tensor of model outputs."""

from rlzmq.modules.distributions.base import Distribution, TorchDistribution, check_dist_inputs
from rlzmq.modules.distributions.categorical import TorchCategorical, TorchMultiCategorical
from rlzmq.modules.distributions.deterministic import TorchDeterministic
from rlzmq.modules.distributions.for_space import (
    TorchMultiDistribution,
    action_dist_cls_for,
    num_dist_inputs,
)
from rlzmq.modules.distributions.gaussian import TorchDiagGaussian, TorchSquashedGaussian

__all__ = [
    "Distribution",
    "TorchCategorical",
    "TorchDeterministic",
    "TorchDiagGaussian",
    "TorchDistribution",
    "TorchMultiCategorical",
    "TorchMultiDistribution",
    "TorchSquashedGaussian",
    "action_dist_cls_for",
    "check_dist_inputs",
    "num_dist_inputs",
]
