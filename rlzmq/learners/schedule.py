"""Schedule: a setting that changes over a run, as a number or a piecewise-linear curve over lifetime env steps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from numbers import Real

from rlzmq.core.errors import ConfigurationError

__all__ = ["Schedule"]


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
        self._timesteps, self.values = _parse(value_or_points, name)
        self.current: float = self.values[0]

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

    def update(self, num_env_steps: int) -> float:
        """Set `current` to the value after `num_env_steps` lifetime env steps and return it."""
        self.current = self.value(num_env_steps)
        return self.current

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
