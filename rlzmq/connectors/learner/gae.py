"""Generalized advantage estimation (arXiv:1506.02438, eq. 16) and discounted returns of many chunks at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike, NDArray

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.learner.whole_batch_estimator import ChunkRows, WholeBatchEstimator
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch

if TYPE_CHECKING:
    import torch

__all__ = [
    "ComputeReturnsToGo",
    "GeneralAdvantageEstimation",
    "compute_gae",
    "discounted_suffix_sums",
    "standardize",
]

# Lower bound of the standard deviation in the division of advantages, so that a batch of equal advantages gives zeros.
_STD_FLOOR = 1e-4


# Rewards may overflow. The learner notices this in the loss and finds the steps.
@np.errstate(over="ignore", invalid="ignore")
def compute_gae(
    rewards_N: ArrayLike,
    values_N: ArrayLike,
    bootstrap_values_C: ArrayLike,
    lengths_C: ArrayLike,
    *,
    gamma: float,
    lambda_: float,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Compute advantages and value targets of C consecutive chunks in N rows.

    The computation is in float64, without a Python loop over rows. A chunk's result does not depend, to the last bit,
    on the other chunks in the batch.

    Args:
        rewards_N: Rewards, [N], one chunk after the other.
        values_N: Value predictions for the observations that were acted on, [N].
        bootstrap_values_C: Value of each chunk's final observation, [C]; 0 if the episode terminated there.
        lengths_C: Number of rows of each chunk, [C], each ≥ 0; their sum is N.
        gamma: Discount factor in [0, 1].
        lambda_: GAE's λ in [0, 1]: 0 is the one-step TD error, 1 the Monte-Carlo return minus the value.

    Returns:
        ``(advantages, value_targets)``, float32 [N] each; ``value_targets = advantages + values``.

    Raises:
        ValueError: The shapes do not fit together.
    """
    rewards = np.asarray(rewards_N, np.float64)
    values = np.asarray(values_N, np.float64)
    bootstrap = np.asarray(bootstrap_values_C, np.float64)
    lengths = np.asarray(lengths_C, np.int64)
    if rewards.ndim != 1 or rewards.shape != values.shape or int(lengths.sum()) != rewards.shape[0]:
        raise ValueError(
            f"compute_gae: expected rewards and values of shape ({int(lengths.sum())},) (the sum of "
            f"{lengths.shape[0]} chunk lengths), got {rewards.shape} and {values.shape}."
        )
    if bootstrap.shape != lengths.shape:
        raise ValueError(
            f"compute_gae: expected {lengths.shape[0]} bootstrap values, got shape {bootstrap.shape}."
        )
    ends = np.cumsum(lengths)[lengths > 0] - 1
    next_values = np.empty_like(values)
    next_values[:-1] = values[1:]
    next_values[ends] = bootstrap[lengths > 0]
    deltas = rewards + gamma * next_values - values
    advantages = discounted_suffix_sums(deltas, ends, gamma * lambda_)
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


