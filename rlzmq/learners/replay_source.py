"""EpisodeReplay: batch source that draws from a replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlzmq.core.tree import tree_map
from rlzmq.core.update_plan import ReplayRatio, UpdatePlan
from rlzmq.episodes.batch_columns import ragged_arange
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.learners.schedule import Schedule
from rlzmq.learners.sources import BatchSource, batches_of, num_env_steps_of
from rlzmq.replay.divided_states import divide_buffers
from rlzmq.replay.episode_replay_buffer import EpisodeReplayBuffer
from rlzmq.replay.multi_agent_episode_replay_buffer import (
    MultiAgentEpisodeReplayBuffer,
    MultiAgentPrioritizedEpisodeReplayBuffer,
    joined,
)
from rlzmq.replay.replay_buffer import ReplayBuffer

__all__ = ["REPLAY_KEY", "BurnIn", "EpisodeReplay", "divide_states"]

REPLAY_KEY = "replay_key"
"""Column of sampled batches, int64: identifies the first step of a row."""

# Arguments of `sample` that `sample_transitions` has, too.
_OF_TRANSITIONS = {"rng", "n_step", "gamma", "beta"}


@dataclass(frozen=True)
class BurnIn:
    """The burn-in before the drawn steps of a stateful module's sequences.

    Args:
        num_steps: Number of steps before the drawn ones that warm up the state, as far as they are stored.
        initial_state: The module's state in new episodes, a tree of arrays.
        num_drawn: Maximum number of steps drawn for a sequence.
    """

    num_steps: int
    initial_state: Any
    num_drawn: int

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `EpisodeReplayBuffer.sample`. They include the ``state_out`` of the step before the burn-in."""
        return {
            "n_step": None,  # the loss sums the rewards of a sequence
            "full_length": True,
            "batch_length_T": self.num_drawn,
            "lookback": self.num_steps + 1,
            "include_extra_model_outputs": True,
        }

    def extend(self, batch: EpisodeBatch, state_before: Callable[[int], Any]) -> None:
        """Extend a sample's sequences to the burn-in, where ``loss_mask`` is False, and set their initial states.

        The initial state is the ``state_out`` of the step before, or what the buffer knows of it if that step is not
        stored. At the beginning of an episode, and in data that was recorded without states, it is that of a new
        episode.

        Args:
            batch: The sample.
            state_before: See `EpisodeReplayBuffer.state_before`.
        """
        num_before = np.minimum(batch.lookback, self.num_steps)
        for name, change in (
            ("start", -num_before),
            ("length", num_before),
            ("lookback", -num_before),
            ("t_started", -num_before),
        ):
            setattr(batch, name, getattr(batch, name) + change)
        mask = np.ones(len(batch.columns[REPLAY_KEY]), np.bool_)
        mask[ragged_arange(batch.start, num_before)] = False
        batch.columns[Columns.LOSS_MASK] = mask
        is_known, before = batch.lookback > 0, np.maximum(batch.start - 1, 0)

        def states(state_out: Any, initial: Any) -> Any:
            rows = state_out[before]
            rows[~is_known] = initial
            return rows

        batch.initial_state = tree_map(states, batch.columns[Columns.STATE_OUT], self.initial_state)
        for c in np.flatnonzero(~is_known & (batch.t_started > 0)).tolist():
            if (known := state_before(int(batch.columns[REPLAY_KEY][batch.start[c]]))) is not None:
                tree_map(lambda rows, state, c=c: rows.__setitem__(c, state), batch.initial_state, known)


def divide_states(states: Sequence[Mapping[str, Any]], num_ranks: int) -> list[dict[str, Any]] | None:
    """Divide the states of all ranks' replay buffers among a different number of ranks.

    Args:
        states: Results of `BatchSource.get_state`, by rank.
        num_ranks: The new number of ranks.

    Returns:
        A state for each rank; None if the states are not those of `rlzmq.replay`'s buffers.
    """
    if not all({"columns", "modules"} & state.get("buffer", {}).keys() for state in states):
        return None
    return [{"buffer": state} for state in divide_buffers([state["buffer"] for state in states], num_ranks)]


