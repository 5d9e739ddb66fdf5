"""GeneralAdvantageEstimation: advantages and value targets of every module's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlzmq.connectors.common.add_time_dim import split_and_zero_pad
from rlzmq.connectors.common.numpy_to_tensor import to_tensor
from rlzmq.connectors.connector_v2 import ConnectorV2, batch_key
from rlzmq.connectors.learner.gae import compute_gae, discounted_suffix_sums, standardize
from rlzmq.connectors.rl_modules import as_numpy, is_multi_rl_module
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns

if TYPE_CHECKING:
    import torch

__all__ = ["GeneralAdvantageEstimation"]


class GeneralAdvantageEstimation(ConnectorV2):
    """Adds ``advantages`` (standardised) and ``value_targets``, float32 tensors (arXiv:1506.02438).

    The last piece of a learner pipeline that begins with AddOneTsToEpisodesAndTruncate: the extra row of
    every chunk gives the value to bootstrap from. Values come from one batched
    ``rl_module[module_id].compute_values(batch[module_id])`` per module, without gradients; modules that
    have no `compute_values` are skipped. Extra and padded rows get zeros.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        gamma: Discount factor in [0, 1].
        lambda_: In [0, 1]: 0 is the one-step TD error, 1 the discounted return minus the value.
        compat: Standardise as RLlib does: over the extra rows too, whose advantages reach into the next
            chunk of the batch.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        gamma: float,
        lambda_: float,
        compat: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.gamma = gamma
        self.lambda_ = lambda_
        self.compat = compat

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        metrics: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See ConnectorV2; the batch is ``{module_id: {column: tensor}}`` (or one module's columns).

        Raises:
            ValueError: The batch's rows are not the episodes' steps, or a chunk has no extra row.
        """
        lengths: dict[Any, dict[Any, list[int]]] = {}
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            if len(episode):
                # Rows lie in the order in which keys came first.
                module_id = DEFAULT_MODULE_ID if episode.module_id is None else episode.module_id
                lengths.setdefault(module_id, {}).setdefault(batch_key(episode), []).append(len(episode))
        modules = rl_module if is_multi_rl_module(rl_module) else {DEFAULT_MODULE_ID: rl_module}
        for module_id, by_key in lengths.items():
            columns = batch if modules is not rl_module and module_id not in batch else batch.get(module_id)
            if columns is None or module_id not in modules:
                continue
            module = modules[module_id]
            if hasattr(module, "compute_values"):
                chunk_lengths = np.array([n for of_key in by_key.values() for n in of_key], np.int64)
                self.add_advantages(columns, _values(module, columns), chunk_lengths, module_id)
        return batch

    def add_advantages(
        self,
        columns: dict[str, Any],
        values: torch.Tensor,
        lengths: npt.NDArray[np.int64],
        module_id: Any,
    ) -> None:
        """Adds both columns to one module's batch; learners' fused path calls it with values of its own.

        Args:
            columns: The module's columns, ``[B, ...]`` or, with ``seq_lens``, ``[B, T, ...]``.
            values: V of every row, ``[B]`` or ``[B, T]``.
            lengths: int64[C], rows of each chunk in the order of the rows, extra ones included.
            module_id: For error texts.

        Raises:
            ValueError: As of calling the piece.
        """
        seq_lens = columns.get(Columns.SEQ_LENS)
        shape = tuple(values.shape)
        real = None
        if len(shape) == 2:
            if seq_lens is None:
                raise ValueError(
                    f"module {module_id!r}: compute_values returned shape {shape}; expected [B], or [B, T] "
                    "for a "
                    f"batch with {Columns.SEQ_LENS!r}."
                )
            real = np.arange(shape[1]) < as_numpy(seq_lens)[:, None]

        def rows(tensor: Any) -> npt.NDArray[Any]:
            array: npt.NDArray[Any] = as_numpy(tensor)
            return array if real is None else array[real]

        values_N = rows(values)
        if len(values_N) != lengths.sum():
            raise ValueError(
                f"module {module_id!r}: expected one row per step of its episodes, {int(lengths.sum())} "
                "(extra steps "
                f"included), got {len(values_N)}. Do all pieces add as many items as steps?"
            )
        advantages, targets = self._estimate(
            values_N.astype(np.float64),
            rows(columns[Columns.REWARDS]).astype(np.float64),
            rows(columns[Columns.TERMINATEDS]).astype(np.bool_),
            rows(columns[Columns.TRUNCATEDS]).astype(np.bool_),
            lengths,
            module_id,
        )
        for name, result in ((Columns.ADVANTAGES, advantages), (Columns.VALUE_TARGETS, targets)):
            padded = result if real is None else split_and_zero_pad(result, lengths, shape[1])
            columns[name] = to_tensor(padded, values.device if hasattr(values, "device") else None)

    def _estimate(
        self,
        values_N: npt.NDArray[np.float64],
        rewards_N: npt.NDArray[np.float64],
        terminated_N: npt.NDArray[np.bool_],
        truncated_N: npt.NDArray[np.bool_],
        lengths: npt.NDArray[np.int64],
        module_id: Any,
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """(advantages, value targets) of all rows, the extra ones included."""
        extra_rows = np.cumsum(lengths) - 1
        done_N = terminated_N | truncated_N
        if lengths.min() < 2 or not done_N[extra_rows - 1].all():
            raise ValueError(
                f"module {module_id!r}: every chunk needs an extra step after its last one, to bootstrap "
                "from: put "
                "AddOneTsToEpisodesAndTruncate first in the pipeline."
            )
        real_N = np.ones(len(values_N), np.bool_)
        real_N[extra_rows] = False
        bootstrap = np.where(terminated_N[extra_rows - 1], 0.0, values_N[extra_rows])
        real_advantages, real_targets = compute_gae(
            rewards_N[real_N],
            values_N[real_N],
            bootstrap,
            lengths - 1,
            gamma=self.gamma,
            lambda_=self.lambda_,
        )
        advantages = np.zeros(len(values_N), np.float32)
        targets = np.zeros(len(values_N), np.float32)
        targets[real_N] = real_targets
        if not self.compat:
            advantages[real_N] = standardize(real_advantages)
            return advantages, targets
        following = np.append(values_N[1:], 0.0)
        deltas = rewards_N + self.gamma * np.where(terminated_N, 0.0, following) - values_N
        ends = np.union1d(np.flatnonzero(done_N), [len(values_N) - 1])
        everywhere = discounted_suffix_sums(deltas, ends, self.gamma * self.lambda_)
        return standardize(everywhere.astype(np.float32)), targets

    def __repr__(self) -> str:
        return f"GeneralAdvantageEstimation(gamma={self.gamma}, lambda_={self.lambda_})"


def _values(module: Any, columns: dict[str, Any]) -> torch.Tensor:
    import torch

    with torch.no_grad():
        return module.compute_values(columns)  # type: ignore[no-any-return]
