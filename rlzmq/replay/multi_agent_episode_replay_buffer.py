"""Replay buffers of multi-agent episodes: a store of env steps, and a buffer for the agents of each module.

An agent's steps are evicted with the env steps of its episode, so that all agents' steps of an env step leave together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce
from typing import Any, ClassVar, Literal

import numpy as np

from rlzmq.episodes.batch_columns import ragged_arange
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.replay.episode_replay_buffer import (
    EpisodeReplayBuffer,
    IntArray,
    PrioritizedEpisodeReplayBuffer,
    as_batches,
    check_samples_episodes,
    drawn_n,
)
from rlzmq.replay.step_store import ENV_T, StepStore

__all__ = ["MultiAgentEpisodeReplayBuffer", "MultiAgentPrioritizedEpisodeReplayBuffer", "joined"]

_ENV_T_BITS = 40  # of an env step's number within its stretch's episode

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


class MultiAgentEpisodeReplayBuffer(EpisodeReplayBuffer):
    """Buffer of the newest `capacity` env steps of multi-agent episodes, with an `EpisodeReplayBuffer` for each module.

    Example:
        >>> buffer = MultiAgentEpisodeReplayBuffer(capacity=50_000)
        >>> buffer.add(env_runner.sample(num_timesteps=1000))
        >>> by_module = buffer.sample_modules(256, n_step=3)
        >>> by_module["p0"].columns["rewards"].shape
        (512,)

    Args:
        capacity: Env steps, >= 1; a single episode may exceed it.
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

    divides_by_module: ClassVar[bool] = True

    def __init__(
        self,
        capacity: int = 10_000,
        *,
        keeps_extra_model_outputs: bool | Collection[str] = True,
        **options: Any,
    ) -> None:
        super().__init__(capacity, **options)  # whose store has the env steps, without columns
        self.keeps_extra_model_outputs = keeps_extra_model_outputs
        self.buffers: dict[str, EpisodeReplayBuffer] = {}
        self._kept_modules: frozenset[str] | None = None
        # Agent steps that were left out, also at the mark, and those that were removed.
        self._num_left_out = self._num_left_out_before = self._num_removed = 0

    def _new_store(self) -> StepStore:
        return StepStore(self.capacity)

    def _new_buffer(self, **options: Any) -> EpisodeReplayBuffer:
        return EpisodeReplayBuffer(**options)

    def _buffer_of(self, module_id: str) -> EpisodeReplayBuffer:
        """Return a module's buffer, a new one if it has none."""
        if module_id not in self.buffers:
            keeps = self.keeps_extra_model_outputs
            self.buffers[module_id] = self._new_buffer(
                capacity=self.capacity,
                batch_size_B=self.batch_size_B,
                batch_length_T=self.batch_length_T,
                metrics_num_episodes_for_smoothing=self._actual_n_steps.maxlen,
                keeps_extra_model_outputs=keeps if isinstance(keeps, bool) else module_id in keeps,
            )
        return self.buffers[module_id]

    # -- facts ----------------------------------------------------------------------------------------

    def get_module_ids(self) -> list[str]:
        """Return the ids of the modules with stored steps."""
        return [module_id for module_id, buffer in self.buffers.items() if len(buffer)]

    def of_module(self, module_id: str) -> EpisodeReplayBuffer:
        """Return the buffer of a module's steps."""
        return self.buffers[module_id]

    def _store_of(self, module_id: str | None) -> StepStore:
        if module_id is None:
            return self._store
        return self.buffers[module_id]._store if module_id in self.buffers else StepStore(self.capacity)

    def get_sampled_timesteps(self, module_id: str | None = None) -> int:
        buffers = self.buffers.values() if module_id is None else [self.buffers[module_id]]
        return sum(buffer.get_sampled_timesteps() for buffer in buffers)

    @property
    def num_bytes(self) -> int:
        """Size of the stored steps in bytes."""
        return sum(buffer.num_bytes for buffer in self.buffers.values())

    @property
    def num_agent_steps_not_kept(self) -> int:
        """Number of agent steps, over the lifetime, that `add` left out or `remove_module` removed."""
        return self._num_left_out + self._num_removed

    def get_metrics(self) -> dict[str, Any]:
        """Return counts of env steps and, as dicts by module id, of its agents' steps and their parts of episodes."""
        counts = super().get_metrics()
        metrics: dict[str, Any] = {
            name: counts[name]
            for name in (
                "num_env_steps_stored",
                "num_env_steps_added_lifetime",
                "num_env_steps_evicted_lifetime",
                "num_episodes_added_lifetime",
                "num_bytes_stored",
            )
        }
        metrics["num_agent_steps_not_kept"] = self.num_agent_steps_not_kept
        for module_id, buffer in self.buffers.items():
            for name, value in buffer.get_metrics().items():
                if name in _NAMES_BY_MODULE:
                    metrics.setdefault(_NAMES_BY_MODULE[name], {})[module_id] = value
        return metrics

    # -- in -------------------------------------------------------------------------------------------

    def add(self, episodes: object, weight: Any = None) -> None:
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
            self._store.make_room(batch.num_env_steps)
            stretches = self._store.append(batch)
            for module_id in batch.get_module_ids():
                own_weight = weight.get(module_id) if isinstance(weight, Mapping) else weight
                for chunks in batch.batches_of(module_id):
                    if self._kept_modules is not None and module_id not in self._kept_modules:
                        self._num_left_out += chunks.num_env_steps
                        continue
                    owners = [stretches[e] for e in chunks.links[0].tolist()]
                    self._buffer_of(module_id)._store.append(chunks, owners, own_weight)
            self._store.make_room(0, num_kept=1)

    def keep_modules(self, module_ids: Collection[str]) -> None:
        """Remove the steps of other modules, and store only those of these modules from now on."""
        self._kept_modules = frozenset(module_ids)
        for module_id in self.buffers.keys() - self._kept_modules:
            self.remove_module(module_id)

    def remove_module(self, module_id: str) -> None:
        """Remove all steps of a module. `undo` does not restore them."""
        buffer = self.buffers.pop(module_id, None)
        if buffer is not None:
            self._num_removed += len(buffer)
            for stretch in self._store:
                stretch.agents = [own for own in stretch.agents if own[0] is not buffer._store]

    def mark(self) -> None:
        super().mark()
        self._num_left_out_before = self._num_left_out
        for buffer in self.buffers.values():
            buffer.mark()

    def undo(self) -> None:
        super().undo()
        self._num_left_out = self._num_left_out_before
        for buffer in self.buffers.values():
            buffer.undo()

    # -- out ------------------------------------------------------------------------------------------

    def sample(  # type: ignore[override]
        self, num_items: int | None = None, **arguments: Any
    ) -> list[SingleAgentEpisode]:
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
        replay_mode: Literal["independent", "synchronized"] = "independent",
        modules_to_sample: Collection[str] | None = None,
        rng: np.random.Generator | None = None,
        **options: Any,
    ) -> dict[str, EpisodeBatch]:
        """Sample items for each module, with replacement.

        Args:
            num_items, rng: See `EpisodeReplayBuffer.sample`. The number of items is per module.
            replay_mode: "independent": each module's items are drawn from its own steps. "synchronized": env steps at
                which all the modules have stored a step are drawn uniformly, and each module's items are the steps of
                all its agents there, in the same order. For transitions only; weights are 1.
            modules_to_sample: Module ids; None: all modules with stored steps.
            options: The other arguments of `EpisodeReplayBuffer.sample`; synchronized replay has those of transitions.

        Returns:
            Module id → its items, with `EpisodeBatch.module_ids` set.

        Raises:
            ValueError: A module has no stored step, there is no common env step, or see `EpisodeReplayBuffer.sample`.
        """
        where = f"{type(self).__name__}.sample"
        rng = self._rng if rng is None else rng
        chosen = self.get_module_ids() if modules_to_sample is None else sorted(modules_to_sample)
        for module_id in chosen or ("any module",):
            if not self.get_num_timesteps(module_id):
                raise ValueError(
                    f"{where}: no stored step of {module_id!r}; modules: {self.get_module_ids()}."
                )
        if replay_mode == "independent":
            result = {
                module_id: self.buffers[module_id].sample(num_items, rng=rng, **options)
                for module_id in chosen
            }
        elif replay_mode == "synchronized":
            result = self._sample_synchronized(chosen, num_items, rng, **options)
        else:
            raise ValueError(
                f"{where}: expected replay_mode 'independent' or 'synchronized', got {replay_mode!r}."
            )
        for module_id, batch in result.items():
            batch.module_ids = [module_id] * len(batch)
        return result

    def _sample_synchronized(
        self,
        module_ids: list[str],
        num_items: int | None,
        rng: np.random.Generator,
        *,
        batch_size_B: int | None = None,
        n_step: int | tuple[int, int] | None = None,
        gamma: float = 0.99,
        beta: float = 0.0,
        include_infos: bool = False,
        include_extra_model_outputs: bool = False,
        sample_episodes: bool = True,
        to_numpy: bool = True,
        **sequences: int,
    ) -> dict[str, EpisodeBatch]:
        where = f"{type(self).__name__}.sample"
        check_samples_episodes(where, sample_episodes, to_numpy)
        if sequences or self.batch_length_T > 1:
            raise ValueError(f"{where}: synchronized replay is for transitions, got {sequences}.")
        num = self._num_to_draw(num_items, batch_size_B, 1)
        stored: dict[str, tuple[IntArray, IntArray]] = {}
        places = {stretch: place for place, stretch in enumerate(self._store)}
        for module_id in module_ids:
            buffer = self.buffers[module_id]
            n_range = buffer._check_sample(n_step, 1)
            stretches, slots = buffer._store.ordered_slots()
            of_slots = np.repeat(
                [places[stretch.owner] for stretch in stretches if stretch.owner],
                [stretch.num_steps + 1 for stretch in stretches],
            )
            env_steps = of_slots << _ENV_T_BITS | buffer._store.columns[ENV_T][slots]
            has_step = buffer._store.has_step(slots)
            env_steps, slots = env_steps[has_step], slots[has_step]
            order = np.lexsort([slots, env_steps])
            stored[module_id] = env_steps[order], slots[order]
        common = reduce(np.intersect1d, (env_steps for env_steps, _ in stored.values()))
        if not len(common):
            raise ValueError(
                f"{type(self).__name__}.sample: no stored env step at which all modules {module_ids} have a step."
            )
        drawn, n = common[rng.integers(len(common), size=num)], drawn_n(*n_range, num, rng)
        result = {}
        for module_id, (env_steps, slots) in stored.items():
            begin, end = (np.searchsorted(env_steps, drawn, side) for side in ("left", "right"))
            counts = end - begin
            rows = ragged_arange(begin, counts)
            buffer = self.buffers[module_id]
            of_rows = n if isinstance(n, int) else n.repeat(counts)
            batch = buffer._transitions(slots[rows], n_step, of_rows, gamma, 0.0)
            result[module_id] = buffer._filled(
                batch, batch.slots(), include_infos, include_extra_model_outputs
            )
        return result

    # -- state ----------------------------------------------------------------------------------------

    def _stored(self) -> EpisodeBatch:
        places = {stretch: place for place, stretch in enumerate(self._store)}
        episodes = self._store.stored()
        episodes.columns, episodes.groups = {}, []
        episodes.start = np.zeros(len(episodes), np.int64)
        for module_id, buffer in self.buffers.items():
            if not len(buffer):
                continue
            group = buffer._stored()
            group.module_ids, group.order = [module_id] * len(group), np.arange(len(group))
            group.episode = np.array([places[own.owner] for own in buffer._store if own.owner], np.int64)
            group.env_ts = group.columns.pop(ENV_T)
            episodes.groups.append(group)
        return episodes

    def _get_counts(self) -> dict[str, Any]:
        modules = {module_id: buffer._get_counts() for module_id, buffer in self.buffers.items()}
        return {**super()._get_counts(), "modules": modules}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the output of `get_state`, replacing all stored steps. The capacity is unchanged."""
        self.buffers = {}
        super().set_state(state)

    def _set_counts(self, counts: Mapping[str, Any]) -> None:
        super()._set_counts(counts)
        for module_id, of_module in counts.get("modules", {}).items():
            self._buffer_of(module_id)._set_counts(of_module)


class MultiAgentPrioritizedEpisodeReplayBuffer(MultiAgentEpisodeReplayBuffer):
    """A MultiAgentEpisodeReplayBuffer with a `PrioritizedEpisodeReplayBuffer` per module.

    Args:
        capacity, options: See `MultiAgentEpisodeReplayBuffer`.
        alpha: Exponent of the priorities, >= 0; 0 draws uniformly.
    """

    uses_priorities: ClassVar[bool] = True
    alpha: float

    def __init__(self, capacity: int = 10_000, *, alpha: float = 1.0, **options: Any) -> None:
        self.alpha = alpha
        super().__init__(capacity, **options)

    def _new_buffer(self, **options: Any) -> PrioritizedEpisodeReplayBuffer:
        return PrioritizedEpisodeReplayBuffer(alpha=self.alpha, **options)

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
