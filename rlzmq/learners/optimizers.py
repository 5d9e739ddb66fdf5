"""Optimizers: from a minibatch's losses to its step: gradients, clipping, each module's named optimizers, schedules."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.names import ALL_MODULES
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.update_plan import Schedule

__all__ = [
    "DEFAULT_OPTIMIZER",
    "LeanAdam",
    "Optimizers",
    "RegisteredOptimizer",
    "clip_gradients",
    "global_norm",
    "make_adam",
]

_log = logging.getLogger("rlzmq.learners")

DEFAULT_OPTIMIZER = "default_optimizer"

_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


@dataclass(frozen=True)
class RegisteredOptimizer:
    """One optimizer of one module.

    Attributes:
        module_id: The module; `ALL_MODULES` for an optimizer that steps with every minibatch.
        name: Unique within the module.
        optimizer: A torch optimizer.
        parameters: The optimized parameters.
        learning_rate: Its schedule; None: the optimizer's learning rate is not changed.
        every: It steps with every so many minibatches, from the first on.
    """

    module_id: str
    name: str
    optimizer: Optimizer
    parameters: tuple[Tensor, ...]
    learning_rate: Schedule | None
    every: int = 1

    def gradients_of(self, gradients: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """Return those of its parameters' gradients that are there."""
        return [g for p in self.parameters if (g := gradients.get(p)) is not None]


