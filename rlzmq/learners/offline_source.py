"""OfflineShards: batch source of recorded episodes from files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.errors import ConfigurationError, NotFiniteError
from rlzmq.core.tree import tree_map
from rlzmq.episodes.bad_values import find_bad_values
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.learners.sources import BatchSource, num_env_steps_of

__all__ = ["DrawnBatches", "OfflineShards"]

_log = logging.getLogger("rlzmq.learners")

_KEY = "offline_key"
_SLOT_BITS = 32
_TRAINED_ON = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS)


class DrawnBatches:
    """Number of batches that each rank has drawn, which determines the ranks' position in their data.

    Args:
        num_recorded: Number of recorded env steps, for all ranks.
    """

    def __init__(self, num_recorded: int) -> None:
        self.num_drawn: int = 0
        self.num_recorded = num_recorded

    def get_state(self) -> dict[str, int]:
        """Return the counts."""
        return {"num_drawn": self.num_drawn, "num_recorded": self.num_recorded}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the number of batches; log a warning if it counts batches of other data."""
        self.num_drawn = int(state["num_drawn"])
        if state["num_recorded"] != self.num_recorded:
            _log.warning(
                "offline data: %d env steps were recorded where this training began, and %d are here. Its further "
                "batches are drawn from these. To continue it exactly, name the same shards in offline_data(input_=…).",
                state["num_recorded"],
                self.num_recorded,
            )


