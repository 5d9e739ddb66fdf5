"""Sampler: the loop of an env runner, vector step after vector step. RowsSampler: its form for one agent on rows.

Per vector step: modules -> module-to-env pipeline -> env step -> episodes -> env-to-module pipeline. A subclass decides
what an episode is meanwhile: rows of columns (RowsSampler), or an object (EpisodeSampler), which its store makes: for
connector pieces and callbacks that need one, or with row numbers of several agents. All give identical numbers.

RowsSampler creates nothing per environment or per episode: `_to_env` writes a vector step's outputs into columns,
`_add` its rewards and observations. `_finish` finds the episodes from the flags when the fragment is complete.

A fragment's columns are env-major, ``[num_envs, num_slots, ...]`` with ``num_slots = lookback + T + 1``.
Slot ``lookback`` holds the observations at the fragment's begin; the slots before it are the last ``lookback`` slots of
the previous fragment. The step at slot s leads to the observation at s + 1. An autoreset step is a slot between two
chunks that belongs to neither. Between two fragments, `OngoingEpisodes` holds the totals of unfinished episodes.
"""

from __future__ import annotations

import abc
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlzmq.connectors.rows import ColumnRows
from rlzmq.core.errors import EnvError
from rlzmq.core.metrics import (
    ENV_STEP_TIMER,
    ENV_TO_MODULE_TIMER,
    INFERENCE_TIMER,
    MODULE_TO_ENV_TIMER,
    VECTOR_STEPS_TIMER,
)
from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.envs.sync_vector import SparseStep
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.runners.episode_metrics import (
    HOW_TO_LIMIT,
    ChunkTable,
    FinishedEpisodes,
    OngoingEpisodes,
    recorded_return,
)
from rlzmq.runners.module_step import ModuleStep, as_chosen, to_numpy

if TYPE_CHECKING:
    from rlzmq.runners.env_runner import EnvRunner, SampleRequest

__all__ = ["ColumnBlock", "RowsSampler", "Sampler", "find_chunks"]

_log = logging.getLogger("rlzmq.runners")

# Reading the clock at every step would cost native vector envs 1 % of their speed: of so many vector
# steps (a power of two) one is timed.
_STEPS_PER_TIMED = 16

_ENDLESS_S, _ENDLESS_AGAIN = 10.0, 6.0  # until the first warning; the next one comes after six times as long

# Fragments of a few steps are written into the same columns one after the other, and copied out of them: making columns
# takes longer than so few steps. The columns have room for few more, as they stay in memory.
_FEW_STEPS = 8
_SHARED_STEPS = 16

# Columns that no module puts out.
_OF_ENV = {Columns.OBS, Columns.REWARDS, Columns.WEIGHTS_VERSION}

BoolArray = NDArray[np.bool_]


