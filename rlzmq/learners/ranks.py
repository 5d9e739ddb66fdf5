"""Ranks: a learner's place: its device and threads, and its peers.

It joins its peers, agrees with them on each update, and averages gradients with them.

Ranks that train together take the same steps: they agree on the minibatches before the first one, and have the same
averaged gradients at each. A rank whose loss is not finite contributes NaN, so that no rank takes the step. After the
last step they compare their counts: an update happens on all ranks or on none.
"""

from __future__ import annotations

import functools
import logging
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgpack  # type: ignore[import-untyped]
import numpy as np
import torch
from torch import nn

from rlzmq.core import faults
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.plain import from_plain, to_plain
from rlzmq.core.process import num_usable_cores
from rlzmq.learners.distributed import GradientAverage, RankGroup
from rlzmq.modules.weights import has_convolutions

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from rlzmq.config.base_config import BaseConfig

__all__ = [
    "COMPARE_EVERY_UPDATES",
    "Ranks",
    "UpdateAgreement",
    "learner_device",
    "set_torch_threads",
    "torch_threads",
]


_log = logging.getLogger("rlzmq.learners")

COMPARE_EVERY_UPDATES = 100
"""Number of updates between comparisons of the ranks' weights; they are also compared after each re-forming."""
# After this many updates (the first one warms up), rank 0 logs whether several ranks are worthwhile.
_NUM_MEASURED_UPDATES = 6


