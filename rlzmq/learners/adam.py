"""LeanAdam: Adam as one kernel call, without torch's wrappers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

__all__ = ["LeanAdam"]

_add_param_group = torch.optim.Optimizer.add_param_group


class LeanAdam(torch.optim.Adam):
    """``torch.optim.Adam(fused=True)``, bit for bit, at about half its cost per step for small models.

    Omits step hooks, the profiler's mark around each step, closures, and the import of torch's compiler (about a
    second), which torch's wrappers trigger on first use.

    Args:
        params: Floating-point parameters on one device.
        lr: Learning rate.
        betas: Decay of the first and second moments.
        eps: Added to the denominator.
        weight_decay: L2 penalty.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch.optim.Optimizer."""
        getattr(_add_param_group, "__wrapped__", _add_param_group)(self, param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply one step with the existing gradients.

        Raises:
            ValueError: A closure is given.
        """
        if closure is not None:
            raise ValueError("LeanAdam.step takes no closure.")
        with torch.no_grad():
            for index, group in enumerate(self.param_groups):
                parameters = [p for p in group["params"] if p.grad is not None]
                if not parameters:
                    continue
                states = [self.state[p] or self._new_state(p) for p in parameters]
                steps = self._counted(index, states)
                beta1, beta2 = group["betas"]
                torch._fused_adam_(
                    parameters,
                    [p.grad for p in parameters],
                    [state["exp_avg"] for state in states],
                    [state["exp_avg_sq"] for state in states],
                    [],
                    steps,
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    amsgrad=False,
                    maximize=False,
                )

    # Tells torch.optim.Optimizer not to wrap `step` for its profiler and hooks.
    step.hooked = True  # type: ignore[attr-defined]

    def _counted(self, index: int, states: list[dict[str, Any]]) -> list[Tensor]:
        """Add 1 to the step of each state of a group; return the steps.

        They are elements of one tensor, since one addition each would take longer than the rest of a small step.
        """
        steps = [state["step"] for state in states]
        counters: dict[int, tuple[Tensor, list[Tensor]]] = self.__dict__.setdefault("_counters", {})
        counter, elements = counters.get(index, (None, []))
        if counter is None or len(elements) != len(steps) or not all(map(is_, elements, steps)):
            counter = torch.stack(steps)
            elements = list(counter.unbind())
            counters[index] = counter, elements
            for state, element in zip(states, elements, strict=True):
                state["step"] = element
        counter.add_(1)
        return elements

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state
