"""Buffers of one agent's episodes: n-step transitions or sequences, drawn uniformly or by priorities.

`HindsightEpisodeReplayBuffer` draws transitions as if a later observation had been the goal (Andrychowicz et al. 2017).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tree import tree_rows
from rlzmq.episodes.batch_items import kind_of
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.replay.replay_buffer import ReplayBuffer
from rlzmq.replay.step_store import (
    ENV_T,
    LEAST_PRIORITY,
    NONE,
    PRIORITY,
    STEP_COLUMNS,
    StepStore,
    Transitions,
    item_facts,
)

__all__ = ["EpisodeReplayBuffer", "HindsightEpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer"]

IntArray = NDArray[np.int64]

_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1
_MOST_REDRAWS = 64
# Arguments of `sample` that `sample_transitions` has, too.
_OF_TRANSITIONS = {"rng", "n_step", "gamma", "beta"}
# Rows of several samples that are read at once; they should stay in a core's cache.
_BYTES_AT_ONCE = 2**20


class EpisodeReplayBuffer(ReplayBuffer):
    """Buffer of the newest `capacity` steps of single-agent episodes.

    Observations are stored once and keep their dtype; consecutive chunks of an episode are joined, across calls of
    `add`. Whole episodes are evicted, the oldest first. Samples are returned as an `EpisodeBatch`, which is both a
    list of episodes and columns for a learner; `sample` does not loop over its items.

    Example:
        >>> buffer = EpisodeReplayBuffer(capacity=100_000)
        >>> buffer.add(env_runner.sample(num_timesteps=1000))
        >>> transitions = buffer.sample(256, n_step=3, gamma=0.99)
        >>> sequences = buffer.sample(batch_size_B=16, batch_length_T=20, lookback=1)

    Args:
        capacity: Env steps, >= 1; a single episode may exceed it.
        batch_size_B, batch_length_T: Default number of items in a sample, and of steps in an item.
        metrics_num_episodes_for_smoothing: Number of newest samples whose mean is ``actual_n_step`` in `get_metrics`.
        keeps_extra_model_outputs: Whether to store extra model outputs (or ids of modules whose outputs to store);
            without them, steps take less memory.
        seed: Seed of the generator that `sample` uses by default; None: from the operating system.
    """

    draws_sequences: ClassVar[bool] = True
    alpha: float | None = None  # of priorities
    # Attributes that are restored with the steps.
    _counts: ClassVar[tuple[str, ...]] = ("_num_sampled", "_num_items_sampled", "_num_redrawn")

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        batch_size_B: int = 16,
        batch_length_T: int = 1,
        metrics_num_episodes_for_smoothing: int = 100,
        keeps_extra_model_outputs: bool | Collection[str] = True,
        seed: int | None = None,
    ) -> None:
        for name, value in (
            ("capacity", capacity),
            ("batch_size_B", batch_size_B),
            ("batch_length_T", batch_length_T),
            ("metrics_num_episodes_for_smoothing", metrics_num_episodes_for_smoothing),
        ):
            if value < 1:
                raise ValueError(f"{type(self).__name__}: expected {name} >= 1, got {value}.")
        self.capacity = capacity
        self.batch_size_B = batch_size_B
        self.batch_length_T = batch_length_T
        self._keeps_extra_model_outputs = bool(keeps_extra_model_outputs)
        self._rng = np.random.default_rng(seed)
        self._store = self._new_store()
        self._drawn: IntArray = np.empty(0, np.int64)  # keys of the steps in the last sample with priorities
        self._num_sampled = self._num_items_sampled = self._num_redrawn = 0
        self._actual_n_steps: deque[float] = deque(maxlen=metrics_num_episodes_for_smoothing)

    def _new_store(self) -> StepStore:
        keeps = self._keeps_extra_model_outputs
        return StepStore(self.capacity, alpha=self.alpha, keeps_extra_model_outputs=keeps)

    # -- facts ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of stored env steps."""
        return self._store.num_steps

    def _store_of(self, module_id: str | None) -> StepStore:
        """Return the store of a module's steps, empty if it has none; None: that of the env steps."""
        return self._store

    def get_num_timesteps(self, module_id: str | None = None) -> int:
        """Return the number of steps stored for a module; None: of env steps."""
        return self._store_of(module_id).num_steps

    def get_num_episodes(self, module_id: str | None = None) -> int:
        """Return the number of episodes with stored steps; of a module: of its agents' parts of episodes."""
        return self._store_of(module_id).num_episodes

    def get_num_episodes_evicted(self, module_id: str | None = None) -> int:
        """Return the number of episodes, or of a module's parts of them, evicted over the lifetime."""
        return self._store_of(module_id).num_episodes_evicted

    def get_added_timesteps(self, module_id: str | None = None) -> int:
        """Return the number of steps added for a module over the lifetime; None: of env steps."""
        return self._store_of(module_id).num_added

    def get_sampled_timesteps(self, module_id: str | None = None) -> int:
        """Return the number of steps sampled for a module over the lifetime; None: for all modules."""
        return self._num_sampled

    @property
    def episodes(self) -> EpisodeBatch:
        """A copy of the stored episodes, the oldest first."""
        batch = self._stored()
        for of_module in batch.agent_batches:
            of_module.columns.pop(PRIORITY, None)
        return batch

    @property
    def num_bytes(self) -> int:
        """Size of the stored steps in bytes."""
        return self._store.num_bytes

    def state_before(self, key: int) -> Any:
        """Return the module's state before a step that begins a stored part of an episode; None: it is not known."""
        return self._store.states.get(key & _SLOT_MASK)

    def get_metrics(self) -> dict[str, float]:
        """Return the current counts, the lifetime counts, and ``actual_n_step``: the mean number of rewards in a sum.

        Sums of `n_step` rewards are shorter at the end of an episode. The mean is that of the newest samples with
        `n_step`; without one it is missing.
        """
        store, n_steps = self._store, self._actual_n_steps
        actual_n_step = {"actual_n_step": sum(n_steps) / len(n_steps)} if n_steps else {}
        return {
            "num_env_steps_stored": store.num_steps,
            "num_episodes_stored": store.num_episodes,
            "num_bytes_stored": self.num_bytes,
            "num_env_steps_added_lifetime": store.num_added,
            "num_env_steps_evicted_lifetime": store.num_evicted,
            "num_env_steps_sampled_lifetime": self._num_sampled,
            "num_episodes_added_lifetime": store.num_episodes_added,
            "num_episodes_evicted_lifetime": store.num_episodes_evicted,
            "num_resamples": self._num_redrawn,
            **actual_n_step,
        }

    # -- in -------------------------------------------------------------------------------------------

    def add(self, episodes: object, weight: Any = None) -> None:
        """Add episodes or chunks of them; lookback parts are ignored.

        Args:
            episodes: A SingleAgentEpisode, an EpisodeBatch, or a list of either.
            weight: Priority of the new steps; None: the highest so far. Prioritized buffers only.

        Raises:
            TypeError: `episodes` is anything else, including multi-agent episodes, or there are no priorities.
            ValueError: The columns differ from those of earlier episodes.
        """
        for batch in as_batches(episodes):
            self._store.make_room(batch.num_env_steps)
            self._store.append(batch, weight=weight)
            self._store.make_room(0, num_kept=1)

    def mark(self) -> None:
        """Make later calls of `add` undoable, until the next `mark`."""
        self._store.mark()

    def undo(self) -> None:
        """Remove the steps added since `mark`. Steps that were evicted to make room are not restored."""
        self._store.undo()

    def _keys(self, slots: IntArray) -> IntArray:
        """Return keys of steps, which stay unique when slots are reused."""
        keys: IntArray = (self._store.serial[slots] & 0x7FFFFFFF) << _SLOT_BITS | slots
        return keys

    def _is_stored(self, keys: IntArray) -> NDArray[np.bool_]:
        store, slots = self._store, keys & _SLOT_MASK
        known: NDArray[np.bool_] = slots < store.num_slots
        known[known] = store.has_step(slots[known]) & (
            store.serial[slots[known]] & 0x7FFFFFFF == keys[known] >> _SLOT_BITS
        )
        return known

    # -- out ------------------------------------------------------------------------------------------

    def sample(
        self,
        num_items: int | None = None,
        *,
        batch_size_B: int | None = None,
        batch_length_T: int | None = None,
        n_step: int | tuple[int, int] | None = None,
        gamma: float = 0.99,
        beta: float = 0.0,
        include_infos: bool = False,
        include_extra_model_outputs: bool = False,
        lookback: int = 0,
        min_batch_length_T: int = 0,
        full_length: bool = False,
        rng: np.random.Generator | None = None,
        sample_episodes: bool = True,
        to_numpy: bool = True,
    ) -> EpisodeBatch:
        """Sample transitions or sequences, starting at steps drawn with replacement.

        With ``batch_length_T`` 1 each item is a transition: observation o_t, action a_t, the rewards' sum
        Σ_{k<n} γ^k r_{t+k}, and o_{t+n} as its next observation. Near the end of an episode, or of the stored part
        of it, fewer than n steps are left: the sum ends there, the column ``n_step`` has the number of rewards in
        it, and the item is terminated or truncated if the episode is. So every stored step can be drawn, and
        γ^n_step is the correct factor of a bootstrapped value in every row.

        With a larger ``batch_length_T`` each item is a sequence of at most that many steps, shorter only at the
        end of the stored part of an episode.

        Args:
            num_items: Number of transitions; for sequences the total number of steps, rounded up to full sequences.
            batch_size_B: Number of items, instead of `num_items`; None: as constructed.
            batch_length_T: Steps per item; None: as constructed.
            n_step: n >= 1, or a range (least, most), inclusive, from which n is drawn per item. Transitions only.
            gamma: γ, for n > 1.
            beta: Exponent of the importance weights in the column ``weights``; 1 for uniform sampling.
            include_infos: Whether the items have infos.
            include_extra_model_outputs: Whether the items have the extra model outputs of their steps.
            lookback: Number of steps before each item to include, as far as they are stored; of transitions with n = 1.
            min_batch_length_T: Sequences shorter than this are redrawn.
            full_length: Whether sequences drawn near the end of a stored part begin so much earlier that they have
                ``batch_length_T`` steps, or as many as the part has.
            rng: Random generator; None: the buffer's generator.
            sample_episodes, to_numpy: As in RLlib, and always True: the result is a list of episodes of numpy arrays.

        Returns:
            The items, each a chunk. Extra columns of transitions: ``weights``, ``n_step`` (with n_step given). Of all
            items: ``replay_key``, for `update_priorities`.

        Raises:
            ValueError: The buffer is empty, `num_items` and `batch_size_B` are both given, no stored stretch has
                `min_batch_length_T` steps, or `sample_episodes` or `to_numpy` is False.
        """
        check_samples_episodes(f"{type(self).__name__}.sample", sample_episodes, to_numpy)
        rng = self._rng if rng is None else rng
        length = self.batch_length_T if batch_length_T is None else batch_length_T
        num = self._num_to_draw(num_items, batch_size_B, length)
        n_range = self._check_sample(n_step, length, lookback)
        starts = drawn = self._draw(num, rng)
        if min_batch_length_T > 1:
            starts = self._redraw_short(starts, min(min_batch_length_T, length), rng)
        if length == 1 and not lookback:
            items = self._transitions(starts, n_step, drawn_n(*n_range, num, rng), gamma, beta)
            return self._filled(items, items.slots(), include_infos, include_extra_model_outputs)
        if full_length:
            starts = self._moved_back(starts, length)
        batch, slots = self._sequences(starts, length, lookback)
        of_items: dict[str, NDArray[Any]] = {}
        if self.alpha is not None or length == 1:
            of_items["weights"] = self._weights(drawn, beta)
        if length == 1:
            of_items["n_step"] = np.ones(num, np.int64)
        elif self.alpha is not None:
            of_items["priority_key"] = self._drawn
        for name, values in of_items.items():
            batch.columns[name] = values.repeat(batch.lookback + batch.length + 1)
        return self._filled(batch, slots, include_infos, include_extra_model_outputs)

    def draw(
        self, module_id: str, num_items: int, *, num_samples: int = 1, **options: Any
    ) -> Sequence[EpisodeBatch]:
        if (
            type(self).sample is EpisodeReplayBuffer.sample
            and options.keys() <= _OF_TRANSITIONS
            and self.batch_length_T == 1
        ):
            return self.sample_transitions(num_items, num_samples=num_samples, **options)
        return super().draw(module_id, num_items, **options)

    def sample_transitions(
        self,
        num: int,
        *,
        rng: np.random.Generator,
        n_step: int | tuple[int, int] | None = None,
        gamma: float = 0.99,
        beta: float = 0.0,
        num_samples: int = 1,
    ) -> list[Transitions]:
        """Sample transitions for a learner: those of `sample`, whose episodes are created when they are first read.

        Until they are, nothing may be added or removed.

        Args:
            num: Number of transitions, >= 1.
            rng, n_step, gamma, beta: See `sample`.
            num_samples: Number of samples, at least 1. Fewer are returned if the next ones depend on priorities that
                the first ones change, if their n is drawn, or if they take much memory.
        """
        least, most = self._check_sample(n_step, 1)
        if least < most or self.alpha is not None or type(self)._draw is not EpisodeReplayBuffer._draw:
            num_samples = 1
        num_samples = max(1, min(num_samples, _BYTES_AT_ONCE // (num * self._store.bytes_per_slot)))
        num_drawn = num * num_samples
        starts = self._draw(num_drawn, rng)
        n = drawn_n(least, most, num_drawn, rng)
        drawn = self._transitions(starts, n_step, n, gamma, beta, num_samples)
        self._num_sampled += num_drawn
        return [drawn] if num_samples == 1 else drawn.parts(num)

    def _check_sample(
        self, n_step: int | tuple[int, int] | None, length: int, lookback: int = 0
    ) -> tuple[int, int]:
        """Check that items can be drawn; return the least and the largest n."""
        least, most = (1, 1) if n_step is None else (n_step, n_step) if isinstance(n_step, int) else n_step
        if not 1 <= least <= most:
            raise ValueError(f"{type(self).__name__}.sample: expected n_step >= 1, got {n_step}.")
        if most > 1 and (length > 1 or lookback):
            raise ValueError(
                f"{type(self).__name__}.sample: n_step={n_step} is for transitions, not for sequences of "
                f"batch_length_T={length} or with lookback={lookback}."
            )
        if not len(self):
            raise ValueError(f"{type(self).__name__}.sample: the buffer is empty.")
        return least, most

    def _num_to_draw(self, num_items: int | None, batch_size_B: int | None, length: int) -> int:
        if num_items is not None and batch_size_B is not None:
            raise ValueError(
                f"{type(self).__name__}.sample: expected num_items or batch_size_B, got both: {num_items}, "
                f"{batch_size_B}."
            )
        num = self.batch_size_B if batch_size_B is None else batch_size_B
        if num_items is not None:
            num = -(-num_items // length)
        if num < 1 or length < 1:
            raise ValueError(
                f"{type(self).__name__}.sample: expected at least one item of at least one step, got "
                f"{num} × {length}."
            )
        return num

    def _draw(self, num: int, rng: np.random.Generator) -> IntArray:
        """Draw steps; return their slots, int64 [num]."""
        return self._store.draw(num, rng)

    def _weights(self, slots: IntArray, beta: float) -> NDArray[np.float32]:
        """Return the importance weights of drawn steps, which `update_priorities` takes for the last ones."""
        tree = self._store.tree
        if tree is None:
            return np.ones(len(slots), np.float32)
        self._drawn = self._keys(slots)
        priorities = tree.get(slots)
        weights: NDArray[np.float32] = ((priorities / priorities.min()) ** -beta).astype(np.float32)
        return weights

    def _redraw_short(self, starts: IntArray, least: int, rng: np.random.Generator) -> IntArray:
        """Redraw starts of sequences with fewer than `least` steps."""
        for _ in range(_MOST_REDRAWS):
            short = np.flatnonzero(~self._store.has_step(self._walk(starts, least - 1)[:, -1]))
            if not len(short):
                return starts
            if self._store.longest < least:
                break
            self._num_redrawn += len(short)
            starts[short] = self._draw(len(short), rng)
        raise ValueError(
            f"{type(self).__name__}.sample: expected stretches of min_batch_length_T={least} steps, the longest "
            f"stored one has {self._store.longest}, and few or none are long enough."
        )

    def _moved_back(self, starts: IntArray, length: int) -> IntArray:
        """Return starts with at least `length` steps after them, as far as there are so many."""
        num_missing = (self._walk(starts, length)[:, 1:] == NONE).sum(1)
        for k in range(1, length):
            before = self._store.previous[starts]
            starts = np.where((num_missing >= k) & (before != NONE), before, starts)
        return starts

    def _walk(self, starts: IntArray, num: int) -> IntArray:
        """Return the slots of the observations from each start, int64 [K, num + 1]; -1 after the last."""
        path = np.empty((len(starts), num + 1), np.int64)
        path[:, 0] = starts
        for k in range(num):
            path[:, k + 1] = np.where(path[:, k] == NONE, NONE, self._store.next[path[:, k]])
        return path

    def _transitions(
        self,
        starts: IntArray,
        n_step: int | tuple[int, int] | None,
        n: IntArray | int,
        gamma: float,
        beta: float,
        num_samples: int = 1,
    ) -> Transitions:
        store = self._store
        last = starts  # slot of the last step in the sum
        num_summed = np.ones(len(starts), np.int64)
        rewards = store.columns[Columns.REWARDS]
        most = n if isinstance(n, int) else int(n.max())
        sums = rewards[starts].astype(np.float64) if most > 1 else rewards[starts]
        for k in range(1, most):
            following = store.next[last]
            continues = (k < n) & store.has_step(following)
            if not continues.any():
                break
            last = np.where(continues, following, last)
            num_summed += continues
            sums += np.where(continues, gamma**k * rewards[last].astype(np.float64), 0.0)
        values: dict[str, NDArray[Any]] = {
            Columns.REWARDS: sums if most == 1 else sums.astype(rewards.dtype, copy=False),
            "weights": self._weights(starts, beta),
            "replay_key": self._keys(starts),
        }
        if n_step is not None:
            values["n_step"] = num_summed
            of_samples = [1.0] * num_samples
            if n_step != 1:
                of_samples = num_summed.reshape(num_samples, -1).mean(axis=1).tolist()
            self._actual_n_steps.extend(of_samples)
        return Transitions(store, starts, last, values, first_item=self._note_items(len(starts)))

    def _sequences(self, starts: IntArray, length: int, lookback: int) -> tuple[EpisodeBatch, IntArray]:
        """Return sequences without the stored columns, and the slot of each of their columns' rows."""
        store = self._store
        path = self._walk(starts, length)
        before = np.empty((len(starts), lookback), np.int64)
        slots = starts
        for k in range(lookback - 1, -1, -1):
            slots = before[:, k] = np.where(slots == NONE, NONE, store.previous[slots])
        whole = np.concatenate([before, path], axis=1)
        is_there = whole != NONE
        num_before = is_there[:, :lookback].sum(axis=1)
        num_steps = is_there[:, lookback:].sum(axis=1) - 1
        last = path[np.arange(len(starts)), num_steps - 1]
        counts = is_there.sum(axis=1)
        slots = whole[is_there]
        batch = EpisodeBatch(
            {"replay_key": self._keys(slots)},
            start=np.cumsum(counts) - counts + num_before,
            length=num_steps,
            lookback=num_before,
            **item_facts(store, starts, last, self._note_items(len(starts))),
        )
        return batch, slots

    def _note_items(self, num: int) -> int:
        """Count items; return the number of the first."""
        self._num_items_sampled += num
        return self._num_items_sampled - num

    def _filled(
        self, batch: EpisodeBatch, slots: IntArray, infos: bool, extra_model_outputs: bool
    ) -> EpisodeBatch:
        columns = self._store.columns
        for name, column in columns.items():
            is_wanted = name in STEP_COLUMNS or (extra_model_outputs and name != ENV_T)
            if is_wanted and name not in batch.columns:
                batch.columns[name] = tree_rows(column, slots)
        if infos and self._store.infos:
            stored = self._store.infos
            batch.infos = {i: stored[slot] for i, slot in enumerate(slots.tolist()) if slot in stored}
        self._num_sampled += batch.num_env_steps
        return batch

    # -- state ----------------------------------------------------------------------------------------

    def _stored(self) -> EpisodeBatch:
        """Return all stored steps, with what a buffer like this one restores of them."""
        return self._store.stored()

    def get_state(self) -> dict[str, Any]:
        """Return the stored steps, counters and random generator as plain values and arrays."""
        return {
            "episodes": list(self._stored().to_wire()),
            "counts": self._get_counts(),
            "rng": self._rng.bit_generator.state,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `get_state`, replacing all stored steps. The capacity is unchanged."""
        old, self._store = self._store, self._new_store()
        spaces = {"observation_space": old.observation_space, "action_space": old.action_space}
        self.add(EpisodeBatch.from_wire(*state["episodes"], **spaces))
        self._set_counts(state["counts"])
        self._rng.bit_generator.state = state["rng"]
        self.mark()

    def _get_counts(self) -> dict[str, Any]:
        """Return what was counted over the lifetime."""
        return {**{name: getattr(self, name) for name in self._counts}, **self._store.counts}

    def _set_counts(self, counts: Mapping[str, Any]) -> None:
        """Restore what was counted; without an entry, from the steps that are stored now."""
        for name in self._counts:
            setattr(self, name, type(getattr(self, name))(counts.get(name, 0)))
        self._store.counts = {**self._store.counts, **counts}


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

    def __init__(self, capacity: int = 10_000, *, alpha: float = 1.0, **options: Any) -> None:
        if alpha < 0.0:
            raise ValueError(f"{type(self).__name__}: expected alpha >= 0, got {alpha}.")
        self.alpha: float = alpha
        super().__init__(capacity, **options)

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
        priorities, store = np.maximum(errors[known], LEAST_PRIORITY), self._store
        store.greatest = max(store.greatest, float(priorities.max()))
        assert store.tree is not None
        store.tree.set(slots[known], priorities**self.alpha)


_GOAL, _ACHIEVED = "desired_goal", "achieved_goal"


class _GoalSettings(Protocol):
    n_step: int | tuple[int, int]

    def make_env(self) -> Any: ...
    def build_env_to_module_connector(self, env: Any, spaces: dict[str, Any]) -> Any: ...


class HindsightEpisodeReplayBuffer(EpisodeReplayBuffer):
    """An EpisodeReplayBuffer for goal environments, arXiv:1707.01495, with the strategy "future".

    Observations are Dicts with ``achieved_goal`` and ``desired_goal``. Of `n_sampled_goal` + 1 drawn transitions,
    `n_sampled_goal` get another goal: what the same episode achieves at a later step, drawn uniformly.
    Their rewards are recomputed.

    In a run, ``replay_buffer_config={"type": "HindsightEpisodeReplayBuffer", "capacity": …}`` takes `compute_reward`,
    and `compute_terminated` if there is one, from the environment (Gymnasium-Robotics' ``GoalEnv``).

    Args:
        capacity, options: See `EpisodeReplayBuffer`.
        compute_reward: ``compute_reward(achieved_goal, desired_goal, info)`` of K steps at once: arrays ``[K, …]`` and
            a list of K info dicts in, float [K] out. The achieved goal is that after the step.
        compute_terminated: The same for a single step: whether it ends the episode; None: it ends as recorded.
        n_sampled_goal: Number of transitions with another goal for each one with the recorded goal, >= 0.
    """

    draws_sequences: ClassVar[bool] = False

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        compute_reward: Callable[[Any, Any, Any], Any],
        compute_terminated: Callable[[Any, Any, Any], Any] | None = None,
        n_sampled_goal: int = 4,
        **options: Any,
    ) -> None:
        super().__init__(capacity, **options)
        self._compute_reward, self._compute_terminated = compute_reward, compute_terminated
        self._share = n_sampled_goal / (n_sampled_goal + 1)

    @classmethod
    def from_config(cls, config: object, **arguments: Any) -> Self:
        """Return a learner's buffer, with the reward of the config's environment.

        Raises:
            ConfigurationError: The environment has no ``compute_reward``, or does not get the goals that are stored; or
                n_step is not 1.
        """
        settings = cast(_GoalSettings, config)
        if settings.n_step != 1:
            raise ConfigurationError(
                f"config.n_step={settings.n_step}: a sum of rewards belongs to the recorded goal. Set n_step=1."
            )
        wrapped = settings.make_env()
        env, spaces = wrapped.unwrapped, (wrapped.observation_space, wrapped.action_space)
        pipeline = settings.build_env_to_module_connector(None, {"__env_single__": spaces})
        stored, own = (getattr(of, "spaces", {}) for of in (pipeline.stored_observation_space, spaces[0]))
        if any(stored.get(name) != own.get(name) for name in (_GOAL, _ACHIEVED)):
            raise ConfigurationError(
                f"config.replay_buffer_config['type']={cls.__name__!r}: a piece of env_to_module_connector changes the "
                f"stored goals to {stored.get(_GOAL)}, and compute_reward needs those of the environment, "
                f"{own.get(_GOAL)}. Leave the piece out, or let it change the part 'observation' only."
            )
        for name in ("compute_reward", "compute_terminated"):
            if hasattr(env, name):
                arguments.setdefault(name, getattr(env, name))
        if "compute_reward" not in arguments:
            raise ConfigurationError(
                f"config.replay_buffer_config['type']={cls.__name__!r}: {type(env).__name__} has no method "
                "compute_reward(achieved_goal, desired_goal, info). Add it, or use 'EpisodeReplayBuffer'."
            )
        return cls(**arguments)

    def sample(self, num_items: int | None = None, **options: Any) -> EpisodeBatch:
        """Sample transitions, see `EpisodeReplayBuffer.sample`.

        Raises:
            ValueError: `n_step` or the length is not 1, since other rewards belong to the recorded goal.
        """
        n_step, length = options.get("n_step") or 1, options.get("batch_length_T") or self.batch_length_T
        if n_step != 1 or length != 1:
            raise ValueError(
                f"{type(self).__name__}.sample: expected 1, got n_step={n_step}, batch_length_T={length}."
            )
        rng = options.setdefault("rng", self._rng)
        batch = super().sample(num_items, **options)
        store, starts = self._store, batch.columns["replay_key"][::2] & _SLOT_MASK
        changed = np.flatnonzero(rng.random(len(starts)) < self._share)
        path = self._walk(starts[changed], store.longest)[:, 1:]
        later = (rng.random(len(changed)) * (path != NONE).sum(1)).astype(np.int64)
        achieved = store.columns[Columns.OBS][_ACHIEVED]
        goals = tree_rows(achieved, path[np.arange(len(changed)), later])
        reached = tree_rows(achieved, path[:, 0])
        infos = [store.infos.get(slot, {}) for slot in path[:, 0].tolist()]
        rewards = self._compute_reward(reached, goals, infos)
        for row in (2 * changed, 2 * changed + 1):
            batch.columns[Columns.OBS][_GOAL][row] = goals
            batch.columns[Columns.REWARDS][row] = rewards
        if self._compute_terminated is not None:
            ends = map(self._compute_terminated, reached, goals, infos)
            batch.terminated[changed] = np.fromiter(ends, np.bool_)
        return batch


def check_samples_episodes(where: str, sample_episodes: bool, to_numpy: bool) -> None:
    """Check two arguments of `sample` that exist for compatibility with RLlib.

    Raises:
        ValueError: One of them is False.
    """
    if not (sample_episodes and to_numpy):
        raise ValueError(
            f"{where}: expected sample_episodes=True and to_numpy=True, got {sample_episodes} and {to_numpy}: a sample "
            "is an EpisodeBatch, a list of episodes of numpy arrays. Leave both out, and read the sample's columns "
            "instead of a dict."
        )


def drawn_n(least: int, most: int, num: int, rng: np.random.Generator) -> IntArray | int:
    """Return the n of `num` transitions: one for all, or int64 [num]."""
    return least if least == most else rng.integers(least, most, num, endpoint=True)


def as_batches(episodes: object, *, of_agents: bool = False) -> list[EpisodeBatch]:
    """Return the argument of `add` as batches.

    Raises:
        TypeError: It is something else, or not of one agent (`of_agents`: of several).
    """
    wanted = "several agents" if of_agents else "one agent"
    if kind_of(episodes):
        given: list[Any] = [episodes]
    elif isinstance(episodes, Iterable) and not isinstance(episodes, Mapping | str):
        given = list(episodes)
    else:
        raise _wrong_type(episodes, of_agents)
    if [item for item in given if not isinstance(item, EpisodeBatch)]:
        for item in given:
            if isinstance(item, EpisodeBatch) or kind_of(item) != wanted:
                raise _wrong_type(item, of_agents)
        given = [EpisodeBatch.from_episodes(given)]
    batches = []
    for one in given:
        batch = one.updated()
        if kind_of(batch) != wanted and len(batch):
            raise _wrong_type(batch, of_agents)
        if batch.agent_ids is not None and len(set(map(repr, batch.agent_ids))) > 1:
            raise TypeError(
                "replay buffer: expected chunks of one agent, got several agents, whose episodes share one id."
            )
        batches.append(batch if batch.length.all() else batch.select(batch.length > 0))
    return batches


def _wrong_type(episodes: object, of_agents: bool) -> TypeError:
    kind = "MultiAgentEpisodes" if of_agents else "SingleAgentEpisodes"
    return TypeError(
        f"replay buffer: expected {kind} or EpisodeBatches of them, got {type(episodes).__name__} {episodes!r:.80}."
        + ("" if of_agents else " Episodes of several agents go into a MultiAgentEpisodeReplayBuffer.")
    )
