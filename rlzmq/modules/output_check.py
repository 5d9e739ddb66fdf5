"""Checks of a custom module: its interfaces, its loss, and its outputs against its spaces, when it is built.

For the outputs, a copy of the module gets three observations sampled from its space. If that forward pass raises an
error, nothing is checked: the module may read columns of custom connector pieces, and the run's first step raises the
same error.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tree import tree_leaves, tree_map, tree_stack
from rlzmq.episodes.columns import Columns
from rlzmq.modules.distributions import num_dist_inputs
from rlzmq.modules.rl_module import RLModule, SelfSupervisedLossAPI, ValueFunctionAPI
from rlzmq.modules.weights import is_trainable

__all__ = ["check_acting_outputs", "check_interfaces", "check_training_outputs", "no_loss"]

_log = logging.getLogger("rlzmq.modules")

_NUM_ROWS = 3  # unlike most numbers of actions, so that swapped dimensions are detected


def check_acting_outputs(module: RLModule) -> None:
    """Check the outputs of ``_forward_exploration``.

    Args:
        module: The module of one policy. The library's own modules are not checked.

    Raises:
        ConfigurationError: A column is missing, or does not have the shape or type that its space needs.
    """
    trial = _TrialCall.of(module, num_steps=1)
    if trial is None or (outputs := trial.run("_forward_exploration", t=0)) is None:
        return
    try:
        trial.module.check_outputs(outputs, "_forward_exploration")
    except (TypeError, ValueError) as error:
        raise ConfigurationError(str(error)) from None
    trial.check_dist_inputs(outputs, "_forward_exploration")
    trial.check_rows(outputs, "_forward_exploration")
    trial.check_state(outputs, "_forward_exploration")


def check_training_outputs(module: RLModule, *, with_values: bool) -> None:
    """Check the outputs of ``_forward_train``, and the values.

    Args:
        module: The module of one policy. The library's own modules are not checked.
        with_values: Whether the learner calls ``compute_values``.

    Raises:
        ConfigurationError: A column is missing, or does not have the shape or type that its space needs.
    """
    trial = _TrialCall.of(module, num_steps=2)
    if trial is None or not isinstance(outputs := trial.run("_forward_train"), Mapping):
        return
    trial.check_dist_inputs(outputs, "_forward_train")
    inputs = outputs.get(Columns.ACTION_DIST_INPUTS)
    if with_values and isinstance(inputs, torch.Tensor) and not inputs.requires_grad:
        _log.warning(
            "%s: %r out of _forward_train depends on no trainable parameter, so training does not change the policy. "
            "Was it detached, or computed under torch.no_grad()?",
            module.describe(),
            Columns.ACTION_DIST_INPUTS,
        )
    if with_values and isinstance(module, ValueFunctionAPI):
        trial.check_values(outputs.get(Columns.EMBEDDINGS))


def check_interfaces(module_id: str, module: Any, required: Sequence[type], learner: str) -> None:
    """Check that a module implements what the losses of a learner's class call.

    Raises:
        ConfigurationError: It lacks one of the interfaces.
    """
    if isinstance(module, SelfSupervisedLossAPI) or not is_trainable(module):
        return
    missing = [api.__name__ for api in required if not isinstance(module, api)]
    if missing:
        raise ConfigurationError(
            f"{learner} needs module {module_id!r} ({type(module).__name__}) to be a "
            f"{' and a '.join(missing)}: add the mix-in to its base classes, "
            f"class {type(module).__name__}(TorchRLModule, {', '.join(missing)})."
        )


def no_loss(returned: object, owner: object, module_id: str) -> ConfigurationError:
    """Return the error for what a loss function of a user returned instead of a tensor with one number.

    Args:
        returned: The value.
        owner: The learner, or the module with its own loss.
        module_id: The module's id.
    """
    name = "compute_loss_for_module"
    if not hasattr(owner, name):
        name = "compute_self_supervised_loss"
    if returned is None:
        what = "None. Does it end with `return loss`?"
    elif isinstance(returned, torch.Tensor):
        what = f"a tensor of shape {tuple(returned.shape)}. Take its mean: loss.mean()."
    else:
        what = (
            f"a {type(returned).__name__}. Keep it a tensor, without float(), .item() or .numpy(): gradients flow "
            "through it."
        )
    return ConfigurationError(
        f"{type(owner).__name__}.{name}() of module {module_id!r}: expected one number as a tensor, got {what}"
    )


class _TrialCall:
    """A copy of a module, and a batch for it.

    Attributes:
        module: The copy.
        lead: Leading dimensions of its outputs: rows, and time steps if it is stateful.
    """

    def __init__(self, module: RLModule, batch: dict[str, Any], lead: tuple[int, ...]) -> None:
        self.module = module
        self.lead = lead
        self._batch = batch

    @classmethod
    def of(cls, module: RLModule, *, num_steps: int) -> _TrialCall | None:
        """Return a trial; None for the library's own modules, or if there is no input to try."""
        if type(module).__module__.startswith("rlzmq.modules.default_models"):
            return None
        if module.observation_space is None or module.action_space is None:
            return None
        try:
            lead = (_NUM_ROWS, num_steps) if module.is_stateful() else (_NUM_ROWS,)
            batch = _draw_batch(module, lead)
            module = copy.deepcopy(module)
        except Exception as error:
            _log.debug("%s is not tried out: %s", module.describe(), error)
            return None
        return cls(module.eval() if isinstance(module, nn.Module) else module, batch, lead)

    def run(self, method: str, *args: object, **kwargs: object) -> Any:
        """Return a module method's outputs for the batch, or None if it raises."""
        try:
            trains = method == "_forward_train"
            with torch.set_grad_enabled(trains), torch.random.fork_rng(devices=[]):
                return getattr(self.module, method)(dict(self._batch), *args, **kwargs)
        except Exception as error:
            _log.debug("%s is not tried out: %s", self.module.describe(), error)
            return None

    def check_dist_inputs(self, outputs: Mapping[str, Any], method: str) -> None:
        column = Columns.ACTION_DIST_INPUTS
        if column not in outputs:
            return
        inputs, space = outputs[column], self.module.action_space
        assert space is not None
        if not isinstance(inputs, torch.Tensor) or not inputs.is_floating_point():
            found = (
                f"a tensor of {inputs.dtype}" if isinstance(inputs, torch.Tensor) else type(inputs).__name__
            )
            raise self._error(method, column, f"is {found}", "a tensor of floats")
        name, width = self._width(method, space)
        shape = tuple(inputs.shape)
        if shape[:-1] == self.lead and width in (None, shape[-1]):
            return
        text = f"has the shape {shape} for {self._rows()}"
        wanted = (*self.lead, "inputs of the distribution" if width is None else width)
        why = "" if width is None else f", as {name} of action_space {space} has {width} inputs per row"
        raise self._error(method, column, text, _shape_text(wanted) + why)

    def _width(self, method: str, space: gym.Space[Any]) -> tuple[str, int | None]:
        """Return the distribution's name, and its number of inputs per row, if known."""
        module = self.module
        kind = "train" if method == "_forward_train" else "exploration"
        dist_cls = getattr(module, f"get_{kind}_action_dist_cls")()
        name = dist_cls.__name__.removesuffix("Partial")
        if module.action_dist_cls is None and dist_cls is RLModule.get_inference_action_dist_cls(module):
            return name, num_dist_inputs(space)
        try:
            return name, int(dist_cls.required_input_dim(space, module.model_config))
        except Exception:  # a user's class may not implement it
            return name, None

    def check_rows(self, outputs: Mapping[str, Any], method: str) -> None:
        for column, value in outputs.items():
            if column == Columns.STATE_OUT:
                continue
            for leaf in tree_leaves(value):
                shape = tuple(np.shape(leaf))
                if shape[: len(self.lead)] != self.lead:
                    wanted = _shape_text((*self.lead, "…"))
                    raise self._error(method, column, f"has the shape {shape} for {self._rows()}", wanted)

    def check_state(self, outputs: Mapping[str, Any], method: str) -> None:
        if len(self.lead) == 1:
            return
        given = tree_map(lambda leaf: tuple(np.shape(leaf)), self._batch[Columns.STATE_IN])
        got = tree_map(lambda leaf: tuple(np.shape(leaf)), outputs[Columns.STATE_OUT])
        if given != got:
            raise self._error(
                method,
                Columns.STATE_OUT,
                f"has the shapes {got}",
                f"those of get_initial_state() with {_NUM_ROWS} rows, {given}",
            )

    def check_values(self, embeddings: object) -> None:
        values = self.run("compute_values", embeddings)
        if values is None:
            return
        shape = tuple(np.shape(values))
        if shape != self.lead:
            hint = ". Drop its last dimension: .squeeze(-1)" if shape == (*self.lead, 1) else ""
            raise ConfigurationError(
                f"{self.module.describe()}: compute_values() returned the shape {shape} for {self._rows()}; expected "
                f"{self.lead}: one value each{hint}."
            )

    def _rows(self) -> str:
        num_rows, *num_steps = self.lead
        return f"{num_rows} observations" + (f" of {num_steps[0]} time steps" if num_steps else "")

    def _error(self, method: str, column: str, found: str, wanted: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self.module.describe()}: {column!r} out of {method} {found}; expected {wanted}."
        )


def _draw_batch(module: RLModule, lead: tuple[int, ...]) -> dict[str, Any]:
    space = copy.deepcopy(module.observation_space)
    assert space is not None
    space.seed(0)
    first = next(iter(module.parameters()), None) if isinstance(module, nn.Module) else None
    device = "cpu" if first is None else first.device

    def to_tensor(leaf: object) -> torch.Tensor:
        array = np.asarray(leaf)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        return torch.from_numpy(array.reshape(*lead, *array.shape[1:])).to(device)

    num = int(np.prod(lead))
    batch = {Columns.OBS: tree_map(to_tensor, tree_stack([space.sample() for _ in range(num)]))}
    if module.is_stateful():
        batch[Columns.STATE_IN] = tree_map(
            lambda leaf: torch.as_tensor(leaf, device=device).expand(lead[0], *np.shape(leaf)).clone(),
            module.get_initial_state(),
        )
    return batch


def _shape_text(shape: tuple[Any, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
