"""Running mean and variance of arrays, mergeable across processes.

Merging is the parallel-variance formula of Chan, Golub & LeVeque (1979), "Updating formulae and a pairwise
algorithm for computing sample variances", eq. 2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["RunningStats"]

Float64 = npt.NDArray[np.float64]


class RunningStats:
    """Count, mean and sum of squared differences (M2) of samples that are lists of arrays.

    Attributes:
        num: Number of samples.
        means: float64 array per leaf.
        m2s: float64 array per leaf, the sum of squared differences from the mean.
    """

    def __init__(
        self, num: int = 0, means: Sequence[Float64] | None = None, m2s: Sequence[Float64] | None = None
    ) -> None:
        self.num = num
        self.means: list[Float64] = list(means or ())
        self.m2s: list[Float64] = list(m2s or ())

    def with_samples(self, leaves: Sequence[Float64]) -> RunningStats:
        """Return the statistics with additional samples ``[N, ...]`` per leaf."""
        num = self.num + len(leaves[0])
        means, m2s = [], []
        for leaf, samples in enumerate(leaves):
            reference = self.means[leaf] if self.num else samples[0]
            differences = samples - reference
            sums = np.add.reduce(differences, axis=0)
            shift = sums / num
            differences *= differences
            m2 = np.add.reduce(differences, axis=0) - sums * shift
            means.append(reference + shift)
            m2s.append(np.maximum(m2 + self.m2s[leaf] if self.num else m2, 0.0))
        return RunningStats(num, means, m2s)

    def merged(self, other: RunningStats) -> RunningStats:
        """Return the statistics of both sets of samples together."""
        if other.num == 0:
            return self
        if self.num == 0:
            return other
        num = self.num + other.num
        means, m2s = [], []
        for mean_a, m2_a, mean_b, m2_b in zip(self.means, self.m2s, other.means, other.m2s, strict=True):
            delta = mean_b - mean_a
            means.append(mean_a + delta * (other.num / num))
            m2s.append(m2_a + m2_b + np.square(delta) * (self.num * other.num / num))
        return RunningStats(num, means, m2s)

    def std(self, leaf: int) -> Float64:
        """Return the sample standard deviation of one leaf; ones if there are fewer than two samples."""
        if self.num < 2:
            return np.ones_like(self.m2s[leaf]) if self.m2s else np.ones(())
        return np.sqrt(self.m2s[leaf] / (self.num - 1))

    def prefixes(self, leaf: int, samples: Float64) -> tuple[Float64, Float64]:
        """Return the mean and M2 after each additional sample, without a loop.

        Args:
            leaf: Index of the leaf.
            samples: float64 ``[N, ...]``.

        Returns:
            ``(means, m2s)``, float64 ``[N, ...]`` each; entry k includes samples 0 … k.
        """
        num, ndim = self.num, samples.ndim
        reference = self.means[leaf] if num else samples[0]
        differences = samples - reference
        counts = np.arange(num + 1.0, num + len(samples) + 1.0)
        if ndim > 1:
            counts = counts.reshape(-1, *[1] * (ndim - 1))
        sums = np.add.accumulate(differences, axis=0)
        means = sums / counts
        differences *= differences
        m2s = np.add.accumulate(differences, axis=0)
        sums *= means
        m2s -= sums
        if num:
            m2s += self.m2s[leaf]
        np.maximum(m2s, 0.0, out=m2s)
        means += reference
        return means, m2s

    def get_state(self) -> dict[str, Any]:
        """Return ``{"num": int, "means": [float64 arrays], "m2s": [float64 arrays]}``."""
        return {"num": self.num, "means": list(self.means), "m2s": list(self.m2s)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RunningStats:
        """Create from a state of `get_state`."""
        return cls(
            int(state["num"]),
            [np.array(mean, np.float64) for mean in state["means"]],
            [np.array(m2, np.float64) for m2 in state["m2s"]],
        )
