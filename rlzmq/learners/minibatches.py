"""Minibatches of a train batch: equal in size, with a number known in advance."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import optree
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlzmq.episodes.columns import Columns

__all__ = ["CyclicRows", "MinibatchIterator", "ModuleRows", "num_minibatches_of"]

# Size of the blocks in which minibatches are gathered. One kernel per column serves many minibatches, and a block still
# fits into a core's cache.
_BLOCK_BYTES = 4 * 2**20
# A train batch up to this size is moved to the GPU at once; a larger one stays in host memory and is moved in blocks.
_RESIDENT_BYTES = 256 * 2**20


def num_minibatches_of(num_rows: int, minibatch_rows: int | None, num_epochs: int) -> int:
    """Return how many minibatches use every row at least `num_epochs` times: ``ceil(epochs * rows / minibatch)``.

    Without a minibatch size, every epoch is one minibatch of all rows.
    """
    if num_rows == 0:
        return 0
    return num_epochs if minibatch_rows is None else -(-num_epochs * num_rows // minibatch_rows)


class CyclicRows:
    """An endless stream of row indices, epoch after epoch.

    Args:
        num_rows: Number of rows in the batch, ≥ 1.
        rng: Generator of each epoch's permutation, including the first; None: no permutation.
    """

    def __init__(self, num_rows: int, rng: np.random.Generator | None) -> None:
        if num_rows < 1:
            raise ValueError(f"CyclicRows: expected at least one row, got {num_rows}.")
        self._num_rows = num_rows
        self._rng = rng
        self._rest = np.empty(0, np.int64)

    def take(self, num_indices: int) -> NDArray[np.int64]:
        """Return the next `num_indices` indices, int64 [num_indices]."""
        parts = [self._rest]
        missing = num_indices - self._rest.size
        while missing > 0:
            epoch = np.arange(self._num_rows) if self._rng is None else self._rng.permutation(self._num_rows)
            parts.append(epoch)
            missing -= self._num_rows
        stream = np.concatenate(parts) if len(parts) > 1 else self._rest
        self._rest = stream[num_indices:]
        return stream[:num_indices]


class ModuleRows:
    """One module's train batch, and the stream of its minibatches.

    Args:
        columns: Column name → tensor, or a tree (dict, tuple, list) of tensors, each ``[num_rows, ...]``. The
            column ``infos`` remains a list.
        minibatch_rows: Number of rows per minibatch; None: all rows.
        rng: Generator of the permutations; None: no permutation.
        device: Device of the minibatches.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        minibatch_rows: int | None,
        rng: np.random.Generator | None,
        device: torch.device,
    ) -> None:
        columns = dict(columns)
        self._infos: list[Any] | None = columns.pop(Columns.INFOS, None)
        leaves: list[Any] = list(columns.values())
        self._names, self._treespec = list(columns), None
        if set(map(type, leaves)) != {Tensor}:  # trees or arrays
            leaves, self._treespec = optree.tree_flatten(columns)  # type: ignore[arg-type]
            leaves = [leaf if isinstance(leaf, Tensor) else _as_tensor(leaf) for leaf in leaves]
        self._leaves = leaves
        if not self._leaves:
            raise ValueError("a module's train batch has no columns")
        self.num_rows: int = int(self._leaves[0].shape[0])
        lead = (self.num_rows,)
        if [leaf for leaf in self._leaves if leaf.shape[:1] != lead]:
            self._check_rows(columns)
        self.minibatch_rows: int = minibatch_rows or self.num_rows
        # Every minibatch contains all rows, so their order does not matter and no row is moved.
        self._whole = self.minibatch_rows == self.num_rows
        self._stream = None if self._whole else CyclicRows(self.num_rows, rng)
        self._device = device
        if device.type != "cpu":
            resident = self._whole or self._num_bytes <= _RESIDENT_BYTES
            self._leaves = [
                _pinned(leaf).to(device, non_blocking=True) if resident else leaf for leaf in self._leaves
            ]

    def minibatches(self, num_minibatches: int) -> Iterator[dict[str, Any]]:
        """Yield the next `num_minibatches` minibatches: column name → tree of ``[minibatch_rows, ...]``."""
        if self._stream is None:
            for _ in range(num_minibatches):
                yield self._assemble(self._leaves, None)
            return
        row_bytes = self._num_bytes // self.num_rows
        per_block = max(1, _BLOCK_BYTES // max(1, row_bytes * self.minibatch_rows))
        while num_minibatches > 0:
            block = min(per_block, num_minibatches)
            num_minibatches -= block
            rows = self._stream.take(block * self.minibatch_rows)
            indices = torch.from_numpy(rows)
            columns = [self._gather(leaf, indices, block) for leaf in self._leaves]
            for i, leaves in enumerate(zip(*columns, strict=True)):
                mine = rows[i * self.minibatch_rows : (i + 1) * self.minibatch_rows]
                yield self._assemble(leaves, mine)

    @property
    def _num_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self._leaves)

    def _gather(self, leaf: Tensor, indices: Tensor, block: int) -> tuple[Tensor, ...]:
        if leaf.device != self._device:
            gathered = _pinned(leaf.index_select(0, indices)).to(self._device, non_blocking=True)
        else:
            gathered = leaf.index_select(0, indices.to(self._device, non_blocking=True))
        return gathered.view(block, self.minibatch_rows, *leaf.shape[1:]).unbind(0)

    def _assemble(self, leaves: Any, rows: NDArray[np.int64] | None) -> dict[str, Any]:
        minibatch: dict[str, Any]
        if self._treespec is None:
            minibatch = dict(zip(self._names, leaves, strict=True))
        else:
            minibatch = optree.tree_unflatten(self._treespec, leaves)  # type: ignore[assignment]
        if self._infos is not None:
            minibatch[Columns.INFOS] = self._infos if rows is None else [self._infos[row] for row in rows]
        return minibatch

    def _check_rows(self, columns: Mapping[str, Any]) -> None:
        for name, column in columns.items():
            for leaf in optree.tree_leaves(column):
                shape = tuple(np.shape(leaf))
                if not shape or shape[0] != self.num_rows:
                    raise ValueError(
                        f"train batch column {name!r}: expected {self.num_rows} rows, as many as column "
                        f"{min(columns)!r} has, got shape {shape}."
                    )