class OfflineShards(BatchSource):
    """Recorded episodes (`rlzmq.replay.open_shards`), epoch by epoch. Each rank trains its part.

    Each epoch visits all of the rank's steps, or whole episodes, in a new random order, as batches of equal size. The
    remainder of an epoch waits for a later epoch. A batch depends only on its number, the seed and the rank, so a run
    that is resumed, or whose group of ranks has changed, continues at the same position. The next batch is read from
    the files on a thread while the current one is trained.

    Steps with NaN or infinity are left out.

    Args:
        shards: EpisodeBatches with the same observations, actions and rewards. Of other columns, `columns` are used.
        batch_size: Env steps per batch; with whole episodes, a lower bound of their mean.
        batches_per_update: Number of batches per update; None: those of an epoch.
        whole_episodes: Use batches of whole episodes instead of single steps.
        seed: Seed of the random orders.
        columns: Names of further columns that all shards have.

    Raises:
        ConfigurationError: There are no steps.
    """

    def __init__(
        self,
        shards: Sequence[EpisodeBatch],
        *,
        batch_size: int,
        batches_per_update: int | None = 1,
        whole_episodes: bool = False,
        seed: int = 0,
        columns: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.progress: DrawnBatches = DrawnBatches(sum(shard.num_env_steps for shard in shards))
        self.batch_size = batch_size
        self._batches_per_update = batches_per_update
        self._whole_episodes = whole_episodes
        self._seed = seed
        self._shards = [_with_keys(shard, index, columns) for index, shard in enumerate(shards)]
        self._ahead: tuple[int, _Ahead] | None = None
        self._initial_state: Any = None
        self._num_empty = 0  # consecutive batches without a usable step
        self._take_part(0, 1)

    def begin_sequences_with(self, initial_state: Any) -> None:
        """Train a stateful module: batches contain whole episodes, and all sequences begin with the same state.

        Recorded states are not used, since another module has computed them.

        Args:
            initial_state: The module's initial state, a tree of arrays without batch dimension.
        """
        self._forget_ahead()
        self._initial_state = initial_state
        self._whole_episodes = True
        self._take_part(*self._rank)

    # -- parts and orders -------------------------------------------------------------------------

    def set_rank(self, rank: int, num_ranks: int) -> None:
        """Select the rank's part. Episodes are assigned to ranks in turn.

        Raises:
            ConfigurationError: There are no steps for this rank.
        """
        if (rank, num_ranks) != self._rank:
            self._forget_ahead()
            self._take_part(rank, num_ranks)
            super().set_rank(rank, num_ranks)

    def _take_part(self, rank: int, num_ranks: int) -> None:
        lengths = np.concatenate([shard.length for shard in self._shards] or [np.zeros(0, np.int64)])
        first_of = np.cumsum([0, *map(len, self._shards)])
        mine = np.flatnonzero(lengths)[rank % num_ranks :: num_ranks]
        if not len(mine):
            raise ConfigurationError(
                f"offline data: expected at least one episode with a step for rank {rank} of {num_ranks}, got "
                f"{len(lengths)} episodes in {len(self._shards)} shards for all ranks. Record more episodes, or lower "
                "num_learners."
            )
        self._shard_of = np.searchsorted(first_of, mine, "right") - 1
        self._chunk_of = mine - first_of[self._shard_of]
        self._length = lengths[mine]
        self._ends = np.cumsum(self._length)
        num_batches = max(int(self._ends[-1]) // self.batch_size, 1)
        self.num_batches_per_epoch: int = min(num_batches, len(mine)) if self._whole_episodes else num_batches
        self._order: tuple[int, list[NDArray[np.int64]]] = (-1, [])

    def _batches_of_epoch(self, epoch: int) -> list[NDArray[np.int64]]:
        """Return the items of each batch of an epoch: positions of this rank's episodes or steps."""
        known, order = self._order
        if known == epoch:
            return order
        rng = np.random.default_rng([self._seed, self._rank[0], epoch])
        num = self.num_batches_per_epoch
        if self._whole_episodes:
            items = rng.permutation(len(self._length))
            ends = np.cumsum(self._length[items])
            places = np.arange(1, num)
            cuts = np.searchsorted(ends, places * (int(ends[-1]) / num)) + 1
            # No batch is empty.
            cuts = np.maximum.accumulate(np.concatenate([[0], cuts - places]))[1:] + places
            order = np.split(items, np.minimum(cuts, len(items) - num + places))
        else:
            items = rng.permutation(int(self._ends[-1]))[: num * self.batch_size]
            order = np.split(items, num)
        self._order = epoch, order
        return order

    def _read(self, number: int) -> EpisodeBatch:
        """Read a batch into memory. Batches are numbered from the beginning of training."""
        epoch, index = divmod(number, self.num_batches_per_epoch)
        items = self._batches_of_epoch(epoch)[index]
        if self._whole_episodes:
            places, within = items, None
        else:
            places = np.searchsorted(self._ends, items, "right")
            within = items - (self._ends - self._length)[places]
        by_shard = np.argsort(self._shard_of[places], kind="stable")
        shards, firsts = np.unique(self._shard_of[places][by_shard], return_index=True)
        parts = []
        for shard, mine in zip(shards.tolist(), np.split(by_shard, firsts[1:]), strict=True):
            chunks = self._chunk_of[places[mine]]
            if within is None:
                part = self._shards[shard].select(chunks)
            else:
                part = _single_steps(self._shards[shard], chunks, within[mine])
            parts.append(part.compact())
        batch = EpisodeBatch.concat(parts).select(np.argsort(by_shard))
        if self._initial_state is not None:
            self._begin_sequences(batch)
        bad = find_bad_values(batch)
        return batch if bad is None else bad.left_out_of(batch)

    def _begin_sequences(self, batch: EpisodeBatch) -> None:
        def repeated(leaf: Any, num: int) -> Any:
            return np.broadcast_to(np.asarray(leaf), (num, *np.shape(leaf)))

        batch.initial_state = tree_map(lambda leaf: repeated(leaf, len(batch)), self._initial_state)
        batch.columns[Columns.STATE_OUT] = tree_map(
            lambda leaf: repeated(leaf, batch.num_slots), self._initial_state
        )

    def _forget_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead[1].join()

    # -- as a batch source ------------------------------------------------------------------------

    @property
    def num_epochs(self) -> int:
        """Number of completed epochs."""
        return self.progress.num_drawn // self.num_batches_per_epoch

    def add(self, episodes: Any) -> None:
        if num_env_steps_of(episodes):
            raise ConfigurationError(
                "OfflineShards trains on files only: expected an update plan without fresh env steps."
            )

    def plan_batches(self, num_fresh: int, num_ranks: int) -> int:
        return self._batches_per_update or self.num_batches_per_epoch

    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        first = self.progress.num_drawn
        self.progress.num_drawn += num_batches
        for number in range(first, first + num_batches):
            ahead, self._ahead = self._ahead, None
            if ahead is not None and ahead[0] == number:
                batch = ahead[1].result()
            else:
                if ahead is not None:
                    ahead[1].join()
                batch = self._read(number)
            self._ahead = number + 1, _Ahead(lambda number=number: self._read(number + 1))  # type: ignore[misc]
            self._num_empty = 0 if batch.num_env_steps else self._num_empty + 1
            if self._num_empty >= self.num_batches_per_epoch:
                raise NotFiniteError(
                    f"offline data: no step of the last {self._num_empty} batches, an epoch or more, can be trained, "
                    "since each has NaN or infinite values. Look at the recorded columns with "
                    "`rlzmq inspect`."
                )
            yield batch

    @property
    def keeps_data(self) -> bool:
        return True

    @property
    def num_bytes(self) -> int:
        return 0  # the operating system manages the files' pages

    def checkpoint(self) -> Any:
        """Return None: the learner restores `progress`."""

    def rollback(self, checkpoint: Any) -> None:
        """Do nothing."""


class _Ahead:
    """A batch that is read on a thread."""

    def __init__(self, read: Callable[[], EpisodeBatch]) -> None:
        self._read = read
        self._batch: EpisodeBatch | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="offline-data", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._batch = self._read()
        except BaseException as error:  # raised by `result`
            self._error = error

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def result(self) -> EpisodeBatch:
        """Return the batch once it has been read."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._batch is not None
        return self._batch


def _with_keys(shard: EpisodeBatch, index: int, further: Sequence[str]) -> EpisodeBatch:
    """Return the shard with its trained columns and further ones, and a column with a key for each slot."""
    columns = {name: shard.columns[name] for name in (*_TRAINED_ON, *further)}
    columns[_KEY] = (np.int64(index) << _SLOT_BITS) + np.arange(len(columns[Columns.REWARDS]))
    return EpisodeBatch(
        columns,
        start=shard.start,
        length=shard.length,
        t_started=shard.t_started,
        terminated=shard.terminated,
        truncated=shard.truncated,
        episode_ids=shard.episode_ids,
        observation_space=shard.observation_space,
        action_space=shard.action_space,
    )


def _single_steps(shard: EpisodeBatch, chunks: NDArray[np.int64], within: NDArray[np.int64]) -> EpisodeBatch:
    """Return steps of a shard, each as a separate chunk on the shard's columns."""
    is_last = within == shard.length[chunks] - 1
    return EpisodeBatch(
        shard.columns,
        start=shard.start[chunks] + within,
        length=np.ones(len(chunks), np.int64),
        t_started=shard.t_started[chunks] + within,
        terminated=shard.terminated[chunks] & is_last,
        truncated=shard.truncated[chunks] & is_last,
        episode_ids=[f"offline-{key}" for key in shard.columns[_KEY][shard.start[chunks] + within].tolist()],
        observation_space=shard.observation_space,
        action_space=shard.action_space,
    )