class Sampler(abc.ABC):
    """Samples fragments of the runner's environments; episodes continue from one fragment to the next.

    Args:
        runner: Provides the env, modules, pipelines, callbacks and counters.
        lookback: Number of steps before each chunk that its columns include.

    Attributes:
        stepper: Resets and steps the vector env.
        has_episodes: Whether unfinished episodes can be continued. If not, call `reset` before `run`.
        random_actions: Whether the unfinished episodes have random actions. They continue with such only: all steps of
            an episode have the same columns.
    """

    def __init__(self, runner: EnvRunner, lookback: int) -> None:
        self.runner = runner
        self.num_envs: int = runner.num_envs
        self.lookback = lookback
        self.has_episodes: bool = False
        self.random_actions: bool = False
        self.stepper: Any = runner.make_stepper()
        self._counts_agent_steps = runner.config.count_steps_by == "agent_steps"
        self._num_steps_ever = 0

    def forget(self) -> None:
        """Drop the unfinished episodes."""
        self.has_episodes = False

    def run(self, request: SampleRequest) -> tuple[EpisodeBatch, FinishedEpisodes, int]:
        """Sample what ``request`` asks for, and continue the ongoing episodes.

        Returns:
            The chunks: finished ones in the order of finishing, then ongoing ones by env; statistics of the ended
            episodes; the number of vector steps made.
        """
        runner, timers, clock = self.runner, self.runner.timers, time.perf_counter
        self._request = request
        self.random_actions = random_actions = request.random_actions
        waits_for_ends = request.num_episodes is not None
        self._finished = FinishedEpisodes()
        # Of the fragment: vector steps, env steps, agent steps, ended episodes.
        self._num_steps = self._num_env_steps = self._num_agent_steps = self._num_ends = 0
        self._begin_s = self._warned_s = clock()
        self._begin_fragment()
        env_steps_before, num_workers = runner.global_env_steps, max(runner.num_workers, 1)
        # torch.inference_mode without its Python frames.
        num_steps_ever, inference_mode = self._num_steps_ever, torch._C._InferenceMode
        most_per_vector_step = sys.maxsize if self._counts_agent_steps else self.num_envs
        loop_s = clock()
        while num_more := request.num_more_vector_steps(
            self._num_steps,
            self._num_agent_steps if self._counts_agent_steps else self._num_env_steps,
            self._num_ends,
            most_per_vector_step,
        ):
            first = num_steps_ever + self._num_steps
            for number in range(first, first + num_more):
                timed = not number & (_STEPS_PER_TIMED - 1)
                if timed:
                    begin_s = inferred_s = clock()
                    if waits_for_ends:
                        self._warn_if_endless(begin_s)
                if random_actions:
                    actions = self._random_actions()
                else:
                    with inference_mode(True):
                        outputs = self._infer(env_steps_before + self._num_env_steps * num_workers)
                    if timed:
                        inferred_s = clock()
                    actions = self._to_env(outputs)
                if timed:
                    acted_s = clock()
                results = self._step(actions)
                if timed:
                    stepped_s = clock()
                self._add(results)
                if timed:
                    timers.add_stage(INFERENCE_TIMER, begin_s, inferred_s)
                    timers.add_stage(MODULE_TO_ENV_TIMER, inferred_s, acted_s)
                    timers.add_stage(ENV_STEP_TIMER, acted_s, stepped_s)
                    timers.add_stage(ENV_TO_MODULE_TIMER, stepped_s, clock())
                self._note_ends()
                self._num_steps += 1
        self._num_steps_ever += self._num_steps
        timers.add(VECTOR_STEPS_TIMER, clock() - loop_s)
        return self._finish(), self._finished, self._num_steps

    def _warn_if_endless(self, now_s: float) -> None:
        """Log a warning if a request for whole episodes has seen none end for long."""
        config, waited_s = self.runner.config, now_s - self._begin_s
        limit_s = _ENDLESS_S
        if config.in_evaluation and config.evaluation_sample_timeout_s is not None:
            limit_s = min(limit_s, config.evaluation_sample_timeout_s)
        if self._warned_s > self._begin_s:
            limit_s = _ENDLESS_AGAIN * (self._warned_s - self._begin_s)
        # One of several runners says it; those of an evaluation count from 1,000,001.
        if waited_s >= limit_s and not self._num_ends and self.runner.worker_index % 1_000_000 <= 1:
            self._warned_s = now_s
            _log.warning(
                "No episode has ended in %d env steps, %.0f s. If episodes never end, limit them: %s.",
                self._num_env_steps,
                waited_s,
                HOW_TO_LIMIT,
            )

    # -- defined by subclasses -----------------------------------------------------------------

    @abc.abstractmethod
    def reset(self) -> None:
        """Reset all environments and begin an episode in each."""

    @abc.abstractmethod
    def _begin_fragment(self) -> None:
        """Prepare for the first vector step of a fragment."""

    @abc.abstractmethod
    def _infer(self, t: int) -> object:
        """Return the modules' outputs; `t` counts the run's env steps, for exploration schedules."""

    @abc.abstractmethod
    def _to_env(self, outputs: Any) -> object:
        """Store the modules' outputs as the next step's; return the vector env's actions."""

    @abc.abstractmethod
    def _random_actions(self) -> object:
        """Store random actions as the next step's; return them."""

    @abc.abstractmethod
    def _step(self, actions: object) -> object:
        """Step the vector env; return what `_add` takes."""

    @abc.abstractmethod
    def _add(self, results: Any) -> None:
        """Add a vector step's results to the episodes, and turn the observations into the modules' next inputs."""

    @abc.abstractmethod
    def _note_ends(self) -> None:
        """Count the episodes that this vector step has ended, and prepare for their successors."""

    @abc.abstractmethod
    def _finish(self) -> EpisodeBatch:
        """Return the fragment's chunks; the ongoing episodes continue in new ones."""


