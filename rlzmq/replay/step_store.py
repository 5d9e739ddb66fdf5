"""StepStore: columnar storage of contiguous parts (stretches) of episodes, with each observation stored once.

```
 slot      7    3    4    9            a stretch of three steps: any free slots, linked by `next`
 obs      o0 ─► o1 ─► o2 ─► o3
 actions  a0    a1    a2    –          the data of a step is in the slot of its first observation
```
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.tree import tree_leaves, tree_map, tree_rows
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch

__all__ = [
    "LEAST_PRIORITY",
    "STEP_COLUMNS",
    "PriorityTree",
    "StepStore",
    "Stretch",
    "Transitions",
    "item_facts",
]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

NONE = -1
STEP_COLUMNS = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS)
ENV_T, PRIORITY = "_env_t", "_priority"
"""Columns that no sample has: the env step of an agent's observation; a step's priority, in the batch of a state."""
# A smaller priority is as good as never drawn, and its weight would scale down all others.
LEAST_PRIORITY = 1e-6

_COUNTS = ("num_added", "num_evicted", "num_episodes_added", "num_episodes_evicted")


_FAN_OUT = 16
_FEW = 256  # for fewer indices, recomputing a shared parent is cheaper than finding duplicates
_MOST_ROOTS = 4096  # one pass over so many costs less than another level


class PriorityTree:
    """Priorities of `size` indices, initially 0. Indices with priority 0 are never drawn.

    Each node above the indices holds the sum of 16 nodes below it, up to 4096 roots at most. A sum is always computed
    from what is below it, so sums do not drift. Drawing or changing K indices takes a few array operations per level,
    and drawing one pass over the roots.

    Args:
        size: Number of indices.
    """

    def __init__(self, size: int) -> None:
        self.size: int = size
        self._levels: list[
            FloatArray
        ] = []  # a row for the children of each node; the indices' level is the first
        while size > _MOST_ROOTS:
            size = -(-size // _FAN_OUT)
            self._levels.append(np.zeros((size, _FAN_OUT)))
        self._roots = np.zeros(size)

    def get(self, indices: IntArray) -> FloatArray:
        """Return the priorities of indices, float64 [K]."""
        priorities: FloatArray = (self._levels[0].reshape(-1) if self._levels else self._roots)[indices]
        return priorities

    def set(self, indices: IntArray, priorities: FloatArray | float) -> None:
        """Set priorities; if an index is given twice, the last value is used.

        Args:
            indices: int64 [K].
            priorities: float64 [K] or one number, >= 0.
        """
        nodes, sums = indices, priorities
        for level in self._levels:
            level.reshape(-1)[nodes] = sums
            nodes = nodes // _FAN_OUT
            if len(nodes) > _FEW:
                nodes = np.unique(nodes)
            sums = level[nodes].sum(1)
        self._roots[nodes] = sums

    def draw(self, num: int, rng: np.random.Generator) -> IntArray:
        """Return indices, int64 [num] in ascending order, with probabilities proportional to their priorities.

        The draws are stratified: the i-th one comes from the i-th of `num` equal parts of the sum.
        """
        ends = self._roots.cumsum()
        points = (np.arange(num) + rng.random(num)) * (ends[-1] / max(num, 1))
        # Rounding errors must lead neither past the last node with priorities, nor to one without.
        points = np.minimum(points, np.nextafter(ends[-1], 0.0))
        nodes: IntArray = ends.searchsorted(points, side="right")
        rest = points - (ends[nodes] - self._roots[nodes])
        rows = np.arange(num)
        for level in reversed(self._levels):
            sums = level[nodes]
            ends = sums.cumsum(1)
            rest = np.maximum(np.minimum(rest, np.nextafter(ends[:, -1], 0.0)), 0.0)
            children = (ends <= rest[:, None]).sum(1)
            rest -= ends[rows, children] - sums[rows, children]
            nodes = nodes * _FAN_OUT + children
        return nodes

    def grown(self, size: int) -> PriorityTree:
        """Return a tree for at least so many indices with the same priorities."""
        if size <= self.size:
            return self
        tree, mine = PriorityTree(size), np.arange(self.size)
        tree.set(mine, self.get(mine))
        return tree


@dataclass(slots=True, eq=False)
class Stretch:
    """Contiguous steps of one episode, or of an agent within a stretch of env steps.

    Attributes:
        t_started: Time step of the first step within the episode.
        slots: Slots of the observations in order (one more than steps), in the parts in which they were added.
        num_steps: Number of steps.
        is_done: Whether the last step ended the episode.
        is_stored: False after eviction.
        agent_id: The agent; None in single-agent use.
        owner: The stretch of env steps with these steps of an agent, which are evicted with it.
        agents: The agents' stretches in a stretch of env steps, and their stores.
    """

    episode_id: str
    t_started: int
    agent_id: Any = None
    owner: Stretch | None = None
    slots: list[IntArray] = field(default_factory=list)
    num_steps: int = 0
    is_done: bool = False
    is_stored: bool = True
    agents: list[tuple[StepStore, Stretch]] = field(default_factory=list)


class StepStore:
    """Storage of a replay buffer's steps.

    Consecutive chunks of an episode are joined. After a gap (a missing or late chunk) the episode continues as another
    stretch. Whole stretches are evicted, oldest first. A stretch that has grown to a quarter of the capacity is not
    extended further, so endless episodes are evicted in parts.

    Of several agents, a store without columns holds the env steps, and a store for each module the steps of its agents,
    whose stretches are evicted with those of the env steps that they belong to (`Stretch.owner`).

    Args:
        capacity: Maximum number of steps; a single stretch may exceed it.
        alpha: Exponent of the priorities with which steps are drawn; None: all are equally likely.
        keeps_extra_model_outputs: Whether to store columns besides observations, actions and rewards.

    Attributes:
        columns: Trees of arrays by name, every leaf ``[num_slots, ...]`` with its original dtype.
        next, previous: int64 [num_slots], the slot of the neighboring observation of the same stretch; -1: none.
        t: int64 [num_slots], time step within the episode.
        terminated, truncated: bool [num_slots], whether the slot's step ended its episode.
        serial: int64 [num_slots], number of the step among all added steps; distinguishes steps that used the same
            slot.
        infos: Non-empty info dicts by slot.
        states: The module's states before stretches that begin in mid-episode, by their first slots.
        tree: The priorities to the power of `alpha`, by slot; None without priorities.
        greatest: The highest priority of any step so far, which new ones get.
        bytes_per_slot: Size of one slot of all columns.
        num_steps, num_evicted, num_episodes_evicted, num_added, num_episodes_added: Counts.
    """

    bytes_per_slot: int
    next: NDArray[np.int64]
    num_added: int
    num_episodes_added: int
    num_episodes_evicted: int
    num_evicted: int
    num_slots: int
    num_steps: int
    previous: NDArray[np.int64]
    serial: NDArray[np.int64]
    t: NDArray[np.int64]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float | None = None,
        keeps_extra_model_outputs: bool = True,
    ) -> None:
        self.capacity = capacity
        self._alpha = 0.0 if alpha is None else alpha
        self.tree = None if alpha is None else PriorityTree(1)
        self.greatest: float = 1.0
        self._keeps_extra_model_outputs = keeps_extra_model_outputs
        self.columns: dict[str, Any] = {}
        self.num_slots = self.bytes_per_slot = 0
        self.next = self.previous = self.t = self.serial = np.empty(0, np.int64)
        self.terminated = self.truncated = np.empty(0, np.bool_)
        self.infos: dict[int, dict[str, Any]] = {}
        self.states: dict[int, Any] = {}
        self.observation_space: Any = None
        self.action_space: Any = None
        self.num_steps = self.num_added = self.num_evicted = 0
        self.num_episodes_added = self.num_episodes_evicted = 0
        self._free = np.empty(0, np.int64)  # a stack
        self._num_free = 0
        self._steps = np.empty(0, np.int64)  # slots with a step: the first num_steps entries, unordered
        self._place = np.empty(0, np.int64)  # position of each slot in _steps
        self._stretches: dict[Stretch, None] = {}  # the oldest first
        # By episode and agent: the newest stretch, and their number.
        self._newest: dict[tuple[str, Any], Stretch] = {}
        self._num_stretches: Counter[tuple[str, Any]] = Counter()
        self._mark = 0  # number of steps added before

    # -- facts ----------------------------------------------------------------------------------------

    @property
    def num_episodes(self) -> int:
        """Number of episodes (agents' parts of episodes) with stored steps."""
        return len(self._num_stretches)

    @property
    def counts(self) -> dict[str, float]:
        """Numbers of steps and episodes that were added and evicted over the lifetime, and the highest priority."""
        names = _COUNTS if self.tree is None else (*_COUNTS, "greatest")
        return {name: getattr(self, name) for name in names}

    @counts.setter
    def counts(self, counts: Mapping[str, float]) -> None:
        for name in _COUNTS:
            setattr(self, name, int(counts[name]))
        self.greatest = float(counts.get("greatest", 1.0))

    @property
    def num_bytes(self) -> int:
        """Size of the stored steps in bytes; columns take memory as they fill."""
        return self.bytes_per_slot * (self.num_slots - self._num_free)

    @property
    def longest(self) -> int:
        """Number of steps in the longest stretch."""
        return max((stretch.num_steps for stretch in self._stretches), default=0)

    def draw(self, num: int, rng: np.random.Generator) -> IntArray:
        """Return the slots of `num` steps, drawn with replacement."""
        if self.tree is not None:
            return self.tree.draw(num, rng)
        slots: IntArray = self._steps[(rng.random(num) * self.num_steps).astype(np.int64)]
        return slots  # rng.integers would take longer

    def ordered_slots(self) -> tuple[list[Stretch], IntArray]:
        """Return all stretches, oldest first, and the slots of their observations in that order."""
        parts = [part for stretch in self._stretches for part in stretch.slots]
        return list(self._stretches), np.concatenate(parts) if parts else np.empty(0, np.int64)

    def ordered_steps(self) -> IntArray:
        """Return the slots of the steps of all stretches, oldest first."""
        slots = self.ordered_slots()[1]
        return slots[self.has_step(slots)]

    def has_step(self, slots: IntArray) -> NDArray[np.bool_]:
        """Return whether each slot holds a step, not only a last observation; False for slot -1."""
        has: NDArray[np.bool_] = (slots >= 0) & (self.next[slots] >= 0)
        return has

    # -- in -------------------------------------------------------------------------------------------

    def make_room(self, num_new: int, *, num_kept: int = 0) -> None:
        """Evict the oldest stretches, all but `num_kept`, until there is room for `num_new` steps."""
        while len(self._stretches) > num_kept and self.num_steps + num_new > self.capacity:
            self.evict(next(iter(self._stretches)))

    def append(
        self,
        batch: EpisodeBatch,
        owners: Sequence[Stretch] | None = None,
        weight: float | None = None,
    ) -> list[Stretch]:
        """Add the chunks of a batch, at least one step each, without their lookback parts. Nothing is evicted.

        Args:
            batch: The chunks.
            owners: The stretches of env steps that agents' chunks belong to.
            weight: Priority of the new steps; None: the highest so far.

        Returns:
            Each chunk's stretch.

        Raises:
            TypeError: A weight is given, but there are no priorities.
            ValueError: The columns differ from those of earlier batches.
        """
        if weight is not None and self.tree is None:
            raise TypeError(
                f"replay buffer: expected no weight, got {weight!r}: all steps are equally likely."
            )
        if not len(batch):
            return []
        columns = batch.columns if owners is None else {**batch.columns, ENV_T: batch.links[2]}
        # Discounted sums of whole rewards are no whole numbers.
        if columns and columns[Columns.REWARDS].dtype.kind != "f":
            columns = {**columns, Columns.REWARDS: columns[Columns.REWARDS].astype(np.float64)}
        self._check(batch, columns)
        steps, observations, sources, stretches = self._link(batch, owners)
        self._write(batch, columns, steps, observations, sources)
        self.serial[steps] = np.arange(self.num_added, self.num_added + len(steps))
        self.num_added += len(steps)
        if self.tree is not None:
            self.tree = self.tree.grown(self.num_slots)
            priority = (self.greatest if weight is None else max(weight, LEAST_PRIORITY)) ** self._alpha
            stored = batch.columns.get(PRIORITY)  # of a state
            self.tree.set(steps, priority if stored is None else stored[batch.step_slots()])
        return stretches

    def _check(self, batch: EpisodeBatch, columns: Mapping[str, Any]) -> None:
        names = [
            name
            for name in columns
            if name in STEP_COLUMNS or name == ENV_T or (self._keeps_extra_model_outputs and name != PRIORITY)
        ]
        if not self.columns:
            self.columns = {
                name: tree_map(lambda leaf: np.empty((0, *leaf.shape[1:]), leaf.dtype), columns[name])
                for name in names
            }
            self.observation_space, self.action_space = batch.observation_space, batch.action_space
            return
        if set(names) != self.columns.keys():
            raise ValueError(
                f"replay buffer: expected the columns {sorted(self.columns)} of the steps it holds, got "
                f"{sorted(names)}."
            )
        for name, column in self.columns.items():
            other = columns[name]
            if type(column) is not np.ndarray or type(other) is not np.ndarray:
                tree_map(partial(_check_column, name), column, other)
            elif column.shape[1:] != other.shape[1:] or column.dtype != other.dtype:
                _check_column(name, column, other)

    def _link(
        self, batch: EpisodeBatch, owners: Sequence[Stretch] | None
    ) -> tuple[IntArray, IntArray, IntArray, list[Stretch]]:
        """Link slots for chunks; return those of steps and of new observations, the latter's sources, and stretches."""
        starts, lengths, t_starts = batch.start.tolist(), batch.length.tolist(), batch.t_started.tolist()
        done = (batch.terminated | batch.truncated).tolist()
        self._reserve(sum(lengths) + len(starts))
        # Of each chunk: the observation slots before and after its steps, the new ones, and their sources.
        before, after, fresh, sources = [], [], [], []
        stretches: list[Stretch] = []
        agents = batch.agent_ids or [None] * len(starts)
        owner, longest = None, max(1, self.capacity // 4)
        for c, key in enumerate(zip(batch.episode_ids, agents, strict=True)):
            length = lengths[c]
            stretch = self._newest.get(key)
            if owners is not None:
                owner = owners[c]
            is_new = (
                stretch is None
                or stretch.is_done
                or stretch.t_started + stretch.num_steps != t_starts[c]
                or stretch.owner is not owner
                or (owner is None and stretch.num_steps + length > longest)
            )
            slots = self._take(length + is_new)
            if is_new:
                stretch = Stretch(key[0], t_starts[c], key[1], owner)
                if owner is not None:
                    owner.agents.append((self, stretch))
                self._stretches[stretch] = None
                self._newest[key] = stretch
                self.num_episodes_added += self._count_stretches(stretch, 1)
                path = slots
            else:
                assert stretch is not None
                path = np.concatenate([stretch.slots[-1][-1:], slots])
            stretches.append(stretch)
            stretch.slots.append(slots)
            stretch.num_steps += length
            stretch.is_done = done[c]
            before.append(path[:-1])
            after.append(path[1:])
            fresh.append(slots)
            sources.append(np.arange(starts[c] + (not is_new), starts[c] + length + 1))
            self.next[path[-1]] = NONE
            if is_new:
                self.previous[path[0]] = NONE
                if self._keeps_extra_model_outputs and batch.initial_state is not None and t_starts[c]:
                    self.states[int(path[0])] = tree_map(
                        lambda leaf, c=c: leaf[c].copy(), batch.initial_state
                    )
        steps, following = _joined(before), _joined(after)
        # In the order of the chunks, so that a chunk that continues another chunk of this batch sets the link last.
        self.next[steps], self.previous[following] = following, steps
        self._steps[self.num_steps : self.num_steps + len(steps)] = steps
        self._place[steps] = np.arange(self.num_steps, self.num_steps + len(steps))
        self.num_steps += len(steps)
        return steps, _joined(fresh), _joined(sources), stretches

    def _write(
        self,
        batch: EpisodeBatch,
        columns: Mapping[str, Any],
        steps: IntArray,
        observations: IntArray,
        sources: IntArray,
    ) -> None:
        from_steps, chunks = batch.step_slots(), batch.step_chunks()
        for name, column in self.columns.items():
            is_of_obs = name in (Columns.OBS, ENV_T)
            to, come_from = (observations, sources) if is_of_obs else (steps, from_steps)
            other = columns[name]
            if type(column) is np.ndarray:
                column[to] = other[come_from]
                continue
            for mine, leaf in zip(tree_leaves(column), tree_leaves(other), strict=True):
                mine[to] = leaf[come_from]
        last = steps[batch.length.cumsum() - 1]
        self.terminated[steps] = self.truncated[steps] = False
        self.terminated[last], self.truncated[last] = batch.terminated, batch.truncated
        times = (batch.t_started - batch.start)[chunks] + from_steps
        self.t[steps] = times
        self.t[self.next[steps]] = times + 1
        if batch.infos:
            for slot, source in zip(observations.tolist(), sources.tolist(), strict=True):
                if source in batch.infos:
                    self.infos[slot] = batch.infos[source]

    # -- out ------------------------------------------------------------------------------------------

    def evict(self, stretch: Stretch) -> None:
        """Remove a stretch, and the agents' stretches in it."""
        for store, own in stretch.agents:
            if own.is_stored:
                store.evict(own)
        self.num_episodes_evicted += self._forget(stretch)
        slots = np.concatenate(stretch.slots)
        self._remove_steps(slots[:-1])
        self._give_back(slots)
        self.num_evicted += stretch.num_steps

    def _forget(self, stretch: Stretch) -> bool:
        """Take a stretch off the lists; return whether it was its episode's last one."""
        del self._stretches[stretch]
        stretch.is_stored = False
        key = stretch.episode_id, stretch.agent_id
        if self._newest.get(key) is stretch:
            del self._newest[key]
        return self._count_stretches(stretch, -1)

    def _count_stretches(self, stretch: Stretch, change: int) -> bool:
        """Change an episode's number of stretches; return whether its first one came or its last one went."""
        key = stretch.episode_id, stretch.agent_id
        before = self._num_stretches[key]
        self._num_stretches[key] = after = before + change
        if not after:
            del self._num_stretches[key]
        return not (before and after)

    def _remove_steps(self, slots: IntArray) -> None:
        """Remove steps from `_steps`; its last entries fill the gaps."""
        if self.tree is not None:
            self.tree.set(slots, 0.0)
        places = self._place[slots]
        num_left = self.num_steps - len(slots)
        is_leaving = np.zeros(len(slots), np.bool_)
        is_leaving[places[places >= num_left] - num_left] = True
        moved = self._steps[num_left : self.num_steps][~is_leaving]
        holes = places[places < num_left]
        self._steps[holes] = moved
        self._place[moved] = holes
        self.num_steps = num_left
        self.next[slots] = NONE

    def mark(self) -> None:
        """Make later additions undoable, until the next `mark`."""
        self._mark = self.num_added

    def undo(self) -> None:
        """Remove the steps added since `mark`. Steps that were evicted to make room are not restored."""
        for stretch in list(self._stretches):
            while stretch.slots:
                slots, is_first = stretch.slots[-1], len(stretch.slots) == 1
                steps = slots[:-1] if is_first else np.append(stretch.slots[-2][-1], slots[:-1])
                if self.serial[steps[0]] < self._mark:
                    break
                self._remove_steps(steps)
                self._give_back(slots)
                stretch.slots.pop()
                stretch.num_steps -= len(steps)
                stretch.is_done = False
                self.num_added -= len(steps)
                if is_first:
                    self.num_episodes_added -= self._forget(stretch)

    # -- state ----------------------------------------------------------------------------------------

    def stored(self) -> EpisodeBatch:
        """Return all stretches as a batch on new columns, the oldest first."""
        stretches, slots = self.ordered_slots()
        if not stretches:
            return EpisodeBatch.from_episodes([])
        length = np.array([stretch.num_steps for stretch in stretches], np.int64)
        last = slots[np.cumsum(length + 1) - 2]
        places = {slot: place for place, slot in enumerate(slots.tolist())} if self.infos else {}
        agents = [stretch.agent_id for stretch in stretches]
        columns = {name: tree_rows(column, slots) for name, column in self.columns.items()}
        without_step = np.cumsum(length + 1) - 1  # last observations
        for name, column in columns.items():
            for leaf in tree_leaves(column) if name not in (Columns.OBS, ENV_T) else ():
                leaf[without_step] = 0
        if self.tree is not None:
            columns[PRIORITY] = self.tree.get(slots)
        return EpisodeBatch(
            columns,
            start=np.cumsum(length + 1) - length - 1,
            length=length,
            t_started=[stretch.t_started for stretch in stretches],
            terminated=self.terminated[last],
            truncated=self.truncated[last],
            episode_ids=[stretch.episode_id for stretch in stretches],
            agent_ids=None if agents.count(None) == len(agents) else agents,
            infos={places[slot]: info for slot, info in self.infos.items() if slot in places},
            initial_state=_stacked([self.states.get(int(stretch.slots[0][0])) for stretch in stretches]),
            observation_space=self.observation_space,
            action_space=self.action_space,
        )

    # -- slots ----------------------------------------------------------------------------------------

    def _take(self, num: int) -> IntArray:
        self._num_free -= num
        return self._free[self._num_free : self._num_free + num].copy()

    def _give_back(self, slots: IntArray) -> None:
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)
        for by_slot in (self.infos, self.states):
            for slot in slots.tolist() if by_slot else ():
                by_slot.pop(slot, None)

    def _reserve(self, num: int) -> None:
        """Reserve `num` free slots. Most systems do not allocate memory before it is written."""
        if num <= self._num_free:
            return
        size = max(self.capacity + self.capacity // 8 + 64, self.num_slots - self._num_free + num)
        if self.num_slots:
            size = max(size, self.num_slots + self.num_slots // 8)
        before, self.num_slots = self.num_slots, size

        def grown(array: Any) -> Any:
            longer = np.empty((size, *array.shape[1:]), array.dtype)
            longer[:before] = array
            return longer

        self.columns = {name: tree_map(grown, column) for name, column in self.columns.items()}
        self.bytes_per_slot = sum(leaf.nbytes for leaf in tree_leaves(self.columns)) // size + 5 * 8 + 2
        for name in ("next", "previous", "t", "serial", "terminated", "truncated"):
            setattr(self, name, grown(getattr(self, name)))
        self.next[before:] = self.previous[before:] = NONE
        self._free, self._steps, self._place = grown(self._free), grown(self._steps), grown(self._place)
        # Low numbers first, so that a partly filled buffer touches few memory pages.
        self._free[: self._num_free + size - before] = np.concatenate(
            [np.arange(size - 1, before - 1, -1), self._free[: self._num_free]]
        )
        self._num_free += size - before

    def __iter__(self) -> Iterator[Stretch]:
        return iter(self._stretches)


def _check_column(name: str, mine: Any, other: Any) -> None:
    """Check that a leaf of a column has items like those of another."""
    if mine.shape[1:] != other.shape[1:] or mine.dtype != other.dtype:
        raise ValueError(
            f"replay buffer, column {name!r}: expected items of shape {mine.shape[1:]} and dtype {mine.dtype} as in "
            f"the steps it holds, got {other.shape[1:]} and {other.dtype}."
        )


def _stacked(states: Sequence[Any]) -> object:
    """Return states as one tree with a row for each, zeros for None; None if all are None."""
    known = [state for state in states if state is not None]
    if not known:
        return None
    zeros = tree_map(np.zeros_like, known[0])
    return tree_map(
        lambda *leaves: np.stack(leaves), *(zeros if state is None else state for state in states)
    )


def _joined(parts: list[IntArray]) -> IntArray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


class _Drawn(NamedTuple):
    store: StepStore
    starts: IntArray
    last: IntArray
    values: dict[str, NDArray[Any]]
    first_item: int
    part_of: _Whole | None


class _Whole(NamedTuple):
    """The transitions that a part was drawn with, its place among them, and their rows until the last part's turn."""

    drawn: Transitions
    place: slice
    rows: dict[bool, dict[str, Any]]


class Transitions(EpisodeBatch):
    """Chunks of one step each, whose columns and table are read from the store when they are first used.

    A learner with default connector pieces reads only `rows`. Until the columns are used, the store must not change.

    Args:
        store: The store.
        starts: int64 [K], slots of the observations o_t.
        last: int64 [K], slot of the last step in each sum of rewards.
        values: Columns [K] that the store does not hold: ``rewards`` (the sums), ``weights``, ``replay_key`` and, if
            it was asked for, ``n_step``.
        first_item: Number of the first item among all sampled ones, from which the episodes' ids follow.
    """

    __slots__ = ("_source",)

    _source: _Drawn | None  # None: the columns were read

    def __init__(
        self,
        store: StepStore,
        starts: IntArray,
        last: IntArray,
        values: dict[str, NDArray[Any]],
        *,
        first_item: int,
    ) -> None:
        self._source = _Drawn(store, starts, last, values, first_item, None)

    def parts(self, num: int) -> list[Transitions]:
        """Return them in parts of `num` transitions each, whose rows are read from the store at once."""
        store, starts, last, values, first_item, *_ = self._drawn
        parts: list[Transitions] = []
        rows: dict[bool, dict[str, Any]] = {}
        for first in range(0, len(starts), num):
            place = slice(first, first + num)
            part = Transitions.__new__(Transitions)
            own = {name: value[place] for name, value in values.items()}
            part._source = _Drawn(
                store, starts[place], last[place], own, first_item + first, _Whole(self, place, rows)
            )
            parts.append(part)
        return parts

    def __getattr__(self, name: str) -> Any:
        """Read the columns and the table, since an attribute is missing."""
        if name == "_source" or self._source is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        slots = self.slots()
        store, starts, last, values, first_item, *_ = self._drawn
        columns: dict[str, Any] = {key: of_rows.repeat(2) for key, of_rows in values.items()}
        for key, column in store.columns.items():
            if key in STEP_COLUMNS and key not in columns:
                columns[key] = tree_rows(column, slots)
        self._source = None
        EpisodeBatch.__init__(
            self,
            columns,
            start=np.arange(0, 2 * len(starts), 2),
            length=np.ones(len(starts), np.int64),
            **item_facts(store, starts, last, first_item),
        )
        return getattr(self, name)

    def take(self, chunks: IntArray, groups: list[Any] | None = None) -> Any:
        """Return some of them as an EpisodeBatch, which has read the columns."""
        return EpisodeBatch(**self._fields()).take(chunks, groups)

    @property
    def is_read(self) -> bool:
        """Whether the columns were used, and may have been changed: `rows` cannot be called any more."""
        return self._source is None

    @property
    def _drawn(self) -> _Drawn:
        if self._source is None:
            raise RuntimeError("expected transitions whose columns were not used yet.")
        return self._source

    @property
    def num_rows(self) -> int:
        """Number of transitions."""
        return len(self._drawn.starts)

    def slots(self) -> IntArray:
        """Return the store's slots of each transition's two observations, int64 [2 K]."""
        store, starts, last, *_ = self._drawn
        slots = np.empty(2 * len(starts), np.int64)
        slots[::2], slots[1::2] = starts, store.next[last]
        return slots

    def rows(self, *, next_observations: bool) -> dict[str, Any]:
        """Return the columns of a train batch, trees of arrays ``[K, ...]``; rewards as float32.

        Args:
            next_observations: Whether to include ``new_obs``.
        """
        store, starts, last, values, _, part_of = self._drawn
        if part_of is not None:
            whole, place, known = part_of
            if next_observations not in known:
                known[next_observations] = whole.rows(next_observations=next_observations)
            shared = known[next_observations]
            if place.stop >= whole.num_rows:
                known.clear()
            return {name: tree_rows(column, place) for name, column in shared.items()}
        obs = store.columns[Columns.OBS]
        rows = {
            **values,
            Columns.REWARDS: values[Columns.REWARDS].astype(np.float32, copy=False),
            Columns.OBS: tree_rows(obs, starts),
            Columns.ACTIONS: tree_rows(store.columns[Columns.ACTIONS], starts),
            Columns.TERMINATEDS: store.terminated[last],
            Columns.TRUNCATEDS: store.truncated[last],
        }
        if next_observations:
            rows[Columns.NEXT_OBS] = tree_rows(obs, store.next[last])
        return rows


def item_facts(store: StepStore, starts: IntArray, last: IntArray, first_item: int) -> dict[str, Any]:
    """Return the arguments of an EpisodeBatch of drawn items that follow from the store.

    Args:
        store: The store.
        starts: int64 [K], slots of the items' first observations.
        last: int64 [K], slots of their last steps.
        first_item: Number of the first item among all sampled ones, from which the episodes' ids follow.
    """
    return {
        "t_started": store.t[starts],
        "terminated": store.terminated[last],
        "truncated": store.truncated[last],
        "episode_ids": [f"replay-{i}" for i in range(first_item, first_item + len(starts))],
        "observation_space": store.observation_space,
        "action_space": store.action_space,
    }
