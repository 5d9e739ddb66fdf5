"""Comparison of an exported policy with its original Policy, on random observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq.algorithms.policy import Policy
from rlzmq.core.errors import RlzmqError
from rlzmq.core.tree import leaf_spaces, tree_leaves, tree_map, tree_stack
from rlzmq.deploy.policy_graph import FlatPolicyGraph
from rlzmq.modules.distributions import num_dist_inputs

__all__ = ["TOLERANCE", "ExportCheck", "ExportError", "check_against"]

TOLERANCE = 1e-4
"""Largest difference between floats that counts as rounding, in units of max(1, value)."""

# Number of steps per episode, for comparing policies with a memory.
_EPISODE_STEPS = 50
# Batch sizes other than the traced one, including a single row.
_FIRST_BATCHES = (1, 2, 7)
# Bounds beyond this count as infinite; such parts are drawn from a normal distribution.
_WIDE = 1e3


class ExportError(RlzmqError):
    """An exported file computes other actions than its original policy. The file was not kept."""


@dataclass(frozen=True)
class ExportCheck:
    """Result of comparing an exported policy with its Policy.

    Attributes:
        num_observations: Number of observations compared.
        largest_difference: Largest absolute difference of a float action; 0 if there are no float actions.
        num_choices: Number of discrete choices compared (a MultiDiscrete action has several).
        num_different: Number of choices that differ and are not ties.
        num_ties: Number of choices that differ only because the two values are equal up to rounding.
    """

    num_observations: int
    largest_difference: float = 0.0
    num_choices: int = 0
    num_different: int = 0
    num_ties: int = 0

    def __str__(self) -> str:
        text = (
            f"{self.num_observations:,} random observations, largest difference {self.largest_difference:.3g}"
        )
        if self.num_choices:
            text += f", {self.num_different} of {self.num_choices:,} discrete choices differ"
        return text + (f", {self.num_ties} ties" if self.num_ties else "")


def check_against(
    policy: Policy,
    graph: FlatPolicyGraph,
    call: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]],
    num_observations: int,
    seed: int,
) -> ExportCheck:
    """Compare an exported policy with its Policy.

    Args:
        policy: The policy; its current episode is not affected.
        graph: The exported graph.
        call: Runs the file: maps inputs to outputs, in the graph's order.
        num_observations: Number of observations to compare.
        seed: Seed of the observations.

    Raises:
        ExportError: The actions differ by more than rounding.
    """
    rng = np.random.default_rng(seed)
    is_remembering = bool(graph.policy.initial_state)
    num_steps = min(_EPISODE_STEPS, num_observations) if is_remembering else 1
    total, worst = _Difference(graph.policy.action_space), 0.0
    for num_rows in _batches(-(-num_observations // num_steps)):
        state: dict[str, Any] = graph.initial_rows(num_rows)
        players = [policy.copy() for _ in range(num_rows)] if is_remembering else []
        rewards = np.zeros(num_rows, np.float32)
        for _ in range(num_steps):
            observations = _random(graph.policy.observation_space, num_rows, rng)
            outputs = call(graph.flat_inputs(observations, rewards, state))
            actions, state, dist_inputs = graph.nested_outputs(outputs)
            if is_remembering:
                expected = tree_stack(
                    [
                        player.compute_action(
                            tree_map(lambda leaf, row=row: leaf[row], observations), reward=rewards[row]
                        )
                        for row, player in enumerate(players)
                    ]
                )
            else:
                expected = policy.compute_actions(observations)
            worst = max(worst, total.add(expected, actions, dist_inputs))
            rewards = rng.normal(size=num_rows).astype(np.float32)
    result = ExportCheck(
        total.num_rows, total.largest, total.num_choices, total.num_different, total.num_ties
    )
    if not worst <= TOLERANCE or result.num_different:
        raise ExportError(
            f"the exported policy differs from the policy: {result}; expected floats within {TOLERANCE:g} and equal "
            "choices. Does each custom connector piece's to_torch() do what the piece does?"
        )
    return result


def _batches(num_rows: int) -> list[int]:
    sizes: list[int] = []
    for size in _FIRST_BATCHES:
        if sum(sizes) + size < num_rows:
            sizes.append(size)
    return [*sizes, num_rows - sum(sizes)]


def _random(space: Any, num_rows: int, rng: np.random.Generator) -> Any:
    """Return random values of a space, a tree of arrays ``[num_rows, ...]``."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _random(part, num_rows, rng) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_random(part, num_rows, rng) for part in space.spaces)
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = np.maximum(space.low, -_WIDE), np.minimum(space.high, _WIDE)
        is_narrow = (space.low == low) & (space.high == high)
        shape = (num_rows, *space.shape)
        drawn = np.where(is_narrow, rng.uniform(low, high, shape), np.clip(rng.normal(size=shape), low, high))
        return drawn.astype(space.dtype)
    space.seed(int(rng.integers(2**31)))
    return np.stack([np.asarray(space.sample(), space.dtype) for _ in range(num_rows)])


