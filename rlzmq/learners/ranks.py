"""Ranks: a learner's peers. It joins them, agrees with them on updates and votes, and compares the weights."""

from __future__ import annotations

import gc
import logging
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgpack  # type: ignore[import-untyped]
import torch
from torch import nn

from rlzmq.core import faults
from rlzmq.core.plain import from_plain, to_plain
from rlzmq.core.process import num_usable_cores
from rlzmq.learners.distributed import RankGroup, Vote
from rlzmq.learners.torch_threads import auto_num_threads, torch_threads

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from rlzmq.config.base_config import BaseConfig
from rlzmq.learners.data_parallel import DataParallelForward, SharedGradients

__all__ = ["COMPARE_EVERY_UPDATES", "Ranks", "UpdateAgreement"]


_log = logging.getLogger("rlzmq.learners")

COMPARE_EVERY_UPDATES = 100
"""Number of updates between comparisons of the ranks' weights; they are also compared after each re-forming."""
# After this many updates (the first one warms up), rank 0 logs whether several ranks are worthwhile.
_NUM_MEASURED_UPDATES = 6


@dataclass(frozen=True)
class UpdateAgreement:
    """The plan of an update, agreed by all ranks.

    Attributes:
        module_ids: Modules with data on any rank, sorted.
        num_minibatches: Module id → number of its minibatches, on every rank.
        num_rows: Module id → real timesteps of all ranks.
        num_env_steps: Env steps of all ranks.
        loss_weights: Module id → factor for this rank's loss that makes the ranks' mean equal to the mean over all
            rows.
    """

    module_ids: list[str]
    num_minibatches: dict[str, int]
    num_rows: dict[str, int]
    num_env_steps: int
    loss_weights: dict[str, float]


class _Learner(Protocol):
    """What `Ranks` uses of its learner."""

    config: BaseConfig
    module: Any
    device: torch.device
    weights_seq_no: int
    num_gradient_updates_lifetime: int

    def get_state(self, *, not_components: str) -> dict[str, Any]: ...
    def set_state(self, state: Mapping[str, Any]) -> None: ...
    def parameter_hash(self, *, with_buffers: bool = True) -> str: ...


