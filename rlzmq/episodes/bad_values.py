"""Values that losses cannot use: NaN, infinity, and values whose square overflows float32.

A chunk with such a value in its observations, step columns, lookback or initial state is left out as a whole, and
counted. Frequent ones end the run.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import optree
from numpy.typing import NDArray

from rlzmq.core.errors import EnvError
from rlzmq.core.tree import tree_leaves
from rlzmq.episodes.batch_columns import ragged_arange
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch

__all__ = ["LARGEST", "BadChunks", "BadValue", "BadValues", "find_bad_values"]

_log = logging.getLogger("rlzmq.runners")

# Losses and gradient norms square their inputs, and the square of a larger float32 overflows.
LARGEST = math.sqrt(float(np.finfo(np.float32).max))
_INITIAL_STATE = "initial_state"
_RANKS = {Columns.OBS: 0, Columns.REWARDS: 2}

# This many are tolerated at once. Beyond that, they must be rarer than this share of the recent env steps, and spoil
# less than this share, so that training goes on.
_MAX_NUM, _MAX_SHARE, _MAX_SPOILT = 4, 0.01, 0.5
_REMEMBERED_STEPS = 10_000
_LOG_EVERY_S = 60.0
_MAX_LOOKED_AT = 100

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BadValue:
    """The first unusable value of a chunk, in the order in which the values were produced.

    Attributes:
        column: The column's name and, in a tree, the path to the leaf.
        value: The unusable value.
        episode: Index of the episode's chunk in the batch.
        num_env_steps: Number of env steps of that episode when the value was produced.
        env_index: The sub-environment; -1: unknown.
        agent_id: The agent; None in single-agent use.
        is_of_env: Whether it is an observation or a reward; otherwise a module output.
    """

    column: str
    value: float
    episode: int
    num_env_steps: int
    env_index: int
    agent_id: Any
    is_of_env: bool

    def __str__(self) -> str:
        agent = "" if self.agent_id is None else f", agent {self.agent_id!r}"
        return (
            f"column {self.column} holds {self.value} at step {self.num_env_steps} of an episode "
            f"(env {self.env_index}{agent})"
        )


@dataclass(frozen=True, slots=True)
class BadValues:
    """Unusable values in a batch.

    Attributes:
        values: The first unusable value of each affected chunk.
        num: Number of unusable observations and rewards; if there are none, of steps with unusable module outputs.
    """

    values: list[BadValue]
    num: int

    def left_out_of(self, batch: EpisodeBatch) -> EpisodeBatch:
        """Return the batch without the chunks that hold these values."""
        keeps = np.ones(len(batch), np.bool_)
        keeps[[value.episode for value in self.values]] = False
        return batch.select(keeps).compact()


def find_bad_values(batch: EpisodeBatch) -> BadValues | None:
    """Return a batch's unusable values; None if there are none. Takes one pass over the columns.

    Lookback parts are included, since connectors read them.
    """
    values: list[BadValue] = []
    num_of_env = num_of_module = 0
    for part in batch.agent_batches:
        columns = dict(part.columns)
        if part.initial_state is not None:
            columns[_INITIAL_STATE] = part.initial_state
        for name, column in columns.items():
            if isinstance(column, np.ndarray):
                is_usable = column.dtype.kind not in "fc" or _all_usable(name, column)
            else:
                is_usable = all(map(_all_usable, repeat(name), tree_leaves(column)))
            if not is_usable:
                found, own_of_env, own_of_module = _find_in(part, columns)
                values += [_described(batch, part, *place) for place in found]
                num_of_env, num_of_module = num_of_env + own_of_env, num_of_module + own_of_module
                break
    # Without `values`, all of them are in slots that belong to no chunk.
    return BadValues(values, num_of_env or num_of_module) if values else None


def _find_in(
    part: EpisodeBatch, columns: Mapping[str, Any]
) -> tuple[list[tuple[int, int, int, str, float]], int, int]:
    """Find the unusable values of a batch on its own columns.

    Returns:
        (chunk, slot, rank, column, value) of each chunk's first one; the numbers of unusable observations and rewards,
        and of steps with unusable module outputs, without lookback parts. The rank is the place in the order in which
        the values of one slot are produced: observation, module outputs, reward.
    """
    first: dict[int, tuple[int, int, str, float]] = {}
    of_env: set[tuple[int, int]] = set()
    of_module: set[tuple[int, int]] = set()
    for name, column in columns.items():
        rank = _RANKS.get(name, 1)
        for path, leaf in zip(*optree.tree_flatten_with_path(column)[:2], strict=True):
            if _all_usable(name, leaf):
                continue
            bad: BoolArray = ~np.all(_usable(name, leaf).reshape(len(leaf), -1), axis=1)
            if name == _INITIAL_STATE:  # a value before all others, but named only if there are no others
                for c in np.flatnonzero(bad).tolist():
                    of_module.add((c, -1))
                    if part.length[c]:
                        first.setdefault(c, (sys.maxsize, 1, repr(name), math.nan))
                continue
            counts = part.lookback + part.length + (rank == _RANKS[Columns.OBS])
            slots = ragged_arange(part.start - part.lookback, counts)
            chunks = np.arange(len(part)).repeat(counts)[bad[slots]]
            shown = f"{name!r}{''.join(f'[{key!r}]' for key in path)}"
            for c, slot in zip(chunks.tolist(), slots[bad[slots]].tolist(), strict=True):
                if slot >= part.start[c]:
                    (of_module if rank == 1 else of_env).add((slot, rank))
                if (slot, rank) < first.get(c, (sys.maxsize,))[:2]:
                    row = np.atleast_1d(leaf[slot])
                    first[c] = slot, rank, shown, float(np.real(row[~_usable(name, row)][0]))
    return [(c, *place) for c, place in sorted(first.items())], len(of_env), len(of_module)


def _described(
    batch: EpisodeBatch, part: EpisodeBatch, c: int, slot: int, rank: int, shown: str, value: float
) -> BadValue:
    """Return an unusable value of a part of the batch (itself, or a group of agents' chunks); see `_find_in`."""
    after = 0 if slot == sys.maxsize else slot - int(part.start[c]) + (rank == _RANKS[Columns.REWARDS])
    e, num_env_steps = c, int(part.t_started[c]) + after
    if part.episode is not None:
        episode, _, env_ts = part.links
        e = int(episode[c])
        place = min(max(after, -int(part.lookback[c])), int(part.length[c]))
        num_env_steps = int(env_ts[int(part.start[c]) + place])
    agent_id = None if part.agent_ids is None or part is batch else part.agent_ids[c]
    return BadValue(shown, value, e, num_env_steps, int(batch.env_index[e]), agent_id, rank != 1)


def _all_usable(name: str, leaf: NDArray[Any]) -> bool:
    if leaf.dtype.kind not in "fc" or not leaf.size:
        return True
    if leaf.dtype.kind == "c":
        return bool(_usable(name, leaf).all())
    # NaN propagates through min and max, and compares False. (`leaf.max()` is a Python function around the reduction.)
    if not float(np.maximum.reduce(leaf, axis=None)) < LARGEST:
        return False
    return name == Columns.ACTION_DIST_INPUTS or float(np.minimum.reduce(leaf, axis=None)) > -LARGEST


def _usable(name: str, leaf: NDArray[Any]) -> BoolArray:
    """Return which values are usable. Logits of masked actions may be arbitrarily low."""
    sizes = leaf if name == Columns.ACTION_DIST_INPUTS else np.abs(leaf)
    # The range of float16 is smaller.
    usable: BoolArray = sizes < (LARGEST if leaf.dtype.itemsize > 2 else np.inf)
    return usable


# -- in runners ---------------------------------------------------------------------------------------


class SamplingRunner(Protocol):
    """What `BadChunks` needs of an env runner."""

    worker_index: int
    failures: Any

    def drop_unfinished_episodes(self) -> None: ...

    def describe_envs(self) -> str: ...


class BadChunks:
    """Checks every batch of a runner before anything else reads it; see `BadChunks.left_out_of`."""

    def __init__(self, runner: SamplingRunner) -> None:
        self._runner = runner
        # All halved regularly: recent steps count more.
        self._num_steps = self._num_bad = self._num_left_out = 0.0
        self._num_untold = 0
        self._told_at: float | None = None

    def left_out_of(self, batch: Any) -> tuple[Any, int]:
        """Return the batch without chunks that hold unusable values, and the number of steps left out.

        If an episode goes on after such a chunk, all unfinished episodes are dropped and the next sample resets the
        environments, since every later chunk could hold the value in its lookback or state, too.

        Raises:
            EnvError: Too many values returned by the environments are unusable; has `way_there`.
            ValueError: The module's outputs are unusable for usable observations.
        """
        found = find_bad_values(batch)
        self._num_steps += batch.num_env_steps
        if self._num_steps > _REMEMBERED_STEPS:
            self._num_steps, self._num_bad = self._num_steps / 2, self._num_bad / 2
            self._num_left_out /= 2
        if found is None:
            return batch, 0
        rest = found.left_out_of(batch)
        num_left_out = batch.num_env_steps - rest.num_env_steps
        self._num_bad += found.num
        self._num_left_out += num_left_out
        if self._num_bad > _MAX_NUM and (
            self._num_bad > _MAX_SHARE * self._num_steps or self._num_left_out > _MAX_SPOILT * self._num_steps
        ):
            self._stop(batch, found)
        self._tell(batch, found, num_left_out)
        is_over = batch.terminated | batch.truncated
        if not all(is_over[value.episode] for value in found.values):
            self._runner.drop_unfinished_episodes()
        return rest, num_left_out

    def _stop(self, batch: object, found: BadValues) -> None:
        value, way = self._best_known(batch, found)
        values = f"{self._num_bad:.0f} such values in {self._num_steps:.0f} env steps"
        share = (
            f"{values} are more than {100 * _MAX_SHARE:g} %"
            if self._num_bad > _MAX_SHARE * self._num_steps
            else f"{values} spoil the chunks of {self._num_left_out:.0f} of them"
        )
        if not value.is_of_env:
            raise ValueError(
                f"{self._describe(value)} {share}: correct the module, or look at its weights (a lr too high, "
                "no grad_clip)."
            )
        how = "The steps that led to it are not known." if way is None else str(way)
        failure = EnvError(
            f"{self._describe(value)} {how} {share}: correct the environment, or clean what it returns in a wrapper."
        )
        failure.way_there = way  # type: ignore[attr-defined]
        raise failure

    def _tell(self, batch: object, found: BadValues, num_left_out: int) -> None:
        now = time.perf_counter()
        self._num_untold += num_left_out
        if not self._num_untold or (self._told_at is not None and now - self._told_at < _LOG_EVERY_S):
            return
        value, way = self._best_known(batch, found)
        _log.warning(
            "%s %s %d env steps, the chunks with such values, were left out (in the account: not_finite).",
            self._describe(value),
            "The steps that led to it are not known." if way is None else way,
            self._num_untold,
        )
        self._told_at, self._num_untold = now, 0

    def _best_known(self, batch: object, found: BadValues) -> tuple[BadValue, object]:
        """Return a value that can be reproduced, if there is one, else the first value."""
        of_envs = [value for value in found.values if value.is_of_env][:_MAX_LOOKED_AT]
        for value in of_envs:
            way = self._runner.failures.way_to(batch, value)
            if way is not None:
                return value, way
        return (of_envs or found.values)[0], None

    def _describe(self, value: BadValue) -> str:
        runner = self._runner
        agent = "" if value.agent_id is None else f" of agent {value.agent_id!r}"
        who = (
            f"Environment {value.env_index} of env runner {runner.worker_index} returned"
            if value.is_of_env
            else f"The module of env runner {runner.worker_index} put out, for finite observations,"
        )
        return (
            f"{who} {value.value} in column {value.column}{agent} at step {value.num_env_steps} of an episode "
            f"{runner.describe_envs()}."
        )
