"""OfflineLearner: base class of the learners that train on recorded data, and estimates of returns from such data.

The estimators are those of Precup et al. 2000, "Eligibility Traces for Off-Policy Policy Evaluation".
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import gymnasium as gym
import numpy as np
import optree
import torch
from numpy.typing import NDArray

from rlzmq.connectors.common.agent_to_module_mapping import initial_state
from rlzmq.core.errors import ConfigurationError, NotFiniteError
from rlzmq.core.names import ALL_MODULES
from rlzmq.core.spaces import is_scaled, space_filler
from rlzmq.core.tree import tree_map
from rlzmq.episodes.bad_values import find_bad_values
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns
from rlzmq.episodes.episode_batch import EpisodeBatch, num_env_steps_of
from rlzmq.learners.batches import BatchSource, FreshBatch
from rlzmq.learners.learner import TorchLearner
from rlzmq.replay.shards import OpenedShards, open_shards

__all__ = [
    "DrawnBatches",
    "OfflineLearner",
    "OfflineShards",
    "estimated_returns",
    "recorded_returns",
]


_log = logging.getLogger(__name__)

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
        lookback: Number of earlier steps that single steps have, as far as they are recorded.

    Raises:
        ConfigurationError: There are no steps.
    """

    keeps_data = True

    def __init__(
        self,
        shards: Sequence[EpisodeBatch],
        *,
        batch_size: int,
        batches_per_update: int | None = 1,
        whole_episodes: bool = False,
        seed: int = 0,
        columns: Sequence[str] = (),
        lookback: int = 0,
    ) -> None:
        super().__init__()
        self.progress: DrawnBatches = DrawnBatches(sum(shard.num_env_steps for shard in shards))
        self.batch_size = batch_size
        self._batches_per_update = batches_per_update
        self._whole_episodes = whole_episodes
        self._seed = seed
        self._lookback = lookback
        self._rank = 0, 1
        self._shards = [_with_keys(shard, index, columns) for index, shard in enumerate(shards)]
        self._ahead: tuple[int, Future[EpisodeBatch]] | None = None
        self._initial_state: Any = None
        self._num_empty = 0  # consecutive batches without a usable step
        self._take_part(0, 1)

    def begin_sequences_with(self, initial_state: object) -> None:
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
            self._rank = rank, num_ranks

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
                part = _single_steps(self._shards[shard], chunks, within[mine], self._lookback)
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
            wait([ahead[1]])

    # -- as a batch source ------------------------------------------------------------------------

    @property
    def num_epochs(self) -> int:
        """Number of completed epochs."""
        return self.progress.num_drawn // self.num_batches_per_epoch

    def add(self, episodes: object) -> None:
        if num_env_steps_of(episodes):
            raise ConfigurationError(
                "OfflineShards trains on files only: expected an update plan without fresh env steps."
            )

    def plan_batches(self, num_fresh: int, rank: int, num_ranks: int) -> int:
        self.set_rank(rank, num_ranks)
        return self._batches_per_update or self.num_batches_per_epoch

    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        first = self.progress.num_drawn
        self.progress.num_drawn += num_batches
        for number in range(first, first + num_batches):
            if self._ahead is not None and self._ahead[0] == number:
                ahead, self._ahead = self._ahead[1], None
                batch = ahead.result()
            else:
                self._forget_ahead()
                batch = self._read(number)
            self._ahead = number + 1, _read_ahead(partial(self._read, number + 1))
            self._num_empty = 0 if batch.num_env_steps else self._num_empty + 1
            if self._num_empty >= self.num_batches_per_epoch:
                raise NotFiniteError(
                    f"offline data: no step of the last {self._num_empty} batches, an epoch or more, can be trained, "
                    "since each has NaN or infinite values. Look at the recorded columns with "
                    "`rlzmq inspect`."
                )
            yield batch


def _read_ahead(read: Callable[[], EpisodeBatch]) -> Future[EpisodeBatch]:
    """Read a batch on a thread."""
    future: Future[EpisodeBatch] = Future()

    def run() -> None:
        try:
            future.set_result(read())
        except BaseException as error:  # raised by `result`
            future.set_exception(error)

    threading.Thread(target=run, name="offline-data", daemon=True).start()
    return future


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


