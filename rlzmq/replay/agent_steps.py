"""The env step and the agent of each stored step of a multi-agent replay buffer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_batch import MultiAgentEpisodeBatch

__all__ = ["AgentCounts", "EnvSteps"]

IntArray = NDArray[np.int64]


class _NumbersBySlot:
    """A number >= 0 for each stored step, by module id and slot."""

    def __init__(self) -> None:
        self._numbers: dict[str, IntArray] = {}  # -1: none

    def set(self, module_id: str, num_slots: int, slots: IntArray, numbers: IntArray) -> None:
        """Set the numbers of stored steps, whose slots are below `num_slots`."""
        known = self._numbers.get(module_id, np.empty(0, np.int64))
        if len(known) < num_slots:
            known = np.concatenate([known, np.full(num_slots - len(known), -1, np.int64)])
            self._numbers[module_id] = known
        known[slots] = numbers

    def of(self, module_id: str, slots: IntArray) -> IntArray:
        """Return the numbers of stored steps."""
        numbers: IntArray = self._numbers[module_id][slots]
        return numbers

    def slots(self, module_id: str) -> IntArray:
        """Return all slots of a module, with and without a number."""
        return np.arange(len(self._numbers.get(module_id, ())))

    def take(self, module_id: str, slots: IntArray) -> IntArray:
        """Remove the numbers of steps, and return those that there were."""
        known = self._numbers.get(module_id, np.empty(0, np.int64))
        slots = slots[slots < len(known)]
        numbers = known[slots]
        known[slots] = -1
        present: IntArray = numbers[numbers >= 0]
        return present


class EnvSteps:
    """Maps stored agent steps to the env steps at which they began. Env steps are numbered in the order of arrival.

    Attributes:
        num_added: Number of env steps added.
        num_stored: Number of env steps with at least one stored agent step.
    """

    def __init__(self) -> None:
        self.num_added = self.num_stored = 0
        self._by_slot = _NumbersBySlot()
        self._counts = np.zeros(0, np.int32)  # stored agent steps by env step, starting at number _first
        self._first = 0
        # Ongoing episodes: for each chunk its first env step's time and number.
        self._chunks: dict[str, list[tuple[int, int]]] = {}
        # `num_added` at the last mark, and the entries of _chunks at that time for the episodes changed since.
        self._marked = 0
        self._chunks_before: dict[str, list[tuple[int, int]]] = {}

    def add(self, batch: MultiAgentEpisodeBatch) -> int:
        """Number the env steps of a batch; return how many of its episodes are new."""
        num_new = 0
        lengths = (batch.env_t - batch.env_t_started).tolist()
        for episode_id, begin, length in zip(
            batch.episode_ids, batch.env_t_started.tolist(), lengths, strict=True
        ):
            if length:
                num_new += episode_id not in self._chunks
                self._chunks_before.setdefault(episode_id, self._chunks.get(episode_id, [])[:])
                self._chunks.setdefault(episode_id, []).append((begin, self.num_added))
                self.num_added += length
        self._counts = np.concatenate([self._counts, np.zeros(sum(lengths), np.int32)])
        return num_new

    def forget_done(self, batch: MultiAgentEpisodeBatch) -> None:
        """Drop the chunks of the batch's episodes that have ended."""
        for e in np.flatnonzero(batch.terminated | batch.truncated).tolist():
            self._chunks.pop(batch.episode_ids[e], None)

    def mark(self) -> None:
        """Make later calls of `add` and `forget_done` undoable."""
        self._marked, self._chunks_before = self.num_added, {}

    def undo(self) -> None:
        """Drop the env steps added since `mark` that have no stored agent step any more."""
        for episode_id, chunks in self._chunks_before.items():
            if chunks:
                self._chunks[episode_id] = chunks
            else:
                self._chunks.pop(episode_id, None)
        self._chunks_before = {}
        self.num_added = self._marked
        self._first = min(self._first, self.num_added)
        self._counts = self._counts[: self.num_added - self._first].copy()

    def numbers_of(self, episode_ids: list[str], lengths: IntArray, env_ts: IntArray) -> IntArray:
        """Return the numbers of env steps, int64 [lengths.sum()].

        Args:
            episode_ids: Episode ids of C agents' chunks.
            lengths: int64 [C], number of steps of each chunk.
            env_ts: int64 [lengths.sum()], env steps within the episodes; one before the first known step counts as
                that step.
        """
        numbers, end = np.empty(len(env_ts), np.int64), 0
        for episode_id, length in zip(episode_ids, lengths.tolist(), strict=True):
            begin, end = end, end + length
            times, first = np.array(self._chunks[episode_id]).T
            chunk = np.maximum(np.searchsorted(times, env_ts[begin:end], "right") - 1, 0)
            numbers[begin:end] = first[chunk] + np.maximum(env_ts[begin:end] - times[chunk], 0)
        return numbers

    def store(self, module_id: str, num_slots: int, slots: IntArray, numbers: IntArray) -> None:
        """Record the env steps of newly stored steps, whose slots are below `num_slots`."""
        self._by_slot.set(module_id, num_slots, slots, numbers)
        unique, counts = np.unique(numbers - self._first, return_counts=True)
        self.num_stored += int((self._counts[unique] == 0).sum())
        self._counts[unique] += counts.astype(np.int32)

    def remove(self, module_id: str, slots: IntArray) -> None:
        """Drop the env steps of removed steps."""
        numbers = self._by_slot.take(module_id, slots)
        unique, counts = np.unique(numbers - self._first, return_counts=True)
        self._counts[unique] -= counts.astype(np.int32)
        self.num_stored -= int((self._counts[unique] == 0).sum())
        num_empty = int(np.argmax(self._counts > 0)) if self.num_stored else 0
        if num_empty > len(self._counts) // 2:
            self._counts, self._first = self._counts[num_empty:].copy(), self._first + num_empty

    def remove_module(self, module_id: str) -> None:
        """Drop the env steps of all steps of a module."""
        self.remove(module_id, self._by_slot.slots(module_id))

    def of_slots(self, module_id: str, slots: IntArray) -> IntArray:
        """Return the env steps of stored steps."""
        return self._by_slot.of(module_id, slots)

    def get_state(self) -> dict[str, Any]:
        """Return all state except the stored steps."""
        chunks = {episode_id: np.array(parts, np.int64) for episode_id, parts in self._chunks.items()}
        return {"chunks": chunks, "num_added": self.num_added, "first": self._first}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `get_state`; `store` adds the stored steps afterwards."""
        self.num_added, self._first = int(state["num_added"]), int(state["first"])
        self._counts = np.zeros(self.num_added - self._first, np.int32)
        self._chunks = {
            str(episode_id): [(int(t), int(number)) for t, number in parts]
            for episode_id, parts in state["chunks"].items()
        }


class AgentCounts:
    """Counts the steps and parts of episodes of each agent id, over all modules.

    A module's buffer stores an agent's part of an episode as an episode with the id ``episode/agent``.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # agent id → its number, in the order of arrival
        self._by_slot = _NumbersBySlot()
        self._steps_added: Counter[str] = Counter()
        self._steps_stored: Counter[str] = Counter()
        self._steps_sampled: Counter[str] = Counter()
        self._episodes_added: Counter[str] = Counter()
        self._episodes_stored: Counter[str] = Counter()
        self._marked = self._steps_added.copy(), self._episodes_added.copy()

    def numbers_of(self, episode_ids: Sequence[str], lengths: Any) -> IntArray:
        """Return the number of each step's agent, int64 [sum of lengths].

        Args:
            episode_ids: Ids of C agents' parts of episodes.
            lengths: int64 [C], number of steps of each.
        """
        agents = [_agent_of(episode_id) for episode_id in episode_ids]
        numbers = [self._numbers.setdefault(agent, len(self._numbers)) for agent in agents]
        return np.repeat(np.array(numbers, np.int64), lengths)

    def add(self, chunks: EpisodeBatch) -> IntArray:
        """Count chunks that will be added to a module's buffer; return the number of each step's agent."""
        for episode_id, length in zip(chunks.episode_ids, chunks.length.tolist(), strict=True):
            self._steps_added[_agent_of(episode_id)] += length
        return self.numbers_of(chunks.episode_ids, chunks.length)

    def store(self, module_id: str, num_slots: int, slots: IntArray, numbers: IntArray) -> None:
        """Record the agents of newly stored steps, whose slots are below `num_slots`."""
        self._by_slot.set(module_id, num_slots, slots, numbers)
        self._count(self._steps_stored, numbers, 1)

    def remove(self, module_id: str, slots: IntArray) -> None:
        """Count steps as removed."""
        self._count(self._steps_stored, self._by_slot.take(module_id, slots), -1)

    def remove_module(self, module_id: str, episode_ids: Iterable[str]) -> None:
        """Count all steps of a module as removed, and its stored parts of episodes."""
        self.remove(module_id, self._by_slot.slots(module_id))
        for episode_id in episode_ids:
            self._episodes_stored[_agent_of(episode_id)] -= 1

    def sampled(self, module_id: str, slots: IntArray) -> None:
        """Count stored steps as sampled; repetitions count."""
        self._count(self._steps_sampled, self._by_slot.of(module_id, slots), 1)

    def on_episode(self, episode_id: str, change: int) -> None:
        """Count a part of an episode whose first step is stored (1), or whose last one is removed (-1)."""
        agent = _agent_of(episode_id)
        self._episodes_stored[agent] += change
        self._episodes_added[agent] += max(change, 0)

    def _count(self, counter: Counter[str], numbers: IntArray, change: int) -> None:
        for agent, count in zip(
            self._numbers, np.bincount(numbers, minlength=len(self._numbers)).tolist(), strict=True
        ):
            if count:
                counter[agent] += change * count

    def mark(self) -> None:
        """Make later calls of `add` undoable."""
        self._marked = self._steps_added.copy(), self._episodes_added.copy()

    def undo(self) -> None:
        """Restore the counts of added steps and episodes at the last `mark`."""
        added, episodes = self._marked
        self._steps_added, self._episodes_added = added.copy(), episodes.copy()

    def get_metrics(self) -> dict[str, dict[str, int]]:
        """Return counts, as dicts by agent id."""
        agents = sorted(self._steps_added)
        counts = {
            "num_agent_steps_stored": self._steps_stored,
            "num_agent_steps_added_lifetime": self._steps_added,
            "num_agent_steps_evicted_lifetime": self._steps_added - self._steps_stored,
            "num_agent_steps_sampled_lifetime": self._steps_sampled,
            "num_agent_episodes": self._episodes_stored,
            "num_agent_episodes_added_lifetime": self._episodes_added,
            "num_agent_episodes_evicted_lifetime": self._episodes_added - self._episodes_stored,
        }
        return {name: {agent: counter[agent] for agent in agents} for name, counter in counts.items()}

    def get_state(self) -> dict[str, dict[str, int]]:
        """Return the counts over the lifetime."""
        return {
            "steps_added": dict(self._steps_added),
            "steps_sampled": dict(self._steps_sampled),
            "episodes_added": dict(self._episodes_added),
        }

    def set_state(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Restore the output of `get_state`, after the stored steps; {}: they are all that was ever added."""
        self._steps_added = Counter(state.get("steps_added", self._steps_stored))
        self._steps_sampled = Counter(state.get("steps_sampled", {}))
        self._episodes_added = Counter(state.get("episodes_added", self._episodes_stored))


def _agent_of(episode_id: str) -> str:
    return episode_id.partition("/")[2]
