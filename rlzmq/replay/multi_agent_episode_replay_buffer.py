"""Replay buffers of multi-agent episodes: one single-agent buffer for the agents of each module."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial, reduce
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from rlzmq.episodes.agent_rows import AgentRows
from rlzmq.episodes.batch_columns import ragged_arange
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_batch import MultiAgentEpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.replay.agent_steps import AgentCounts, EnvSteps
from rlzmq.replay.episode_replay_buffer import (
    _SLOT_MASK,
    EpisodeReplayBuffer,
    IntArray,
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
        self._env_steps = EnvSteps()
        self._agents = AgentCounts()
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

    def add(self, episodes: Any, weight: Any = None, *, module_ids: Collection[str] | None = None) -> None:
        """Add multi-agent episodes or chunks of them; lookback parts are ignored.

        Args:
            episodes: A MultiAgentEpisode, a MultiAgentEpisodeBatch, or a list of either.
            weight: Priority of the new steps, or priorities by module; None: the highest so far. Prioritized buffers
                only.
            module_ids: Modules whose steps are stored; other modules' steps are only counted. None: all.

        Raises:
            TypeError: `episodes` is anything else, or a weight is given to a uniform buffer.
            ValueError: A module's columns differ from those of its earlier steps.
        """
        for batch in _as_batches(episodes):
            self._num_episodes_added += self._env_steps.add(batch)
            for module_id in batch.module_ids:
                if module_ids is not None and module_id not in module_ids:
                    self._num_not_kept += sum(
                        int(rows.batch.length[_of_module(rows, module_id)].sum()) for rows in batch.rows
                    )
                    continue
                own_weight = weight.get(module_id) if isinstance(weight, Mapping) else weight
                for rows in batch.rows:
                    self._add_rows(module_id, batch, rows, own_weight)
            self._env_steps.forget_done(batch)

    def _add_rows(self, module_id: str, batch: MultiAgentEpisodeBatch, rows: AgentRows, weight: Any) -> None:
        mine = np.flatnonzero(_of_module(rows, module_id) & (rows.batch.length > 0))
        if not len(mine):
            return
        chunks = rows.batch.select(mine)
        episodes = [batch.episode_ids[e] for e in rows.episode[mine].tolist()]
        # Each agent's part is an episode in its module's buffer.
        chunks.episode_ids = [
            f"{of}/{agent}" for of, agent in zip(episodes, chunks.agent_ids or (), strict=True)
        ]
        chunks.agent_ids = None
        buffer = self._buffer_of(module_id)
        num_before = buffer.get_added_timesteps()
        agents = self._agents.add(chunks)
        slots = self._add_chunks(buffer, chunks, weight)
        first_observations = np.cumsum(rows.counts)[mine] - chunks.length - 1
        env_ts = rows.obs_env_ts[ragged_arange(first_observations, chunks.length)]
        numbers = self._env_steps.numbers_of(episodes, chunks.length, env_ts)
        store = buffer._store
        places = store.serial[slots] - num_before
        self._env_steps.store(module_id, store.num_slots, slots, numbers[places])
        self._agents.store(module_id, store.num_slots, slots, agents[places])

    def _buffer_of(self, module_id: str) -> EpisodeReplayBuffer:
        if module_id not in self.buffers:
            buffer = self.buffers[module_id] = self._new_buffer(module_id)
            buffer.on_removed = partial(self._on_removed, module_id)
            buffer.on_episode = self._agents.on_episode
            if self._marked is not None:
                buffer.mark()
        return self.buffers[module_id]

    def _on_removed(self, module_id: str, slots: IntArray) -> None:
        self._env_steps.remove(module_id, slots)
        self._agents.remove(module_id, slots)

    def remove_module(self, module_id: str) -> None:
        """Remove all steps of a module. `undo` does not restore them."""
        buffer = self.buffers.pop(module_id, None)
        if buffer is not None:
            self._num_not_kept += len(buffer)
            if self._marked is not None:
                self._marked = self._marked[0], self._marked[1] + len(buffer)
            self._env_steps.remove_module(module_id)
            self._agents.remove_module(module_id, buffer._store.episode_ids)

    def _add_chunks(self, buffer: Any, chunks: EpisodeBatch, weight: Any) -> IntArray:
        """Add chunks to a module's buffer; return the slots of those new steps that were not evicted at once."""
        if weight is not None:
            raise TypeError(
                f"{type(self).__name__}.add: expected no weight, got {weight!r}: all steps are equally likely."
            )
        slots: IntArray = buffer._add(chunks)
        return slots

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

    # -- out ------------------------------------------------------------------------------------------

    def sample(self, num_items: int | None = None, **arguments: Any) -> list[SingleAgentEpisode]:
        """Sample as `sample_modules` does, and return the items of all modules in one list."""
        return [
            episode for batch in self.sample_modules(num_items, **arguments).values() for episode in batch
        ]

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
            keys = batch.columns["replay_key"][batch.step_slots()]
            self._agents.sampled(module_id, keys & _SLOT_MASK)
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
            env_steps = self._env_steps.of_slots(module_id, slots)
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
            state["env_steps"] = self._env_steps.of_slots(module_id, buffer._store.ordered_steps())
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
        self.buffers, self._env_steps, self._agents = {}, EnvSteps(), AgentCounts()
        self._env_steps.set_state(state["env_steps"])
        for module_id, own in state["modules"].items():
            buffer = self._buffer_of(module_id)
            buffer.set_state(own)
            slots = buffer._store.ordered_steps()
            # If the capacity is smaller than before, only the newest steps are stored.
            numbers = np.asarray(own["env_steps"], np.int64)[-len(slots) :]
            self._env_steps.store(module_id, buffer._store.num_slots, slots, numbers)
            agents = self._agents.numbers_of(own["episode_ids"], own["length"])[-len(slots) :]
            self._agents.store(module_id, buffer._store.num_slots, slots, agents)
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

    def _add_chunks(self, buffer: Any, chunks: EpisodeBatch, weight: Any) -> IntArray:
        slots: IntArray = buffer._add(chunks, weight)
        return slots

    def update_priorities(  # type: ignore[override]
        self, td_errors: Any, module_id: str, keys: Any = None
    ) -> None:
        """Update the priorities of a module's steps; see `PrioritizedEpisodeReplayBuffer.update_priorities`.

        Raises:
            KeyError: No step of the module was ever added.
        """
        buffer = self.buffers[module_id]
        assert isinstance(buffer, PrioritizedEpisodeReplayBuffer)
        buffer.update_priorities(td_errors, keys)


