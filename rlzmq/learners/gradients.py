"""Gradients: one minibatch's way from its losses to the optimizers' steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError

if TYPE_CHECKING:
    from rlzmq.learners.optimizers import Optimizers, RegisteredOptimizer
    from rlzmq.learners.ranks import Ranks
    from rlzmq.learners.update_report import UpdateReport

__all__ = ["Gradients", "clip_gradients", "global_norm"]


class _Learner(Protocol):
    """What gradients depend on."""

    optimizers: Optimizers
    ranks: Ranks
    report: UpdateReport
    trained_module_ids: list[str]
    num_gradient_updates_lifetime: int


class Gradients:
    """The gradients of a minibatch: their sum over the losses and mean over the ranks, norms, clipping, and the step.

    A module takes a step if its gradients are finite on all ranks, since one other step would corrupt Adam's state.

    Args:
        learner: The learner.
        are_changed: Whether they may change after `clip`, which has seen whether they are finite.

    Attributes:
        loss_weights: Module id → factor of its loss: this rank's share of the rows, see `UpdateAgreement`.
    """

    def __init__(self, learner: _Learner, *, are_changed: bool) -> None:
        self._learner = learner
        self._are_changed = are_changed
        self._is_finite: dict[str, bool] = {}  # those of each module
        self.loss_weights: Mapping[str, float] = {}

    def compute(self, losses: Mapping[str, Tensor]) -> dict[Tensor, Tensor]:
        """Return parameter → gradient of the losses' sum, as a mean over the ranks.

        Raises:
            ConfigurationError: The losses depend on no parameter.
        """
        learner = self._learner
        for entry in learner.optimizers.entries:
            for parameter in entry.parameters:
                parameter.grad = None
        total: Any = None
        for module_id, loss in losses.items():
            learner.report.log(module_id, {"total_loss": loss})
            # If the loss is not finite, no rank shall take the step.
            weight = self.loss_weights.get(module_id, 1.0) if math.isfinite(loss.detach()) else math.nan
            weighted = loss if weight == 1.0 else loss * weight
            total = weighted if total is None else total + weighted
        if total is not None:
            if not total.requires_grad:
                raise ConfigurationError(
                    f"The loss of {', '.join(map(repr, losses))} depends on no trainable parameter: was it "
                    "computed under torch.no_grad(), from detached tensors, or from the batch alone?"
                )
            # Tensor.backward would examine its arguments for longer than a small layer takes.
            engine: Any = torch.autograd.Variable._execution_engine
            engine.run_backward(
                (total,),
                (torch.ones_like(total),),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )
        learner.ranks.average_gradients()
        gradients: dict[Tensor, Tensor] = {}
        for entries in learner.optimizers.by_module(sorted(learner.trained_module_ids)).values():
            for entry in entries:
                for parameter in entry.parameters:
                    if parameter.grad is not None:
                        gradients[parameter] = parameter.grad
        return gradients

    def by_module(self, gradients: dict[Tensor, Tensor]) -> Iterator[tuple[str, dict[Tensor, Tensor]]]:
        """Yield the trained modules that have gradients, each with its own; `ALL_MODULES` comes last."""
        self._is_finite = {}
        by_module = self._learner.optimizers.by_module(self._learner.trained_module_ids)
        for module_id, entries in by_module.items():
            mine = gradients
            if len(by_module) > 1:  # looking up each parameter takes longer than summing its gradient
                parameters = [p for entry in entries for p in entry.parameters]
                mine = {p: gradients[p] for p in parameters if gradients.get(p) is not None}
            if mine:
                yield module_id, mine

    def clip(self, module_id: str, config: BaseConfig, gradients: dict[Tensor, Tensor]) -> None:
        """Clip one module's gradients in place, and log their norms; separately for each optimizer."""
        is_finite = True
        entries = self._learner.optimizers.of_module(module_id)
        for entry in entries:
            if len(entries) == 1:  # all are its gradients
                mine = list(gradients.values())
            else:
                mine = entry.gradients_of(gradients)
            norm = float(global_norm(mine))
            if getattr(config, "log_gradients", True) and self._is_due(entry):
                self._learner.report.log(module_id, {f"gradients_{entry.name}_global_norm": norm})
            if math.isfinite(norm):
                clip_gradients(mine, grad_clip=config.grad_clip, grad_clip_by=config.grad_clip_by, norm=norm)
            else:
                is_finite = False
        self._is_finite[module_id] = is_finite

    def apply(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Step the optimizers of the trained modules whose gradients are finite; count the others as skipped."""
        for parameter, gradient in gradients.items():
            if parameter.grad is not gradient:
                parameter.grad = gradient
        skipped = self._learner.report.num_skipped
        by_module = self._learner.optimizers.by_module(self._learner.trained_module_ids)
        # The ranks' gradients are equal at this point, so every rank reaches the same verdict.
        for module_id, entries in by_module.items():
            is_finite = self._is_finite.get(module_id, True)
            if self._are_changed:
                of_module = [g for entry in entries for g in entry.gradients_of(gradients)]
                is_finite = math.isfinite(float(global_norm(of_module)))
            if not is_finite:
                skipped[module_id] = skipped.get(module_id, 0) + 1
                continue
            for entry in entries:
                if self._is_due(entry):
                    entry.optimizer.step()

    def step(self, module_id: str, optimizer_name: str) -> bool:
        """Return whether the current minibatch's step includes an optimizer."""
        entries = self._learner.optimizers.of_module(module_id)
        return all(self._is_due(entry) for entry in entries if entry.name == optimizer_name)

    def _is_due(self, entry: RegisteredOptimizer) -> bool:
        return entry.every == 1 or self._learner.num_gradient_updates_lifetime % entry.every == 0


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients as one vector; a 0-d tensor, not finite if any element is not."""
    if not gradients:
        return torch.zeros(())
    norm: Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))))
    return norm


def clip_gradients(
    gradients: Sequence[Tensor],
    *,
    grad_clip: float | None,
    grad_clip_by: Literal["value", "norm", "global_norm"],
    norm: float,
) -> None:
    """Clip gradients in place, with a few kernels regardless of their number.

    Args:
        gradients: Gradients of one optimizer's parameters.
        grad_clip: The threshold; None: no clipping.
        grad_clip_by: The limited quantity: "value" every element, "norm" each tensor's 2-norm,
            "global_norm" the 2-norm of all gradients together.
        norm: The gradients' `global_norm`; finite.

    Raises:
        ValueError: `grad_clip_by` is not one of the three.
    """
    if grad_clip is None or not gradients:
        return
    gradients = list(gradients)
    if grad_clip_by == "global_norm":
        if norm > grad_clip:
            torch._foreach_mul_(gradients, grad_clip / norm)
    elif grad_clip_by == "value":
        torch._foreach_clamp_min_(gradients, -grad_clip)
        torch._foreach_clamp_max_(gradients, grad_clip)
    elif grad_clip_by == "norm":
        norms = torch._foreach_norm(gradients)
        scales = [(grad_clip / n.clamp(min=1e-12)).clamp(max=1.0) for n in norms]
        torch._foreach_mul_(gradients, scales)
    else:
        raise ValueError(f"grad_clip_by: expected 'value', 'norm' or 'global_norm', got {grad_clip_by!r}.")
