"""One act of a module on a whole vector step: arrays in, arrays out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import Columns

__all__ = ["ModuleStep", "to_numpy"]

_MISSING_OUTPUTS = (
    "{module}.{forward}() returned the columns {got}; expected 'action_dist_inputs' (actions are then "
    "sampled from it) or 'actions'."
)


class ModuleStep:
    """Runs a module the way the default connector pieces do, without the per-episode dicts.

    Args:
        module: The RLModule, in eval mode.
        generator: Where the randomness of actions comes from.
        device: Where the module is; None: CPU.

    Attributes:
        is_stateful: Whether the module has a state.
        initial_row: Its initial state, a tree of tensors without batch dimension; None if stateless.
    """

    def __init__(self, module: Any, generator: torch.Generator, device: Any = None) -> None:
        self.module = module
        self.is_stateful: bool = bool(module.is_stateful())
        self._generator = generator
        self._device = None if device is None or str(device) == "cpu" else torch.device(device)
        self.initial_row: Any = None
        if self.is_stateful:
            self.initial_row = tree_map(self._to_tensor, tree_map(_as_array, module.get_initial_state()))
        self.begin(explore=True)

    def begin(self, *, explore: bool) -> None:
        """Chooses between exploration and greedy inference for the following steps."""
        module = self.module
        self._explore = explore
        self._forward = module.forward_exploration if explore else module.forward_inference
        self._dist_cls: Any = None

    def initial_state(self, num_rows: int) -> Any:
        """The module's initial state for so many rows: a tree of tensors ``[num_rows, ...]``."""
        return tree_map(lambda leaf: leaf.unsqueeze(0).repeat(num_rows, *[1] * leaf.dim()), self.initial_row)

    def reset_rows(self, state: Any, rows: NDArray[np.int64]) -> Any:
        """The state with the given rows set to the initial state (a copy)."""
        index = torch.from_numpy(rows)

        def reset(leaf: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
            leaf = leaf.clone()
            leaf[index] = initial
            return leaf

        with torch.inference_mode():
            return tree_map(reset, state, self.initial_row)

    @property
    def initial_row_numpy(self) -> Any:
        """``initial_row`` as arrays."""
        return tree_map(to_numpy, self.initial_row)

    def forward(self, batch: dict[str, Any], t: int) -> Any:
        """The module's forward pass alone, on a batch that connector pieces made."""
        with torch.inference_mode():
            return self._forward(batch, t=t) if self._explore else self._forward(batch)

    def __call__(self, observations: Any, state: Any, t: int) -> tuple[dict[str, Any], Any]:
        """Acts.

        Args:
            observations: Tree of arrays ``[N, ...]``, not changed, read before the call returns.
            state: Tree of tensors ``[N, ...]`` for stateful modules, else None.
            t: Lifetime env steps of the whole run, for exploration schedules.

        Returns:
            Columns as arrays ``[N, ...]``, actions among them; and the state to go on with.

        Raises:
            ValueError: The module's outputs lack what actions are made of.
        """
        with torch.inference_mode():
            if isinstance(observations, np.ndarray):
                batch = {Columns.OBS: self._to_tensor(observations)}
            else:
                batch = {Columns.OBS: tree_map(self._to_tensor, observations)}
            if state is not None:
                batch[Columns.OBS] = tree_map(_add_time, batch[Columns.OBS])
                batch[Columns.STATE_IN] = state
            outputs = self._forward(batch, t=t) if self._explore else self._forward(batch)
            if Columns.ACTIONS not in outputs:
                outputs = self._with_actions(outputs)
            columns: dict[str, Any] = {}
            if state is None:
                for name, value in outputs.items():
                    columns[name] = (
                        value.numpy() if type(value) is torch.Tensor else tree_map(to_numpy, value)
                    )
                return columns, None
            state_out = outputs.get(Columns.STATE_OUT)
            if state_out is None:
                raise ValueError(
                    f"{type(self.module).__name__} is stateful (get_initial_state() is not empty), but its "
                    f"forward pass returned no 'state_out', only {sorted(outputs)}."
                )
            for name, value in outputs.items():
                columns[name] = tree_map(to_numpy if name == Columns.STATE_OUT else _without_time, value)
            return columns, state_out

    def _with_actions(self, outputs: Any) -> dict[str, Any]:
        inputs = outputs.get(Columns.ACTION_DIST_INPUTS) if isinstance(outputs, dict) else None
        if inputs is None:
            forward = "_forward_exploration" if self._explore else "_forward_inference"
            got = sorted(outputs) if isinstance(outputs, dict) else type(outputs).__name__
            raise ValueError(
                _MISSING_OUTPUTS.format(module=type(self.module).__name__, forward=forward, got=got)
            )
        if self._dist_cls is None:
            module = self.module
            self._dist_cls = (
                module.get_exploration_action_dist_cls()
                if self._explore
                else module.get_inference_action_dist_cls()
            )
        dist = self._dist_cls.from_logits(inputs)
        if not self._explore:
            dist = dist.to_deterministic()
        actions, logp = dist.sample_and_logp(generator=self._generator)
        outputs = dict(outputs)
        outputs[Columns.ACTIONS] = actions
        if Columns.ACTION_LOGP not in outputs:
            outputs[Columns.ACTION_LOGP] = logp
        return outputs

    def _to_tensor(self, array: NDArray[Any]) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if tensor.dtype is torch.float64:
            tensor = tensor.float()
        return tensor if self._device is None else tensor.to(self._device)


def _as_array(leaf: Any) -> NDArray[Any]:
    return leaf.detach().cpu().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)


def _add_time(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.unsqueeze(1)


def to_numpy(leaf: Any) -> Any:
    """A tensor's values as an array (a view where it can be one); anything else through numpy."""
    return leaf.cpu().numpy() if isinstance(leaf, torch.Tensor) else np.asarray(leaf)


def _without_time(leaf: Any) -> Any:
    return to_numpy(leaf)[:, 0]