class RowsSampler(Sampler):
    """Samples fragments for a runner whose pipelines run on rows."""

    def __init__(self, runner: EnvRunner) -> None:
        env_to_module = runner.env_to_module
        super().__init__(runner, max(runner.config.episode_lookback_horizon, env_to_module.required_lookback))
        self._module_step = ModuleStep(runner.module, runner.generator, env_to_module.device)
        self._env_to_module = env_to_module
        self._has_pieces = bool(env_to_module.writers or env_to_module.readers)
        self._normalize = runner.module_to_env.normalize
        self._source = self.stepper.source
        self._counts_agent_steps = False  # of the only agent, they are the env steps

    # -- between fragments ---------------------------------------------------------------------

    def reset(self) -> None:
        num_envs, lookback = self.num_envs, self.lookback
        observations, infos = self.stepper.reset(self.runner.take_reset_seed())
        self._ongoing = OngoingEpisodes(num_envs, self.runner.new_episode_id)
        self._needs_reset = np.zeros(num_envs, np.bool_)
        self._num_resetting = 0
        self._num_previous = np.zeros(num_envs, np.int64)
        self._state: Any = None
        self._carried_infos = {(index, lookback): info for index, info in infos.items()}
        # Where the fragment is written, from the slot `_first` on.
        self._block = block = ColumnBlock(
            num_envs, lookback + 1, np.zeros((2, lookback + 1, num_envs), np.bool_)
        )
        self._first = 0
        self._rows = ColumnRows(
            block.columns, 0, is_first=np.ones(num_envs, np.bool_), num_previous=self._num_previous
        )
        if self._env_to_module.required_lookback:  # pieces read the actions before the first one
            block.writer(Columns.ACTIONS, self.stepper.example_actions())
        block.writer(Columns.REWARDS, np.zeros(num_envs))
        block.writer(Columns.WEIGHTS_VERSION, np.zeros(num_envs, np.int64))
        stored = observations
        if self._has_pieces:
            stored = self._to_store(observations, lookback, np.ones(num_envs, np.bool_))
        block.writer(Columns.OBS, stored)(lookback, stored)
        self._module_observations = (
            self._env_to_module.read(stored, self._rows) if self._has_pieces else observations
        )
        self.has_episodes = True

    # -- one fragment --------------------------------------------------------------------------

    def _begin_fragment(self) -> None:
        num_envs, module_step = self.num_envs, self._module_step
        module_step.begin(explore=self._request.explore)
        if module_step.is_stateful and self._state is None:
            self._state = module_step.initial_state(num_envs)
        self._begin_state: Any = None
        if self._state is not None:
            self._begin_state = tree_map(lambda leaf: to_numpy(leaf).copy(), self._state)
        num_steps, request = 256, self._request
        if request.num_vector_steps is not None:
            num_steps = request.num_vector_steps
        elif request.num_timesteps is not None:
            num_steps = -(-request.num_timesteps // num_envs)
            num_steps += num_steps // 8 + 2  # autoresets use some slots
        self._make_room(num_steps)
        self._starts_with_reset, self._num_starting_with_reset = self._needs_reset, self._num_resetting
        self._infos = self._carried_infos
        self._num_failures = 0

    def _make_room(self, num_steps: int) -> None:
        """Make room for `num_steps` vector steps of the fragment, and keep those that were made."""
        self._num_slots, block = num_steps, self._block
        if self._first + self.lookback + num_steps >= block.num_slots:
            capacity = _SHARED_STEPS if num_steps <= _FEW_STEPS else num_steps
            self._block = block = block.part(self._first, block.num_slots, self.lookback + capacity + 1)
            self._rows.columns = block.columns
            self._first = 0
            self._terminated, self._truncated = block.flags
            self._write_observations = block.writer(Columns.OBS)
            self._write_rewards = block.writer(Columns.REWARDS)
            self._writers: dict[str, Writer] | None = None  # of the module's outputs
        self._first_slot = self._first + self.lookback

    def _infer(self, t: int) -> dict[str, Any]:
        outputs, self._state = self._module_step(self._module_observations, self._state, t)
        return outputs

    def _to_env(self, outputs: dict[str, Any]) -> object:
        if Columns.ACTIONS_FOR_ENV in outputs:
            for_env = outputs.pop(Columns.ACTIONS_FOR_ENV)
        elif self._normalize is None:
            for_env = outputs[Columns.ACTIONS]
        else:
            for_env = self._normalize.apply_vectorized(outputs[Columns.ACTIONS])
        step = self._num_steps
        if step == self._num_slots:
            self._make_room(2 * step)
        writers = self._writers
        if writers is None or (not step and outputs.keys() != writers.keys()):
            writers = self._writers = {}
            for name in self._block.columns.keys() - outputs.keys() - _OF_ENV if not step else ():
                del self._block.columns[name]  # of a fragment whose actions explored, or did not
            for name, values in outputs.items():
                writers[name] = self._block.writer(name, values)
        if len(outputs) != len(writers):
            raise self._changed_outputs(outputs, writers)
        slot = self._first_slot + step
        for name, values in outputs.items():
            writers[name](slot, values)
        return for_env

    def _random_actions(self) -> object:
        actions = self.stepper.sample_random_actions()
        chosen = as_chosen(self._normalize, self.runner.env.single_action_space, actions)
        return self._to_env({Columns.ACTIONS: chosen, Columns.ACTIONS_FOR_ENV: actions})

    def _step(self, actions: object) -> object:
        return self._source.step_sparse(actions)

    def _add(self, results: SparseStep) -> None:
        observations, rewards, terminated, truncated, infos = results
        step = self._num_steps
        slot = self._first_slot + step
        self._write_rewards(slot, rewards)
        self._terminated[slot] = terminated
        self._truncated[slot] = truncated
        if self._source.failed:
            self._mark_failures()
        self._num_env_steps += self.num_envs - self._num_resetting
        if infos:
            for index, info in infos.items():
                self._infos[index, self.lookback + step + 1] = info
        if self._has_pieces:
            observations = self._to_store(observations, slot + 1, self._needs_reset)
            self._write_observations(slot + 1, observations)
            self._module_observations = self._env_to_module.read(observations, self._rows)
        else:
            self._write_observations(slot + 1, observations)
            self._module_observations = observations

    def _note_ends(self) -> None:
        if self._num_resetting and self._state is not None:
            self._state = self._module_step.reset_rows(self._state, np.flatnonzero(self._needs_reset))
        slot = self._first_slot + self._num_steps
        self._needs_reset = needs_reset = self._terminated[slot] | self._truncated[slot]
        self._num_resetting = num_ends = needs_reset.tobytes().count(1)
        if num_ends:
            self.runner.failures.num_in_a_row = 0
            self._num_ends += num_ends

    def _finish(self) -> EpisodeBatch:
        """Find the chunks, update the ongoing episodes and keep what the next fragment needs."""
        block, num_steps, lookback, first = self._block, self._num_steps, self.lookback, self._first
        request, begin_s, finished = self._request, self._begin_s, self._finished
        num_slots = lookback + self._num_slots + 1
        sampled = slice(self._first_slot, self._first_slot + num_steps)
        block.columns[Columns.WEIGHTS_VERSION][:, sampled] = self.runner.weights_seq_no
        terminated, truncated = block.flags[:, sampled]
        if num_slots == block.num_slots:  # the block is the fragment
            columns = block.flat()
            self._block = block.part(num_steps, num_steps + lookback + 1)
        else:
            columns = block.flat(first, first + num_slots)
            self._first += num_steps
        if self._num_ends or self._num_failures or self._num_starting_with_reset:
            table = find_chunks(terminated, truncated, self._starts_with_reset)
            if table.num_finished < self._num_ends and not self._num_failures:
                raise self._no_autoreset(terminated | truncated)
        else:
            zeros, no = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, np.bool_)
            table = ChunkTable(np.arange(self.num_envs), zeros, zeros + num_steps, no, no, ~no, 0)
        if request.num_episodes is not None:
            table = table.select(np.arange(len(table.length)) < min(request.num_episodes, table.num_finished))
        start = table.env_index * num_slots + lookback + table.first_step
        returns = _sums(columns[Columns.REWARDS], start, table.length)
        num_returns = len(finished.returns)
        episode_ids, t_started = self._ongoing.add_fragment(table, returns, begin_s, num_steps, finished)
        infos = {}
        if self._infos:
            infos = {index * num_slots + slot: info for (index, slot), info in self._infos.items()}
            ends = (start + table.length)[: table.num_finished].tolist()
            for n, end in enumerate(ends, num_returns):
                if (recorded := recorded_return(infos.get(end, {}))) is not None:
                    finished.returns[n] = recorded
            self._carried_infos = {
                (index, slot - num_steps): info
                for (index, slot), info in self._infos.items()
                if slot >= num_steps
            }
        if request.num_episodes is not None:
            self.forget()
        return EpisodeBatch(
            columns=columns,
            start=start,
            length=table.length,
            lookback=np.minimum(t_started, lookback),
            t_started=t_started,
            terminated=table.terminated,
            truncated=table.truncated,
            env_index=table.env_index,
            episode_ids=episode_ids,
            initial_state=None if self._begin_state is None else self._initial_states(table),
            duration_s=(time.perf_counter() - begin_s) * table.length / max(num_steps, 1),
            infos=infos,
            observation_space=self._env_to_module.stored_observation_space,
            action_space=self.runner.env.single_action_space,
        )

    # -- off the hot path ----------------------------------------------------------------------

    def _to_store(self, observations: object, slot: int, is_first: BoolArray) -> object:
        """Return what the pieces make of observations, and move the rows there; readers come after storing."""
        self._num_previous += 1
        self._num_previous[is_first] = 0
        num_previous = np.minimum(self._num_previous, slot - self._first)
        self._rows.move_to(slot, is_first=is_first, num_previous=num_previous)
        return self._env_to_module.write(observations, self._rows)

    def _changed_outputs(self, outputs: dict[str, Any], writers: dict[str, Writer]) -> ValueError:
        odd = sorted(set(outputs) ^ set(writers))
        return ValueError(
            f"{type(self.runner.module).__name__} returned the columns {sorted(outputs)} at vector step "
            f"{self._num_steps} of a fragment, but {sorted(writers)} before: {', '.join(map(repr, odd))} must be there "
            "at every step or never."
        )

    def _mark_failures(self) -> None:
        """Truncate the episodes of recreated envs before this step, which becomes a reset."""
        step, slot = self._num_steps, self._first_slot + self._num_steps
        failed = np.zeros(self.num_envs, np.bool_)
        failed[self._source.failed] = True
        for index in np.flatnonzero(failed & ~self._needs_reset).tolist():
            self._num_failures += 1
            if step == 0:
                self._starts_with_reset = self._starts_with_reset.copy()
                self._starts_with_reset[index] = True
                self._ongoing.close(index, self._finished)
                continue
            self._truncated[slot - 1, index] = True
            was_resetting = (
                self._starts_with_reset[index] if step == 1 else self._block.flags[:, slot - 2, index].any()
            )
            self._num_ends += not was_resetting
        self._needs_reset = self._needs_reset | failed
        self._num_resetting = int(np.count_nonzero(self._needs_reset))

    def _no_autoreset(self, done: BoolArray) -> EnvError:
        after = np.concatenate([self._starts_with_reset[None], done[:-1]])
        step, index = np.argwhere(done & after)[0].tolist()
        return EnvError(
            f"Environment {index} of env runner {self.runner.worker_index} reported an episode's end at vector step "
            f"{step} of this fragment, directly after another end. In NEXT_STEP autoreset that step is the reset, with "
            "terminated and truncated False: does the vector env really autoreset in this mode?"
        )

    def _initial_states(self, table: ChunkTable) -> object:
        """Return the module's state before each chunk's first step, leaves ``[C, ...]``."""
        from_before = table.first_step == 0

        def pick(begin: NDArray[Any], initial: object) -> NDArray[Any]:
            picked = begin[table.env_index]
            picked[~from_before] = to_numpy(initial)
            return picked

        return tree_map(pick, self._begin_state, self._module_step.initial_row)


