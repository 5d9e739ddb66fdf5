"""EpisodeReplay: a learner rank trains batches that it draws from a replay buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlzmq.core.replay_ratio import ReplayRatio
from rlzmq.core.update_plan import UpdatePlan
from rlzmq.learners.sources import BatchSource, batches_of
from rlzmq.replay.episode_replay_buffer import EpisodeReplayBuffer

__all__ = ["EpisodeReplay"]


class EpisodeReplay(BatchSource):
    """A replay buffer: every update adds its fresh steps, and draws batches as the ratio says.

    A rank whose buffer holds fewer steps than a batch draws no more than it holds: one that has joined a moment ago
    weighs as much as it knows. What left the buffer to make room for an update that failed stays gone.

    Args:
        buffer: An EpisodeReplayBuffer, or another kind of it.
        batch_size: Env steps of a batch on each rank.
        train_ratio, warm_up: See `ReplayRatio`; `UpdatePlan` has them.
        options: What `buffer.sample` takes besides: n_step, gamma, beta, batch_length_T, lookback, …
    """

    def __init__(
        self,
        buffer: EpisodeReplayBuffer,
        *,
        batch_size: int,
        train_ratio: float,
        warm_up: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.buffer = buffer
        self.batch_size = batch_size
        self.options = options
        self.ratio: ReplayRatio = ReplayRatio(train_ratio, warm_up)

    @classmethod
    def of_plan(
        cls, plan: UpdatePlan, buffer: EpisodeReplayBuffer, *, batch_size: int, **options: Any
    ) -> EpisodeReplay:
        """The source of an update plan with a train ratio."""
        return cls(
            buffer, batch_size=batch_size, train_ratio=plan.train_ratio, warm_up=plan.warm_up, **options
        )

    def add(self, episodes: Any) -> None:
        for batch in batches_of(episodes):
            self.buffer.add(batch)

    def plan_batches(self, num_fresh: int, num_ranks: int) -> int:
        self.ratio.sampled(num_fresh)
        return self.ratio.take(self.batch_size * num_ranks)

    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        for _ in range(num_batches):
            if not len(self.buffer):
                yield []
                continue
            num_items = min(self.batch_size, len(self.buffer))
            yield self.buffer.sample(num_items, rng=rng, **self.options)

    @property
    def keeps_data(self) -> bool:
        return True

    @property
    def num_env_steps(self) -> int:
        return len(self.buffer)

    @property
    def num_added(self) -> int:
        return self.buffer.get_added_timesteps()

    @property
    def num_bytes(self) -> int:
        return self.buffer.num_bytes

    def update_priorities(self, td_errors: Any, keys: Any) -> None:
        """See `PrioritizedEpisodeReplayBuffer.update_priorities`; nothing where draws are uniform.

        Args:
            td_errors: float [K].
            keys: int64 [K], the train batch's column ``replay_key``.
        """
        update = getattr(self.buffer, "update_priorities", None)
        if update is not None:
            update(td_errors, keys)

    def checkpoint(self) -> Any:
        self.buffer.mark()

    def rollback(self, checkpoint: Any) -> None:
        self.buffer.undo()

    def get_state(self) -> dict[str, Any]:
        return {"buffer": self.buffer.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.buffer.set_state(state["buffer"])
