"""DQNLearner: Q-learning against a target network, on TD errors (arXiv:1312.5602) or distributions (arXiv:1707.06887).

Shape suffixes: ``B`` rows of a minibatch, ``A`` actions, ``Z`` atoms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from rlzmq.algorithms.dqn import DQNConfig, DQNTrainingSettings
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import Columns
from rlzmq.learners.learner_report import Scalar
from rlzmq.learners.replay_learner import ReplayLearner, importance_weights, with_n_step_sums
from rlzmq.learners.target_network_learner import ErrorLoss, discounts, error_loss
from rlzmq.modules.rl_module import QNetAPI, TargetNetworkAPI

__all__ = [
    "DQNLearner",
    "DQNLoss",
    "distribution_loss",
    "distribution_stats",
    "mean_loss",
    "project_distribution",
]


class DQNLoss(NamedTuple):
    """The loss, a 0-d tensor, and each row's value and target, float [B], without gradients."""

    loss: Tensor
    values_B: Tensor
    targets_B: Tensor | float

    @property
    def td_errors_B(self) -> Tensor:
        """Each row's TD error, float [B]."""
        return (self.values_B - self.targets_B).abs()


def mean_loss(
    *,
    q_BA: Tensor,
    actions_B: Tensor,
    next_q_B: Tensor,
    rewards_B: Tensor,
    discounts_B: Tensor,
    weights_B: Tensor,
    kind: ErrorLoss,
) -> DQNLoss:
    """Return the weighted mean of the rows' losses against y = r + discount · q'. TD errors are |q - y|.

    Args:
        q_BA: Values of all actions.
        actions_B: The actions taken, int64, from 0.
        next_q_B: The target network's values of the next actions.
        rewards_B: Sums of n rewards.
        discounts_B: γ^n, or 0 after a terminal step.
        weights_B: Importance weights.
        kind: See `ErrorLoss`.
    """
    targets_B = (rewards_B + discounts_B * next_q_B).detach()
    q_B = q_BA.gather(1, actions_B[:, None]).squeeze(1)
    return DQNLoss((weights_B * error_loss(q_B, targets_B, kind)).mean(), q_B.detach(), targets_B)


def project_distribution(
    *, next_probs_BZ: Tensor, rewards_B: Tensor, discounts_B: Tensor, atoms_Z: Tensor
) -> Tensor:
    """Return the distribution of r + discount · Z, projected to the atoms (arXiv:1707.06887, algorithm 1).

    Args:
        next_probs_BZ: Distribution of Z for the next action.
        rewards_B, discounts_B: See `mean_loss`.
        atoms_Z: The atoms, equidistant and ascending.

    Returns:
        float [B, Z]; each row sums to 1.
    """
    num_atoms = len(atoms_Z)
    low, high = atoms_Z[0], atoms_Z[-1]
    moved_BZ = (rewards_B[:, None] + discounts_B[:, None] * atoms_Z).clamp(low, high)
    positions_BZ = (moved_BZ - low) / (high - low) * (num_atoms - 1)
    # The share of each atom decreases linearly with its distance.
    below_BZ = positions_BZ.floor().clamp(max=num_atoms - 2)
    above_BZ = positions_BZ - below_BZ
    index_BZ = below_BZ.long()
    projected_BZ = torch.zeros_like(next_probs_BZ)
    projected_BZ.scatter_add_(1, index_BZ, next_probs_BZ * (1.0 - above_BZ))
    projected_BZ.scatter_add_(1, index_BZ + 1, next_probs_BZ * above_BZ)
    return projected_BZ


def distribution_loss(*, logits_BZ: Tensor, targets_BZ: Tensor, weights_B: Tensor) -> DQNLoss:
    """Return the weighted mean of the rows' cross-entropies, which are also the TD errors.

    Args:
        logits_BZ: Logits for the actions taken.
        targets_BZ: Projected distributions.
        weights_B: Importance weights.
    """
    losses_B = -(targets_BZ.detach() * functional.log_softmax(logits_BZ, -1)).sum(-1)
    return DQNLoss((weights_B * losses_B).mean(), losses_B.detach(), 0.0)


