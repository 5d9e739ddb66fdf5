"""Plans, leases, schedules and seeds: the numbers that serial and distributed runs have in common.

An UpdatePlan is the training data of an update, as one value that every layer reads. A lease is the permission to
sample a number of vector steps, the only flow control; a run in one process plans it as if it had one runner.
"""

from __future__ import annotations

import math
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from rlzmq.core.errors import ConfigurationError

__all__ = [
    "ReplayRatio",
    "Schedule",
    "UpdatePlan",
    "derive_seed",
    "plan_lease",
    "small_lease",
    "step_allowance",
]


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """How much fresh data an update takes, and how old it may be.

    The config creates it (`AlgorithmConfig.update_plan`). The driver uses it to open updates, the broker to grant
    leases, and a run in one process to sample.

    Attributes:
        env_steps_per_rank: Fresh env steps of one update for each learner rank, at least (with S = 0 all that was
            sampled for it) or exactly (S >= 1); 0: an update needs none (offline
            data), and nothing is sampled.
        num_ranks: Number of learner ranks that share a batch. It does not change while a rank is missing.
        fragment_length: Vector steps of a full lease.
        staleness: S. 0: an update trains exactly on data sampled with the weights it starts from. S >= 1: runners
            sample up to S batches ahead, and no trained step is more than S versions old.
        max_policy_lag: Data older than this many versions is dropped, and counted as ``stale``.
        train_ratio: Trained env steps, counting repetitions, per env step that an update takes; 0: the batch source
            decides. With a ratio, an update trains as many batches as are due and is then committed; sampling waits
            for it, at most S + 1 updates ahead.
        warm_up: With a ratio, the number of env steps taken before the first one is trained.
        keeps_episodes: Whether all chunks of an episode go to the same rank, for sources that join them (n-step sums,
            sequences). A rank's part is the data of its environments. A
            runner with a multi-agent environment sends all its episodes to one rank.
        open_updates: Number of updates that the driver keeps open at the same time.
    """

    env_steps_per_rank: int
    num_ranks: int
    fragment_length: int
    staleness: int = 0
    max_policy_lag: int = 0
    train_ratio: float = 0.0
    warm_up: int = 0
    keeps_episodes: bool = False
    open_updates: int = 1

    @property
    def num_env_steps(self) -> int:
        """Number of fresh env steps of one update over all ranks."""
        return self.env_steps_per_rank * self.num_ranks


_ROUNDING = 1e-6  # env steps