def _single_steps(
    shard: EpisodeBatch, chunks: NDArray[np.int64], within: NDArray[np.int64], lookback: int
) -> EpisodeBatch:
    """Return steps of a shard, each as a separate chunk on the shard's columns."""
    is_last = within == shard.length[chunks] - 1
    return EpisodeBatch(
        shard.columns,
        start=shard.start[chunks] + within,
        length=np.ones(len(chunks), np.int64),
        lookback=np.minimum(within, lookback),
        t_started=shard.t_started[chunks] + within,
        terminated=shard.terminated[chunks] & is_last,
        truncated=shard.truncated[chunks] & is_last,
        episode_ids=[f"offline-{key}" for key in shard.columns[_KEY][shard.start[chunks] + within].tolist()],
        observation_space=shard.observation_space,
        action_space=shard.action_space,
    )


Floats = NDArray[np.float64]
# Bound of a ratio's logarithm, so that no weight overflows.
_MAX_LOG_RATIO = 500.0


class _HasHeldOutInput(Protocol):
    """A config of an offline algorithm."""

    def get_held_out_input(self) -> str | list[str]: ...


class OfflineLearner(TorchLearner):
    """Trains on the shards of ``config.input_``. `OfflineShards` gives each rank its part of them.

    Results contain, for all modules, ``dataset_num_iters_trained`` (batches of each rank in this update),
    ``dataset_num_epochs``, ``num_shards`` and ``num_shards_skipped``.
    """

    trains_whole_episodes: ClassVar[bool] = False
    """Whether the loss needs whole episodes instead of single steps. Stateful modules always get whole episodes."""

    def __init__(self, **kwargs: Any) -> None:
        self._opened = OpenedShards()
        self._held_out: OpenedShards | None = None
        super().__init__(**kwargs)

    def make_source(self) -> BatchSource:
        """Open the shards.

        Raises:
            ConfigurationError: No shard is usable, or their columns do not fit together.
        """
        config = self.config
        if config.input_ is None:
            return FreshBatch()  # the algorithm was built for evaluation, without its data
        self._opened = opened = _open(config.input_)
        return OfflineShards(
            opened.shards,
            batch_size=config.train_batch_size_per_learner,
            batches_per_update=config.dataset_num_iters_per_learner,
            whole_episodes=self.trains_whole_episodes,
            seed=self.seed,
            lookback=self._learner_connector.required_lookback,
        )

    def build(self) -> None:
        """Build the module and check that the data fits it.

        Raises:
            ConfigurationError: Observations or actions in the data do not have the structure of the spaces, or there
                are fewer episodes than learners.
        """
        if self.module is not None:
            return
        super().build()
        modules: Any = self.module
        module = modules[DEFAULT_MODULE_ID]
        self._check_shards(self._opened, module)
        if self.config.offline_evaluation_interval is not None:
            self._open_held_out()
        if isinstance(self.source, OfflineShards):
            self.source.set_rank(self.ranks.rank, self.ranks.num)
            recorded, batch = self.source.progress.num_recorded, self.source.batch_size
            if recorded < batch * self.ranks.num and self.rank == 0:
                of_each = f" of each of {self.ranks.num} learners" if self.ranks.num > 1 else ""
                _log.warning(
                    "offline data: train_batch_size_per_learner=%d%s is more than the %d env steps that are recorded: "
                    "each batch is all of them. Record more, or lower it to %d or less.",
                    batch, of_each, recorded, max(recorded // self.ranks.num, 1),
                )  # fmt: skip
            if module.is_stateful():
                self.source.begin_sequences_with(initial_state(module))

    def _open_held_out(self) -> OpenedShards:
        """Return the shards for evaluation, opened at the first call."""
        if self._held_out is None:
            opened = _open(cast(_HasHeldOutInput, self.config).get_held_out_input())
            self._check_shards(opened, self.module[DEFAULT_MODULE_ID])
            if self.config.offline_evaluation_type in ("is", "pdis"):
                self._check_estimates(opened)
            self._held_out = opened
        return self._held_out

    def _check_estimates(self, opened: OpenedShards) -> None:
        where = f"config.offline_evaluation_type={self.config.offline_evaluation_type!r}"
        module = self.module[DEFAULT_MODULE_ID]
        if module.is_stateful():
            raise ConfigurationError(
                f"{where}: {module.describe()} is stateful, and its actions' probabilities depend on whole episodes. "
                "Set it to 'eval_loss'."
            )
        for shard, path in zip(opened.shards, opened.paths, strict=True):
            if Columns.ACTION_LOGP not in shard.columns:
                raise ConfigurationError(
                    f"offline data, {path}: {where} needs the column 'action_logp', got {sorted(shard.columns)}. "
                    "Record data with sampled actions (`rlzmq record … --explore`), or set it to 'eval_loss'."
                )

    def evaluate_offline(self) -> dict[str, Any]:
        """Evaluate the current weights on the recorded data in ``evaluation_config["input_"]``.

        Nothing changes, neither the weights nor the position in the trained data. Each call reads the same batches.

        Returns:
            With ``offline_evaluation_type`` "eval_loss": ``{module_id: {"total_eval_loss": …, …}}``, means over the
            batches of the loss and of what it logs. With "is" and "pdis": ``episode_return_mean``, ``_min`` and
            ``_max``, estimates of the policy's discounted return; ``v_behavior``, the mean of the recorded ones; and
            ``num_episodes``. In both cases ``"__all_modules__": {"dataset_num_iters_evaluated": …,
            "num_env_steps_sampled": …, "num_module_steps_sampled": …}``.

        Raises:
            ConfigurationError: See `build`.
        """
        self._check_built()
        config, estimates = self.config, self.config.offline_evaluation_type in ("is", "pdis")
        module: Any = self.module[DEFAULT_MODULE_ID]
        source = OfflineShards(
            self._open_held_out().shards,
            batch_size=config.offline_eval_batch_size_per_runner,
            whole_episodes=self.trains_whole_episodes or estimates,
            seed=self.seed,
            columns=[Columns.ACTION_LOGP] if estimates else [],
            lookback=self._learner_connector.required_lookback,
        )
        if module.is_stateful():
            source.begin_sequences_with(initial_state(module))
        num_batches = source.num_batches_per_epoch
        if config.dataset_num_iters_per_offline_eval_runner is not None:
            num_batches = (
                config.dataset_num_iters_per_offline_eval_runner * config.offline_evaluation_duration
            )
        num_env_steps = 0

        def batches() -> Iterator[EpisodeBatch]:
            nonlocal num_env_steps
            for batch in source.batches(num_batches, np.random.default_rng()):
                num_env_steps += batch.num_env_steps
                yield batch

        with self._running(), torch.no_grad():
            results = (self._estimate_returns if estimates else self._mean_losses)(batches(), module)
        results[ALL_MODULES] = {
            "dataset_num_iters_evaluated": num_batches,
            "num_env_steps_sampled": num_env_steps,
            "num_module_steps_sampled": num_env_steps,
        }
        return results

    def _mean_losses(self, batches: Iterable[EpisodeBatch], module: Any) -> dict[str, Any]:
        state, num_batches = self.get_state(["counters", "extra"]), 0
        self.report.forget()
        for batch in batches:
            columns, num_batches = self.prepare(batch).on(self.device), num_batches + 1
            # Without the other ranks.
            fwd_out = {DEFAULT_MODULE_ID: module.forward_train(columns[DEFAULT_MODULE_ID])}
            for module_id, loss in self.compute_losses(fwd_out=fwd_out, batch=columns).items():
                self.log_stats(module_id, {"total_eval_loss": loss})
        results: dict[str, Any] = self.report.means(num_batches)
        self.report.forget()
        self.set_state(state)
        return results

    def _estimate_returns(self, batches: Iterable[EpisodeBatch], module: Any) -> dict[str, Any]:
        estimated, recorded = [], []
        for batch in batches:
            columns = self.prepare(batch).on(self.device)[DEFAULT_MODULE_ID]
            logits = module.forward_inference(columns)[Columns.ACTION_DIST_INPUTS]
            dist = module.get_inference_action_dist_cls().from_logits(logits)
            log_ratios = dist.logp(columns[Columns.ACTIONS]) - columns[Columns.ACTION_LOGP]
            rewards = cast(np.ndarray, batch.columns[Columns.REWARDS])[batch.step_slots()].astype(np.float64)
            lengths, gamma = batch.length[batch.length > 0], self.config.gamma
            recorded.append(recorded_returns(rewards, lengths, gamma))
            estimated.append(
                estimated_returns(
                    log_ratios.double().cpu().numpy(), rewards, lengths, gamma,
                    per_decision=self.config.offline_evaluation_type == "pdis",
                )
            )  # fmt: skip
        returns = np.concatenate(estimated)
        return {
            "episode_return_mean": float(returns.mean()),
            "episode_return_min": float(returns.min()),
            "episode_return_max": float(returns.max()),
            "v_behavior": float(np.concatenate(recorded).mean()),
            "num_episodes": len(returns),
        }

    def _check_shards(self, opened: OpenedShards, module: Any) -> None:
        for shard, path in zip(opened.shards, opened.paths, strict=True):
            self._check_shard(shard, str(path), module)
        config, expected = self.config, module.observation_space
        if config.learner_connector is not None or config.observation_space is not None or self.rank:
            return  # the user says what was recorded, or converts it
        for shard, path in zip(opened.shards, opened.paths, strict=True):
            if shard.observation_space not in (None, expected):
                _log.warning(
                    "offline data, %s: the module gets observations of %s, and those of %s were recorded. If a "
                    "connector (MeanStdFilter) changed them, set the same env_to_module_connector, and before acting "
                    'load its statistics: algo.restore_from_path(RUN, component="env_runner"). Else set '
                    "observation_space.",
                    path, expected, shard.observation_space,
                )  # fmt: skip
                return

    def _check_shard(self, shard: EpisodeBatch, path: str, module: Any) -> None:
        config = self.config
        # A learner connector may convert the recorded observations into those of the module.
        spaces = [module.observation_space]
        if config.learner_connector is not None:
            spaces = [config.observation_space] if config.observation_space is not None else []
        observations = shard.columns[Columns.OBS]
        if spaces and not any(_fits(space, observations) for space in spaces):
            raise ConfigurationError(
                f"offline data, {path}, column 'obs': expected observations of {spaces[0]}, got "
                f"{shard.observation_space or _shapes(observations)}. Set the environment (or observation_space) that "
                "the data was recorded with, or a learner_connector that converts it."
            )
        actions, space = shard.columns[Columns.ACTIONS], module.action_space
        discrete = (gym.spaces.Discrete, gym.spaces.MultiDiscrete)
        is_other = isinstance(space, discrete) and shard.action_space not in (None, space)
        if is_other or not _fits(space, actions):
            raise ConfigurationError(
                f"offline data, {path}, column 'actions': expected actions of {space}, got "
                f"{shard.action_space or _shapes(actions)}. Set the environment (or action_space) that the data was "
                "recorded with."
            )
        stored = shard.meta.get("normalize_actions")
        if isinstance(space, gym.spaces.Box) and stored not in (None, config.normalize_actions):
            raise ConfigurationError(
                f"offline data, {path}: its actions are {'' if stored else 'not '}normalized to [-1, 1], but "
                f"config.normalize_actions={config.normalize_actions}. Set .environment(normalize_actions={stored})."
            )
        # Recorded actions may lie beyond a Box's bounds; they are clipped, as the environment does.
        if stored is None:
            self._check_range(shard, path, space)

    def _check_range(self, shard: EpisodeBatch, path: str, space: gym.Space[Any]) -> None:
        what, advice = str(space), "Set the action_space that the data was recorded with"
        if isinstance(space, gym.spaces.Discrete):
            low, high = int(space.start), int(space.start + space.n) - 1
        elif is_scaled(space) and self.config.normalize_actions:
            low, high = -1, 1
            if self.config.actions_in_input_normalized:
                return
            what += ", normalized to [-1, 1]"
            advice = (
                "Scale the actions before write_shard(…, normalize_actions=True), or set "
                ".environment(normalize_actions=False) if they are within the space's bounds, or "
                ".offline_data(actions_in_input_normalized=True) if a policy drew some beyond [-1, 1]"
            )
        else:
            return
        actions = cast(np.ndarray, shard.columns[Columns.ACTIONS])[shard.step_slots()]
        least, most = actions.min(), actions.max()
        if least < low or most > high:
            raise ConfigurationError(
                f"offline data, {path}, column 'actions': expected actions of {what}, got values from {least:g} to "
                f"{most:g}. {advice}."
            )

    def num_env_steps_lifetime(self) -> int:
        """Return the env steps trained so far, before this minibatch: an update may have any number of them."""
        return self.report.num_env_steps_of_all_ranks_lifetime + self.report.num_env_steps

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        """Log how much of the data was used."""
        super().after_gradient_based_update(timesteps=timesteps)
        if isinstance(self.source, OfflineShards):
            values = {
                "dataset_num_epochs": self.source.num_epochs,
                "num_shards": len(self._opened.shards),
                "num_shards_skipped": len(self._opened.skipped),
            }
            for name, value in values.items():
                self.metrics.log_value((ALL_MODULES, name), value, reduce="max")


def _open(paths: str | list[str]) -> OpenedShards:
    opened = open_shards(paths)
    for file, reason in opened.skipped:
        _log.warning("offline data: skipped %s: %s", file, reason)
    return opened


def _shapes(column: Any) -> object:
    return optree.tree_map(lambda leaf: f"{leaf.dtype} {tuple(leaf.shape[1:])}", column)


def _fits(space: gym.Space[Any], column: Any) -> bool:
    """Return whether a column has the structure and shapes of a space's items, and integers where the space does."""
    wanted = space_filler(space, 0, lead=(1,))
    if optree.tree_structure(wanted) != optree.tree_structure(column):
        return False
    return all(
        np.shape(one)[1:] == np.shape(leaf)[1:]
        and (np.asarray(one).dtype.kind == "f" or leaf.dtype.kind in "biu")
        for one, leaf in zip(optree.tree_leaves(wanted), optree.tree_leaves(column), strict=True)
    )


def recorded_returns(rewards_B: Floats, lengths_E: NDArray[np.int64], gamma: float) -> Floats:
    """Return each episode's discounted return Σ γ^t r_t, float64 [E].

    Args:
        rewards_B: Rewards of all episodes' steps, one episode after the other.
        lengths_E: Number of steps of each episode, >= 1.
        gamma: γ.
    """
    return np.add.reduceat(rewards_B * gamma ** _times(lengths_E), _starts(lengths_E))


def estimated_returns(
    log_ratios_B: Floats, rewards_B: Floats, lengths_E: NDArray[np.int64], gamma: float, *, per_decision: bool
) -> Floats:
    """Return each episode's estimate of the policy's discounted return, float64 [E]. Their mean has no bias.

    With ρ_t = π(a_t|s_t) / μ(a_t|s_t), importance sampling weights the whole return by the product of all ρ. Per
    decision (PDIS), each reward is weighted by the product of the ρ up to its step, which varies less.

    Args:
        log_ratios_B: log ρ of all episodes' steps.
        rewards_B, lengths_E, gamma: See `recorded_returns`.
        per_decision: Whether to estimate per decision.
    """
    starts_E = _starts(lengths_E)
    if not per_decision:
        totals_E = np.add.reduceat(log_ratios_B, starts_E)
        return np.exp(np.minimum(totals_E, _MAX_LOG_RATIO)) * recorded_returns(rewards_B, lengths_E, gamma)
    sums_B = log_ratios_B.cumsum()
    sums_B -= (sums_B[starts_E] - log_ratios_B[starts_E]).repeat(lengths_E)
    return recorded_returns(np.exp(np.minimum(sums_B, _MAX_LOG_RATIO)) * rewards_B, lengths_E, gamma)


def _starts(lengths_E: NDArray[np.int64]) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = lengths_E.cumsum() - lengths_E
    return starts


def _times(lengths_E: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each step's index in its episode, int64 [B]."""
    times: NDArray[np.int64] = np.arange(lengths_E.sum()) - _starts(lengths_E).repeat(lengths_E)
    return times