class UpdateAgreement(NamedTuple):
    """The plan of an update, agreed by all ranks.

    Attributes:
        num_minibatches: Module id → number of its minibatches, on every rank; for modules with data on any rank.
        num_rows: Module id → real timesteps of all ranks; sorted.
        num_env_steps: Env steps of all ranks.
        loss_weights: Module id → factor for this rank's loss that makes the ranks' mean equal to the mean over all
            rows; 1 if it is missing.
    """

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
        num_passes: Number of minibatches that went through the loss on this rank, successfully or not.
    """

    def __init__(self, learner: _Learner, rank: int, num: int) -> None:
        self._learner = learner
        self.rank: int = rank
        self.num: int = num
        self.group: RankGroup | None = None
        self.num_divergences: int = 0
        self.num_passes: int = 0
        self._average: GradientAverage | None = None
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
        timeout = self._learner.config.learner_timeout_s if timeout_s is None else timeout_s
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
        if self.group is not None:
            self.group.close()
            self.group = None
            self.num = 1

    def on_modules_changed(self) -> None:
        """Prepare for other modules, with other gradients."""
        if self._average is not None:
            self._average.close()
            self._average = None
        self._num_threads = None

    def torch_threads(self) -> AbstractContextManager[None]:
        """Use ``config.torch_num_threads`` torch threads in the block."""
        wanted = self._learner.config.torch_num_threads
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
        versions: list[int] = group.gather([mine])[:, 0].tolist()
        source = versions.index(max(versions))
        if min(versions) != max(versions) or not self.agree():
            self.broadcast_state(source)
        return source

    def agree(self) -> bool:
        """Return whether all ranks hold bitwise equal weights. A collective.

        Buffers do not count: each rank's own data changes them (e.g. BatchNorm's statistics), until the ranks get
        those of rank 0 with the next gradients.
        """
        return len(set(self.gather(self._learner.parameter_hash(with_buffers=False)))) == 1

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

    def average_gradients(self) -> None:
        """Replace the gradients of all modules' parameters by their means over the ranks; None counts as zeros.

        Buffers become those of rank 0. The gradients are overwritten by the next call.
        """
        self.num_passes += 1
        if self.group is None:
            return
        if self._average is None:
            modules = self._learner.module
            networks = nn.ModuleList(
                modules[module_id]
                for module_id in sorted(modules)
                if isinstance(modules[module_id], nn.Module)
            )  # each tensor once, even if modules share it
            parameters = [p for p in networks.parameters() if p.requires_grad]
            self._average = GradientAverage(self.group, parameters, list(networks.buffers()))
        self._average.run()

    def agree_on_update(
        self, num_rows: Mapping[str, int], num_minibatches: Mapping[str, int], num_env_steps: int
    ) -> UpdateAgreement:
        """Agree with all ranks on the plan of this update, before the first gradient.

        If all batches have exactly ``train_batch_size_per_learner`` steps, the ranks agree anyway, and this verifies
        it. Data from other sources is equalized: all ranks take the largest number of minibatches of a module that any
        of them needs.

        Args:
            num_rows: Module id → real timesteps of this rank, for modules that have some.
            num_minibatches: Module id → number of minibatches in this rank's data, for modules that have some.
            num_env_steps: Number of env steps of this rank.

        Raises:
            DesynchronizedError: The ranks are at different updates.
        """
        if self.group is None:
            return UpdateAgreement(dict(num_minibatches), dict(num_rows), num_env_steps, {})
        module_ids = sorted(self._learner.module.keys())
        table = self.group.gather(
            [
                *(num_rows.get(module_id, 0) for module_id in module_ids),
                *(num_minibatches.get(module_id, 0) for module_id in module_ids),
                num_env_steps,
            ],
            step=[self._learner.weights_seq_no],
        )
        totals, most = table.sum(0).tolist(), table.max(0).tolist()[len(module_ids) :]
        rows = {module_id: num for module_id, num in zip(module_ids, totals, strict=False) if num}
        return UpdateAgreement(
            {module_id: num for module_id, num in zip(module_ids, most, strict=False) if module_id in rows},
            rows,
            totals[-1],
            {module_id: num_rows.get(module_id, 0) * self.num / num for module_id, num in rows.items()},
        )

    @property
    def waited_s(self) -> float:
        """Number of seconds spent in exchanges with peers so far."""
        return 0.0 if self.group is None else self.group.waited_s

    def commit_update(self, *num_steps: int) -> None:
        """Compare what the ranks did: either all completed all steps of an update, or none keeps any of them.

        Args:
            num_steps: Numbers of what this rank did, which must be equal on all ranks.

        Raises:
            DesynchronizedError: The ranks did not take the same steps.
        """
        if self.group is not None:
            if self._learner.weights_seq_no % COMPARE_EVERY_UPDATES == 0:
                self.mend_divergence()
            faults.at("learner.vote")
            self.group.gather([], step=num_steps)
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
    def progress(self) -> int:
        """A number that increases while this rank works; may be read from any thread (see `RankGroup.num_entered`)."""
        return self.num_passes + (0 if self.group is None else self.group.num_entered)

    @property
    def is_waiting(self) -> bool:
        """Whether this rank waits for its peers; may be read from any thread."""
        return self.group is not None and self.group.is_waiting

    def gather(self, value: object) -> list[Any]:
        """Return every rank's plain value, in rank order. A collective."""
        if self.group is None:
            return [value]
        return [msgpack.unpackb(packed) for packed in self.group.gather_bytes(msgpack.packb(value))]

    def mean(self, values: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
        """Return the mean of each named value over the ranks that have it; 0 if none has.

        Args:
            values: This rank's values by name, some of `names`.
            names: Their names, the same on all ranks.
        """
        if self.group is None:
            return {**dict.fromkeys(names, 0.0), **values}
        names = sorted(names)
        mine = [[values.get(name, 0.0), float(name in values)] for name in names]
        sums = self.group.gather(np.array(mine, np.float64).flatten()).sum(0).reshape(-1, 2).tolist()
        return {
            name: total / weight if weight else 0.0 for name, (total, weight) in zip(names, sums, strict=True)
        }


# Of a learner that chooses the number itself. Two were measured; minibatches of images are too small for very many.
_MAX_AUTO_THREADS = 8
_UNCHANGED = nullcontext()


def learner_device(config: BaseConfig, rank: int) -> torch.device:
    """Return the device of a learner: the CPU, or a GPU of this machine, chosen by its rank."""
    wanted, num_learners = config.num_gpus_per_learner, config.num_learners
    num_gpus = torch.cuda.device_count() if wanted and torch.cuda.is_available() else 0
    is_auto = wanted == "auto"
    if is_auto:  # NCCL needs a GPU for each rank, and ranks on other machines must decide alike
        wanted = num_gpus >= max(1, num_learners) and not config.num_remote_learners
    if not wanted:
        return torch.device("cpu")
    if not num_gpus:
        raise ConfigurationError(
            f"num_gpus_per_learner={wanted}, but torch sees no CUDA device here: "
            "set num_gpus_per_learner=0 or install a CUDA build of torch."
        )
    local = config.local_gpu_idx if num_learners == 0 else rank
    device = torch.device("cuda", local % num_gpus)
    if is_auto:
        name = torch.cuda.get_device_name(device)
        print(f"learner {rank} trains on {name} ({device}): num_gpus_per_learner is 'auto'", file=sys.stderr)
    return device


def set_torch_threads(config: BaseConfig) -> None:
    """Set the number of torch threads with which a process starts: one if ``config.torch_num_threads`` is "auto"."""
    num_threads = 1 if config.torch_num_threads == "auto" else config.torch_num_threads
    if num_threads > 1:
        _use_one_thread_in_forks()
    torch.set_num_threads(num_threads)


def auto_num_threads(config: BaseConfig, device: torch.device, modules: Iterable[Any], num_ranks: int) -> int:
    """Return the number of torch threads that pays for each of the ranks on this host.

    Networks without convolutions are mostly faster on one.
    """
    if device.type != "cpu" or not has_convolutions(modules):
        return 1
    samples_meanwhile = config.update_plan().staleness > 0
    num_free = num_usable_cores() - (config.num_env_runners if samples_meanwhile else 0)
    return min(_MAX_AUTO_THREADS, max(1, num_free // num_ranks))


def torch_threads(num_threads: int | None) -> AbstractContextManager[None]:
    """Use this number of torch threads in the block and restore the number afterwards; None: no change."""
    if num_threads is None:
        return _UNCHANGED
    if num_threads > 1:
        _use_one_thread_in_forks()
    before = torch.get_num_threads()
    return _UNCHANGED if num_threads == before else _changed_threads(num_threads, before)


@contextmanager
def _changed_threads(num_threads: int, before: int) -> Iterator[None]:
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _use_one_thread_in_forks() -> None:
    """Make forked processes, e.g. vector envs' workers, use one torch thread; more would wait forever."""
    if hasattr(os, "register_at_fork"):  # where processes fork
        os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
