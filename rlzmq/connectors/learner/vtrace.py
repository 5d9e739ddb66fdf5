"""V-trace: off-policy corrected value targets and advantages (arXiv:1802.01561, section 4.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlzmq.connectors.learner.advantages import ChunkRows, WholeBatchEstimator, discounted_suffix_sums
from rlzmq.episodes.columns import Columns

if TYPE_CHECKING:
    import torch

__all__ = ["TARGET_DIST_INPUTS", "VTrace", "compute_vtrace"]

TARGET_DIST_INPUTS = "target_action_dist_inputs"
_TARGET_LOGP = "target_logp"


# Rewards may overflow. The learner skips minibatches whose loss is not finite.
@np.errstate(over="ignore", invalid="ignore")
def compute_vtrace(
    *,
    behavior_logp_N: ArrayLike,
    target_logp_N: ArrayLike,
    rewards_N: ArrayLike,
    values_N: ArrayLike,
    bootstrap_values_C: ArrayLike,
    lengths_C: ArrayLike,
    gamma: float,
    clip_rho_threshold: float | None = 1.0,
    clip_c_threshold: float | None = 1.0,
    clip_pg_rho_threshold: float | None = 1.0,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Compute V-trace targets and advantages of C consecutive chunks in N rows.

    With the ratios ρ_t = π(a_t|x_t) / μ(a_t|x_t), each clipped from above::

        δ_t = min(ρ̄, ρ_t) (r_t + γ V_{t+1} - V_t)
        v_t = V_t + δ_t + γ min(c̄, ρ_t) (v_{t+1} - V_{t+1})
        A_t = min(ρ̄_pg, ρ_t) (r_t + γ v_{t+1} - V_t)

    At a chunk's end both V_{t+1} and v_{t+1} are its bootstrap value. The computation is in float64, without a Python
    loop over rows.

    Args:
        behavior_logp_N: log μ(a|x) of the sampling policy, [N], one chunk after the other.
        target_logp_N: log π(a|x) of the evaluated policy, [N].
        rewards_N: Rewards, [N].
        values_N: V of the observations that were acted on, [N].
        bootstrap_values_C: V of each chunk's final observation, [C]; 0 if the episode terminated there.
        lengths_C: Number of rows of each chunk, [C], each >= 1; their sum is N.
        gamma: Discount factor in [0, 1].
        clip_rho_threshold: ρ̄, bound of the ratio in the TD errors; None: no bound.
        clip_c_threshold: c̄, bound of the trace coefficients; None: no bound.
        clip_pg_rho_threshold: ρ̄_pg, bound of the ratio that multiplies the advantage; None: no bound.

    Returns:
        ``(advantages, value_targets)``, float32 [N] each.

    Raises:
        ValueError: The shapes do not fit together.
    """
    lengths = np.asarray(lengths_C, np.int64)
    arrays = {
        "behavior_logp": np.asarray(behavior_logp_N, np.float64),
        "target_logp": np.asarray(target_logp_N, np.float64),
        "rewards": np.asarray(rewards_N, np.float64),
        "values": np.asarray(values_N, np.float64),
    }
    for name, array in arrays.items():
        if array.shape != (lengths.sum(),):
            raise ValueError(
                f"compute_vtrace: expected {name} of shape ({int(lengths.sum())},), the sum of "
                f"{len(lengths)} chunk lengths, got {array.shape}."
            )
    bootstrap = np.asarray(bootstrap_values_C, np.float64)
    if bootstrap.shape != lengths.shape or not (lengths >= 1).all():
        raise ValueError(
            f"compute_vtrace: expected {len(lengths)} chunks of 1 row or more and as many bootstrap values, "
            f"got lengths {lengths.tolist()} and bootstrap values of shape {bootstrap.shape}."
        )
    values, rewards = arrays["values"], arrays["rewards"]
    ends = np.cumsum(lengths) - 1
    ratios = np.exp(arrays["target_logp"] - arrays["behavior_logp"])
    deltas = _clipped(ratios, clip_rho_threshold) * (
        rewards + gamma * _shifted(values, ends, bootstrap) - values
    )
    # v_t - V_t
    corrections = discounted_suffix_sums(deltas, ends, gamma * _clipped(ratios, clip_c_threshold))
    targets = values + corrections
    advantages = _clipped(ratios, clip_pg_rho_threshold) * (
        rewards + gamma * _shifted(targets, ends, bootstrap) - values
    )
    return advantages.astype(np.float32), targets.astype(np.float32)


