"""Ranks: a learner's peers. It joins them, agrees with them on updates and votes, and compares the weights."""

from __future__ import annotations

import gc
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, Self

import msgpack  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rlzmq.core import faults
from rlzmq.core.plain import from_plain, to_plain
from rlzmq.core.process import num_usable_cores
from rlzmq.learners.distributed import RankGroup, SharedRows, Vote
from rlzmq.learners.torch_threads import auto_num_threads, torch_threads
from rlzmq.modules.default_models.dense_gradients import backward, run_backward

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from rlzmq.config.base_config import BaseConfig

__all__ = [
    "COMPARE_EVERY_UPDATES",
    "DataParallelForward",
    "Ranks",
    "SharedGradients",
    "UpdateAgreement",
]


_ALIGN_BYTES = 64


class DataParallelForward:
    """Averages gradients over ranks, whichever modules, columns and parameters a rank's loss involves.

    One DistributedDataParallel holds all modules, so its buckets are reduced in one fixed order. A rank whose minibatch
    lacks a module, or whose loss does not depend on a parameter, contributes zeros instead of making its peers wait: an
    edge without a gradient ties every parameter to the loss.

    Args:
        modules: All modules, by id.
        forward_train: The training forward pass: module id → batch in, module id → outputs out.
        group: The ranks; world_size ≥ 2.
        ddp_kwargs: Additional arguments of DistributedDataParallel. ``find_unused_parameters`` is ignored,
            since no parameter is left out of the graph.
    """

    is_forward_local = False
    """Whether `forward_train` is just the modules' own: DistributedDataParallel prepares the backward pass in it."""

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        forward_train: Callable[[dict[str, Any]], dict[str, Any]],
        group: RankGroup,
        ddp_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._group = group
        wrapped = _TrainForward(modules, forward_train)
        self._parameters = [p for p in wrapped.parameters() if p.requires_grad]
        kwargs = {"process_group": group.process_group, **(ddp_kwargs or {})}
        kwargs.pop("find_unused_parameters", None)
        if group.device.type == "cuda":
            kwargs.setdefault("device_ids", [group.device.index or torch.cuda.current_device()])
        with group.typed_errors("the first broadcast of weights"):
            self._ddp = DistributedDataParallel(wrapped, **kwargs)

    def forward_train(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs of the modules' `forward_train` by module id; an empty batch is allowed.

        Raises:
            PeerLostError: A peer died or hangs.
        """
        with self._group.typed_errors("forward pass", computes=True, waits=False):
            outputs: dict[str, Any] = self._ddp(batch)
        return outputs

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass. Afterwards every parameter's gradient is the mean over the ranks.

        Raises:
            PeerLostError: A peer died or hangs.
        """
        with self._group.typed_errors("gradient all-reduce", computes=True):
            run_backward(_Touch.apply(loss, *self._parameters))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Release the process group, even if the wrapped module is still referenced (e.g. by a traceback).

        Gloo closes its connections, which notifies the peers, only when the last reference to the group is gone.
        """
        ddp: Any = self._ddp
        ddp.process_group = ddp.reducer = ddp.logger = None


class _TrainForward(nn.Module):
    """The module that DistributedDataParallel wraps: all modules, with their training forward pass as `forward`."""

    def __init__(
        self, modules: Mapping[str, nn.Module], forward_train: Callable[[dict[str, Any]], dict[str, Any]]
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(modules[module_id] for module_id in sorted(modules))
        self._forward_train = forward_train

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        return self._forward_train(batch) if batch else {}


class _Touch(torch.autograd.Function):
    """The identity of the loss, with an edge without a gradient to each parameter."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], *[None] * ctx.num_parameters


class SharedGradients:
    """Averages gradients over ranks like `DataParallelForward`, in one exchange after the backward pass.

    Each host's gradients are summed in the order of its ranks. With several hosts, the first ranks sum these sums, so
    each crosses the network once. All ranks get the same bits; two ranks of one host the sums of gloo. As with
    DistributedDataParallel, all receive rank 0's parameters and buffers at the construction and its buffers before
    each forward pass. A parameter without a gradient on a rank counts as zeros.

    Args:
        forward_train: The training forward pass: module id → batch in, module id → outputs out.
        group: The ranks.
        parameters: All trainable parameters.
        buffers: All buffers.
        rows: Shared rows for the gradients and for the buffers; the latter are None if there are no buffers.
    """

    def __init__(
        self,
        forward_train: Callable[[dict[str, Any]], dict[str, Any]],
        group: RankGroup,
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        rows: tuple[SharedRows, SharedRows | None],
    ) -> None:
        self._group = group
        self._forward_train = forward_train
        self._parameters, self._buffers = parameters, buffers
        self._rows, self._buffer_rows = rows
        layout = _Layout(parameters)
        self._means = layout.on(torch.zeros(layout.num_bytes, dtype=torch.uint8))
        self._by_turn = [[layout.on(row) for row in rows_of_turn] for rows_of_turn in self._rows.rows]
        if self._buffer_rows is not None:
            layout = _Layout(buffers)
            self._buffers_of_rank_0 = [layout.on(rows_of_turn[0]) for rows_of_turn in self._buffer_rows.rows]

    @classmethod
    def of(
        cls,
        modules: Mapping[str, nn.Module],
        forward_train: Callable[[dict[str, Any]], dict[str, Any]],
        group: RankGroup,
    ) -> Self | None:
        """Return an object for these modules; None on all ranks if they cannot share memory. A collective.

        Raises:
            PeerLostError: A peer died or hangs.
        """
        ordered = [modules[module_id] for module_id in sorted(modules)]
        everything = nn.ModuleList(ordered)  # each tensor once, even if modules share it
        parameters = [p for p in everything.parameters() if p.requires_grad]
        buffers = list(everything.buffers())
        if not group.shares_memory or not parameters:
            return None
        with group.typed_errors("the first broadcast of weights"):
            shared: list[SharedRows | None] = []
            for tensors in (parameters, buffers):
                shared.append(group.share_rows(_Layout(tensors).num_bytes) if tensors else None)
                if tensors and shared[-1] is None:
                    return None
            state = [tensor.detach() for tensor in (*everything.parameters(), *buffers)]
            layout = _Layout(state)
            mine = torch.zeros(layout.num_bytes, dtype=torch.uint8)
            torch._foreach_copy_(layout.on(mine).views, state)
            torch._foreach_copy_(state, layout.on(group.broadcast(mine, 0)).views)
        gradients, of_buffers = shared
        assert gradients is not None
        return cls(forward_train, group, parameters, buffers, (gradients, of_buffers))

    @property
    def is_forward_local(self) -> bool:
        """Whether `forward_train` is just the modules' own, without anything exchanged between ranks."""
        return self._buffer_rows is None

    def forward_train(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs of the modules' `forward_train` by module id; an empty batch is allowed.

        Raises:
            PeerLostError: A peer died or hangs.
        """
        if self._buffer_rows is not None:
            self._copy_buffers(self._buffer_rows)
        return self._forward_train(batch) if batch else {}

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass. Afterwards every parameter's gradient is the mean over the ranks.

        The gradients share a buffer, which the next backward pass overwrites.

        Raises:
            PeerLostError: A peer died or hangs.
        """
        backward(loss)
        rows, size = self._rows, self._group.world_size
        with self._group.typed_errors("gradient exchange"):
            mine = self._by_turn[rows.begin()][rows.index]
            _fill(mine.views, [p.grad for p in self._parameters])
            for block in mine.blocks:
                block.mul_(1 / size)
            rows.post()
            self._sum([of_rank.blocks for of_rank in self._by_turn[rows.wait()]])
            if self._group.num_hosts > 1:
                self._sum_over_hosts()
        for parameter, mean in zip(self._parameters, self._means.views, strict=True):
            parameter.grad = mean

    def _sum(self, of_ranks: list[list[Tensor]]) -> None:
        first, *others = of_ranks
        for index, mean in enumerate(self._means.blocks):
            if others:
                torch.add(first[index], others[0][index], out=mean)
            else:
                mean.copy_(first[index])
            for other in others[1:]:
                mean.add_(other[index])

    def _sum_over_hosts(self) -> None:
        rows, sums = self._rows, self._means.blocks
        turn = rows.begin()
        if rows.index == 0:
            self._group.sum_over_hosts(sums)
            torch._foreach_copy_(self._by_turn[turn][0].blocks, sums)
        rows.post()
        turn = rows.wait()
        if rows.index:
            torch._foreach_copy_(sums, self._by_turn[turn][0].blocks)

    def close(self) -> None:
        """Leave the group. Idempotent."""
        for rows in (self._rows, self._buffer_rows):
            if rows is not None:
                rows.close()

    def _copy_buffers(self, rows: SharedRows) -> None:
        with self._group.typed_errors("forward pass"), torch.no_grad():
            turn = rows.begin()
            if self._group.rank == 0:
                torch._foreach_copy_(self._buffers_of_rank_0[turn].views, list(self._buffers))
            if rows.index == 0:
                self._group.broadcast_over_hosts(rows.rows[turn, 0])
            rows.post()
            turn = rows.wait()
        if self._group.rank:
            with torch.no_grad():
                torch._foreach_copy_(list(self._buffers), self._buffers_of_rank_0[turn].views)


class _Placed:
    """Tensors of a `_Layout` in a row of bytes: a view of each one, and one flat block per dtype."""

    def __init__(self, views: list[Tensor], blocks: list[Tensor]) -> None:
        self.views = views
        self.blocks = blocks


class _Layout:
    """The positions of tensors in a row of bytes; those of one dtype are adjacent."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        order = sorted(range(len(tensors)), key=lambda index: str(tensors[index].dtype))
        self._tensors = tensors
        self._dtypes: list[tuple[torch.dtype, list[int], int, int]] = []
        begin = 0
        for dtype, group in groupby(order, key=lambda index: tensors[index].dtype):
            members = list(group)
            end = begin + dtype.itemsize * sum(tensors[index].numel() for index in members)
            self._dtypes.append((dtype, members, begin, end))
            begin = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        self.num_bytes = begin

    def on(self, row: Tensor) -> _Placed:
        """Return the tensors' views of a row, uint8 ``[num_bytes or more]``."""
        views: dict[int, Tensor] = {}
        blocks = []
        for dtype, members, begin, end in self._dtypes:
            block = row[begin:end].view(dtype)
            blocks.append(block)
            offset = 0
            for index in members:
                tensor = self._tensors[index]
                part = block[offset : offset + tensor.numel()]
                offset += tensor.numel()
                # the parameter's strides, which fused optimizers need; dense strides if it has gaps
                views[index] = part.as_strided(tensor.shape, torch.empty_like(tensor).stride())
        return _Placed([views[index] for index in range(len(self._tensors))], blocks)


def _fill(views: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    """Copy values into views; zeros for None."""
    with torch.no_grad():
        if all(value is not None for value in values):
            torch._foreach_copy_(list(views), list(values))  # type: ignore[arg-type]
            return
        for view, value in zip(views, values, strict=True):
            if value is None:
                view.zero_()
            else:
                view.copy_(value)


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
        wanted = self._learner.config.get("torch_num_threads", None)
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
