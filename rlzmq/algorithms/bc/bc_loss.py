"""BC's loss.

Shape suffix: ``B`` rows of a minibatch, ``[B]`` for stateless modules, ``[B, T]`` with a mask for stateful ones.
"""

from __future__ import annotations

from torch import Tensor

from rlzmq.learners.losses import masked_mean

__all__ = ["bc_loss"]


def bc_loss(logp_B: Tensor, mask_B: Tensor | None = None) -> Tensor:
    """Return minus the mean log-likelihood, 0-d.

    Args:
        logp_B: Log-probability of the recorded actions under the trained policy.
        mask_B: Whether entries are real; None: all.
    """
    return -masked_mean(logp_B, mask_B)
