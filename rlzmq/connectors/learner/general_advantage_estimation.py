"""GeneralAdvantageEstimation: advantages and value targets of every module's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from rlzmq.connectors.learner.gae import compute_gae, discounted_suffix_sums, standardize
from rlzmq.connectors.learner.whole_batch_estimator import ChunkRows, WholeBatchEstimator
from rlzmq.episodes.columns import Columns

if TYPE_CHECKING:
    import torch

__all__ = ["GeneralAdvantageEstimation"]


class GeneralAdvantageEstimation(WholeBatchEstimator):
    """Adds ``advantages`` (standardised) and ``value_targets``, float32 tensors (arXiv:1506.02438).

    Values come from one batched ``rl_module[module_id].compute_values(batch[module_id])`` per module; see
    `WholeBatchEstimator`. Extra and padded rows get zeros.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        gamma: Discount factor in [0, 1].
        lambda_: In [0, 1]: 0 is the one-step TD error, 1 the discounted return minus the value.
        standardize: Over which rows mean and deviation are taken. "real_steps": those that are trained on.
            "as_rllib": the extra row of each chunk, too, whose advantage reaches into the next chunk of the batch; then
            the numbers are RLlib's.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        gamma: float,
        lambda_: float,
        standardize: Literal["real_steps", "as_rllib"] = "real_steps",
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma = gamma
        self.lambda_ = lambda_
        self.standardize = standardize

    def evaluate(self, module: Any, columns: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {Columns.VF_PREDS: module.compute_values(columns)}

    def estimate(self, rows: ChunkRows) -> dict[str, npt.NDArray[np.float32]]:
        values_N, rewards_N = rows.columns[Columns.VF_PREDS], rows.columns[Columns.REWARDS]
        real_N = rows.real_N
        real_advantages, real_targets = compute_gae(
            rewards_N[real_N],
            values_N[real_N],
            rows.bootstrap_C(values_N),
            rows.lengths_C - 1,
            gamma=self.gamma,
            lambda_=self.lambda_,
        )
        targets = np.zeros(len(values_N), np.float32)
        targets[real_N] = real_targets
        if self.standardize == "as_rllib":
            advantages = standardize(self._over_chunk_borders(rows))
        else:
            advantages = np.zeros(len(values_N), np.float32)
            advantages[real_N] = standardize(real_advantages)
        return {Columns.ADVANTAGES: advantages, Columns.VALUE_TARGETS: targets}

    def _over_chunk_borders(self, rows: ChunkRows) -> npt.NDArray[np.float32]:
        values_N, rewards_N = rows.columns[Columns.VF_PREDS], rows.columns[Columns.REWARDS]
        following = np.append(values_N[1:], 0.0)
        deltas = rewards_N + self.gamma * np.where(rows.terminated_N, 0.0, following) - values_N
        ends = np.union1d(np.flatnonzero(rows.terminated_N | rows.truncated_N), [len(values_N) - 1])
        return discounted_suffix_sums(deltas, ends, self.gamma * self.lambda_).astype(np.float32)

    def __repr__(self) -> str:
        return f"GeneralAdvantageEstimation(gamma={self.gamma}, lambda_={self.lambda_})"
