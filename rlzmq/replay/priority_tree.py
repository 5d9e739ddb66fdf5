"""PriorityTree: sums of priorities, with vectorized sampling and updates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["PriorityTree"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

_FEW = 1024  # for fewer indices, recomputing a shared parent is cheaper than finding duplicates
_MOST_ROOTS = 1024  # one pass over so many costs less than ten more levels


class PriorityTree:
    """Priorities of `size` indices, initially 0. Indices with priority 0 are never drawn.

    Binary trees over the indices hold the sum below each node, up to 1024 roots at most. A parent is always computed
    from its children, so sums do not drift. Drawing or changing K indices takes a few array operations of length K per
    level, O(K log size) in all, and drawing one pass over the roots.

    Args:
        size: Number of indices, rounded up to a power of two.
    """

    def __init__(self, size: int) -> None:
        self.size: int = 1 << max(0, size - 1).bit_length()
        # The children of node i are 2i and 2i + 1, and the leaves are the last nodes.
        self._sums = np.zeros(2 * self.size)
        self._num_roots = min(self.size, _MOST_ROOTS)
        self._root_sums = self._sums[self._num_roots : 2 * self._num_roots]

    @property
    def total(self) -> float:
        """Sum of all priorities."""
        return float(self._root_sums.sum())

    def get(self, indices: IntArray) -> FloatArray:
        """Return the priorities of indices, float64 [K]."""
        priorities: FloatArray = self._sums[indices + self.size]
        return priorities

    def set(self, indices: IntArray, priorities: FloatArray | float) -> None:
        """Set priorities; if an index is given twice, the last value is used.

        Args:
            indices: int64 [K].
            priorities: float64 [K] or one number, >= 0.
        """
        if not len(indices):
            return
        nodes = indices + self.size
        sums = self._sums
        sums[nodes] = priorities
        if len(nodes) == 1:
            self._update_ancestors(int(nodes[0]))
            return
        while nodes[0] >= 2 * self._num_roots:
            nodes = nodes >> 1
            if len(nodes) > _FEW:
                nodes = np.unique(nodes)
            left = 2 * nodes
            sums[nodes] = sums[left] + sums[left + 1]

    def _update_ancestors(self, node: int) -> None:
        """Recompute the nodes above one leaf, without arrays of length 1."""
        sums = self._sums
        while node >= 2 * self._num_roots:
            node >>= 1
            sums[node] = sums[2 * node] + sums[2 * node + 1]

    def draw(self, num: int, rng: np.random.Generator) -> IntArray:
        """Return indices, int64 [num] in ascending order, with probabilities proportional to their priorities.

        The draws are stratified: the i-th one comes from the i-th of `num` equal parts of the sum.
        """
        ends = self._root_sums.cumsum()
        total = ends[-1]
        points = (np.arange(num) + rng.random(num)) * (total / max(num, 1))
        # Rounding errors must not lead past the last root with priorities.
        rest = np.minimum(points, np.nextafter(total, 0.0))
        roots = ends.searchsorted(rest, side="right")
        rest = np.maximum(rest - (ends[roots] - self._root_sums[roots]), 0.0)
        nodes: IntArray = roots + self._num_roots
        while nodes.size and nodes[0] < self.size:
            left = 2 * nodes
            below = self._sums[left]
            # Nor to a subtree without priorities.
            is_right = (rest >= below) & (self._sums[left + 1] > 0.0)
            rest -= below * is_right
            nodes = left + is_right
        return nodes - self.size

    def grown(self, size: int) -> PriorityTree:
        """Return a tree for more indices with the same priorities."""
        tree = PriorityTree(size)
        old = np.arange(self.size, dtype=np.int64)
        tree.set(old, self.get(old))
        return tree
