"""DefaultCQLModule: SAC's default module for Box actions, which also computes values of sampled actions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlzmq.algorithms.sac.sac_module import DefaultSACModule, critic_values, require_box
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import Columns

__all__ = ["DefaultCQLModule"]


class DefaultCQLModule(DefaultSACModule):
    """Policy and critics for Box actions. For `model_config`, see DefaultSACModule."""

    def setup(self) -> None:
        require_box(self, "CQL", "BC or MARWIL")
        super().setup()

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        # The environment clips actions further out, which other algorithms' policies may have recorded.
        return super()._forward_train({**batch, Columns.ACTIONS: batch[Columns.ACTIONS].clamp(-1.0, 1.0)})

    def values_of_sampled_actions(self, batch: dict[str, Any], num_actions: int) -> tuple[Tensor, Tensor]:
        """Return the critics' values of sampled actions at ``obs``, with gradients for the critics, and log-densities.

        Args:
            batch: The batch, with ``obs`` and ``new_obs`` of B rows.
            num_actions: Number of actions of each kind: uniform in (-1, 1), from the policy at ``obs``, and at
                ``new_obs``.

        Returns:
            float [B, C, 3 · num_actions] for C critics, and float [B, 3 · num_actions].
        """
        with torch.no_grad():
            logits, obs = self._logits(batch[Columns.OBS])
            next_logits, _ = self._logits(batch[Columns.NEXT_OBS])
            of_policy = [self._sample(of, num_actions) for of in (logits, next_logits)]
            uniform = 2.0 * torch.rand_like(of_policy[0][0]) - 1.0
            actions = torch.cat([uniform, *(drawn for drawn, _ in of_policy)], 1)
            log_density = -math.log(2.0) * math.prod(uniform.shape[2:])
            logp = torch.cat(
                [torch.full(uniform.shape[:2], log_density).to(logits), *(logp for _, logp in of_policy)], 1
            )
        repeated = tree_map(lambda leaf: leaf.repeat_interleave(3 * num_actions, 0), obs)
        values = critic_values(self.qfs, (repeated, actions.flatten(0, 1)))
        return values.reshape(*logp.shape, -1).transpose(1, 2), logp

    def _sample(self, logits: Tensor, num_actions: int) -> tuple[Tensor, Tensor]:
        """Return actions of the policy, [B, num_actions, …], and their log-probabilities, [B, num_actions]."""
        dist: Any = self.get_train_action_dist_cls().from_logits(logits.repeat_interleave(num_actions, 0))
        actions, logp = dist.sample_and_logp()
        shape = len(logits), num_actions
        return actions.reshape(*shape, *actions.shape[1:]), logp.reshape(shape)
