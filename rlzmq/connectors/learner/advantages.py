"""Learner pieces that use the module's outputs on the whole batch, and GAE (arXiv:1506.02438)."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike, NDArray

from rlzmq.connectors.common.agent_to_module_mapping import is_multi_rl_module
from rlzmq.connectors.common.layout import split_and_zero_pad, to_tensor
from rlzmq.connectors.connector_v2 import LAST_STAGE, ConnectorV2
from rlzmq.connectors.rows import TrainRows
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tree import as_numpy, tree_leaves, tree_map
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns
from rlzmq.episodes.episode_batch import EpisodeBatch

if TYPE_CHECKING:
    import torch

__all__ = [
    "FORWARD_OUTPUTS",
    "ChunkRows",
    "ComputeReturnsToGo",
    "GeneralAdvantageEstimation",
    "WholeBatchEstimator",
    "compute_gae",
    "discounted_suffix_sums",
    "sampled_column",
    "standardize",
]

FORWARD_OUTPUTS = "fwd_out"
"""Column of a train batch: the outputs of `forward_train` on its rows, with their graph, for the loss."""

# On a GPU, the forward pass is split into blocks of this many bytes of observations.
_BLOCK_BYTES = 256 * 2**20


def sampled_column(columns: Mapping[str, Any], name: str, module_id: str) -> Any:
    """Return a column that env runners add to each step.

    Raises:
        ConfigurationError: It is missing.
    """
    if name in columns:
        return columns[name]
    raise ConfigurationError(
        f"module {module_id!r}: its sampled steps need the column {name!r}, they have {', '.join(sorted(columns))}. "
        "Pieces of module_to_env_connector return the whole batch that they get, and modules action_dist_inputs."
    )


@dataclass(frozen=True)
class ChunkRows:
    """One module's rows without padding, chunk after chunk; each chunk's extra row comes last.

    Attributes:
        columns: ``rewards``, the estimator's `reads`, and the outputs of `evaluate`: float64 arrays [N].
        terminated_N, truncated_N: Whether the episode ended with this row's step.
        lengths_C: Number of rows of each chunk, including the extra one.
        extra_C: Index of each chunk's extra row.
        real_N: Whether each row is a step, not an extra row.
    """

    columns: dict[str, npt.NDArray[np.float64]]
    terminated_N: npt.NDArray[np.bool_]
    truncated_N: npt.NDArray[np.bool_]
    lengths_C: npt.NDArray[np.int64]
    extra_C: npt.NDArray[np.int64]
    real_N: npt.NDArray[np.bool_]

    def bootstrap_C(self, values_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the value after each chunk's last step: that of its extra row, or 0 if the episode terminated."""
        bootstrap: npt.NDArray[np.float64] = np.where(
            self.terminated_N[self.extra_C - 1], 0.0, values_N[self.extra_C]
        )
        return bootstrap