class Ranks:
    """The peers of a learner, and its place among them. Without a group, its methods do what one rank alone does.

    Every exchange with peers raises PeerLostError if one of them died or hangs.

    Args:
        learner: The Learner.
        rank: Its index among its peers.
        num: Number of ranks.

    Attributes:
        group: The RankGroup; None for a single learner.
        num_divergences: How often the ranks held different weights; see `mend_divergence`.
    """

    def __init__(self, learner: _Learner, rank: int, num: int) -> None:
        self._learner = learner
        self.rank = rank
        self.num = num
        self.group: RankGroup | None = None
        self.num_divergences: int = 0
        self._data_parallel: DataParallelForward | SharedGradients | None = None
        self._vote: Vote | None = None
        self._speedups: list[float] = []  # in the first updates
        self._num_threads: int | None = None  # with torch_num_threads="auto"

    def join(
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        store: Store | None = None,
        timeout_s: float | None = None,
        forming_timeout_s: float | None = None,
        generation: int = 0,
        interface: str | None = None,
        is_called_off: Callable[[], bool] = lambda: False,
    ) -> None:
        """Join a group of learners, after leaving the current one.

        Each rank keeps its state; use `broadcast_state` to update new ranks. With a world size of one, no group is
        formed, and updates are those of a single learner.

        Args:
            rank: Index of this learner; None: that of the constructor.
            world_size: Number of learners; None: that of the constructor.
            store: A torch.distributed Store that all ranks can reach and that outlives them.
            timeout_s: Seconds after which a silent peer counts as lost; None:
                ``config.learner_timeout_s``.
            generation: Increases by one with each new group.
            forming_timeout_s, interface, is_called_off: See `RankGroup`.

        Raises:
            PeerLostError: Not all ranks arrived in time.
            ValueError: A store is needed but missing.
        """
        self.leave()
        self.rank = self.rank if rank is None else rank
        self.num = self.num if world_size is None else world_size
        if self.num == 1:
            return
        if store is None:
            raise ValueError(f"Ranks.join: {self.num} ranks need a store (FileStore, TCPStore) to meet.")
        timeout = getattr(self._learner.config, "learner_timeout_s", 60.0) if timeout_s is None else timeout_s
        self.group = RankGroup(
            backend="nccl" if self._learner.device.type == "cuda" else "gloo",
            rank=self.rank,
            world_size=self.num,
            store=store,
            timeout_s=timeout,
            forming_timeout_s=forming_timeout_s,
            generation=generation,
            device=self._learner.device,
            interface=interface,
            is_called_off=is_called_off,
        )

    def leave(self) -> None:
        """Leave the group, if there is one. Allowed right after a failure of the group."""
        self.on_modules_changed()
        self._vote = None
        if self.group is not None:
            self.group.close()
            self.group = None
            self.num = 1
            # DistributedDataParallel is part of reference cycles that keep the group alive; see RankGroup.close.
            gc.collect()

    def on_modules_changed(self) -> None:
        """Prepare for other modules: the next forward pass is set up anew."""
        if self._data_parallel is not None:
            self._data_parallel.close()
            self._data_parallel = None
        self._num_threads = None

    def torch_threads(self) -> AbstractContextManager[None]:
        """Use ``config.torch_num_threads`` torch threads in the block."""
        wanted = getattr(self._learner.config, "torch_num_threads", None)
        if wanted == "auto":
            if self._num_threads is None:
                num_ranks = 1 if self.group is None else len(self.group.host_ranks)
                modules = self._learner.module.values()
                self._num_threads = auto_num_threads(
                    self._learner.config, self._learner.device, modules, num_ranks
                )
            wanted = self._num_threads
        return torch_threads(wanted)

    def broadcast_state(self, source_rank: int) -> None:
        """Make every rank's state (weights, optimizers, counters, …) equal to `source_rank`'s."""
        if self.group is None:
            return
        mine = None
        if self.rank == source_rank:
            state = self._learner.get_state(not_components="source")  # a source belongs to its rank
            mine = msgpack.packb(to_plain(state, "learner state"))
        packed = self.group.broadcast_bytes(mine, source_rank)
        if self.rank != source_rank:
            limit = len(packed)
            self._learner.set_state(
                from_plain(msgpack.unpackb(packed, max_bin_len=limit, strict_map_key=True))
            )

    def adopt_newest_state(self) -> int:
        """Load the state of the rank with the most updates on every rank. A collective.

        Nothing is sent if all ranks have the same number of updates and bitwise equal weights.

        Returns:
            The rank whose state all ranks have now.
        """
        group = self.group
        if group is None:
            return self.rank
        mine = self._learner.weights_seq_no
        newest, minus_oldest = group.all_reduce(torch.tensor([mine, -mine]), "max").tolist()
        candidate = self.rank if mine == newest else self.num
        source = int(group.all_reduce(torch.tensor([candidate]), "min")[0])
        if newest != -minus_oldest or not self.agree():
            self.broadcast_state(source)
        return source

    def agree(self) -> bool:
        """Return whether all ranks hold bitwise equal weights. A collective.

        Buffers do not count: each rank's own data changes them (e.g. BatchNorm's statistics), and the ranks get those
        of rank 0 before each forward pass, as with DistributedDataParallel.
        """
        return self.group is None or self.group.agree(self._learner.parameter_hash(with_buffers=False))

    def mend_divergence(self) -> bool:
        """If the ranks hold different weights (e.g. after a bit flip), load rank 0's state on all. A collective.

        Returns:
            Whether the weights differed, which is logged as an error and counted in `num_divergences`.
        """
        if self.agree():
            return False
        self.num_divergences += 1
        _log.error(
            "learner rank %d: the ranks hold different weights at update %d; all ranks load those of rank 0.",
            self.rank,
            self._learner.weights_seq_no,
        )
        self.broadcast_state(0)
        return True

    def data_parallel(self) -> DataParallelForward | SharedGradients:
        """Return the forward and backward pass that averages gradients over ranks."""
        if self._data_parallel is None:
            assert self.group is not None
            unwrapped = {module_id: module.unwrapped() for module_id, module in self._learner.module.items()}
            modules = {name: module for name, module in unwrapped.items() if isinstance(module, nn.Module)}
            forward_train, ddp_kwargs = (
                self._learner.module.forward_train,
                getattr(self._learner.config, "torch_ddp_kwargs", None),
            )
            shared = None if ddp_kwargs else SharedGradients.of(modules, forward_train, self.group)
            self._data_parallel = shared or DataParallelForward(
                modules, forward_train, self.group, ddp_kwargs
            )
        return self._data_parallel

    def agree_on_update(
        self, num_rows: Mapping[str, int], num_minibatches: Mapping[str, int], num_env_steps: int
    ) -> UpdateAgreement:
        """Agree with all ranks on the plan of this update, before the first gradient.

        If all batches have exactly ``train_batch_size_per_learner`` steps, the ranks agree anyway, and this verifies
        it. Data from other sources is equalized: all ranks take the largest number of minibatches of a module that any
        of them needs.

        Args:
            num_rows: Module id → real timesteps of this rank; the same module ids on all ranks.
            num_minibatches: Module id → number of minibatches in this rank's data, for modules that have some.
            num_env_steps: Number of env steps of this rank.

        Raises:
            DesynchronizedError: The ranks are at different updates.
        """
        module_ids = sorted(num_rows)
        if self.group is None:
            active = [module_id for module_id in module_ids if num_rows[module_id]]
            return UpdateAgreement(
                active,
                {module_id: num_minibatches[module_id] for module_id in active},
                dict(num_rows),
                num_env_steps,
                dict.fromkeys(active, 1.0),
            )
        self.group.vote([True], step_id=self._learner.weights_seq_no)
        # One row per rank; each rank fills its own.
        counts = torch.zeros((self.num, 2 * len(module_ids) + 1), dtype=torch.int64)
        counts[self.rank] = torch.tensor(
            [
                *(num_rows[module_id] for module_id in module_ids),
                *(num_minibatches.get(module_id, 0) for module_id in module_ids),
                num_env_steps,
            ]
        )
        counts = self.group.all_reduce(counts)
        totals, most = counts.sum(0).tolist(), counts.max(0).values.tolist()
        total_rows = dict(zip(module_ids, totals, strict=False))
        active = [module_id for module_id in module_ids if total_rows[module_id]]
        num_of_modules = dict(zip(module_ids, most[len(module_ids) :], strict=False))
        return UpdateAgreement(
            active,
            {module_id: num_of_modules[module_id] for module_id in active},
            total_rows,
            totals[-1],
            {module_id: num_rows[module_id] * self.num / total_rows[module_id] for module_id in active},
        )

    def start_vote(self, verdicts: list[bool], *, num_skipped: int) -> None:
        """Start to vote on the steps of a minibatch, e.g. while its backward pass runs; `votes` ends it.

        Args:
            verdicts: Whether this rank agrees, for each step.
            num_skipped: Number of steps that this update has not taken so far.
        """
        if self.group is not None:
            self._vote = self.group.start_vote(
                verdicts, step_id=self._learner.num_gradient_updates_lifetime, num_skipped=num_skipped
            )

    def votes(self, verdicts: list[bool], *, num_skipped: int) -> list[bool]:
        """Return for each step whether all ranks agree; see `start_vote`, which is called if it was not."""
        if self.group is None:
            return verdicts
        if self._vote is None:
            self.start_vote(verdicts, num_skipped=num_skipped)
        vote, self._vote = self._vote, None
        assert vote is not None
        return vote.result()

    @property
    def waited_s(self) -> float:
        """Number of seconds spent in exchanges with peers so far."""
        return 0.0 if self.group is None else self.group.waited_s

    def commit_update(self, *, num_skipped: int) -> None:
        """Take the last vote of an update: either all ranks completed all of its steps, or none keeps any of them.

        Raises:
            DesynchronizedError: The ranks did not take the same steps.
        """
        if self.group is not None:
            if self._learner.weights_seq_no % COMPARE_EVERY_UPDATES == 0:
                self.mend_divergence()
            faults.at("learner.vote")
            self.group.vote([], step_id=self._learner.num_gradient_updates_lifetime, num_skipped=num_skipped)
            faults.at("learner.voted")

    def speedup_over_one_rank(self, update_s: float, waited_s: float) -> float:
        """Return an update's estimated rate as a multiple of one rank's. Rank 0 logs it after the run's first updates.

        A single rank would compute as long as all ranks together, without waiting; but on more threads, if it may.

        Args:
            update_s: Seconds that the update took.
            waited_s: Seconds of these spent on exchanges with peers.
        """
        assert self.group is not None
        num_at_once = self.num
        if self.group.device.type == "cpu":
            num_at_once = min(num_at_once, self.group.num_hosts * num_usable_cores())
        speedup = num_at_once * (1.0 - waited_s / update_s)
        if self._num_threads is not None:
            speedup *= self._num_threads / auto_num_threads(
                self._learner.config, self._learner.device, self._learner.module.values(), num_ranks=1
            )
        if len(self._speedups) < _NUM_MEASURED_UPDATES:
            self._speedups.append(speedup)
            is_new_run = (
                self._learner.weights_seq_no <= 2 * _NUM_MEASURED_UPDATES
            )  # otherwise the group was re-formed
            if len(self._speedups) == _NUM_MEASURED_UPDATES and self.rank == 0 and is_new_run:
                typical = statistics.median(self._speedups[1:])
                _log.log(
                    logging.WARNING if typical < 1.0 else logging.INFO,
                    "%d learner ranks train at an estimated %.2f times the rate of one%s.",
                    self.num,
                    typical,
                    ": num_learners=1 would be faster" if typical < 1.0 else "",
                )
        return speedup

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for its peers; may be read from any thread."""
        return self.group is not None and self.group.num_waits > 0

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's plain value, in rank order. A collective."""
        if self.group is None:
            return [value]
        return [msgpack.unpackb(packed) for packed in self.group.gather_bytes(msgpack.packb(value))]

    def mean(self, values: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
        """Return the weighted mean of each named value over all ranks. The names must be equal on all ranks."""
        if self.group is None:
            return dict(values)
        names = sorted(values)
        sums = torch.tensor(
            [[values[name] * weights[name] for name in names], [weights[name] for name in names]],
            dtype=torch.float64,
        )
        totals, total_weights = self.group.all_reduce(sums).tolist()
        return {
            name: total / weight if weight else 0.0
            for name, total, weight in zip(names, totals, total_weights, strict=True)
        }
