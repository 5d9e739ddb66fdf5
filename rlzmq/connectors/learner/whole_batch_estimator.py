"""WholeBatchEstimator: base class of learner pieces that use the module's outputs on the whole batch."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from rlzmq.connectors.common.layout import split_and_zero_pad, to_tensor
from rlzmq.connectors.connector_v2 import LAST_STAGE, ConnectorV2
from rlzmq.connectors.rl_modules import is_multi_rl_module
from rlzmq.connectors.rows import TrainRows
from rlzmq.core.tree import as_numpy, tree_leaves, tree_map
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns

if TYPE_CHECKING:
    import torch

__all__ = ["FORWARD_OUTPUTS", "ChunkRows", "WholeBatchEstimator"]

FORWARD_OUTPUTS = "fwd_out"
"""Column of a train batch: the outputs of `forward_train` on its rows, with their graph, for the loss."""

# On a GPU, the forward pass is split into blocks of this many bytes of observations.
_BLOCK_BYTES = 256 * 2**20


@dataclass(frozen=True)
class ChunkRows:
    """One module's rows without padding, chunk after chunk; each chunk's extra row comes last.

    Attributes:
        columns: ``rewards``, the estimator's `reads`, and the outputs of `evaluate`: float64 arrays [N].
        terminated_N, truncated_N: Whether the episode ended with this row's step.
        lengths_C: Number of rows of each chunk, including the extra one.
    """

    columns: dict[str, npt.NDArray[np.float64]]
    terminated_N: npt.NDArray[np.bool_]
    truncated_N: npt.NDArray[np.bool_]
    lengths_C: npt.NDArray[np.int64]

    @property
    def extra_C(self) -> npt.NDArray[np.int64]:
        """Index of each chunk's extra row."""
        return np.cumsum(self.lengths_C) - 1

    @property
    def real_N(self) -> npt.NDArray[np.bool_]:
        """Whether each row is a step, not an extra row."""
        real = np.ones(len(self.terminated_N), np.bool_)
        real[self.extra_C] = False
        return real

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
        uses_forward_train: Whether `evaluate` needs the outputs of the module's `forward_train`. An update with one
            minibatch per batch then computes its loss from the same outputs, without a second pass.
    """

    stage: ClassVar[int] = LAST_STAGE + 1
    reads: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    uses_forward_train: bool = False

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
        if keeps_forward and _are_rows(fwd_out, len(rows)):
            rows.columns[FORWARD_OUTPUTS] = fwd_out

    def _evaluate_rows(
        self, rows: TrainRows, keeps_graph: bool
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the result of `evaluate` for all rows, on the CPU; and that of `forward_train`.

        The latter is that of the last block of rows; on the CPU there is only one. Columns that the module sets in its
        batch (an action mask taken out of the observations) replace those of the train batch, as in `__call__`.
        """
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
                block = {
                    name: tree_map(
                        lambda leaf, at=slice(begin, begin + per_block): leaf[at].to(device), column
                    )
                    for name, column in columns.items()
                    if name != Columns.INFOS
                }
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

        def rows(tensor: Any) -> npt.NDArray[Any]:
            array: npt.NDArray[Any] = as_numpy(tensor)
            return array if real is None else array[real]

        given = {name: columns[name] for name in (Columns.REWARDS, *self.reads)} | outputs
        flat = ChunkRows(
            {name: rows(tensor).astype(np.float64) for name, tensor in given.items()},
            rows(columns[Columns.TERMINATEDS]).astype(np.bool_),
            rows(columns[Columns.TRUNCATEDS]).astype(np.bool_),
            lengths,
        )
        _check(flat, next(iter(outputs)), module_id)
        device = getattr(next(iter(outputs.values())), "device", None)
        for name, result in self.estimate(flat).items():
            padded = result if real is None else split_and_zero_pad(result, lengths, shape[1])
            columns[name] = to_tensor(padded, device)


def _check(rows: ChunkRows, output: str, module_id: object) -> None:
    num_rows = len(rows.columns[output])
    if num_rows != rows.lengths_C.sum():
        raise ValueError(
            f"module {module_id!r}: expected one row per step of its episodes, {int(rows.lengths_C.sum())} "
            f"(extra steps included), got {num_rows}. Do all pieces add as many items as steps?"
        )
    done_N = rows.terminated_N | rows.truncated_N
    if rows.lengths_C.min() < 2 or not done_N[rows.extra_C - 1].all():
        raise ValueError(
            f"module {module_id!r}: every chunk needs an extra step after its last one, to bootstrap from: "
            "put AddOneTsToEpisodesAndTruncate first in the pipeline."
        )


def _are_rows(outputs: dict[str, Any], num_rows: int) -> bool:
    """Return whether there are outputs, all of them tensors with a row for each of the batch's."""
    leaves = tree_leaves(outputs)
    return bool(leaves) and all(hasattr(leaf, "detach") and leaf.shape[:1] == (num_rows,) for leaf in leaves)
