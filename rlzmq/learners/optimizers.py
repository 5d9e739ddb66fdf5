"""Optimizers: each module's named optimizers, with their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlzmq.core.names import ALL_MODULES
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.update_plan import Schedule

__all__ = [
    "DEFAULT_OPTIMIZER",
    "LeanAdam",
    "Optimizers",
    "RegisteredOptimizer",
    "make_adam",
]

DEFAULT_OPTIMIZER = "default_optimizer"


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
    """All optimizers of a Learner, by module id and name.

    Attributes:
        entries: All of them; a module's are adjacent, in order of registration.
    """

    def __init__(self) -> None:
        self.entries: list[RegisteredOptimizer] = []

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
        schedule = (
            None if learning_rate is None else Schedule(learning_rate, name=f"lr of {module_id}/{name}")
        )
        if schedule is not None:
            _set_learning_rate(optimizer, schedule.current)
        place = self.entries.index(mine[-1]) + 1 if mine else len(self.entries)
        entry = RegisteredOptimizer(module_id, name, optimizer, tuple(parameters), schedule, every)
        self.entries.insert(place, entry)

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
        return [entry for entry in self.entries if entry.module_id == module_id]

    def by_module(self, module_ids: Iterable[str]) -> dict[str, list[RegisteredOptimizer]]:
        """Return the optimizers that step when these modules are trained; those of `ALL_MODULES` come last."""
        found: dict[str, list[RegisteredOptimizer]] = {}
        for module_id in (*module_ids, ALL_MODULES):
            if entries := [entry for entry in self.entries if entry.module_id == module_id]:
                found[module_id] = entries
        return found

    def remove(self, module_id: str) -> None:
        """Remove a module's optimizers."""
        self.entries = [entry for entry in self.entries if entry.module_id != module_id]

    def update_learning_rates(self, num_env_steps: int) -> None:
        """Set all learning rates to their schedules' values after `num_env_steps`."""
        for entry in self.entries:
            if entry.learning_rate is not None:
                _set_learning_rate(entry.optimizer, entry.learning_rate.update(num_env_steps))

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

        A constant learning rate stays the configured one, so a run may be resumed with another one. A scheduled
        learning rate is the state's until the schedule's next value.

        Raises:
            KeyError: The state names an unknown module or optimizer.
        """
        for module_id, optimizers in state.items():
            for name, optimizer_state in optimizers.items():
                entry = self._entry(module_id, name)
                _set_state(entry.optimizer, optimizer_state, names)
                if entry.learning_rate is not None and entry.learning_rate.is_constant:
                    _set_learning_rate(entry.optimizer, entry.learning_rate.current)


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
        with torch.no_grad():
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
        """Add 1 to the steps of a group; return the averages of gradients and of their squares, and the steps.

        The steps are elements of one tensor, since one addition each would take longer than the rest of a small step.
        The lists are kept, as long as parameters and states are the same.
        """
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


def make_adam(parameters: Sequence[Tensor], learning_rate: float, eps: float = 1e-8) -> torch.optim.Adam:
    """Return an Adam optimizer; it is fused into one kernel if all parameters are on one CPU or CUDA device."""
    devices = {p.device for p in parameters}
    lean = len(devices) == 1 and all(p.is_floating_point() for p in parameters)
    if lean and next(iter(devices)).type in ("cpu", "cuda"):
        return LeanAdam(parameters, lr=learning_rate, eps=eps)
    return torch.optim.Adam(parameters, lr=learning_rate, eps=eps)


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
        {**group, **{key: _like(value, group.get(key)) for key, value in saved.items()}}
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
