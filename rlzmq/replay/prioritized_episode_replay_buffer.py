"""PrioritizedEpisodeReplayBuffer: samples steps in proportion to priorities (Schaul et al. 2016)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.replay.episode_replay_buffer import _SLOT_MASK, EpisodeReplayBuffer, IntArray, as_batches
from rlzmq.replay.step_store import PRIORITY, StepStore, Stretch

__all__ = ["PrioritizedEpisodeReplayBuffer", "PriorityTree"]

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


# A smaller priority is as good as never drawn, and its weight would scale down all others.
_LEAST_PRIORITY = 1e-6


class PrioritizedEpisodeReplayBuffer(EpisodeReplayBuffer):
    """An EpisodeReplayBuffer with priorities (arXiv:1511.05952): step i is drawn with probability p_i^α / Σ p_j^α.

    A new step gets the highest priority of any step so far (initially 1), and none has less than 1e-6. Draws are
    stratified: each comes from another of equal parts of Σ p_j^α. The column ``weights`` of samples is (N P_i)^-β
    divided by the largest such weight in the sample. A sequence has the weight of the drawn step, whose key is in the
    column ``priority_key``.

    Args:
        capacity, options: See `EpisodeReplayBuffer`.
        alpha: α, >= 0; 0 draws uniformly.
    """

    uses_priorities: ClassVar[bool] = True
    _counts = (*EpisodeReplayBuffer._counts, "_greatest")

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        alpha: float = 1.0,
        **options: Any,
    ) -> None:
        if alpha < 0.0:
            raise ValueError(f"{type(self).__name__}: expected alpha >= 0, got {alpha}.")
        self.alpha = alpha
        self._tree = PriorityTree(1)
        self._greatest = 1.0
        self._drawn: IntArray = np.empty(0, np.int64)
        super().__init__(capacity, **options)

    def _new_store(self) -> StepStore:
        self._tree = PriorityTree(1)
        return StepStore(
            self.capacity,
            lambda slots: self._tree.set(slots, 0.0),
            keeps_extra_model_outputs=self._keeps_extra_model_outputs,
        )

    def add(self, episodes: object, weight: float | None = None) -> None:
        """Add episodes; see `EpisodeReplayBuffer.add`.

        Args:
            episodes: See `EpisodeReplayBuffer.add`.
            weight: Priority of the new steps; None: the highest so far.
        """
        for batch in as_batches(episodes):
            self._add(batch, weight)

    def _append(
        self,
        batch: EpisodeBatch,
        weight: float | None = None,
        owners: Sequence[Stretch] | None = None,
    ) -> IntArray:
        steps = super()._append(batch, None, owners)
        if self._tree.size < self._store.num_slots:
            self._tree = self._tree.grown(self._store.num_slots)
        if (stored := batch.columns.get(PRIORITY)) is not None:  # the batch is of a state
            self._tree.set(steps, stored[batch.step_slots()])
        else:
            priority = self._greatest if weight is None else max(weight, _LEAST_PRIORITY)
            self._tree.set(steps, priority**self.alpha)
        return steps

    def _draw(self, num: int, rng: np.random.Generator) -> IntArray:
        return self._tree.draw(num, rng)

    def _weights(self, slots: IntArray, beta: float) -> NDArray[np.float32]:
        self._drawn = self._keys(slots)
        priorities = self._tree.get(slots)
        weights: NDArray[np.float32] = ((priorities / priorities.min()) ** -beta).astype(np.float32)
        return weights

    def _of_drawn(self, slots: IntArray, beta: float) -> dict[str, NDArray[Any]]:
        return {"weights": self._weights(slots, beta), "priority_key": self._drawn}

    def update_priorities(self, td_errors: object, keys: object = None) -> None:
        """Update the priorities of steps. Steps that have been evicted in the meantime are ignored.

        Args:
            td_errors: float [K], any sign.
            keys: int64 [K], values of the column ``replay_key`` of samples, in any order; None: all transitions of the
                last `sample`, in its order.

        Raises:
            ValueError: The lengths differ, or an error is not finite.
        """
        errors = np.abs(np.asarray(td_errors, np.float64))
        keys = self._drawn if keys is None else np.asarray(keys, np.int64)
        if errors.shape != keys.shape or errors.ndim != 1:
            raise ValueError(
                f"{type(self).__name__}.update_priorities: expected as many errors as keys, one dimension, got "
                f"{errors.shape} and {keys.shape}."
            )
        if not np.isfinite(errors).all():
            raise ValueError(f"{type(self).__name__}.update_priorities: an error is NaN or infinite.")
        slots, known = keys & _SLOT_MASK, self._is_stored(keys)
        if not known.any():
            return
        priorities = np.maximum(errors[known], _LEAST_PRIORITY)
        self._greatest = max(self._greatest, float(priorities.max()))
        self._tree.set(slots[known], priorities**self.alpha)

    def _stored(self) -> EpisodeBatch:
        batch = super()._stored()
        batch.columns[PRIORITY] = self._tree.get(self._store.ordered_slots()[1])
        return batch

    def set_state(self, state: Mapping[str, Any]) -> None:
        super().set_state(state)
        self._drawn = np.empty(0, np.int64)