class Optimizers:
    """All optimizers of a Learner, by module id and name, and the other settings that follow schedules.

    A module takes a step if its gradients are finite on all ranks, since one other step would corrupt Adam's state.

    Attributes:
        entries: All of them; a module's are adjacent, in order of registration.
        shared: Ids of modules that a MultiRLModule runs for others, which step with every minibatch.
        coefficients: Setting → module id → current value, see `Learner`.
    """

    def __init__(self) -> None:
        self.entries: list[RegisteredOptimizer] = []
        self.shared: list[str] = []
        self._by_module: dict[str, list[RegisteredOptimizer]] = {}
        self.coefficients: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._schedules: dict[tuple[str, str], Schedule] = {}
        self._is_finite: dict[str, bool] = {}  # the clipped gradients of each module

    # -- a minibatch's step ------------------------------------------------------------------------

    def backward(self, losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> None:
        """Compute the gradients of the sum of losses.

        Args:
            losses: Module id → 0-d tensor. If it is not finite, gradients become NaN, so that no rank takes the step.
            weights: Module id → factor of its loss; 1 if it is missing.

        Raises:
            ConfigurationError: The losses depend on no parameter.
        """
        for entry in self.entries:
            for parameter in entry.parameters:
                parameter.grad = None
        total: Any = None
        for module_id, loss in losses.items():
            weight = weights.get(module_id, 1.0) if math.isfinite(loss.detach()) else math.nan
            weighted = loss if weight == 1.0 else loss * weight
            total = weighted if total is None else total + weighted
        if total is None:
            return
        if not total.requires_grad:
            raise ConfigurationError(
                f"The loss of {', '.join(map(repr, losses))} depends on no trainable parameter: was it "
                "computed under torch.no_grad(), from detached tensors, or from the batch alone?"
            )
        # torch.autograd.backward without its checks, which take longer than the pass of a small network's loss.
        _run_backward((total,), (torch.ones_like(total),), False, False, (), accumulate_grad=True)

    def gradients(self, module_ids: Iterable[str]) -> dict[Tensor, Tensor]:
        """Return parameter → gradient, for the parameters of these modules that have one."""
        gradients: dict[Tensor, Tensor] = {}
        for entries in self.by_module(module_ids).values():
            for entry in entries:
                for parameter in entry.parameters:
                    if parameter.grad is not None:
                        gradients[parameter] = parameter.grad
        return gradients

    def clip(
        self, module_id: str, gradients: Mapping[Tensor, Tensor], config: BaseConfig, num_minibatches: int
    ) -> dict[str, float]:
        """Clip one module's gradients in place, separately for each optimizer.

        Returns:
            Name of a result → norm before clipping, for the optimizers that step with this minibatch.
        """
        self._is_finite[module_id] = True
        norms: dict[str, float] = {}
        entries = self.of_module(module_id)
        for entry in entries:
            # A module's only optimizer has all its gradients.
            mine = list(gradients.values()) if len(entries) == 1 else entry.gradients_of(gradients)
            norm = global_norm(mine)
            if num_minibatches % entry.every == 0:
                norms[f"gradients_{entry.name}_global_norm"] = norm
            if math.isfinite(norm):
                clip_gradients(mine, grad_clip=config.grad_clip, grad_clip_by=config.grad_clip_by, norm=norm)
            else:
                self._is_finite[module_id] = False
        return norms

    def step(
        self,
        gradients: Mapping[Tensor, Tensor],
        module_ids: Iterable[str],
        num_minibatches: int,
        *,
        are_clipped: bool,
    ) -> list[str]:
        """Step the optimizers of the modules whose gradients are finite, and return the other modules.

        Args:
            gradients: Parameter → gradient, the same on all ranks, so every rank reaches the same verdict.
            module_ids: The trained modules.
            num_minibatches: Number of minibatches before this one.
            are_clipped: Whether they are as `clip` left them, which has seen whether they are finite.
        """
        for parameter, gradient in gradients.items():
            if parameter.grad is not gradient:
                parameter.grad = gradient
        skipped = []
        for module_id, entries in self.by_module(module_ids).items():
            is_finite = self._is_finite.pop(module_id, True)
            if not are_clipped:
                of_module = [g for entry in entries for g in entry.gradients_of(gradients)]
                is_finite = math.isfinite(global_norm(of_module))
            if not is_finite:
                skipped.append(module_id)
                continue
            for entry in entries:
                if num_minibatches % entry.every == 0:
                    entry.optimizer.step()
        return skipped

    # -- optimizers and schedules ------------------------------------------------------------------

    def register(
        self,
        module_id: str,
        name: str,
        optimizer: Optimizer,
        parameters: Sequence[Tensor],
        learning_rate: float | Sequence[Sequence[float]] | None,
        every: int = 1,
    ) -> None:
        """Add an optimizer and set its learning rate to the schedule's first value.

        Raises:
            ValueError: The name is taken, or the optimizer was created for other parameters.
        """
        mine = self.of_module(module_id)
        if name in {entry.name for entry in mine}:
            raise ValueError(
                f"module {module_id!r} already has an optimizer named {name!r}: use another name."
            )
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if held != {id(p) for p in parameters}:
            raise ValueError(
                f"optimizer {name!r} of module {module_id!r}: expected one that holds exactly the "
                f"{len(parameters)} parameters it is registered with, got one with {len(held)} (others)."
            )
        others = [entry for entry in self.entries if not held.isdisjoint(map(id, entry.parameters))]
        if others:
            raise ValueError(
                f"optimizer {name!r} of module {module_id!r}: optimizer {others[0].name!r} of module "
                f"{others[0].module_id!r} steps some of its parameters, too. Give each to one optimizer."
            )
        schedule = (
            None if learning_rate is None else Schedule(learning_rate, name=f"lr of {module_id}/{name}")
        )
        if schedule is not None:
            _set_learning_rate(optimizer, schedule.values[0])
        entry = RegisteredOptimizer(module_id, name, optimizer, tuple(parameters), schedule, every)
        self._by_module[module_id] = [*mine, entry]
        self.entries = [*chain.from_iterable(self._by_module.values())]

    def warn_of_untrained(self, module_id: str, module: nn.Module) -> None:
        """Log a warning if parameters of a module that need gradients have no optimizer."""
        held = {id(p) for entry in self.entries for p in entry.parameters}
        names = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]
        if names:
            _log.warning(
                "module %r: %d of its parameters have no optimizer, so they are never trained: %s. Register one in "
                "configure_optimizers_for_module(), or call requires_grad_(False).",
                module_id, len(names), ", ".join(names[:4]) + (", …" if len(names) > 4 else ""),
            )  # fmt: skip

    def get(self, module_id: str, name: str = DEFAULT_OPTIMIZER) -> Optimizer:
        """Return one optimizer.

        Raises:
            KeyError: There is no optimizer of this name.
        """
        return self._entry(module_id, name).optimizer

    def _entry(self, module_id: str, name: str) -> RegisteredOptimizer:
        names = {entry.name: entry for entry in self.of_module(module_id)}
        if name not in names:
            raise KeyError(f"module {module_id!r} has no optimizer {name!r}.{did_you_mean(name, names)}")
        return names[name]

    def of_module(self, module_id: str) -> list[RegisteredOptimizer]:
        """Return the module's optimizers in order of registration."""
        return self._by_module.get(module_id, [])

    def by_module(self, module_ids: Iterable[str]) -> dict[str, list[RegisteredOptimizer]]:
        """Return the optimizers that step when these modules are trained; those of `ALL_MODULES` come last."""
        stepped = (*module_ids, *self.shared, ALL_MODULES)
        return {m: self._by_module[m] for m in stepped if m in self._by_module}

    def schedule(self, module_id: str, settings: Mapping[str, Any]) -> None:
        """Let a module's settings follow their schedules, from the first value on."""
        for setting, value_or_points in settings.items():
            schedule = self._schedules[setting, module_id] = Schedule(value_or_points, setting)
            self.coefficients[setting][module_id] = schedule.values[0]

    def set_coefficients(self, setting: str, by_module: Mapping[str, float]) -> None:
        """Restore a setting's values. A constant stays the configured one, as a constant learning rate does."""
        for module_id, value in by_module.items():
            schedule = self._schedules.get((setting, module_id))
            if schedule is None or not schedule.is_constant:
                self.coefficients[setting][module_id] = value

    def remove(self, module_id: str) -> None:
        """Remove a module's optimizers and coefficients."""
        self._by_module.pop(module_id, None)
        self.entries = [*chain.from_iterable(self._by_module.values())]
        for setting, coefficients in self.coefficients.items():
            coefficients.pop(module_id, None)
            self._schedules.pop((setting, module_id), None)

    def follow_schedules(self, num_env_steps: int) -> Iterator[tuple[str, str, float]]:
        """Set learning rates and other settings to their schedules' values after `num_env_steps`.

        Yields:
            Setting, module id, and its value until then, of the others.
        """
        for entry in self.entries:
            if entry.learning_rate is not None:
                _set_learning_rate(entry.optimizer, entry.learning_rate.value(num_env_steps))
        for (setting, module_id), schedule in self._schedules.items():
            coefficients = self.coefficients[setting]
            yield setting, module_id, coefficients[module_id]
            coefficients[module_id] = schedule.value(num_env_steps)

    def get_state(self, names: Mapping[int, str]) -> dict[str, Any]:
        """Return every optimizer's state as named arrays and plain scalars.

        Args:
            names: ``id(parameter)`` → name. Parameters without a name are identified by position.

        Returns:
            ``{module id: {optimizer: {"state": {parameter: {key: array or scalar}}, "groups": [{key:
            plain}]}}}``.
        """
        state: dict[str, Any] = {}
        for entry in self.entries:
            state.setdefault(entry.module_id, {})[entry.name] = _get_state(entry.optimizer, names)
        return state

    def set_state(self, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
        """Load a state from `get_state`. Modules and optimizers missing in it keep their state.

        A constant learning rate and Adam's ε stay the configured ones, so a run may be resumed with others. A scheduled
        learning rate is the state's until the schedule's next value.

        Raises:
            KeyError: The state names an unknown module or optimizer.
        """
        for module_id, optimizers in state.items():
            for name, optimizer_state in optimizers.items():
                entry = self._entry(module_id, name)
                _set_state(entry.optimizer, optimizer_state, names)
                if entry.learning_rate is not None and entry.learning_rate.is_constant:
                    _set_learning_rate(entry.optimizer, entry.learning_rate.values[0])


def global_norm(gradients: Sequence[Tensor]) -> float:
    """Return the 2-norm of all gradients as one vector; not finite if any element is not."""
    norms = torch._foreach_norm(list(gradients)) if gradients else ()
    return math.hypot(*torch.stack(norms).tolist()) if norms else 0.0


def clip_gradients(
    gradients: list[Tensor],
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
    """
    if grad_clip is None or not gradients:
        return
    if grad_clip_by == "global_norm":
        if norm > grad_clip:
            torch._foreach_mul_(gradients, grad_clip / norm)
    elif grad_clip_by == "value":
        torch._foreach_clamp_min_(gradients, -grad_clip)
        torch._foreach_clamp_max_(gradients, grad_clip)
    else:
        norms = torch._foreach_norm(gradients)
        scales = [(grad_clip / n.clamp(min=1e-12)).clamp(max=1.0) for n in norms]
        torch._foreach_mul_(gradients, scales)


_add_param_group = torch.optim.Optimizer.add_param_group


class _Known(NamedTuple):
    """The tensors of a group, all parameters and states that they depend on, and the tensor of its steps."""

    held: list[Tensor]
    counter: Tensor
    columns: tuple[list[Tensor], list[Tensor], list[Tensor]]


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
        with torch.set_grad_enabled(False):  # less than half of the cost of torch.no_grad()
            for index, group in enumerate(self.param_groups):
                parameters = [p for p in group["params"] if p.grad is not None]
                if not parameters:
                    continue
                averages, squares, steps = self._counted(index, parameters)
                beta1, beta2 = group["betas"]
                torch._fused_adam_(
                    parameters,
                    [p.grad for p in parameters],
                    averages,
                    squares,
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

    def _counted(
        self, index: int, parameters: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Add 1 to the steps of a group; return the averages of gradients and of their squares, and the steps."""
        # The steps are elements of one tensor: an addition for each would cost a tenth of PPO's update.
        # The lists are kept, as long as parameters and states are the same.
        held = [*parameters, *chain.from_iterable(map(dict.values, self.state.values()))]
        known: dict[int, _Known] = self.__dict__.setdefault("_known", {})
        mine = known.get(index)
        if mine is None or len(mine.held) != len(held) or not all(map(is_, mine.held, held)):
            states = [self.state[p] or self._new_state(p) for p in parameters]
            counter = torch.stack([state["step"] for state in states])
            for state, element in zip(states, counter.unbind(), strict=True):
                state["step"] = element
            columns = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
            held = [*parameters, *chain.from_iterable(map(dict.values, self.state.values()))]
            mine = known[index] = _Known(held, counter, (columns[0], columns[1], columns[2]))
        mine.counter.add_(1)
        return mine.columns

    def _new_state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def make_adam(parameters: Sequence[Tensor], eps: float) -> torch.optim.Adam:
    """Return Adam with learning rate 0; it is fused into one kernel if all parameters are on one CPU or CUDA device."""
    devices = {p.device for p in parameters}
    lean = len(devices) == 1 and all(p.is_floating_point() for p in parameters)
    if lean and next(iter(devices)).type in ("cpu", "cuda"):
        return LeanAdam(parameters, lr=0.0, eps=eps)
    return torch.optim.Adam(parameters, lr=0.0, eps=eps)


def _set_learning_rate(optimizer: Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def _parameter_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(p), f"parameter_{i}") for i, p in enumerate(parameters)]


def _get_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # read directly, since Optimizer.state_dict imports torch's compiler at its first call
    return {
        "state": {
            name: {key: _to_plain(value) for key, value in optimizer.state[parameter].items()}
            for name, parameter in zip(_parameter_names(optimizer, names), parameters, strict=True)
            if parameter in optimizer.state
        },
        "groups": [
            {key: _to_plain(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
    }


def _set_state(optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[int, str]) -> None:
    positions = {name: index for index, name in enumerate(_parameter_names(optimizer, names))}
    unknown = sorted(set(state["state"]) - set(positions))
    if unknown:
        raise KeyError(
            f"optimizer state of an unknown parameter {unknown[0]!r}.{did_you_mean(unknown[0], positions)}"
        )
    # LeanAdam's state is accessed directly, since state_dict and load_state_dict import torch's compiler
    is_lean = type(optimizer) is LeanAdam
    mine = optimizer.param_groups if is_lean else optimizer.state_dict()["param_groups"]
    if len(mine) != len(state["groups"]):
        raise ValueError(f"expected the state of {len(mine)} parameter groups, got {len(state['groups'])}.")
    groups = [
        {**group, **{key: _like(value, group.get(key)) for key, value in saved.items() if key != "eps"}}
        for group, saved in zip(mine, state["groups"], strict=True)
    ]
    values = {
        positions[name]: {key: _from_plain(value) for key, value in entries.items()}
        for name, entries in state["state"].items()
    }
    if not is_lean:
        optimizer.load_state_dict({"state": values, "param_groups": groups})
        return
    parameters = [p for group in mine for p in group["params"]]
    for group, new in zip(mine, groups, strict=True):
        group.update(new)
    optimizer.state.clear()
    for position, entries in values.items():
        parameter = parameters[position]
        optimizer.state[parameter] = {
            key: value.to(device=parameter.device, dtype=torch.float32 if key == "step" else parameter.dtype)
            for key, value in entries.items()
        }


def _to_plain(value: object) -> object:
    return value.detach().cpu().numpy().copy() if isinstance(value, Tensor) else value


def _from_plain(value: object) -> Any:
    # as_tensor would share a read-only buffer
    return torch.tensor(value) if hasattr(value, "dtype") else value


def _like(value: Any, mine: Any) -> Any:
    """Return a setting in the optimizer's type, since plain formats may lack tuples and tensors."""
    if isinstance(mine, Tensor):
        return torch.as_tensor(value, dtype=mine.dtype, device=mine.device)
    return tuple(value) if isinstance(mine, tuple) else value
