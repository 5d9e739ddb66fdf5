"""IMPALALearner: policy gradient with V-trace advantages (arXiv:1802.01561, section 4.2).

Shape suffix: ``B`` rows of a minibatch, ``[B]`` for stateless modules, ``[B, T]`` with a mask for stateful
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

from torch import Tensor

from rlzmq.algorithms.impala import IMPALAConfig, IMPALATrainingSettings
from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.learner import VTrace
from rlzmq.episodes.columns import Columns
from rlzmq.learners.batches import MaskedMean
from rlzmq.learners.learner import TorchLearner
from rlzmq.modules.rl_module import ValueFunctionAPI

__all__ = [
    "IMPALALearner",
    "IMPALALossTerms",
    "impala_loss_terms",
]


class IMPALALossTerms(NamedTuple):
    """Means over the real rows of a minibatch, 0-d tensors, and the number of these rows."""

    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    num_rows: Tensor | int


def impala_loss_terms(
    *,
    logp_B: Tensor,
    advantages_B: Tensor,
    values_B: Tensor,
    value_targets_B: Tensor,
    entropy_B: Tensor,
    mask_B: Tensor | None = None,
) -> IMPALALossTerms:
    """Return the three terms of the loss.

    Args:
        logp_B: Log-probability of the actions under the trained policy.
        advantages_B: V-trace advantages, not standardized.
        values_B: Predictions of the trained value function.
        value_targets_B: V-trace targets.
        entropy_B: Entropy of the trained policy.
        mask_B: Whether entries are real; None: all.
    """
    mean = MaskedMean(mask_B)
    return IMPALALossTerms(
        policy_loss=-mean(logp_B * advantages_B),
        value_loss=0.5 * mean((values_B - value_targets_B).square()),
        entropy=mean(entropy_B),
        num_rows=logp_B.numel() if mask_B is None else mask_B.sum(),
    )


class IMPALALearner(TorchLearner):
    """Trains actor-critic modules with IMPALA (arXiv:1802.01561).

    Needs the columns ``actions``, ``action_logp``, ``advantages`` and ``value_targets``; the last two come from
    the learner connector's VTrace.
    """

    config: IMPALAConfig
    scheduled_settings: ClassVar[Sequence[str]] = ["entropy_coeff"]

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """Return `ValueFunctionAPI`."""
        return [ValueFunctionAPI]

    def make_estimator(self) -> VTrace:
        """Return V-trace."""
        return VTrace(
            gamma=self.config.gamma,
            clip_rho_threshold=self.config.vtrace_clip_rho_threshold,
            clip_pg_rho_threshold=self.config.vtrace_clip_pg_rho_threshold,
        )

    def compute_loss_for_module(
        self, *, module_id: str, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Return the mean of policy loss + value loss − entropy bonus over the rows."""
        module = self.module[module_id]
        logits = module.require_output(fwd_out, Columns.ACTION_DIST_INPUTS)
        dist = module.get_train_action_dist_cls().from_logits(logits)
        terms = impala_loss_terms(
            logp_B=dist.logp(batch[Columns.ACTIONS]),
            advantages_B=batch[Columns.ADVANTAGES],
            values_B=module.compute_values(batch, embeddings=fwd_out.get(Columns.EMBEDDINGS)),
            value_targets_B=batch[Columns.VALUE_TARGETS],
            entropy_B=dist.entropy(),
            mask_B=batch.get(Columns.LOSS_MASK),
        )
        self.log_stats(
            module_id,
            {
                "pi_loss": terms.policy_loss * terms.num_rows,
                "vf_loss": terms.value_loss * terms.num_rows,
                "mean_pi_loss": terms.policy_loss,
                "mean_vf_loss": terms.value_loss,
                "entropy": terms.entropy,
            },
        )
        entropy_coeff = self.coefficients["entropy_coeff"][module_id]
        vf_loss_coeff = cast(IMPALATrainingSettings, config).vf_loss_coeff
        return terms.policy_loss + vf_loss_coeff * terms.value_loss - entropy_coeff * terms.entropy
