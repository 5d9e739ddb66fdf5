"""OfflineShards: batch source of recorded episodes from files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.errors import ConfigurationError, NotFiniteError
from rlzmq.episodes.bad_values import BadValues
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.learners.sources import BatchSource, num_env_steps_of

__all__ = ["OfflineShards"]

_KEY = "offline_key"
_SLOT_BITS = 32


class OfflineShards(BatchSource):
    """Recorded episodes (`rlzmq.replay.open_shards`), epoch by epoch; each rank trains its part.

    Each epoch visits the rank's shards in a new order, and the steps or whole episodes of each shard in a new order.
    Batches of single steps are views of the shards' columns, of which a learner reads only the rows it needs; at the
    end of a shard, a batch continues with the next.

    Steps that made a loss overflow are passed over from then on; `num_left_out` counts them.

    Args:
        shards: EpisodeBatches.
        batch_size: Env steps of a batch; with whole episodes the minimum.
        batches_per_update: Number of batches that an update trains.
        whole_episodes: Use batches of whole episodes instead of single steps.
        rank, num_ranks: Select the rank's part: episodes are assigned in turn.
        seed: Seed of the orders.

    Raises:
        ConfigurationError: There are no steps for this rank.
    """

    def __init__(
        self,
        shards: Sequence[EpisodeBatch],
        *,
        batch_size: int,
        batches_per_update: int = 1,
        whole_episodes: bool = False,
        rank: int = 0,
        num_ranks: int = 1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        first = 0
        self._shards: list[EpisodeBatch] = []
        for shard in shards:
            mine = shard.select(np.arange((rank - first) % num_ranks, len(shard), num_ranks))
            first += len(shard)
            if mine.num_env_steps:
                self._shards.append(mine)
        if not self._shards:
            raise ConfigurationError(
                f"offline data: expected at least one episode with a step for rank {rank} of {num_ranks}, got "
                f"{first} episodes in {len(shards)} shards for all ranks."
            )
        self.batch_size = batch_size
        self._batches_per_update = batches_per_update
        self._whole_episodes = whole_episodes
        self._seed = [seed, rank]
        self._epoch = self._position = 0  # items taken in this epoch
        self._left_out: set[int] = set()  # keys of steps: which shard, and which slot of it
        for index, shard in enumerate(self._shards):
            num_slots = len(shard.columns[Columns.REWARDS])
            keys = (np.int64(index) << _SLOT_BITS) + np.arange(num_slots)
            shard.columns = {**shard.columns, _KEY: keys}
        self._order: tuple[int, list[tuple[int, np.ndarray]]] = (-1, [])

    @property
    def num_epochs(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    def add(self, episodes: Any) -> None:
        if num_env_steps_of(episodes):
            raise ConfigurationError(
                "OfflineShards trains on files only: expected an update plan without fresh env steps."
            )

    def plan_batches(self, num_fresh: int, num_ranks: int) -> int:
        return self._batches_per_update

    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        for _ in range(num_batches):
            parts: list[EpisodeBatch] = []
            missing = self.batch_size
            while missing > 0:
                part = self._usable(self._take(missing))
                missing -= part.num_env_steps
                parts.append(part)
            # Parts of several shards are copied, whole shards are not.
            yield parts[0] if len(parts) == 1 else EpisodeBatch.concat([part.compact() for part in parts])

    def _usable(self, part: EpisodeBatch) -> EpisodeBatch:
        if not self._left_out:
            return part
        mask = ~np.isin(part.columns[_KEY][part.step_slots()], list(self._left_out))
        return part if mask.all() else BadValues(usable=mask).cut_out_of(part)

    def _take(self, num_steps: int) -> EpisodeBatch:
        """Return the next items of one shard: at most `num_steps` steps, or whole episodes with at least as many."""
        passed = 0
        for index, items in self._order_of_epoch():
            if self._position < passed + len(items):
                items, shard = items[self._position - passed :], self._shards[index]
                if self._whole_episodes:
                    ends = np.cumsum(shard.length[items])
                    items = items[: int(np.searchsorted(ends, num_steps)) + 1]
                    part = shard.select(items)
                else:
                    items = items[:num_steps]
                    part = _single_steps(shard, items)
                self._position += len(items)
                return part
            passed += len(items)
        self._epoch, self._position = self._epoch + 1, 0
        return self._take(num_steps)

    def _order_of_epoch(self) -> list[tuple[int, np.ndarray]]:
        if self._order[0] != self._epoch:
            rng = np.random.default_rng([*self._seed, self._epoch])
            order = [
                (index, rng.permutation(self._num_items(self._shards[index])))
                for index in rng.permutation(len(self._shards)).tolist()
            ]
            self._order = self._epoch, order
        return self._order[1]

    def _num_items(self, shard: EpisodeBatch) -> int:
        return len(shard) if self._whole_episodes else shard.num_env_steps

    @property
    def num_left_out(self) -> int:
        """Recorded steps that are not given any more, since they made a loss overflow."""
        return len(self._left_out)

    def remove_steps(self, batch: Any, steps: NDArray[np.int64]) -> list[tuple[Any, int]]:
        self._left_out.update(batch.columns[_KEY][batch.step_slots()[steps]].tolist())
        if len(self._left_out) == sum(shard.num_env_steps for shard in self._shards):
            raise NotFiniteError(
                "offline data: every recorded step makes the loss or its gradients NaN or infinite."
            )
        return []  # never counted as fresh

    @property
    def keeps_data(self) -> bool:
        return True

    @property
    def num_bytes(self) -> int:
        return 0  # the operating system manages the files' pages

    def checkpoint(self) -> Any:
        return self._epoch, self._position

    def rollback(self, checkpoint: Any) -> None:
        self._epoch, self._position = checkpoint

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "left_out": sorted(self._left_out)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._left_out = set(map(int, state.get("left_out", ())))


def _single_steps(shard: EpisodeBatch, steps: np.ndarray) -> EpisodeBatch:
    """Return steps of a shard, each as a separate chunk on the shard's columns."""
    ends = np.cumsum(shard.length)
    chunks = np.searchsorted(ends, steps, "right")
    within = steps - (ends - shard.length)[chunks]
    is_last = within == shard.length[chunks] - 1
    return EpisodeBatch(
        shard.columns,
        start=shard.start[chunks] + within,
        length=np.ones(len(steps), np.int64),
        t_started=shard.t_started[chunks] + within,
        terminated=shard.terminated[chunks] & is_last,
        truncated=shard.truncated[chunks] & is_last,
        episode_ids=[f"offline-{step}" for step in steps.tolist()],
        observation_space=shard.observation_space,
        action_space=shard.action_space,
    )
