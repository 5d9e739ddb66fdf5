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
        num: How many samples.
        means: float64 array per leaf.
        m2s: float64 array per leaf, the sum of squared differences from the mean.
    """

    def __init__(
        self, num: int = 0, means: Sequence[Float64] | None = None, m2s: Sequence[Float64] | None = None
    ) -> None:
        self.num = num
        self.means: list[Float64] = list(means or ())
        self.m2s: list[Float64] = list(m2s or ())

    @classmethod
    def of_samples(cls, leaves: Sequence[Float64]) -> RunningStats:
        """The statistics of samples ``[num, ...]`` per leaf."""
        means = [leaf.mean(axis=0) for leaf in leaves]
        m2s = [np.square(leaf - mean).sum(axis=0) for leaf, mean in zip(leaves, means, strict=True)]
        return cls(len(leaves[0]), means, m2s)

    def merged(self, other: RunningStats) -> RunningStats:
        """The statistics of both sets of samples together."""
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
        """The sample standard deviation of one leaf; ones with fewer than two samples."""
        if self.num < 2:
            return np.ones_like(self.m2s[leaf]) if self.m2s else np.ones(())
        return np.sqrt(self.m2s[leaf] / (self.num - 1))

    def prefixes(self, leaf: int, samples: Float64) -> tuple[Float64, Float64]:
        """Mean and standard deviation after each further sample, without a loop.

        Args:
            leaf: Which leaf.
            samples: float64 ``[N, ...]``.

        Returns:
            ``(means, stds)``, float64 ``[N, ...]`` each: entry k counts samples 0 … k.
        """
        reference = self.means[leaf] if self.num else samples[0]
        differences = samples - reference
        counts = (self.num + 1 + np.arange(len(samples))).reshape(-1, *[1] * (samples.ndim - 1))
        sums = np.cumsum(differences, axis=0)
        m2s = np.cumsum(np.square(differences), axis=0) - np.square(sums) / counts
        if self.num:
            m2s += self.m2s[leaf]
        stds = np.sqrt(np.maximum(m2s, 0.0) / np.maximum(counts - 1, 1))
        if self.num == 0:
            stds[0] = 1.0
        return reference + sums / counts, stds

    def get_state(self) -> dict[str, Any]:
        """``{"num": int, "means": [float64 arrays], "m2s": [float64 arrays]}``."""
        return {"num": self.num, "means": list(self.means), "m2s": list(self.m2s)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> RunningStats:
        """The inverse of `get_state`."""
        return cls(
            int(state["num"]),
            [np.array(mean, np.float64) for mean in state["means"]],
            [np.array(m2, np.float64) for m2 in state["m2s"]],
        )