class EpisodeReplay(BatchSource):
    """A replay buffer. Every update adds its fresh steps and draws batches at the configured ratio.

    A rank whose buffer holds fewer steps than a batch draws at most the number that it holds, so that a rank that has
    just joined has less weight. Steps evicted for a failed update are not restored.

    Args:
        buffer: The buffer.
        batch_size: Env steps per batch on each rank.
        train_ratio, warm_up: See `ReplayRatio`; set by `UpdatePlan`.
        options: Additional arguments of `buffer.sample`: n_step, gamma, beta, … `beta` may be a schedule over the
            sampled env steps of all ranks together.

    Attributes:
        burn_ins: The burn-in of each stateful module, by id. Their batches are sequences; those of others are
            transitions.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        *,
        batch_size: int,
        train_ratio: float,
        warm_up: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.buffer = buffer
        self.batch_size = batch_size
        self._num_added = 0
        self.burn_ins: Mapping[str, BurnIn] = {}
        self.options = options
        self._beta = Schedule(options["beta"], "beta") if "beta" in options else None
        self.progress: ReplayRatio = ReplayRatio(train_ratio, warm_up)
        self._modules: frozenset[str] | None = None
        self._trained: frozenset[str] | None = None

    @classmethod
    def of_plan(
        cls, plan: UpdatePlan, buffer: ReplayBuffer, *, batch_size: int, **options: Any
    ) -> EpisodeReplay:
        """Create from an update plan with a train ratio."""
        return cls(
            buffer, batch_size=batch_size, train_ratio=plan.train_ratio, warm_up=plan.warm_up, **options
        )

    @property
    def divides_by_module(self) -> bool:
        return isinstance(self.buffer, MultiAgentEpisodeReplayBuffer)

    def set_modules(self, module_ids: Collection[str], trained: Collection[str]) -> None:
        assert isinstance(self.buffer, MultiAgentEpisodeReplayBuffer)
        self._modules, self._trained = frozenset(module_ids), frozenset(trained)
        for module_id in self.buffer.buffers.keys() - self._modules:
            self.buffer.remove_module(module_id)

    def add(self, episodes: Any) -> None:
        for batch in batches_of(episodes):
            if isinstance(self.buffer, MultiAgentEpisodeReplayBuffer):
                self.buffer.add(batch, module_ids=self._modules)
            else:
                self.buffer.add(batch)
        self._num_added += num_env_steps_of(episodes)

    def plan_batches(self, num_fresh: int, num_ranks: int) -> int:
        self.progress.sampled(num_fresh)
        return self.progress.take(self.batch_size * num_ranks)

    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        while num_batches > 0:
            num_batches -= 1
            if not len(self.buffer):
                yield []
                continue
            num_items = min(self.batch_size, len(self.buffer))
            if isinstance(self.buffer, MultiAgentEpisodeReplayBuffer):
                module_ids = self.buffer.get_module_ids()
                if self._trained is not None:
                    module_ids = [module_id for module_id in module_ids if module_id in self._trained]
                drawn = {mid: self._draw(mid, num_items, rng, 1)[0] for mid in sorted(module_ids)}
                yield joined(drawn) if drawn else []
            else:
                samples = self._draw(DEFAULT_MODULE_ID, num_items, rng, num_batches + 1)
                num_batches -= len(samples) - 1
                yield from samples

    def _draw(
        self, module_id: str, num_items: int, rng: np.random.Generator, most: int
    ) -> Sequence[EpisodeBatch]:
        """Draw items from the steps of one module: a batch, or up to `most` if the buffer can draw them at once."""
        burn_in = self.burn_ins.get(module_id)
        buffer: ReplayBuffer = self.buffer
        options = {**self.options, "rng": rng, **({} if burn_in is None else burn_in.options)}
        if self._beta is not None:
            options["beta"] = self._beta.value(self.progress.num_sampled)
        if isinstance(buffer, MultiAgentEpisodeReplayBuffer):
            batch = buffer.sample_modules(num_items, modules_to_sample=[module_id], **options)[module_id]
            buffer = buffer.buffers[module_id]
        elif (
            isinstance(buffer, EpisodeReplayBuffer)
            and type(buffer).sample is EpisodeReplayBuffer.sample
            and options.keys() <= _OF_TRANSITIONS
            and buffer.batch_length_T == 1
        ):
            return buffer.sample_transitions(num_items, num_samples=most, **options)
        else:
            batch = buffer.sample(num_items, **options)
        if burn_in is not None:
            assert isinstance(buffer, EpisodeReplayBuffer)
            burn_in.extend(batch, buffer.state_before)
        return [batch]

    @property
    def keeps_data(self) -> bool:
        return True

    @property
    def num_env_steps(self) -> int:
        return len(self.buffer)

    @property
    def num_added(self) -> int:
        return self._num_added

    @property
    def num_agent_steps_not_kept(self) -> int:
        if isinstance(self.buffer, MultiAgentEpisodeReplayBuffer):
            return self.buffer.num_agent_steps_not_kept
        return 0

    @property
    def num_bytes(self) -> int:
        return self.buffer.num_bytes

    def get_metrics(self) -> dict[str, Any]:
        return self.buffer.get_metrics()

    def update_priorities(self, module_id: str, td_errors: Any, keys: Any) -> None:
        if isinstance(self.buffer, MultiAgentPrioritizedEpisodeReplayBuffer):
            self.buffer.update_priorities(td_errors, module_id, keys)
        elif self.buffer.uses_priorities:
            self.buffer.update_priorities(td_errors, keys)

    def checkpoint(self) -> Any:
        self.buffer.mark()
        return self._num_added

    def rollback(self, checkpoint: Any) -> None:
        self.buffer.undo()
        self._num_added = checkpoint

    def get_state(self) -> dict[str, Any]:
        return {"buffer": self.buffer.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.buffer.set_state(state["buffer"])
        self._num_added = len(self.buffer)
