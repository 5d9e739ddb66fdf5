"""MeanStdFilter: normalizes observations to running mean 0 and standard deviation 1."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlzmq.connectors.connector_v2 import Batch, Memory, TorchPiece
from rlzmq.connectors.observation_pieces import ObservationPiece, agent_space
from rlzmq.connectors.rows import RowsContext
from rlzmq.core.spaces import leaf_spaces
from rlzmq.core.tree import tree_flatten
from rlzmq.episodes.columns import DEFAULT_AGENT_ID, Columns

__all__ = ["MeanStdFilter", "RunningStats"]

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


# Added to the standard deviation, so that constant features give 0 instead of 0 / 0.
_SMALL = 1e-6
# Bound of sums of squared differences: the range of float32, the dtype of observations.
_MOST = float(np.finfo(np.float32).max)


class MeanStdFilter(ObservationPiece):
    """Normalizes observations by the statistics of all observations seen so far, separately for each agent.

    Box parts become float32 ``(x - mean) / std``, clipped; other parts are unchanged. The result is written back into
    the episodes, so learners see it, too. The k-th observation of a call is normalized with statistics that include
    it and those before it. If fewer than two observations have been seen, the deviation counts as 1.

    Runners learn separately and are synchronized by `get_delta`, `merge_deltas` and `apply_merged_state` (or RLlib's
    `merge_states`). The exchanged data are (count, mean, M2) of the observations since the last synchronization. They
    are merged by the parallel-variance formula, so the merged filter equals one filter that saw all observations.

    Args:
        input_observation_space, input_action_space, multi_agent: See ObservationPiece.
        de_mean_to_zero: Whether to subtract the mean.
        de_std_to_one: Whether to divide by the standard deviation.
        clip_by_value: Bound c: results are clipped to [-c, c]; None: no clipping.
        update_stats: Whether to learn from the observations; False in evaluation.
    """

    writes_episodes: ClassVar[bool] = True

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        de_mean_to_zero: bool = True,
        de_std_to_one: bool = True,
        clip_by_value: float | None = 10.0,
        update_stats: bool = True,
        multi_agent: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space, multi_agent=multi_agent)
        self.de_mean_to_zero = de_mean_to_zero
        self.de_std_to_one = de_std_to_one
        self.clip_by_value = clip_by_value
        self._update_stats = update_stats
        self._box_indices: dict[Any, list[int]] = {}
        # By agent id (DEFAULT_AGENT_ID in single-agent use): the statistics at the last synchronization, those since
        # then, and both together.
        self._base: dict[Any, RunningStats] = {}
        self._delta: dict[Any, RunningStats] = {}
        self._total: dict[Any, RunningStats] = {}

    # -- spaces ---------------------------------------------------------------------------------

    def recompute_output_observation_space(
        self, input_observation_space: Any, input_action_space: Any
    ) -> Any:
        """See ObservationPiece."""
        self._box_indices = {}
        return super().recompute_output_observation_space(input_observation_space, input_action_space)

    def new_space(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], agent_id: Hashable
    ) -> Any:
        """Return the space with Box parts replaced by float32 Boxes bounded by `clip_by_value`."""
        return self._filtered_space(observation_space)

    def _filtered_space(self, space: gym.Space[Any]) -> Any:
        if isinstance(space, gym.spaces.Dict):
            return gym.spaces.Dict({key: self._filtered_space(part) for key, part in space.spaces.items()})
        if isinstance(space, gym.spaces.Tuple):
            return gym.spaces.Tuple([self._filtered_space(part) for part in space.spaces])
        if not isinstance(space, gym.spaces.Box):
            return space
        bound = np.inf if self.clip_by_value is None else self.clip_by_value
        return gym.spaces.Box(-bound, bound, space.shape, np.float32)

    # -- calling --------------------------------------------------------------------------------

    def transform_observations(self, observations: Any, rows: RowsContext) -> Any:
        """See ConnectorV2. Updates the statistics once with every row."""
        agent_id = rows.agent_id
        is_array = type(observations) is np.ndarray
        leaves, spec = ([observations], None) if is_array else tree_flatten(observations)
        chosen = self._box_leaves(agent_id, len(leaves))
        samples = [np.asarray(leaves[i], np.float64) for i in chosen]
        if not samples or not len(samples[0]):
            return observations
        key = DEFAULT_AGENT_ID if agent_id is None else agent_id
        stats = self._total.get(key) or RunningStats()
        learned = self._learned(stats, leaves, chosen, samples) if self._update_stats else None
        if learned is None:
            for position, (leaf, values) in enumerate(zip(chosen, samples, strict=True)):
                mean = stats.means[position] if stats.num else np.zeros(())
                leaves[leaf] = self._normalised(values, mean, stats.std(position))
        else:
            self._total[key] = learned
            delta = self._delta.get(key)
            self._delta[key] = (RunningStats() if delta is None else delta).with_samples(samples)
        return leaves[0] if spec is None else spec.unflatten(leaves)

    def _learned(
        self, stats: RunningStats, leaves: list[Any], chosen: list[int], samples: list[Any]
    ) -> RunningStats | None:
        """Return the statistics with these samples, and put the filtered samples into their `leaves`."""
        # None, without changes, if a sample is NaN, infinite or absurd, since it would stay in the statistics forever.
        filtered = []
        num = stats.num + len(samples[0])
        degrees_of_freedom = np.arange(stats.num, num, dtype=np.float64)
        if stats.num == 0:
            degrees_of_freedom[0] = 1.0
        means, m2s = [], []
        for position, values in enumerate(samples):
            mean, m2 = stats.prefixes(position, values)
            std = m2 / degrees_of_freedom.reshape(-1, *[1] * (values.ndim - 1))
            np.sqrt(std, out=std)
            if stats.num == 0:
                std[0] = 1.0
            if not np.maximum.reduce(m2[-1], axis=None) < _MOST:  # nor is NaN
                return None
            filtered.append(self._normalised(values, mean, std))
            means.append(mean[-1])
            m2s.append(m2[-1])
        for leaf, values in zip(chosen, filtered, strict=True):
            leaves[leaf] = values
        return RunningStats(num, means, m2s)

    def _normalised(self, values: Any, mean: Any, std: Any) -> npt.NDArray[np.float32]:
        if self.de_mean_to_zero:
            values = values - mean
        if self.de_std_to_one:
            values = values / (std + _SMALL)
        clip = self.clip_by_value
        if clip is not None:
            values = np.minimum(np.maximum(values, -clip), clip)
        return values.astype(np.float32)  # type: ignore[no-any-return]

    def _box_leaves(self, agent_id: object, num_leaves: int) -> list[int]:
        """Return the indices of the leaves to filter: those of Box spaces, or all leaves while the space is unknown."""
        indices = self._box_indices.get(agent_id)
        if indices is None:
            space = agent_space(self.input_observation_space, agent_id)
            if space is None:
                return list(range(num_leaves))
            spaces = leaf_spaces(space)
            indices = [i for i, leaf in enumerate(spaces) if isinstance(leaf, gym.spaces.Box)]
            self._box_indices[agent_id] = indices
        return indices

    def freeze_statistics(self) -> None:
        """Stop learning from observations."""
        self._update_stats = False

    # -- state ----------------------------------------------------------------------------------

    def _sum_up(self, key: object) -> None:
        nothing = RunningStats()
        self._total[key] = self._base.get(key, nothing).merged(self._delta.get(key, nothing))

    def get_state(
        self,
        components: str | Sequence[str] | None = None,
        *,
        not_components: str | Sequence[str] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """Return ``{agent_id: {"base": stats, "delta": stats, "total": stats}}``; single-agent: ``"default_agent"``.

        `base` has the statistics at the last synchronization, `delta` those since then, `total` both. Stats are
        ``{"num": int, "means": [arrays], "m2s": [arrays]}``, one array per Box part.
        """
        nothing = RunningStats()
        return {
            key: {
                "base": self._base.get(key, nothing).get_state(),
                "delta": self._delta.get(key, nothing).get_state(),
                "total": total.get_state(),
            }
            for key, total in self._total.items()
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state from `get_state` exactly."""
        self.reset_state()
        for key, of_agent in state.items():
            self._base[key] = RunningStats.from_state(of_agent["base"])
            self._delta[key] = RunningStats.from_state(of_agent["delta"])
            self._total[key] = RunningStats.from_state(of_agent["total"])

    def reset_state(self) -> None:
        """Reset all statistics."""
        self._base, self._delta, self._total = {}, {}, {}

    def merge_states(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge the deltas of all `states` into their latest common base. The result's delta is empty."""
        merged = {}
        for key in dict.fromkeys([*self._base, *(key for state in states for key in state)]):
            of_agent = [state[key] for state in states if key in state]
            bases = [self._base.get(key, RunningStats())]
            bases.extend(RunningStats.from_state(part["base"]) for part in of_agent)
            stats = max(bases, key=lambda base: base.num)
            for part in of_agent:
                stats = stats.merged(RunningStats.from_state(part["delta"]))
            merged[key] = {
                "base": stats.get_state(),
                "delta": RunningStats().get_state(),
                "total": stats.get_state(),
            }
        return merged

    def get_delta(self) -> dict[str, Any]:
        """Return ``{agent_id: stats}`` of the samples since the last call, and add them to the base."""
        delta = {key: stats.get_state() for key, stats in self._delta.items() if stats.num}
        self._base = dict(self._total)
        self._delta = {}
        return delta

    def merge_deltas(self, deltas: Sequence[dict[str, Any]]) -> None:
        """Merge other copies' deltas into the base, in the given order."""
        for delta in deltas:
            for key, stats in delta.items():
                base = self._base.get(key, RunningStats())
                self._base[key] = base.merged(RunningStats.from_state(stats))
                self._sum_up(key)

    def apply_merged_state(self, state: dict[str, Any]) -> None:
        """Use the merged statistics as base, and keep those since the last `get_delta` on top."""
        for key, of_agent in state.items():
            base = RunningStats.from_state(of_agent["base"])
            self._base[key] = base.merged(RunningStats.from_state(of_agent["delta"]))
        for key in self._base:
            self._sum_up(key)

    def __repr__(self) -> str:
        nums = {key: stats.num for key, stats in self._total.items()}
        return f"MeanStdFilter(num_seen={nums}, update_stats={self._update_stats})"

    def to_torch(self, *, rl_module: Any, agent_id: Any) -> TorchPiece:
        """See ConnectorV2. The statistics become constants, in float64 as in `__call__`."""
        import torch

        space = agent_space(self.input_observation_space, agent_id)
        stats = self._total.get(DEFAULT_AGENT_ID if agent_id is None else agent_id) or RunningStats()
        # Leaf -> (mean, deviation), as clones, so that later samples do not change them.
        constants = {
            leaf: tuple(
                torch.tensor(value, dtype=torch.float64)
                for value in (stats.means[position] if stats.num else np.zeros(()), stats.std(position))
            )
            for position, leaf in enumerate(self._box_leaves(agent_id, len(leaf_spaces(space))))
        }

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            leaves, spec = tree_flatten(batch[Columns.OBS])
            for leaf, (mean, std) in constants.items():
                values = leaves[leaf].to(torch.float64)
                if self.de_mean_to_zero:
                    values = values - mean
                if self.de_std_to_one:
                    values = values / (std + _SMALL)
                if self.clip_by_value is not None:
                    values = values.clamp(-self.clip_by_value, self.clip_by_value)
                leaves[leaf] = values.to(torch.float32)
            return {**batch, Columns.OBS: spec.unflatten(leaves)}, memory

        return TorchPiece(forward=forward)