class MinibatchIterator:
    """Minibatches of a batch of one or several modules, epoch after epoch.

    Each module's rows form an endless cycle (with a new permutation per epoch), cut into minibatches of exactly
    `minibatch_size` rows. A minibatch larger than the module's batch repeats rows. Each module has as many minibatches
    as cover its rows `num_epochs` times. Iteration ends when every module had its own; those of a module with fewer
    rows than the largest one are spread evenly over it, and the others lack this module.

    Args:
        batch: Module id → column name → tensor (or tree of tensors), ``[rows, ...]`` each.
        minibatch_size: Timesteps per minibatch; None: the whole batch. If a row holds several timesteps (``[B, T,
            ...]``, see `timesteps`), a minibatch has as many rows as contain that many timesteps on average, at least
            one.
        num_epochs: Minimum number of uses of each row.
        shuffle: Whether to draw a new permutation for every epoch, including the first; otherwise rows keep their
            order.
        seed: Seed of the permutations. Each module has an independent stream.
        num_minibatches: Number of minibatches of the module with the most; replaces the one derived from `num_epochs`.
        timesteps: Module id → real timesteps in its batch, for modules whose rows hold several.
        device: Device of the minibatches.

    Attributes:
        modules: The rows of each module that has some.
        num_of_modules: Module id → number of its minibatches; may be replaced before the iteration, e.g. by the numbers
            that all ranks agreed on.
    """

    def __init__(
        self,
        batch: Mapping[str, Mapping[str, Any]],
        *,
        minibatch_size: int | None,
        num_epochs: int,
        shuffle: bool,
        seed: int,
        num_minibatches: int | None = None,
        timesteps: Mapping[str, int] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_epochs < 1 or (minibatch_size is not None and minibatch_size < 1):
            raise ValueError(
                f"expected num_epochs ≥ 1 and minibatch_size ≥ 1 (or None), "
                f"got {num_epochs} and {minibatch_size}."
            )
        self.modules: dict[str, ModuleRows] = {}
        for module_id in sorted(batch):
            num_rows = _num_rows(batch[module_id])
            if num_rows == 0:
                continue
            num_timesteps = (timesteps or {}).get(module_id, num_rows)
            rows = minibatch_size
            if rows is not None and num_timesteps != num_rows:
                rows = max(1, num_rows * rows // max(1, num_timesteps))
            rng = np.random.default_rng([seed, zlib.crc32(module_id.encode())]) if shuffle else None
            self.modules[module_id] = ModuleRows(batch[module_id], rows, rng, torch.device(device))
        self.num_of_modules: dict[str, int] = {
            module_id: num_minibatches_of(
                rows.num_rows, None if minibatch_size is None else rows.minibatch_rows, num_epochs
            )
            for module_id, rows in self.modules.items()
        }
        if num_minibatches is not None and self.modules:
            most = len(self)
            for module_id, num in self.num_of_modules.items():
                self.num_of_modules[module_id] = -(-num * num_minibatches // most)

    def __len__(self) -> int:
        return max(self.num_of_modules.values(), default=0)

    def due(self, index: int) -> list[str]:
        """Return the ids of the modules that the minibatch with this index trains, on any rank."""
        total = len(self)
        return [
            m for m, num in self.num_of_modules.items() if (index + 1) * num // total > index * num // total
        ]

    def __iter__(self) -> Iterator[dict[str, dict[str, Any]]]:
        streams = {
            module_id: rows.minibatches(self.num_of_modules[module_id])
            for module_id, rows in self.modules.items()
        }
        for index in range(len(self)):
            yield {
                module_id: next(streams[module_id]) for module_id in self.due(index) if module_id in streams
            }


def _num_rows(columns: Mapping[str, Any]) -> int:
    for name, column in columns.items():
        if name == Columns.INFOS:
            continue
        for leaf in (column,) if isinstance(column, Tensor) else optree.tree_leaves(column):
            return int(np.shape(leaf)[0])
    return 0


def _as_tensor(leaf: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(leaf))


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()