@np.errstate(over="ignore", invalid="ignore")
def discounted_suffix_sums(
    terms_N: NDArray[np.float64], ends: NDArray[Any], discount: float | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Compute ``y[t] = terms[t] + discount[t] * y[t + 1]`` within each chunk, for all chunks at once.

    Pass k extends every row's sum from 2^k to 2^(k+1) terms, so a longest chunk of length L takes log2(L) vectorized
    passes instead of L Python steps.

    Args:
        terms_N: The terms of the sums, [N].
        ends: Index of each chunk's last row, ascending; the last one is N - 1.
        discount: Discount in [0, 1]; one number, or one per row, [N].
    """
    sums = terms_N.copy()
    if sums.size == 0:
        return sums
    # weight[t]: the factor of the sum that follows the sum starting at t; 0 once that sum reaches the chunk's end
    weights = np.empty_like(sums)
    weights[:] = discount
    weights[ends] = 0.0
    longest = int(np.diff(ends, prepend=-1).max())
    reach = 1
    while reach < longest and weights.any():
        sums[:-reach] += weights[:-reach] * sums[reach:]
        weights[:-reach] *= weights[reach:]
        # rows this close to the batch's end are complete, since their chunk ends within this distance
        weights[-reach:] = 0.0
        reach *= 2
    return sums


@np.errstate(over="ignore", invalid="ignore")
def standardize(advantages_N: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the advantages of one module's real rows, shifted to mean 0 and scaled to deviation 1 (floor 1e-4)."""
    if advantages_N.size == 0:
        return advantages_N
    wide = advantages_N.astype(np.float64)
    centered = wide - wide.mean()
    scaled: NDArray[np.float32] = (centered / max(_STD_FLOOR, float(wide.std()))).astype(np.float32)
    return scaled


class GeneralAdvantageEstimation(WholeBatchEstimator):
    """Adds ``advantages`` (standardized) and ``value_targets``, float32 tensors (arXiv:1506.02438).

    Values come from one batched ``rl_module[module_id].compute_values(batch[module_id])`` per module; see
    `WholeBatchEstimator`. Extra and padded rows get zeros.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        gamma: Discount factor in [0, 1].
        lambda_: GAE's λ in [0, 1]: 0 is the one-step TD error, 1 the discounted return minus the value.
        standardize: The rows for mean and deviation. "real_steps": the rows that are trained on. "as_rllib": also the
            extra row of each chunk, whose advantage reaches into the next chunk of the batch, as in RLlib. "minibatch":
            none; the loss standardizes each minibatch.
        keeps_values: Whether to add the value predictions, too, as ``vf_preds``.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        gamma: float,
        lambda_: float,
        standardize: Literal["real_steps", "as_rllib", "minibatch"] = "real_steps",
        keeps_values: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma = gamma
        self.lambda_ = lambda_
        self.standardize = standardize
        self.keeps_values = keeps_values

    def evaluate(
        self, module: Any, columns: dict[str, Any], fwd_out: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
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
            is_scaled = self.standardize != "minibatch"
            advantages[real_N] = standardize(real_advantages) if is_scaled else real_advantages
        columns = {Columns.ADVANTAGES: advantages, Columns.VALUE_TARGETS: targets}
        if self.keeps_values:
            columns[Columns.VF_PREDS] = values_N.astype(np.float32)
        return columns

    def _over_chunk_borders(self, rows: ChunkRows) -> npt.NDArray[np.float32]:
        values_N, rewards_N = rows.columns[Columns.VF_PREDS], rows.columns[Columns.REWARDS]
        following = np.append(values_N[1:], 0.0)
        deltas = rewards_N + self.gamma * np.where(rows.terminated_N, 0.0, following) - values_N
        ends = np.union1d(np.flatnonzero(rows.terminated_N | rows.truncated_N), [len(values_N) - 1])
        return discounted_suffix_sums(deltas, ends, self.gamma * self.lambda_).astype(np.float32)

    def __repr__(self) -> str:
        return f"GeneralAdvantageEstimation(gamma={self.gamma}, lambda_={self.lambda_})"


class ComputeReturnsToGo(ConnectorV2):
    """Adds ``returns_to_go``: ``r[t] + gamma * r[t + 1] + …`` up to the chunk's end, float32.

    There is no bootstrapping, so use whole episodes (``batch_mode="complete_episodes"``) unless the sums should stop at
    chunk ends.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        gamma: Discount factor in [0, 1].
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        gamma: float,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma = gamma

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2."""
        if Columns.RETURNS_TO_GO in batch:
            return batch
        kept = [
            episode
            for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False)
            if len(episode)
        ]
        if not kept:
            return batch
        lengths = [len(episode) for episode in kept]
        rewards = np.concatenate([np.asarray(episode.get_rewards(), np.float64) for episode in kept])
        returns = self._returns(rewards, lengths)
        for episode, part in zip(kept, np.split(returns, np.cumsum(lengths)[:-1]), strict=True):
            self.add_n_batch_items(batch, Columns.RETURNS_TO_GO, part, len(part), episode)
        return batch

    def compute_columns(self, episodes: EpisodeBatch) -> dict[str, Any]:
        """Row form of `__call__`."""
        rewards = np.asarray(episodes.columns[Columns.REWARDS][episodes.step_slots()], np.float64)
        return {Columns.RETURNS_TO_GO: self._returns(rewards, episodes.length)}

    def _returns(self, rewards: npt.NDArray[np.float64], lengths: Any) -> npt.NDArray[np.float32]:
        lengths = np.asarray(lengths, np.int64)
        ends = np.cumsum(lengths)[lengths > 0] - 1
        return discounted_suffix_sums(rewards, ends, self.gamma).astype(np.float32)

    def __repr__(self) -> str:
        return f"ComputeReturnsToGo(gamma={self.gamma})"