@torch.no_grad()
def distribution_stats(probs_BAZ: Tensor, atoms_Z: Tensor) -> dict[str, Tensor]:
    """Return by how much the actions' return distributions, averaged over rows, differ, and their mean entropy.

    Differences are those of an action and the next one: of the expectations (``expectations_abs_diff``) and the total
    variation (``dist_total_variation_dist``, in [0, 1]), both as means over these pairs, and the largest difference in
    any atom's probability (``dist_max_abs_distance``). The entropy, in nats, is ``action_dist_mean_entropy``.

    Args:
        probs_BAZ: Probabilities of the atoms.
        atoms_Z: The atoms.
    """
    probs_AZ = probs_BAZ.mean(0)
    stats = {"action_dist_mean_entropy": torch.special.entr(probs_AZ).sum(-1).mean()}
    if len(probs_AZ) > 1:
        differences_AZ = probs_AZ.diff(dim=0).abs()
        stats |= {
            "expectations_abs_diff": (probs_AZ * atoms_Z).sum(-1).diff().abs().mean(),
            "dist_total_variation_dist": 0.5 * differences_AZ.sum(-1).mean(),
            "dist_max_abs_distance": differences_AZ.max(),
        }
    return stats


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
        """Return the loss of the chosen actions' values against n-step targets."""
        settings = cast(DQNTrainingSettings, config)
        module = self.module[module_id]
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

        def next_actions() -> Tensor:
            return next_rows(chooser["qf_preds"]).argmax(-1)

        q_BA = rows(module.require_output(fwd_out, "qf_preds"))
        # A Discrete space may begin at another number than 0.
        actions_B = rows(batch[Columns.ACTIONS]).long()
        if start := int(module.action_space.start):
            actions_B = actions_B - start
        following = {Columns.OBS: batch[Columns.NEXT_OBS]} if mask is None else _unrolled(batch)
        with torch.set_grad_enabled(False):
            target = chooser = module.forward_target(following)
            if settings.double_q:
                chooser = module.rank_actions(following) if mask is None else fwd_out
        shared = {
            "rewards_B": rows(batch[Columns.REWARDS]).float(),
            "discounts_B": rows(discounts(batch, config.gamma)),
        }
        weights_B = rows(importance_weights(batch))
        if settings.num_atoms == 1:
            next_q_BA = next_rows(target["qf_preds"])
            result = mean_loss(
                q_BA=q_BA,
                actions_B=actions_B,
                next_q_B=next_q_BA.amax(-1) if chooser is target else _of(next_q_BA, next_actions()),
                weights_B=weights_B,
                kind=settings.td_error_loss_fn,
                **shared,
            )
        else:
            next_probs_BZ = _of(next_rows(target["qf_probs"]), next_actions())
            atoms_Z = target["atoms"]
            targets_BZ = project_distribution(next_probs_BZ=next_probs_BZ, atoms_Z=atoms_Z, **shared)
            self.log_stats(
                module_id,
                {"targets_outside_support": lambda: _share_outside(next_probs_BZ, atoms_Z, **shared)},
            )
            logits_BZ = _of(rows(module.require_output(fwd_out, "qf_logits")), actions_B)
            result = distribution_loss(logits_BZ=logits_BZ, targets_BZ=targets_BZ, weights_B=weights_B)
            probs_BAZ = rows(module.require_output(fwd_out, "qf_probs"))
            self.log_stats(module_id, distribution_stats(probs_BAZ, target["atoms"]))
        if self.needs_td_errors:
            self.note_td_errors(module_id, batch, result.td_errors_B)
        values_BA = q_BA.detach()
        stats: dict[str, Scalar] = {
            "qf_loss": result.loss,
            "qf_mean": lambda: _of(values_BA, actions_B).mean(),
            "qf_max": lambda: _of(values_BA, actions_B).max(),
            "qf_min": lambda: _of(values_BA, actions_B).min(),
            "td_error_mean": lambda: result.td_errors_B.mean(),
        }
        self.log_stats(module_id, stats)
        return result.loss


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
