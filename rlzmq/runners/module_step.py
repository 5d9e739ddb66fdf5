"""ModuleStep: computes the module's actions for a whole vector step, arrays in, arrays out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from numpy.typing import NDArray

from rlzmq.connectors.module_to_env import NormalizeAndClipActions, draw_actions, given_actions_logp
from rlzmq.core.spaces import actions_of_module
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import Columns
from rlzmq.modules.default_models.actor_critic import acting_chain
from rlzmq.modules.rl_module import TorchRLModule

__all__ = ["ModuleStep", "as_chosen", "initial_row", "to_numpy"]

_FLOAT64 = np.dtype(np.float64)


class ModuleStep:
    """Runs a module with the same results as the default connector pieces, without the per-episode dicts.

    Args:
        module: The RLModule, in eval mode.
        generator: Random generator for the actions.
        device: Device of the module; None: CPU.

    Attributes:
        is_stateful: Whether the module has a state.
        initial_arrays, initial_row: The initial state, a tree of arrays, or tensors, without batch dimension; None if
            stateless.
    """

    def __init__(self, module: Any, generator: torch.Generator, device: Any = None) -> None:
        self.module = module
        self.is_stateful: bool = bool(module.is_stateful())
        self._generator = generator
        self._seen: Any = None
        self._seen_tensor: Any = None
        self._device = None if device is None or str(device) == "cpu" else torch.device(device)
        self.initial_arrays: Any = initial_row(module)
        self.initial_row: Any = None
        if self.is_stateful:
            self.initial_row = tree_map(self._to_tensor, self.initial_arrays)
        self.begin(explore=True)

    def begin(self, *, explore: bool) -> None:
        """Choose between exploration and greedy inference for the following steps."""
        module = self.module
        self._explore = explore
        name = "forward_exploration" if explore else "forward_inference"
        self._forward = getattr(module, name)
        self._dist_cls: Any = None
        self._draws_with_logp = False  # as soon as the class is known: exploring, with log-probabilities
        # The modes and checks that TorchRLModule's public forward adds are already ensured here.
        is_plain = getattr(type(module), name, None) is getattr(TorchRLModule, name)
        self._inner_forward = getattr(module, f"_{name}") if is_plain else self._forward
        self._chain = acting_chain(module)

    def initial_state(self, num_rows: int) -> Any:
        """Return the module's initial state for ``num_rows`` rows: a tree of tensors ``[num_rows, ...]``."""
        return tree_map(lambda leaf: leaf.unsqueeze(0).repeat(num_rows, *[1] * leaf.dim()), self.initial_row)

    def reset_rows(self, state: object, rows: NDArray[np.int64]) -> Any:
        """Return a copy of the state with the given rows set to the initial state."""
        index = torch.from_numpy(rows)

        def reset(leaf: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
            if leaf.device.type == "cpu":  # numpy sets rows in a fifth of torch's time
                array = leaf.numpy().copy()
                array[rows] = initial.numpy()
                return torch.from_numpy(array)
            leaf = leaf.clone()
            leaf[index] = initial
            return leaf

        with torch.inference_mode():
            return tree_map(reset, state, self.initial_row)

    def forward(self, batch: dict[str, Any], t: int) -> Any:
        """Return the outputs of the module's forward pass for a batch that connector pieces made."""
        return self._forward(batch, t=t) if self._explore else self._forward(batch)

    def __call__(self, observations: object, state: object, t: int) -> tuple[dict[str, Any], Any]:
        """Compute actions, in torch's inference mode.

        Args:
            observations: Tree of arrays ``[N, ...]``; not modified, and read before the call returns.
            state: Tree of tensors ``[N, ...]`` for stateful modules, else None.
            t: Lifetime env steps of the whole run, for exploration schedules.

        Returns:
            Columns as arrays ``[N, ...]``, including actions, and the next state.

        Raises:
            ValueError: The module's outputs lack the columns for actions, or a state.
        """
        if observations is self._seen:
            inputs = self._seen_tensor  # shares the array's memory
        elif type(observations) is np.ndarray:
            inputs = self._to_tensor(observations)
            if self._device is None and observations.dtype is not _FLOAT64:
                self._seen, self._seen_tensor = observations, inputs
        else:
            inputs = tree_map(self._to_tensor, observations)
        chain = self._chain
        if chain is not None and chain.takes(inputs):
            logits, state_out = chain(inputs, state)
            actions, logp = self._sample(logits)
            acted: dict[str, Any] = {
                Columns.ACTION_DIST_INPUTS: logits.numpy(),
                Columns.ACTIONS: (
                    actions.numpy() if type(actions) is torch.Tensor else tree_map(to_numpy, actions)
                ),
                Columns.ACTION_LOGP: logp.numpy(),
            }
            if state_out is not None:
                acted[Columns.STATE_OUT] = tree_map(to_numpy, state_out)
            return acted, state_out
        if state is not None:
            return self._act_stateful(inputs, state, t)
        batch = {Columns.OBS: inputs}
        outputs = self._inner_forward(batch, t=t) if self._explore else self._inner_forward(batch)
        if type(outputs) is not dict or Columns.ACTION_DIST_INPUTS not in outputs:
            outputs = self._checked(outputs)
        outputs = self._with_logp(outputs)
        columns = {
            name: value.numpy() if type(value) is torch.Tensor else tree_map(to_numpy, value)
            for name, value in outputs.items()
        }
        if Columns.ACTIONS not in columns:
            actions, logp = self._sample(
                outputs[Columns.ACTION_DIST_INPUTS], Columns.ACTION_LOGP not in columns
            )
            columns[Columns.ACTIONS] = tree_map(to_numpy, actions)
            if logp is not None:
                columns[Columns.ACTION_LOGP] = to_numpy(logp)
        return columns, None

    def _act_stateful(self, inputs: object, state: object, t: int) -> tuple[dict[str, Any], Any]:
        batch = {Columns.OBS: tree_map(_add_time, inputs), Columns.STATE_IN: state}
        outputs = self._inner_forward(batch, t=t) if self._explore else self._inner_forward(batch)
        outputs = dict(self._with_logp(self._checked(outputs)))
        if Columns.ACTIONS not in outputs:
            actions, logp = self._sample(
                outputs[Columns.ACTION_DIST_INPUTS], Columns.ACTION_LOGP not in outputs
            )
            outputs[Columns.ACTIONS] = actions
            if logp is not None:
                outputs[Columns.ACTION_LOGP] = logp
        # Its own memory: the module may have returned a part of the observations, which the next step overwrites.
        state_out = tree_map(torch.clone, outputs[Columns.STATE_OUT])
        columns = {
            name: tree_map(to_numpy if name == Columns.STATE_OUT else _without_time, value)
            for name, value in outputs.items()
        }
        return columns, state_out

    def _with_logp(self, outputs: Any) -> Any:
        """Return the outputs, with log-probabilities if the module itself chose the actions while exploring."""
        if Columns.ACTIONS not in outputs or not self._explore:
            return outputs
        inputs = outputs.get(Columns.ACTION_DIST_INPUTS)
        if inputs is None or Columns.ACTION_LOGP in outputs:
            return outputs
        return {
            **outputs,
            **given_actions_logp(self._find_dist_cls().from_logits(inputs), outputs[Columns.ACTIONS]),
        }

    def _sample(self, inputs: torch.Tensor, wants_logp: bool = True) -> tuple[Any, Any]:
        """Return actions and their log-probabilities (or None), drawn as in GetActions."""
        dist_cls = self._dist_cls
        if dist_cls is None:
            dist_cls = self._find_dist_cls()
        distribution = dist_cls.from_logits(inputs)
        if wants_logp and self._draws_with_logp:
            drawn: tuple[Any, Any] = distribution.sample_and_logp(generator=self._generator)
        else:
            drawn = draw_actions(distribution, self._explore, self._generator, wants_logp=wants_logp)
        return drawn

    def _find_dist_cls(self) -> Any:
        if self._dist_cls is None:
            module = self.module
            self._dist_cls = (
                module.get_exploration_action_dist_cls()
                if self._explore
                else module.get_inference_action_dist_cls()
            )
            self._draws_with_logp = self._explore and getattr(self._dist_cls, "has_logp", True)
        return self._dist_cls

    def _checked(self, outputs: object) -> Any:
        method = "_forward_exploration" if self._explore else "_forward_inference"
        name = f"{type(self.module).__name__}.{method}"
        if not isinstance(outputs, Mapping):
            raise TypeError(f"{name} must return a dict of columns, got {type(outputs).__name__}.")
        if Columns.ACTIONS not in outputs and Columns.ACTION_DIST_INPUTS not in outputs:
            raise ValueError(
                f"{name} returned the columns {sorted(outputs)}; expected 'action_dist_inputs' (actions are "
                "then sampled from it) or 'actions'."
            )
        if self.is_stateful and Columns.STATE_OUT not in outputs:
            raise ValueError(
                f"{name} returned no 'state_out', only {sorted(outputs)}, but get_initial_state() is not "
                "empty: a stateful module returns its new state."
            )
        return outputs

    def _to_tensor(self, array: NDArray[Any]) -> torch.Tensor:
        if array.dtype is _FLOAT64:
            array = array.astype(np.float32)
        tensor = torch.from_numpy(array)
        return tensor if self._device is None else tensor.to(self._device)


def as_chosen(normalize: NormalizeAndClipActions | None, space: gym.Space[Any], actions: Any) -> Any:
    """Return the actions that a module would have chosen for these of the env, the inverse of `normalize`.

    Args:
        normalize: The piece that converts actions for the env; None: it changes none.
        space: The env's action space.
        actions: An action, or a tree of arrays ``[N, ...]`` of actions.
    """
    return (
        actions
        if normalize is None
        else actions_of_module(space, actions, scales=normalize.normalize_actions)
    )


def initial_row(module: Any) -> Any:
    """Return a module's state at an episode's start, a tree of arrays without batch dimension; None if stateless."""

    def as_array(leaf: object) -> NDArray[Any]:
        array = leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
        return array.astype(np.float32) if array.dtype == _FLOAT64 else array

    return tree_map(as_array, module.get_initial_state()) if module.is_stateful() else None


def _add_time(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.unsqueeze(1)


def to_numpy(leaf: object) -> Any:
    """Return a tensor's values as an array (a view if possible); convert anything else with numpy."""
    return leaf.cpu().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)


def _without_time(leaf: object) -> object:
    return to_numpy(leaf)[:, 0]