class ReplayRatio:
    """Computes the number of batches that an update trains to reach a given ratio of trained to sampled env steps.

    All ranks have the same counts: fresh and trained env steps of all ranks together. The ratio therefore survives
    the loss of a rank, and a remainder after whole batches counts for the next update: the trained steps never differ
    from ``ratio × (sampled − warm_up)`` by a batch of all ranks or more.

    Args:
        ratio: Trained env steps, counting repetitions, per sampled env step, > 0.
        warm_up: Number of env steps sampled before the first one is trained; they do not count.
    """

    num_sampled: int
    num_trained: int

    def __init__(self, ratio: float, warm_up: int = 0) -> None:
        if ratio <= 0.0:
            raise ValueError(f"ReplayRatio: expected a ratio > 0, got {ratio}.")
        self.ratio = ratio
        self.warm_up = warm_up
        self.num_sampled = self.num_trained = 0

    def sampled(self, num_env_steps: int) -> None:
        """Add fresh env steps, summed over all ranks."""
        self.num_sampled += num_env_steps

    def take(self, batch: int) -> int:
        """Return the number of due batches of `batch` env steps (over all ranks), and count them as trained."""
        due = self.ratio * self.num_counted - self.num_trained
        num_batches = max(0, int((due + _ROUNDING) // batch))
        self.num_trained += num_batches * batch
        return num_batches

    @property
    def num_counted(self) -> int:
        """Number of env steps sampled since the warm-up."""
        return max(0, self.num_sampled - self.warm_up)

    def get_state(self) -> dict[str, int]:
        """Return the counts."""
        return {"num_sampled": self.num_sampled, "num_trained": self.num_trained}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the counts."""
        self.num_sampled, self.num_trained = int(state["num_sampled"]), int(state["num_trained"])


def plan_lease(
    remaining_env_steps: int,
    num_runners: int,
    num_envs: int,
    fragment_length: int,
    *,
    pace: float = 1.0,
    leased_env_steps: int = 0,
    held_env_steps: int = 0,
    travel_steps: int = 0,
) -> int:
    """Return the number of vector steps of the next lease of a batch; 0 if the batch is covered.

    Leases are full while much of the batch remains. Towards the end a runner gets its share of the rest, in
    proportion to its pace: at least a small lease (a quarter of a full one, less for a slow runner), at most what
    covers the rest. Runners therefore finish together, and the surplus stays below one small lease. The result
    never decreases as `remaining_env_steps` grows.

    Args:
        remaining_env_steps: Batch minus the steps that have arrived and those leased (counted in full).
        num_runners: Number of runners that share the rest, >= 1.
        num_envs: Env steps per vector step of the asking runner.
        fragment_length: Vector steps of a full lease.
        pace: Env steps per second of the asking runner, divided by the mean of all runners.
        leased_env_steps: Env steps of this batch leased to all runners, including the asking one.
        held_env_steps: Env steps of this batch leased to the asking runner.
        travel_steps: Env steps that the asking runner samples while a lease and its data are on their way: a smaller
            lease would take longer to travel than to sample.

    Example:
        >>> plan_lease(1000, 1, 8, 50), plan_lease(100, 1, 8, 50), plan_lease(0, 1, 8, 50)
        (50, 13, 0)
        >>> plan_lease(400, 2, 8, 50), plan_lease(400, 2, 8, 50, pace=0.2), plan_lease(400, 2, 8, 50, pace=1.8)
        (25, 5, 45)
    """
    if remaining_env_steps <= 0:
        return 0
    covering = -(-remaining_env_steps // num_envs)
    part = (remaining_env_steps + leased_env_steps) * pace / max(1, num_runners) - held_env_steps
    least = max(1, int(small_lease(fragment_length) * min(1.0, pace)), travel_steps // num_envs)
    return min(fragment_length, covering, max(math.ceil(part / num_envs), least))


def small_lease(fragment_length: int) -> int:
    """Return the number of vector steps below which a lease is not split: a quarter of a full one, at least 1."""
    return max(1, fragment_length // 4)


def step_allowance(
    *,
    batch: int,
    staleness: int,
    num_envs: int,
    in_flight: int,
) -> int:
    """Return the number of env steps that may be leased now in an asynchronous run (staleness S >= 1).

    There are S+1 slots of one batch each. A slot is occupied from the lease until the data was trained *and* the
    resulting weights were published. In FIFO order the data is then at most S versions old when it is trained. With
    replay, an update trains in proportion to its fresh steps (`core.update_plan`), so the slots also limit how far
    sampling may run ahead of the ratio.

    Args:
        batch: Env steps per update over all ranks.
        staleness: S.
        num_envs: Env steps per vector step of the asking runner. The slots leave room for one vector step beyond a
            batch; otherwise a batch smaller than a vector step could never be filled.
        in_flight: Env steps leased (in full), pending, in training, or trained but not yet published.
    """
    if not batch:
        return 0
    return max((staleness + 1) * batch, batch + num_envs) - in_flight


def derive_seed(run_seed: int, role: str, index: int = 0, *extra: int) -> int:
    """Return the seed of one random stream, from (run seed, role, index, ...).

    Equal arguments give equal seeds in every process and on every machine. Different arguments give streams that are
    independent for all practical purposes (numpy's ``SeedSequence``).

    Args:
        run_seed: The run's seed, ``config.seed``.
        role: Purpose of the stream, e.g. ``"env"``, ``"policy"``, ``"minibatch"``, ``"module"``.
        index: Index of the process (or env, or rank) within its role, from 0.
        extra: Additional coordinates, e.g. the incarnation of a restarted process.

    Returns:
        An int in [0, 2**31), accepted by Gymnasium, numpy and torch alike.
    """
    words = (run_seed, run_seed >> 32, zlib.crc32(role.encode()), index, *extra)
    # Passed as an array, since numpy converts a list of numbers one by one.
    sequence = np.random.SeedSequence(np.array([int(word) & 0xFFFFFFFF for word in words], np.uint32))
    return int(sequence.generate_state(1, np.uint32)[0]) & 0x7FFFFFFF


class Schedule:
    """The value of a setting as a function of the lifetime env steps.

    >>> lr = Schedule([(0, 1e-3), (1000, 1e-4)], name="lr")
    >>> lr.value(0), lr.value(500), lr.value(10**9)
    (0.001, 0.00055, 0.0001)

    Args:
        value_or_points: A number (constant), or at least two ``(env steps, value)`` pairs whose env steps start at 0
            and increase. Values are interpolated linearly between points and constant after the last one.
        name: The setting's name, for error messages.

    Raises:
        ConfigurationError: The points violate these rules.
    """

    def __init__(self, value_or_points: float | Sequence[Sequence[float]], name: str = "value") -> None:
        self.name = name
        self.values: list[float]
        self._timesteps, self.values = _parse(value_or_points, name)

    @property
    def is_constant(self) -> bool:
        """Whether the value never changes."""
        return len(set(self.values)) == 1

    def value(self, num_env_steps: int) -> float:
        """Return the value after `num_env_steps` lifetime env steps."""
        right = bisect_right(self._timesteps, num_env_steps)
        if right == len(self._timesteps):
            return self.values[-1]
        if right == 0:
            return self.values[0]
        start, end = self._timesteps[right - 1], self._timesteps[right]
        first, last = self.values[right - 1], self.values[right]
        return first + (last - first) * (num_env_steps - start) / (end - start)

    def __repr__(self) -> str:
        points = list(zip(self._timesteps, self.values, strict=True))
        return f"Schedule({self.values[0] if self.is_constant else points}, name={self.name!r})"


def _parse(value_or_points: object, name: str) -> tuple[list[float], list[float]]:
    if isinstance(value_or_points, Real) and not isinstance(value_or_points, bool):
        return [0.0], [float(value_or_points)]
    expected = (
        f"{name}: expected a number or [(0, v0), (t1, v1), …] with at least two points and rising env steps"
    )
    if not isinstance(value_or_points, Sequence) or isinstance(value_or_points, str):
        raise ConfigurationError(f"{expected}, got {value_or_points!r}.")
    points: list[tuple[float, float]] = []
    for point in value_or_points:
        if not isinstance(point, Sequence) or len(point) != 2 or not all(isinstance(x, Real) for x in point):
            raise ConfigurationError(f"{expected}, got the point {point!r}.")
        points.append((float(point[0]), float(point[1])))
    if len(points) < 2:
        raise ConfigurationError(f"{expected}, got {len(points)} point(s): {value_or_points!r}.")
    timesteps = [timestep for timestep, _ in points]
    if timesteps[0] != 0:
        raise ConfigurationError(f"{expected}, got a first point at {timesteps[0]:g} env steps instead of 0.")
    if any(later <= earlier for earlier, later in pairwise(timesteps)):
        raise ConfigurationError(f"{expected}, got env steps {timesteps}.")
    return timesteps, [value for _, value in points]