def _sums(values: NDArray[Any], start: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the sums of the disjoint slices ``start … start + length - 1``; no slice contains the last slot."""
    if len(start) == 0:
        return np.zeros(0)
    if len(start) == 1:
        begin = int(start[0])
        return np.add.reduceat(values[begin : begin + int(length[0])], [0], dtype=np.float64)
    order = np.argsort(start)
    bounds = np.stack([start[order], start[order] + length[order]], axis=1).reshape(-1)
    sums = np.empty(len(start))
    sums[order] = np.add.reduceat(values, bounds, dtype=np.float64)[::2]
    return sums


Writer = Callable[[int, Any], None]


@dataclass
class ColumnBlock:
    """Columns by name, each a tree of arrays ``[num_envs, num_slots, ...]``.

    Attributes:
        flags: bool ``[2, num_slots, num_envs]``: terminated and truncated.
    """

    num_envs: int
    num_slots: int
    flags: BoolArray
    columns: dict[str, Any] = field(default_factory=dict)

    def writer(self, name: str, example: object = None) -> Writer:
        """Return ``write(slot, values)`` for values ``[num_envs, ...]`` of a column.

        Args:
            name: The column.
            example: Such values. A new column of zeros gets their shapes and dtypes, an older one their dtypes (actions
                may have been sampled from the action space before). None: the column stays as it is.

        Raises:
            ValueError: The example is not of all environments.
        """
        for leaf in () if example is None else tree_leaves(example):
            if leaf.shape[:1] != (self.num_envs,):
                raise ValueError(
                    f"Column {name!r} has shape {leaf.shape}, expected its first dimension to be "
                    f"the {self.num_envs} environments."
                )
        column = self.columns.get(name)
        if column is None:
            lead = (self.num_envs, self.num_slots)
            column = tree_map(lambda leaf: np.zeros((*lead, *leaf.shape[1:]), leaf.dtype), example)
        elif example is not None:
            column = tree_map(lambda leaf, like: leaf.astype(like.dtype, copy=False), column, example)
        self.columns[name] = column
        if isinstance(column, np.ndarray):
            write: Writer = column.swapaxes(0, 1).__setitem__
            return write
        rows = [leaf.swapaxes(0, 1) for leaf in tree_leaves(column)]

        def write_tree(slot: int, values: object) -> None:
            for row, value in zip(rows, tree_leaves(values), strict=True):
                row[slot] = value

        return write_tree

    def part(self, begin: int, end: int, num_slots: int | None = None) -> ColumnBlock:
        """Return a block that begins with copies of the slots ``begin … end - 1``.

        Args:
            begin, end: The slots.
            num_slots: The block's slots, of which further ones are zeros; None: only those that are copied.
        """
        size = end - begin if num_slots is None else num_slots
        part = ColumnBlock(self.num_envs, size, np.zeros((2, size, self.num_envs), np.bool_))

        def cut(leaf: NDArray[Any]) -> NDArray[Any]:
            if num_slots is None:
                return leaf[:, begin:end].copy()
            larger = np.zeros((leaf.shape[0], num_slots, *leaf.shape[2:]), leaf.dtype)
            larger[:, : end - begin] = leaf[:, begin:end]
            return larger

        for name, column in self.columns.items():
            part.columns[name] = tree_map(cut, column)
        part.flags[:, : end - begin] = self.flags[:, begin:end]
        return part

    def flat(self, begin: int = 0, end: int | None = None) -> dict[str, Any]:
        """Return the columns as ``[num_envs * num_slots, ...]``: views, or copies of the slots ``begin … end - 1``."""

        def flatten(leaf: NDArray[Any]) -> NDArray[Any]:
            kept = leaf if end is None else leaf[:, begin:end].copy()
            return kept.reshape(-1, *leaf.shape[2:])

        columns: dict[str, Any] = tree_map(flatten, self.columns)
        return columns


def find_chunks(
    terminated: NDArray[np.bool_], truncated: NDArray[np.bool_], starts_with_reset: NDArray[np.bool_]
) -> ChunkTable:
    """Find the chunks from the done flags of a fragment.

    Args:
        terminated, truncated: bool ``[T, num_envs]``, the flags of each vector step; False at
            autoreset steps.
        starts_with_reset: bool ``[num_envs]``, envs whose step 0 is an autoreset step.

    Returns:
        The chunks with at least one step.
    """
    num_steps, num_envs = terminated.shape
    end_step, end_env = np.nonzero(terminated | truncated)
    # Ended chunks by (step, env), then one per env that goes on; `order` has each behind the one before it in its env.
    env = np.concatenate([end_env, np.arange(num_envs)])
    end = np.concatenate([end_step + 1, np.full(num_envs, num_steps)])
    order = np.lexsort((end, env))
    first = order[np.searchsorted(env[order], np.arange(num_envs))]
    begin = np.empty_like(end)
    begin[order[1:]] = end[order[:-1]] + 1  # behind the autoreset step
    begin[first] = starts_with_reset
    continues = np.zeros(len(env), np.bool_)
    continues[first] = ~starts_with_reset
    no = np.zeros(num_envs, np.bool_)
    has_terminated = np.concatenate([terminated[end_step, end_env], no])
    has_truncated = np.concatenate([truncated[end_step, end_env], no])
    table = ChunkTable(env, begin, end - begin, has_terminated, has_truncated, continues, len(end_env))
    return table.select(table.length > 0)
