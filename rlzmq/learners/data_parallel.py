"""DistributedDataParallel around the modules' training forward pass, safe for any data on any rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rlzmq.learners.distributed import RankGroup
from rlzmq.modules.default_models.dense_gradients import run_backward

__all__ = ["DataParallelForward"]


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
        with self._group.typed_errors("forward pass", computes=True):
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
