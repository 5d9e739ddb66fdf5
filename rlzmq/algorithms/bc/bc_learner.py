"""BCLearner: maximizes the log-likelihood of recorded actions.

Shape suffix: ``B`` rows of a minibatch, ``[B]`` for stateless modules, ``[B, T]`` with a mask for stateful ones.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlzmq.config.base_config import BaseConfig
from rlzmq.episodes.columns import Columns
from rlzmq.learners.batches import MaskedMean
from rlzmq.learners.offline_learner import OfflineLearner

__all__ = [
    "BCLearner",
    "bc_loss",
]


def bc_loss(logp_B: Tensor, mask_B: Tensor | None = None) -> Tensor:
    """Return minus the mean log-likelihood, 0-d.

    Args:
        logp_B: Log-probability of the recorded actions under the trained policy.
        mask_B: Whether entries are real; None: all.
    """
    return -MaskedMean(mask_B)(logp_B)


class BCLearner(OfflineLearner):
    """Trains modules with behavior cloning on single recorded steps. Needs the column ``actions``."""

    def compute_loss_for_module(
        self, *, module_id: str, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Return minus the mean log-likelihood of the actions; see `bc_loss`."""
        module = self.module[module_id]
        logits = module.require_output(fwd_out, Columns.ACTION_DIST_INPUTS)
        dist = module.get_train_action_dist_cls().from_logits(logits)
        loss = bc_loss(dist.logp(batch[Columns.ACTIONS]), batch.get(Columns.LOSS_MASK))
        self.log_stats(module_id, {"policy_loss": loss})
        return loss
