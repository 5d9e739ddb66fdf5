"""Replay buffers of multi-agent episodes: one single-agent buffer for the agents of each module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial, reduce
from typing import Any, ClassVar, Literal

import numpy as np

from rlzmq.episodes.columns import ragged_arange
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.replay.episode_replay_buffer import (
    _SLOT_MASK,
    EpisodeReplayBuffer,
    IntArray,
    as_batches,
    check_samples_episodes,
    drawn_n,
)
from rlzmq.replay.prioritized_episode_replay_buffer import PrioritizedEpisodeReplayBuffer
from rlzmq.replay.replay_buffer import ReplayBuffer

__all__ = ["MultiAgentEpisodeReplayBuffer", "MultiAgentPrioritizedEpisodeReplayBuffer", "joined"]

# Names in `get_metrics` of what the modules' buffers count.
_NAMES_BY_MODULE = {
    "num_env_steps_stored": "num_module_steps_stored",
    "num_episodes_stored": "num_module_episodes",
    "num_env_steps_added_lifetime": "num_module_steps_added_lifetime",
    "num_env_steps_evicted_lifetime": "num_module_steps_evicted_lifetime",
    "num_env_steps_sampled_lifetime": "num_module_steps_sampled_lifetime",
    "num_episodes_added_lifetime": "num_module_episodes_added_lifetime",
    "num_episodes_evicted_lifetime": "num_module_episodes_evicted_lifetime",
    "num_resamples": "num_module_resamples",
    "actual_n_step": "module_actual_n_step",
}


class MultiAgentEpisodeReplayBuffer(ReplayBuffer):
    """Buffer of the newest steps of multi-agent episodes, with one `EpisodeReplayBuffer` per module for its agents.

    Example:
        >>> buffer = MultiAgentEpisodeReplayBuffer(capacity=50_000)
        >>> buffer.add(env_runner.sample(num_timesteps=1000))
        >>> by_module = buffer.sample_modules(256, n_step=3)
        >>> by_module["p0"].columns["rewards"].shape
        (512,)

    Args:
        capacity: Maximum number of agent steps in the buffer of each module, >= 1.
        batch_size_B, batch_length_T: Default number of items per module in a sample, and of steps in an item.
        metrics_num_episodes_for_smoothing: Number of newest samples whose mean is ``module_actual_n_step`` in
            `get_metrics`.
        keeps_extra_model_outputs: Whether to store extra model outputs, or the ids of the modules whose outputs to
            store; without them, steps take less memory.
        seed: Seed of the generator that `sample` uses by default; None: from the operating system.

    Attributes:
        buffers: The buffer of each module, created when its first step is added.
        keeps_extra_model_outputs: The argument; changes apply to modules without a buffer.
    """

    draws_sequences: ClassVar[bool] = True
    divides_by_module: ClassVar[bool] = True

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
        self.capacity = capacity
        self.batch_size_B = batch_size_B
        self.batch_length_T = batch_length_T
        self._num_smoothed = metrics_num_episodes_for_smoothing
        self.buffers: dict[str, EpisodeReplayBuffer] = {}
        self.keeps_extra_model_outputs = keeps_extra_model_outputs
        self._rng = np.random.default_rng(seed)
        self._env_steps = _EnvSteps()
        self._agents = _AgentCounts()
        self._kept_modules: frozenset[str] | None = None
        self._num_episodes_added = 0
        self._num_not_kept = 0
        self._marked: tuple[int, int] | None = None  # the two numbers above at the last `mark`
        self._new_buffer("")  # checks the arguments

    def _keeps(self, module_id: str) -> bool:
        keeps = self.keeps_extra_model_outputs
        return keeps if isinstance(keeps, bool) else module_id in keeps

    def _new_buffer(self, module_id: str) -> EpisodeReplayBuffer:
        return EpisodeReplayBuffer(**self._arguments(module_id))

    def _arguments(self, module_id: str) -> dict[str, Any]:
        return {
            "capacity": self.capacity,
            "batch_size_B": self.batch_size_B,
            "batch_length_T": self.batch_length_T,
            "metrics_num_episodes_for_smoothing": self._num_smoothed,
            "keeps_extra_model_outputs": self._keeps(module_id),
        }

    # -- facts ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of env steps with at least one stored agent step."""
        return self._env_steps.num_stored

    def get_module_ids(self) -> list[str]:
        """Return the ids of the modules with stored steps."""
        return [module_id for module_id, buffer in self.buffers.items() if len(buffer)]

    def get_num_timesteps(self, module_id: str | None = None) -> int:
        """Return the number of steps stored for a module; None: env steps, as `len`."""
        return len(self) if module_id is None else len(self.buffers.get(module_id, ()))

    def get_num_episodes(self, module_id: str | None = None) -> int:
        """Return the number of episodes with stored steps; of a module: of its agents' parts of episodes."""
        if module_id is not None:
            return self.buffers[module_id].get_num_episodes() if module_id in self.buffers else 0
        stored = (name for buffer in self.buffers.values() for name in buffer._store.episode_ids)
        return len({name.partition("/")[0] for name in stored})

    def get_num_episodes_evicted(self, module_id: str | None = None) -> int:
        """Return the number of episodes without stored steps that were added; of a module: evicted agents' parts."""
        if module_id is None:
            return self._num_episodes_added - self.get_num_episodes()
        return self.buffers[module_id].get_num_episodes_evicted() if module_id in self.buffers else 0

    def get_added_timesteps(self, module_id: str | None = None) -> int:
        """Return the number of steps added for a module over the lifetime; None: env steps."""
        if module_id is None:
            return self._env_steps.num_added
        return self.buffers[module_id].get_added_timesteps() if module_id in self.buffers else 0

    def get_sampled_timesteps(self, module_id: str | None = None) -> int:
        """Return the number of steps sampled for a module over the lifetime; None: for all modules."""
        buffers = self.buffers.values() if module_id is None else [self.buffers[module_id]]
        return sum(buffer.get_sampled_timesteps() for buffer in buffers)

    @property
    def num_bytes(self) -> int:
        """Size of the stored steps in bytes."""
        return sum(buffer.num_bytes for buffer in self.buffers.values())

    @property
    def num_agent_steps_not_kept(self) -> int:
        """Number of agent steps, over the lifetime, that `add` left out or `remove_module` removed."""
        return self._num_not_kept

    def get_metrics(self) -> dict[str, Any]:
        """Return counts of all modules together, and the modules' counts, as dicts by module id.

        Env steps and episodes are counted as evicted once no agent's step of them is stored. Those of a module are its
        agents' steps and their parts of episodes. ``num_agent_…`` are dicts by agent id.
        """
        by_module: dict[str, dict[str, float]] = {name: {} for name in _NAMES_BY_MODULE.values()}
        for module_id, buffer in self.buffers.items():
            for name, value in buffer.get_metrics().items():
                if name in _NAMES_BY_MODULE:
                    by_module[_NAMES_BY_MODULE[name]][module_id] = value
        return {
            "num_env_steps_stored": len(self),
            "num_env_steps_added_lifetime": self._env_steps.num_added,
            "num_env_steps_evicted_lifetime": self._env_steps.num_added - len(self),
            "num_episodes_added_lifetime": self._num_episodes_added,
            "num_agent_steps_not_kept": self._num_not_kept,
            "num_bytes_stored": self.num_bytes,
            **self._agents.get_metrics(),
            **{name: values for name, values in by_module.items() if values},
        }

    # -- in -------------------------------------------------------------------------------------------

    def add(self, episodes: object, weight: object = None) -> None:
        """Add multi-agent episodes or chunks of them; lookback parts are ignored. See `keep_modules`.

        Args:
            episodes: A MultiAgentEpisode, an EpisodeBatch of several agents, or a list of either.
            weight: Priority of the new steps, or priorities by module; None: the highest so far. Prioritized buffers
                only.

        Raises:
            TypeError: `episodes` is anything else, or a weight is given to a uniform buffer.
            ValueError: A module's columns differ from those of its earlier steps.
        """
        for batch in as_batches(episodes, of_agents=True):
            self._num_episodes_added += self._env_steps.add(batch)
            for module_id in batch.get_module_ids():
                if self._kept_modules is not None and module_id not in self._kept_modules:
                    self._num_not_kept += sum(
                        int(group.length[group.is_of(module_id)].sum()) for group in batch.agent_batches
                    )
                    continue
                own_weight = weight.get(module_id) if isinstance(weight, Mapping) else weight
                for group in batch.agent_batches:
                    self._add_group(module_id, batch, group, own_weight)
            self._env_steps.trim()
            self._env_steps.forget_done(batch)

    def keep_modules(self, module_ids: Collection[str]) -> None:
        """Remove the steps of other modules, and store only those of these modules from now on."""
        self._kept_modules = frozenset(module_ids)
        for module_id in self.buffers.keys() - self._kept_modules:
            self.remove_module(module_id)

    def _add_group(self, module_id: str, batch: EpisodeBatch, group: EpisodeBatch, weight: object) -> None:
        chunks = group.select(group.is_of(module_id) & (group.length > 0))
        if not len(chunks):
            return
        of_chunks, _, env_ts = chunks.links
        episodes = [batch.episode_ids[e] for e in of_chunks.tolist()]
        # Each agent's part is an episode in its module's buffer.
        chunks.episode_ids = [
            f"{of}/{agent}" for of, agent in zip(episodes, chunks.agent_ids or (), strict=True)
        ]
        chunks.agent_ids = None
        labels = {
            "agent": self._agents.add(chunks),
            "env_step": self._env_steps.numbers_of(episodes, chunks.length, env_ts[chunks.step_slots()]),
        }
        self._add_chunks(self._buffer_of(module_id), chunks, labels, weight)

    def _buffer_of(self, module_id: str) -> EpisodeReplayBuffer:
        if module_id not in self.buffers:
            buffer = self.buffers[module_id] = self._new_buffer(module_id)
            buffer.on_steps = partial(self._on_steps, buffer)
            buffer.on_episode = self._agents.on_episode
            if self._marked is not None:
                buffer.mark()
        return self.buffers[module_id]

    def _on_steps(self, buffer: EpisodeReplayBuffer, slots: IntArray, change: int) -> None:
        labels = buffer._store.labels
        if labels:  # they follow the steps when a state is restored
            self._env_steps.count(labels["env_step"][slots], change)
            self._agents.count(labels["agent"][slots], change)

    def remove_module(self, module_id: str) -> None:
        """Remove all steps of a module. `undo` does not restore them."""
        buffer = self.buffers.pop(module_id, None)
        if buffer is not None:
            self._num_not_kept += len(buffer)
            if self._marked is not None:
                self._marked = self._marked[0], self._marked[1] + len(buffer)
            self._on_steps(buffer, buffer._store.ordered_steps(), -1)
            for episode_id in buffer._store.episode_ids:
                self._agents.on_episode(episode_id, -1)

    def _add_chunks(
        self, buffer: Any, chunks: EpisodeBatch, labels: dict[str, IntArray], weight: Any
    ) -> None:
        """Add chunks to a module's buffer."""
        if weight is not None:
            raise TypeError(
                f"{type(self).__name__}.add: expected no weight, got {weight!r}: all steps are equally likely."
            )
        buffer._add(chunks, labels)

    def mark(self) -> None:
        """Make later calls of `add` and `remove` undoable, until the next `mark`."""
        self._marked = self._num_episodes_added, self._num_not_kept
        self._env_steps.mark()
        self._agents.mark()
        for buffer in self.buffers.values():
            buffer.mark()

    def undo(self) -> None:
        """Remove the steps added since `mark`; see `EpisodeReplayBuffer.undo`."""
        if self._marked is None:
            return
        for buffer in self.buffers.values():
            buffer.undo()
        self._env_steps.undo()
        self._agents.undo()
        self._num_episodes_added, self._num_not_kept = self._marked

    def of_module(self, module_id: str) -> EpisodeReplayBuffer:
        """Return the buffer of a module's steps."""
        return self.buffers[module_id]

    # -- out ------------------------------------------------------------------------------------------

    def sample(self, num_items: int | None = None, **arguments: Any) -> list[SingleAgentEpisode]:
        """Sample as `sample_modules` does, and return the items of all modules in one list."""
        return [
            episode for batch in self.sample_modules(num_items, **arguments).values() for episode in batch
        ]

    def draw(
        self, module_id: str, num_items: int, *, num_samples: int = 1, **options: Any
    ) -> list[EpisodeBatch]:
        return [self.sample_modules(num_items, modules_to_sample=[module_id], **options)[module_id]]

    def sample_modules(
        self,
        num_items: int | None = None,
        *,
        batch_size_B: int | None = None,
        n_step: int | tuple[int, int] | None = None,
        gamma: float = 0.99,
        beta: float = 0.0,
        replay_mode: Literal["independent", "synchronized"] = "independent",
        modules_to_sample: Collection[str] | None = None,
        include_infos: bool = False,
        include_extra_model_outputs: bool = False,
        rng: np.random.Generator | None = None,
        sample_episodes: bool = True,
        to_numpy: bool = True,
        **sequences: int,
    ) -> dict[str, EpisodeBatch]:
        """Sample items for each module, with replacement.

        Args:
            num_items, batch_size_B, n_step, gamma, beta, include_infos, include_extra_model_outputs, rng: See
                `EpisodeReplayBuffer.sample`. The number of items is per module.
            replay_mode: "independent": each module's items are drawn from its own steps. "synchronized": env steps at
                which all the modules have stored a step are drawn uniformly, and each module's items are the steps of
                all its agents there, in the same order. For transitions only; weights are 1.
            modules_to_sample: Module ids; None: all modules with stored steps.
            sample_episodes, to_numpy: As in RLlib, and always True.
            sequences: ``batch_length_T``, ``lookback``, ``min_batch_length_T`` of `EpisodeReplayBuffer.sample`, for
                independent replay.

        Returns:
            Module id → its items, with `EpisodeBatch.module_ids` set.

        Raises:
            ValueError: A module has no stored step, there is no common env step, or see `EpisodeReplayBuffer.sample`.
        """
        where = f"{type(self).__name__}.sample"
        check_samples_episodes(where, sample_episodes, to_numpy)
        rng = self._rng if rng is None else rng
        chosen = self.get_module_ids() if modules_to_sample is None else sorted(modules_to_sample)
        for module_id in chosen or ("any module",):
            if not self.get_num_timesteps(module_id):
                raise ValueError(
                    f"{where}: no stored step of {module_id!r}; modules: {self.get_module_ids()}."
                )
        includes = {
            "include_infos": include_infos,
            "include_extra_model_outputs": include_extra_model_outputs,
        }
        if replay_mode == "independent":
            options: dict[str, Any] = {
                "n_step": n_step,
                "gamma": gamma,
                "beta": beta,
                **includes,
                **sequences,
            }
            result = {
                module_id: self.buffers[module_id].sample(
                    num_items, batch_size_B=batch_size_B, rng=rng, **options
                )
                for module_id in chosen
            }
        elif replay_mode == "synchronized":
            if sequences or self.batch_length_T > 1:
                raise ValueError(f"{where}: synchronized replay is for transitions, got {sequences}.")
            num = self.buffers[chosen[0]]._num_to_draw(num_items, batch_size_B, 1)
            result = self._sample_synchronized(chosen, num, n_step, gamma, rng, includes)
        else:
            raise ValueError(
                f"{where}: expected replay_mode 'independent' or 'synchronized', got {replay_mode!r}."
            )
        for module_id, batch in result.items():
            batch.module_ids = [module_id] * len(batch)
            slots = batch.columns["replay_key"][batch.step_slots()] & _SLOT_MASK
            self._agents.sampled(self.buffers[module_id]._store.labels["agent"][slots])
        return result

    def _sample_synchronized(
        self,
        module_ids: list[str],
        num: int,
        n_step: int | tuple[int, int] | None,
        gamma: float,
        rng: np.random.Generator,
        includes: dict[str, bool],
    ) -> dict[str, EpisodeBatch]:
        stored: dict[str, tuple[IntArray, IntArray]] = {}
        for module_id in module_ids:
            buffer = self.buffers[module_id]
            buffer._check_sample(n_step, 1)
            slots = buffer._store.steps(np.arange(len(buffer)))
            env_steps = buffer._store.labels["env_step"][slots]
            order = np.lexsort([slots, env_steps])
            stored[module_id] = env_steps[order], slots[order]
        common = reduce(np.intersect1d, (env_steps for env_steps, _ in stored.values()))
        if not len(common):
            raise ValueError(
                f"{type(self).__name__}.sample: no stored env step at which all modules {module_ids} have a step."
            )
        drawn, n = common[rng.integers(len(common), size=num)], drawn_n(n_step, num, rng)
        result = {}
        for module_id, (env_steps, slots) in stored.items():
            begin, end = (np.searchsorted(env_steps, drawn, side) for side in ("left", "right"))
            counts = end - begin
            rows = ragged_arange(begin, counts)
            buffer = self.buffers[module_id]
            of_rows = n if isinstance(n, int) else n.repeat(counts)
            batch = buffer._transitions(slots[rows], n_step, of_rows, gamma, 0.0)
            result[module_id] = buffer._filled(
                batch, batch.slots(), includes["include_infos"], includes["include_extra_model_outputs"]
            )
        return result

    # -- state ----------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, Any]:
        """Return the stored steps, counters and random generator as plain values and arrays."""
        modules = {}
        for module_id, buffer in self.buffers.items():
            state = buffer.get_state()
            slots = buffer._store.ordered_steps()
            state["env_steps"] = buffer._store.labels.get("env_step", slots)[slots]
            modules[module_id] = state
        return {
            "modules": modules,
            "env_steps": self._env_steps.get_state(),
            "agents": self._agents.get_state(),
            "num_episodes_added": self._num_episodes_added,
            "rng": self._rng.bit_generator.state,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `get_state`, replacing all stored steps. The capacity is unchanged."""
        self.buffers, self._env_steps, self._agents = {}, _EnvSteps(), _AgentCounts()
        self._env_steps.set_state(state["env_steps"])
        for module_id, own in state["modules"].items():
            buffer = self._buffer_of(module_id)
            buffer.set_state(own)
            slots = buffer._store.ordered_steps()
            # If the capacity is smaller than before, only the newest steps are stored.
            values = {
                "env_step": np.asarray(own["env_steps"], np.int64),
                "agent": self._agents.numbers_of(own["episode_ids"], own["length"]),
            }
            for name, of_steps in values.items():
                label = buffer._store.labels[name] = np.zeros(buffer._store.num_slots, np.int64)
                label[slots] = of_steps[len(of_steps) - len(slots) :]
            self._on_steps(buffer, slots, 1)
        self._agents.set_state(state["agents"])
        self._num_episodes_added = int(state["num_episodes_added"])
        if self._marked is not None:
            self.mark()
        self._rng.bit_generator.state = state["rng"]


class MultiAgentPrioritizedEpisodeReplayBuffer(MultiAgentEpisodeReplayBuffer):
    """A MultiAgentEpisodeReplayBuffer with a `PrioritizedEpisodeReplayBuffer` per module.

    Args:
        capacity, batch_size_B, batch_length_T, metrics_num_episodes_for_smoothing, keeps_extra_model_outputs, seed: See
            `MultiAgentEpisodeReplayBuffer`.
        alpha: Exponent of the priorities, >= 0; 0 draws uniformly.
    """

    uses_priorities: ClassVar[bool] = True

    def __init__(self, capacity: int = 10_000, *, alpha: float = 1.0, **arguments: Any) -> None:
        self.alpha = alpha
        super().__init__(capacity, **arguments)

    def _new_buffer(self, module_id: str) -> PrioritizedEpisodeReplayBuffer:
        return PrioritizedEpisodeReplayBuffer(alpha=self.alpha, **self._arguments(module_id))

    def _add_chunks(
        self, buffer: Any, chunks: EpisodeBatch, labels: dict[str, IntArray], weight: Any
    ) -> None:
        buffer._add(chunks, labels, weight)

    def update_priorities(  # type: ignore[override]
        self, td_errors: object, module_id: str, keys: object = None
    ) -> None:
        """Update the priorities of a module's steps; see `PrioritizedEpisodeReplayBuffer.update_priorities`.

        Raises:
            KeyError: No step of the module was ever added.
        """
        self.of_module(module_id).update_priorities(td_errors, keys)


def joined(samples: Mapping[str, EpisodeBatch]) -> EpisodeBatch:
    """Return the items of several modules side by side, as a learner trains them.

    Item i of every module becomes an agent's chunk in multi-agent episode i, with the module's id as the agent's id.
    The number of env steps is that of the module with the most steps. Items are transitions or sequences.
    """
    groups = []
    for place, (module_id, items) in enumerate(samples.items()):
        items.agent_ids = items.module_ids = [module_id] * len(items)
        counts = items.lookback + items.length + 1
        positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        items.episode, items.order = np.arange(len(items)), np.full(len(items), place)
        items.env_ts = positions
        groups.append(items)
    num = max(map(len, groups), default=0)
    lengths, lookbacks = np.zeros((2, num), np.int64)
    terminated, truncated = np.ones((2, num), np.bool_)
    for own in groups:
        size = len(own)
        lengths[:size] = np.maximum(lengths[:size], own.length)
        lookbacks[:size] = np.maximum(lookbacks[:size], own.lookback)
        terminated[:size] &= own.terminated
        truncated[:size] &= own.truncated
    return EpisodeBatch(
        {},
        groups=groups,
        episode_ids=[f"replay-{i}" for i in range(num)],
        t_started=lookbacks,
        length=lengths,
        lookback=lookbacks,
        terminated=terminated,
        truncated=truncated,
    )


class _EnvSteps:
    """Maps stored agent steps to the env steps at which they began. Env steps are numbered in the order of arrival.

    Attributes:
        num_added: Number of env steps added.
        num_stored: Number of env steps with at least one stored agent step.
    """

    def __init__(self) -> None:
        self.num_added = self.num_stored = 0
        self._counts = np.zeros(0, np.int32)  # stored agent steps by env step, starting at number _first
        self._first = 0
        # Ongoing episodes: for each chunk its first env step's time and number.
        self._chunks: dict[str, list[tuple[int, int]]] = {}
        # `num_added` at the last mark, and the entries of _chunks at that time for the episodes changed since.
        self._marked = 0
        self._chunks_before: dict[str, list[tuple[int, int]]] = {}

    def add(self, batch: EpisodeBatch) -> int:
        """Number the env steps of a batch; return how many of its episodes are new."""
        num_new = 0
        lengths = batch.length.tolist()
        for episode_id, begin, length in zip(
            batch.episode_ids, batch.t_started.tolist(), lengths, strict=True
        ):
            if length:
                num_new += episode_id not in self._chunks
                self._chunks_before.setdefault(episode_id, self._chunks.get(episode_id, [])[:])
                self._chunks.setdefault(episode_id, []).append((begin, self.num_added))
                self.num_added += length
        self._counts = np.concatenate([self._counts, np.zeros(sum(lengths), np.int32)])
        return num_new

    def forget_done(self, batch: EpisodeBatch) -> None:
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

    def count(self, numbers: IntArray, change: int) -> None:
        """Count the env steps of agent steps that were added (1) or removed (-1)."""
        unique, counts = np.unique(numbers - self._first, return_counts=True)
        self.num_stored += int(change > 0 and (self._counts[unique] == 0).sum())
        self._counts[unique] += change * counts.astype(np.int32)
        self.num_stored -= int(change < 0 and (self._counts[unique] == 0).sum())

    def trim(self) -> None:
        """Forget the counts of the oldest env steps if most have no stored agent step."""
        num_empty = int(np.argmax(self._counts > 0)) if self.num_stored else 0
        if num_empty > len(self._counts) // 2:
            self._counts, self._first = self._counts[num_empty:].copy(), self._first + num_empty

    def get_state(self) -> dict[str, Any]:
        """Return all state except the stored steps."""
        chunks = {episode_id: np.array(parts, np.int64) for episode_id, parts in self._chunks.items()}
        return {"chunks": chunks, "num_added": self.num_added, "first": self._first}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `get_state`; `count` adds the stored steps afterwards."""
        self.num_added, self._first = int(state["num_added"]), int(state["first"])
        self._counts = np.zeros(self.num_added - self._first, np.int32)
        self._chunks = {
            str(episode_id): [(int(t), int(number)) for t, number in parts]
            for episode_id, parts in state["chunks"].items()
        }


class _AgentCounts:
    """Counts the steps and parts of episodes of each agent id, over all modules.

    A module's buffer stores an agent's part of an episode as an episode with the id ``episode/agent``.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}  # agent id → its number, in the order of arrival
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

    def count(self, numbers: IntArray, change: int) -> None:
        """Count steps that were stored (1) or removed (-1), by the numbers of their agents."""
        self._count(self._steps_stored, numbers, change)

    def sampled(self, numbers: IntArray) -> None:
        """Count sampled steps; repetitions count."""
        self._count(self._steps_sampled, numbers, 1)

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
