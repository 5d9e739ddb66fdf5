"""DQNLearner: Q-learning on transitions from a replay buffer, against a target network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from rlzmq.algorithms.dqn.dqn_config import DQNConfig, DQNTrainingSettings
from rlzmq.algorithms.dqn.dqn_loss import (
    distribution_loss,
    distribution_stats,
    mean_loss,
    project_distribution,
)
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import Columns
from rlzmq.learners.replay_learner import ReplayLearner, importance_weights, with_n_step_sums
from rlzmq.learners.target_network_learner import discounts, target_outputs
from rlzmq.learners.update_counts import Scalar
from rlzmq.modules.apis import QNetAPI, TargetNetworkAPI

__all__ = ["DQNLearner"]


class DQNLearner(ReplayLearner):
    """Trains modules with action values (arXiv:1312.5602, 1509.06461, 1707.06887).

    A module's `forward_train` returns the result of its `compute_q_values`.
    """

    trains_sequences: ClassVar[bool] = True
    config: DQNConfig

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """Return `QNetAPI` and `TargetNetworkAPI`."""
        return [QNetAPI, TargetNetworkAPI]

    def forward_train(self, batch: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Run the modules; stateful ones also over the observation after each sequence: outputs are [B, T + 1, …]."""
        return super().forward_train(
            {
                module_id: {**columns, **_unrolled(columns)}
                if self.module[module_id].is_stateful()
                else columns
                for module_id, columns in batch.items()
            }
        )

    def compute_loss_for_module(
        self, *, module_id: str, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Return the loss of the chosen actions' values against n-step targets; see `dqn_loss`."""
        settings = cast(DQNTrainingSettings, config)
        module = self.module[module_id].unwrapped()
        # The trained steps of a stateful module's sequences become rows.
        mask: Tensor | None = None
        if module.is_stateful():
            batch, ends_BT = with_n_step_sums(batch, self.drawn_n(batch), config.gamma)
            mask = batch[Columns.LOSS_MASK]
            assert mask is not None
            sequences_B, next_steps_B = mask.nonzero()[:, 0], ends_BT[mask] + 1

        def rows(values: Tensor) -> Tensor:
            return values if mask is None else values[:, : mask.shape[1]][mask]

        def next_rows(values: Tensor) -> Tensor:
            return values if mask is None else values[sequences_B, next_steps_B]

        q_BA = rows(module.require_output(fwd_out, "qf_preds"))
        # A Discrete space may begin at another number than 0.
        actions_B = rows(batch[Columns.ACTIONS]).long()
        if start := int(module.action_space.start):
            actions_B = actions_B - start
        following = {Columns.OBS: batch[Columns.NEXT_OBS]} if mask is None else _unrolled(batch)
        target = target_outputs(module, following)
        chooser = target
        if settings.double_q:
            with torch.no_grad():
                chooser = module.rank_actions(following) if mask is None else fwd_out
        next_actions_B = next_rows(chooser["qf_preds"]).argmax(-1)
        shared = {
            "rewards_B": rows(batch[Columns.REWARDS]).float(),
            "discounts_B": rows(discounts(batch, config.gamma)),
        }
        weights_B = rows(importance_weights(batch))
        if settings.num_atoms == 1:
            loss, td_errors_B = mean_loss(
                q_BA=q_BA,
                actions_B=actions_B,
                next_q_B=_of(next_rows(target["qf_preds"]), next_actions_B),
                weights_B=weights_B,
                kind=settings.td_error_loss_fn,
                **shared,
            )
        else:
            next_probs_BZ = _of(next_rows(target["qf_probs"]), next_actions_B)
            atoms_Z = target["atoms"]
            targets_BZ = project_distribution(next_probs_BZ=next_probs_BZ, atoms_Z=atoms_Z, **shared)
            self.log_stats(
                module_id,
                {"targets_outside_support": lambda: _share_outside(next_probs_BZ, atoms_Z, **shared)},
            )
            logits_BZ = _of(rows(module.require_output(fwd_out, "qf_logits")), actions_B)
            loss, td_errors_B = distribution_loss(
                logits_BZ=logits_BZ, targets_BZ=targets_BZ, weights_B=weights_B
            )
            probs_BAZ = rows(module.require_output(fwd_out, "qf_probs"))
            self.log_stats(module_id, distribution_stats(probs_BAZ, target["atoms"]))
        self.note_td_errors(module_id, batch, td_errors_B)
        values_BA = q_BA.detach()
        stats: dict[str, Scalar] = {
            "qf_loss": loss,
            "qf_mean": lambda: _of(values_BA, actions_B).mean(),
            "qf_max": lambda: _of(values_BA, actions_B).max(),
            "qf_min": lambda: _of(values_BA, actions_B).min(),
            "td_error_mean": td_errors_B.mean,
        }
        self.log_stats(module_id, stats)
        return loss


def _unrolled(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return each sequence with the observation after its last step, [B, T + 1, …], and its initial state."""
    obs = tree_map(
        lambda now, after: torch.cat([now[:, :1], after], 1), batch[Columns.OBS], batch[Columns.NEXT_OBS]
    )
    return {Columns.OBS: obs, Columns.STATE_IN: batch[Columns.STATE_IN]}


def _of(values_BA: Tensor, actions_B: Tensor) -> Tensor:
    """Return the values of one action per row: [B, A, …] → [B, …]."""
    if values_BA.dim() == 2:
        return values_BA.gather(1, actions_B[:, None]).squeeze(1)
    return values_BA[torch.arange(len(actions_B), device=actions_B.device), actions_B]


@torch.no_grad()
def _share_outside(next_probs_BZ: Tensor, atoms_Z: Tensor, rewards_B: Tensor, discounts_B: Tensor) -> Tensor:
    """Return the fraction of rows whose expected target is below the first or above the last atom."""
    means_B = rewards_B + discounts_B * (next_probs_BZ * atoms_Z).sum(-1)
    slack = 1e-3 * (atoms_Z[-1] - atoms_Z[0])
    return ((means_B < atoms_Z[0] - slack) | (means_B > atoms_Z[-1] + slack)).float().mean()