def _clipped(ratios: NDArray[np.float64], threshold: float | None) -> NDArray[np.float64]:
    return ratios if threshold is None else np.minimum(ratios, threshold)


def _shifted(
    values: NDArray[np.float64], ends: NDArray[np.int64], bootstrap: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return each row's next value."""
    following = np.empty_like(values)
    following[:-1] = values[1:]
    following[ends] = bootstrap
    return following


class VTrace(WholeBatchEstimator):
    """Adds V-trace ``advantages`` and ``value_targets``, float32 tensors (arXiv:1802.01561).

    Traces end with their chunk, which bootstraps from the value of its final observation unless the episode terminated
    there. Extra and padded rows get zeros. See `compute_vtrace` and `WholeBatchEstimator`.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        gamma: Discount factor in [0, 1].
        clip_rho_threshold, clip_pg_rho_threshold: See `compute_vtrace`.
        use_target_network: Whether to evaluate the policy of the module's target network (`TargetNetworkAPI`), as in
            APPO, instead of the trained one. Adds its ``target_action_dist_inputs``.
    """

    reads: tuple[str, ...] = (Columns.ACTION_LOGP,)
    adds: tuple[str, ...] = (TARGET_DIST_INPUTS,)
    uses_forward_train: bool = True

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        gamma: float,
        clip_rho_threshold: float | None = 1.0,
        clip_pg_rho_threshold: float | None = 1.0,
        use_target_network: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma = gamma
        self.clip_rho_threshold = clip_rho_threshold
        self.clip_pg_rho_threshold = clip_pg_rho_threshold
        self.use_target_network = use_target_network

    def evaluate(
        self, module: Any, columns: dict[str, Any], fwd_out: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        outputs = {Columns.VF_PREDS: module.compute_values(columns, fwd_out.get(Columns.EMBEDDINGS))}
        if self.use_target_network:
            target = module.forward_target(columns)
            logits = module.require_output(target, Columns.ACTION_DIST_INPUTS, method="forward_target")
            outputs[TARGET_DIST_INPUTS] = logits
        else:
            logits = module.require_output(fwd_out, Columns.ACTION_DIST_INPUTS)
        dist = module.get_train_action_dist_cls().from_logits(logits)
        return outputs | {_TARGET_LOGP: dist.logp(columns[Columns.ACTIONS])}

    def estimate(self, rows: ChunkRows) -> dict[str, NDArray[np.float32]]:
        values_N, real_N = rows.columns[Columns.VF_PREDS], rows.real_N
        estimates = compute_vtrace(
            behavior_logp_N=rows.columns[Columns.ACTION_LOGP][real_N],
            target_logp_N=rows.columns[_TARGET_LOGP][real_N],
            rewards_N=rows.columns[Columns.REWARDS][real_N],
            values_N=values_N[real_N],
            bootstrap_values_C=rows.bootstrap_C(values_N),
            lengths_C=rows.lengths_C - 1,
            gamma=self.gamma,
            clip_rho_threshold=self.clip_rho_threshold,
            clip_pg_rho_threshold=self.clip_pg_rho_threshold,
        )
        columns: dict[str, NDArray[np.float32]] = {}
        for name, real in zip((Columns.ADVANTAGES, Columns.VALUE_TARGETS), estimates, strict=True):
            columns[name] = np.zeros(len(values_N), np.float32)
            columns[name][real_N] = real
        return columns

    def __repr__(self) -> str:
        return f"VTrace(gamma={self.gamma})"
