"""Gradients averaged over ranks: by DistributedDataParallel, or in memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rlzmq.learners.distributed import RankGroup, SharedRows
from rlzmq.modules.default_models.dense_gradients import backward, run_backward

if TYPE_CHECKING:
    pass

__all__ = ["DataParallelForward", "SharedGradients"]


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