def joined(samples: Mapping[str, EpisodeBatch]) -> MultiAgentEpisodeBatch:
    """Return the items of several modules side by side, as a learner trains them.

    Item i of every module becomes an agent's chunk in multi-agent episode i, with the module's id as the agent's id.
    The number of env steps is that of the module with the most steps. Items are transitions or sequences.
    """
    rows = []
    for place, (module_id, items) in enumerate(samples.items()):
        items.agent_ids = items.module_ids = [module_id] * len(items)
        counts = items.lookback + items.length + 1
        positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows.append(AgentRows(items, np.arange(len(items)), np.full(len(items), place), positions))
    num = max((len(group.batch) for group in rows), default=0)
    lengths, lookbacks = np.zeros((2, num), np.int64)
    terminated, truncated = np.ones((2, num), np.bool_)
    for group in rows:
        own, size = group.batch, len(group.batch)
        lengths[:size] = np.maximum(lengths[:size], own.length)
        lookbacks[:size] = np.maximum(lookbacks[:size], own.lookback)
        terminated[:size] &= own.terminated
        truncated[:size] &= own.truncated
    return MultiAgentEpisodeBatch(
        rows,
        episode_ids=[f"replay-{i}" for i in range(num)],
        env_t_started=lookbacks,
        env_t=lookbacks + lengths,
        lookback=lookbacks,
        terminated=terminated,
        truncated=truncated,
    )


def _as_batches(episodes: Any) -> Iterator[MultiAgentEpisodeBatch]:
    if isinstance(episodes, MultiAgentEpisodeBatch):
        yield episodes.updated()
        return
    if isinstance(episodes, MultiAgentEpisode):
        episodes = [episodes]
    if not isinstance(episodes, Iterable) or isinstance(episodes, Mapping | str):
        raise _wrong_type(episodes)
    items = list(episodes)
    if items and all(isinstance(item, MultiAgentEpisodeBatch) for item in items):
        yield from (item.updated() for item in items)
        return
    for item in items:
        if not isinstance(item, MultiAgentEpisode):
            raise _wrong_type(item)
    if items:
        yield MultiAgentEpisodeBatch.from_episodes(items)


def _of_module(rows: AgentRows, module_id: str) -> NDArray[np.bool_]:
    """Return which chunks belong to a module's agents, bool [chunks]."""
    return np.array([mid == module_id for mid in rows.batch.module_ids or ()], np.bool_)


def _wrong_type(episodes: Any) -> TypeError:
    return TypeError(
        f"replay buffer: expected MultiAgentEpisodes or MultiAgentEpisodeBatches, got {type(episodes).__name__}."
    )