class WholeBatchEstimator(ConnectorV2):
    """The last piece of a learner pipeline. It adds columns that depend on the current weights.

    The pipeline begins with AddOneTsToEpisodesAndTruncate, so every chunk has an extra row with the observation to
    bootstrap from. One batched forward pass per module computes `evaluate` on all rows, without gradients; `estimate`
    turns the result into columns. Modules without `compute_values` are skipped. Subclasses implement both methods.

    Attributes:
        reads: Additional float columns of the batch that `estimate` needs.
        adds: Outputs of `evaluate` that become columns as they are, tensors ``[B, ...]`` (``[B, T, ...]``).
        of_modules: Module id → the estimator with its own settings; None, or no entry: this one.
        uses_forward_train: Whether `evaluate` needs the outputs of the module's `forward_train`. An update with one
            minibatch per batch then computes its loss from the same outputs, without a second pass.
    """

    stage: ClassVar[int] = LAST_STAGE + 1
    reads: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    uses_forward_train: bool = False

    def __init__(self, input_observation_space: Any = None, input_action_space: Any = None) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.of_modules: dict[Any, WholeBatchEstimator | None] = {}

    @abc.abstractmethod
    def evaluate(
        self, module: Any, columns: dict[str, Any], fwd_out: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the module outputs that are needed on every row. Called without gradients.

        Args:
            module: The RLModule.
            columns: Column -> tensor ``[B, ...]``, or ``[B, T, ...]`` if stateful.
            fwd_out: The outputs of `forward_train` on these columns if `uses_forward_train`, else empty.

        Returns:
            Name -> tensor ``[B]`` or ``[B, T]``; those in `adds` may have more dimensions.
        """

    @abc.abstractmethod
    def estimate(self, rows: ChunkRows) -> dict[str, npt.NDArray[np.float32]]:
        """Return the columns to add: name -> float32 array [N], 0 in extra rows."""

    def __call__(
        self, *, rl_module: Any, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object
    ) -> dict[str, Any]:
        """See ConnectorV2; the batch is ``{module_id: {column: tensor}}`` (or one module's columns).

        Raises:
            ValueError: The batch's rows are not the episodes' steps, or a chunk has no extra row.
        """
        import torch

        lengths: dict[Any, dict[Any, list[int]]] = {}
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            if len(episode):
                # Rows are in the order in which the keys first appeared.
                module_id = DEFAULT_MODULE_ID if episode.module_id is None else episode.module_id
                lengths.setdefault(module_id, {}).setdefault(episode.batch_key, []).append(len(episode))
        modules = rl_module if is_multi_rl_module(rl_module) else {DEFAULT_MODULE_ID: rl_module}
        for module_id, by_key in lengths.items():
            columns = batch if modules is not rl_module and module_id not in batch else batch.get(module_id)
            if columns is None or module_id not in modules:
                continue
            module = modules[module_id]
            if hasattr(module, "compute_values"):
                chunk_lengths = np.array([n for of_key in by_key.values() for n in of_key], np.int64)
                with torch.no_grad():
                    fwd_out = module.forward_train(columns) if self.uses_forward_train else {}
                    outputs = self.evaluate(module, columns, fwd_out)
                self.add_estimates(columns, outputs, chunk_lengths, module_id)
        return batch

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`. Adds the column `FORWARD_OUTPUTS` where they are computed anyway and may be kept."""
        if not hasattr(rows.module, "compute_values"):
            return
        keeps_forward = rows.keeps_forward and rows.device.type == "cpu" and not rows.module.is_stateful()
        outputs, fwd_out = self._evaluate_rows(rows, keeps_forward)
        self.add_estimates(rows.columns, outputs, rows.lengths, rows.module_id)
        leaves, num_rows = tree_leaves(fwd_out), (len(rows),)
        are_rows = all(hasattr(leaf, "detach") and leaf.shape[:1] == num_rows for leaf in leaves)
        if keeps_forward and leaves and are_rows:
            rows.columns[FORWARD_OUTPUTS] = fwd_out

    def _evaluate_rows(
        self, rows: TrainRows, keeps_graph: bool
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the result of `evaluate` for all rows, on the CPU; and of `forward_train` for the last block."""
        # On the CPU there is only one block. Columns that the module sets in its batch (an action mask taken out of the
        # observations) replace those of the train batch, as in `__call__`.
        import torch

        columns, device = rows.columns, rows.device
        leaves = tree_leaves(columns[Columns.OBS])
        per_block = num_rows = int(leaves[0].shape[0])
        if device.type != "cpu":
            bytes_per_row = sum(leaf[0].numel() * leaf.element_size() for leaf in leaves)
            per_block = max(1, _BLOCK_BYTES // max(1, bytes_per_row))
        parts = []
        rewritten: list[dict[str, Any]] = []
        fwd_out: dict[str, Any] = {}
        with torch.no_grad():
            for begin in range(0, num_rows, per_block):
                block = dict(columns)
                block.pop(Columns.INFOS, None)
                if device.type != "cpu":
                    at = slice(begin, begin + per_block)
                    for name, column in block.items():
                        block[name] = tree_map(lambda leaf, at=at: leaf[at].to(device), column)
                given = dict(block)
                if self.uses_forward_train:
                    with torch.set_grad_enabled(keeps_graph):
                        fwd_out = rows.module.forward_train(block)
                outputs = self.evaluate(rows.module, block, fwd_out)
                parts.append({name: out.cpu() for name, out in outputs.items()})
                rewritten.append(
                    {name: column for name, column in block.items() if column is not given.get(name)}
                )
        for name in rewritten[0] if rewritten else ():
            columns[name] = tree_map(
                lambda *leaves: torch.cat([leaf.cpu() for leaf in leaves]),
                *(block[name] for block in rewritten),
            )
        if len(parts) == 1:
            return parts[0], fwd_out
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, fwd_out

    def add_estimates(
        self,
        columns: dict[str, Any],
        outputs: dict[str, torch.Tensor],
        lengths: npt.NDArray[np.int64],
        module_id: Any,
    ) -> None:
        """Add the columns to one module's batch.

        Args:
            columns: The module's columns, ``[B, ...]`` or, with ``seq_lens``, ``[B, T, ...]``.
            outputs: The result of `evaluate`, ``[B]`` or ``[B, T]`` each.
            lengths: int64[C], number of rows of each chunk, in the order of the rows, including extra rows.
            module_id: Used in error texts.

        Raises:
            ValueError: See `__call__`.
        """
        outputs = dict(outputs)
        for name in self.adds:
            if name in outputs:
                columns[name] = outputs.pop(name)
        seq_lens = columns.get(Columns.SEQ_LENS)
        shape = tuple(next(iter(outputs.values())).shape)
        real = None
        if len(shape) == 2:
            if seq_lens is None:
                raise ValueError(
                    f"module {module_id!r}: compute_values returned shape {shape}; expected [B], or [B, T] "
                    f"for a batch with {Columns.SEQ_LENS!r}."
                )
            real = np.arange(shape[1]) < as_numpy(seq_lens)[:, None]

        given = {**columns, **outputs}
        values: dict[str, npt.NDArray[np.float64]] = {}
        for name in (Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS, *self.reads, *outputs):
            array = as_numpy(sampled_column(given, name, module_id))
            values[name] = (array if real is None else array[real]).astype(np.float64)
        terminated = values.pop(Columns.TERMINATEDS).astype(np.bool_)
        truncated = values.pop(Columns.TRUNCATEDS).astype(np.bool_)
        num_rows, extra = len(values[next(iter(outputs))]), np.cumsum(lengths) - 1
        if num_rows != extra[-1] + 1:
            raise ValueError(
                f"module {module_id!r}: expected one row per step of its episodes, {int(extra[-1]) + 1} (extra steps "
                f"included), got {num_rows}. Do all pieces add as many items as steps?"
            )
        if lengths.min() < 2 or not (terminated | truncated)[extra - 1].all():
            raise ValueError(
                f"module {module_id!r}: every chunk needs an extra step after its last one, to bootstrap from: put "
                "AddOneTsToEpisodesAndTruncate first in the pipeline."
            )
        is_step = np.ones(num_rows, np.bool_)
        is_step[extra] = False
        flat = ChunkRows(values, terminated, truncated, lengths, extra, is_step)
        device = getattr(next(iter(outputs.values())), "device", None)
        for name, result in (self.of_modules.get(module_id) or self).estimate(flat).items():
            padded = result if real is None else split_and_zero_pad(result, lengths, shape[1])
            columns[name] = to_tensor(padded, device)


# Lower bound of the standard deviation in the division of advantages, so that a batch of equal advantages gives zeros.
_STD_FLOOR = 1e-4


# Rewards may overflow. The learner skips minibatches whose loss is not finite.
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
        use_critic: Whether to use the module's values; otherwise they count as 0.
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
        use_critic: bool = True,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma = gamma
        self.lambda_ = lambda_
        self.standardize = standardize
        self.keeps_values = keeps_values
        self.use_critic = use_critic

    def evaluate(
        self, module: Any, columns: dict[str, Any], fwd_out: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        rewards = columns[Columns.REWARDS]
        values = module.compute_values(columns) if self.use_critic else rewards.new_zeros(rewards.shape)
        return {Columns.VF_PREDS: values}

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