class _Difference:
    """Accumulates the differences between actions, per leaf of the action space."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self._spaces = leaf_spaces(space)
        self.num_rows = self.num_choices = self.num_different = self.num_ties = 0
        self.largest = 0.0

    def add(self, expected: Any, actual: Any, dist_inputs: Any) -> float:
        """Compare a batch of actions; return the largest difference of floats, in the units of `TOLERANCE`."""
        first, worst = 0, 0.0
        leaves = list(zip(self._spaces, tree_leaves(expected), tree_leaves(actual), strict=True))
        self.num_rows += len(leaves[0][1])
        is_default = dist_inputs is not None and dist_inputs.shape[-1] == sum(
            map(num_dist_inputs, self._spaces)
        )
        for space, ours, theirs in leaves:
            ours, theirs = np.asarray(ours), np.asarray(theirs)
            width = num_dist_inputs(space)
            inputs = dist_inputs[..., first : first + width] if is_default else None
            first += width
            if ours.dtype.kind == "f":
                difference = np.abs(theirs.astype(np.float64) - ours)
                self.largest = max(self.largest, float(difference.max(initial=0.0)))
                worst = max(worst, float((difference / np.maximum(np.abs(ours), 1.0)).max(initial=0.0)))
            else:
                self._add_choices(space, ours, theirs, inputs)
        return worst

    def _add_choices(self, space: Any, ours: Any, theirs: Any, inputs: Any) -> None:
        self.num_choices += ours.size
        rows, choices = np.nonzero((ours != theirs).reshape(len(ours), -1))
        if not len(rows):
            return
        is_tie = np.zeros(len(rows), np.bool_)
        if inputs is not None:
            start, lens = _choices(space)
            begin = np.concatenate([[0], np.cumsum(lens)[:-1]])
            values = [
                inputs[rows, begin[choices] + action.reshape(len(ours), -1)[rows, choices] - start[choices]]
                for action in (ours, theirs)
            ]
            is_tie = np.abs(values[0] - values[1]) <= TOLERANCE * np.maximum(np.abs(values[0]), 1.0)
        self.num_ties += int(is_tie.sum())
        self.num_different += int((~is_tie).sum())


def _choices(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the first value and the number of values of each choice in a discrete leaf."""
    if isinstance(space, gym.spaces.Discrete):
        return np.array([int(space.start)]), np.array([int(space.n)])
    if isinstance(space, gym.spaces.MultiDiscrete):
        return space.start.reshape(-1).astype(np.int64), space.nvec.reshape(-1).astype(np.int64)
    if isinstance(space, gym.spaces.Box):
        low, high = (bound.reshape(-1).astype(np.int64) for bound in (space.low, space.high))
        return low, high - low + 1
    size = int(np.prod(space.shape))
    return np.zeros(size, np.int64), np.full(size, 2)
