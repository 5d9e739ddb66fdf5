"""Snapshot: the state of a learner, which is read and loaded by parts, and restored if an update fails."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlzmq.core.checkpoint import chosen_parts, without_objects
from rlzmq.core.errors import PeerLostError
from rlzmq.learners.distributed import DesynchronizedError
from rlzmq.learners.learner_report import LearnerReport, ReportedLearner
from rlzmq.modules.weights import StructureCache

__all__ = ["Snapshot", "parameter_hash"]

_COMPONENTS = (
    "rl_module",
    "optimizer",
    "weights_seq_no",
    "counters",
    "learner_connector",
    "metrics",
    "random",
    "extra",
    "source",
)
_OTHER_ALGORITHM = (
    ". Was it saved by another algorithm? Its weights alone are the component 'rl_module' (of an algorithm: "
    "'learner_group/learner/rl_module')."
)


class _Learner(ReportedLearner, Protocol):
    """What a snapshot reads and restores of its learner, and the hooks that a subclass's own state goes through."""

    report: LearnerReport
    seed: int
    scheduled_settings: ClassVar[Sequence[str]]

    def get_extra_state(self) -> dict[str, Any]: ...
    def set_extra_state(self, state: Mapping[str, Any]) -> None: ...


class Snapshot:
    """The state of a learner: modules, optimizers, counters, metrics, source, and what a subclass adds.

    As a context, it restores weights, optimizers, counters, metrics and source if the block, an update, raises: an
    update is applied completely or not at all. If a peer dies during the update, the survivors return to the weights
    that all of them had, and the update's data can be trained again. If the error arose on this rank (e.g. in a loss),
    the rank also leaves the group, so that its peers fail at once instead of waiting.

    Forward passes change only buffers, which are copied at the beginning. Weights and optimizers are copied by
    `complete`. If an interrupt comes after the only optimizer step of an update, before which that was not called, the
    step stays taken. The next update reuses the memory of the copies.

    Args:
        learner: The learner.
    """

    def __init__(self, learner: _Learner) -> None:
        self._learner = learner
        self._tensors = StructureCache(_tensors)
        self._buffers = _Copies()
        self._others = _Copies()  # parameters, then tensors of optimizer states
        self._parameters: list[Tensor] = []
        # Each optimizer with its state: parameters and their values.
        self._optimizers: list[tuple[Optimizer, list[tuple[Any, dict[str, Any]]]]] = []
        self._is_complete = False
        self._of_source: Any = None

    # -- updates -------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        learner = self._learner
        self._parameters, buffers = self._tensors.of(learner.module.values())
        self._buffers.take(buffers)
        self._is_complete = False
        metrics = learner.metrics.get_state() if learner.metrics else {}
        before = learner.weights_seq_no, self._counters(), metrics, learner.get_extra_state()
        self._before: tuple[int, dict[str, Any], Any, dict[str, Any]] = before
        self._of_source = learner.source.checkpoint()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        learner = self._learner
        self.undo_steps()
        learner.weights_seq_no, counters, metrics, extra = self._before
        self._set_counters(counters)
        learner.metrics.set_state(metrics)
        learner.set_extra_state(extra)
        if learner.ranks.group is not None and not isinstance(error, (PeerLostError, DesynchronizedError)):
            learner.ranks.leave()

    def complete(self) -> None:
        """Copy weights and optimizer states, once per update: before its first step, if anything may undo that step."""
        if self._is_complete:
            return
        self._is_complete = True
        saved = list(self._parameters)
        self._optimizers = []
        for entry in self._learner.optimizers.entries:
            state: list[tuple[Any, dict[str, Any]]] = []
            for parameter, values in entry.optimizer.state.items():
                kept = dict(values)
                state.append((parameter, kept))
                for key, value in values.items():
                    if type(value) is Tensor or isinstance(value, Tensor):
                        saved.append(value)
                    else:
                        kept[key] = copy.copy(value)
            self._optimizers.append((entry.optimizer, state))
        self._others.take(saved)

    def undo_steps(self) -> None:
        """Restore weights, optimizers and source to what they were before the current update."""
        self._buffers.restore()
        if self._is_complete:
            self._others.restore()
            for optimizer, state in self._optimizers:
                optimizer.state.clear()
                for parameter, values in state:
                    optimizer.state[parameter] = {
                        key: value if isinstance(value, Tensor) else copy.copy(value)
                        for key, value in values.items()
                    }
        self._learner.source.rollback(self._of_source)

    def restore_not_finite(self) -> None:
        """Restore the buffers that have become NaN or infinite, e.g. a BatchNorm's statistics."""
        for tensor, saved in zip(self._buffers.tensors, self._buffers.copies, strict=True):
            # One kernel: the sum is finite only if all elements are finite.
            may_not_be = tensor.is_floating_point() and not math.isfinite(tensor.detach().sum())
            if may_not_be and not bool(torch.isfinite(tensor).all()):
                tensor.detach().copy_(saved)

    # -- states --------------------------------------------------------------------------------------

    def get_state(
        self,
        components: str | Sequence[str] | None = None,
        not_components: str | Sequence[str] | None = None,
        inference_only: bool = False,
    ) -> dict[str, Any]:
        """See `Learner.get_state`."""
        learner = self._learner
        if components is None:
            components = [name for name in _COMPONENTS if name != "source"]
        state: dict[str, Any] = {}
        chosen = chosen_parts(_COMPONENTS, components, not_components, whose="a Learner's state")
        for name, (inside, outside) in chosen.items():
            if name == "rl_module":
                state[name] = learner.module.get_state(
                    inside, not_components=outside, inference_only=inference_only
                )
            elif name == "optimizer":
                state[name] = learner.optimizers.get_state(self._parameter_names())
            elif name == "weights_seq_no":
                state[name] = learner.weights_seq_no
            elif name == "counters":
                state[name] = self._counters()
            elif name == "learner_connector":
                state[name] = learner._learner_connector.get_state()
            elif name == "metrics":
                state[name] = without_objects(learner.metrics.get_state())
            elif name == "random":
                state[name] = {"seed": learner.seed}
            elif name == "source":
                state[name] = learner.source.get_state()
            else:
                state[name] = learner.get_extra_state()
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """See `Learner.set_state`."""
        learner = self._learner
        chosen_parts(_COMPONENTS, list(state), whose="a Learner's state")
        if "counters" in state:
            self._check_counters(state["counters"])
        if "rl_module" in state:
            learner.module.set_state(state["rl_module"])
        if "optimizer" in state:
            learner.optimizers.set_state(state["optimizer"], self._parameter_names())
        if "weights_seq_no" in state:
            learner.weights_seq_no = int(state["weights_seq_no"])
        if "counters" in state:
            self._set_counters(state["counters"])
        if state.get("learner_connector"):
            learner._learner_connector.set_state(state["learner_connector"])
        if "metrics" in state:
            learner.metrics.set_state(state["metrics"])
        if "random" in state:
            learner.seed = int(state["random"]["seed"])
        if "extra" in state:
            try:
                learner.set_extra_state(state["extra"])
            except KeyError as error:
                raise self._misfit(f"{error} in 'extra'") from error
        if state.get("source"):
            learner.source.set_state(state["source"])

    def parameter_hash(self, with_buffers: bool) -> str:
        """See `Learner.parameter_hash`."""
        named: dict[str, Any] = {}
        for module_id, values in self._learner.module.get_state().items():
            of = self._learner.module.get(module_id)
            buffers = dict(of.named_buffers()) if isinstance(of, nn.Module) and not with_buffers else {}
            named |= {f"{module_id}/{name}": value for name, value in values.items() if name not in buffers}
        return parameter_hash(named)

    def _counters(self) -> dict[str, Any]:
        learner = self._learner
        counters = learner.report.get_counters()
        counters["coefficients"] = {}
        for setting, by_module in learner.optimizers.coefficients.items():
            counters["coefficients"][setting] = {**by_module}
        if learner.source.progress is not None:
            counters["source_progress"] = learner.source.progress.get_state()
        return counters

    def _set_counters(self, counters: Mapping[str, Any]) -> None:
        learner = self._learner
        learner.report.set_counters(counters)
        for setting, by_module in counters["coefficients"].items():
            learner.optimizers.set_coefficients(
                setting, {m: float(value) for m, value in by_module.items() if m in learner.module}
            )
        if learner.source.progress is not None and "source_progress" in counters:
            learner.source.progress.set_state(counters["source_progress"])

    def _check_counters(self, counters: Mapping[str, Any]) -> None:
        mine, optional = self._counters(), "source_progress"
        missing = [name for name in mine if name not in counters and name != optional]
        settings, progress = counters.get("coefficients", ()), counters.get(optional)
        missing += [name for name in self._learner.scheduled_settings if name not in settings]
        if progress is not None:
            missing += [name for name in mine.get(optional, ()) if name not in progress]
        if missing:
            raise self._misfit(f"the counts {', '.join(missing)}")

    def _misfit(self, what: str) -> ValueError:
        name = type(self._learner).__name__
        return ValueError(f"{name}: the state does not fit; it lacks {what}{_OTHER_ALGORITHM}")

    def _parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for module in self._learner.module.values():
            if isinstance(module, nn.Module):
                names.update((id(p), name) for name, p in module.named_parameters())
        return names


def _tensors(modules: list[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return all parameters and all buffers."""
    networks = [module for module in modules if isinstance(module, nn.Module)]
    parameters: list[Tensor] = [p for module in networks for p in module.parameters()]
    return parameters, [buffer for module in networks for buffer in module.buffers()]


class _Copies:
    """Tensors with copies of their values."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.copies: list[Tensor] = []
        self._addresses: list[int] = []  # of the tensors; they change with ``tensor.data = …``

    def take(self, tensors: list[Tensor]) -> None:
        if not tensors and not self.tensors:
            return
        with torch.no_grad():
            addresses = list(map(Tensor.data_ptr, tensors))
            if addresses == self._addresses and all(map(is_, tensors, self.tensors)):
                torch._foreach_copy_(self.copies, tensors)
            else:
                self.tensors, self._addresses = tensors, addresses
                self.copies = [tensor.detach().clone() for tensor in tensors]

    def restore(self) -> None:
        with torch.no_grad():
            for tensor, value in zip(self.tensors, self.copies, strict=True):
                tensor.copy_(value)


def parameter_hash(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 (hex) of named tensors or arrays: names, dtypes, shapes and all bits of their values.

    Args:
        state: A state dict, e.g. ``module.state_dict()``; the order of names does not matter.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
