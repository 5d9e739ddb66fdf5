"""How torch runs a learner's networks: ``torch.compile`` and mixed precision."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tree import tree_map

__all__ = ["Execution"]

# The methods with which learners run a module's networks.
_METHODS = (
    "forward_train",
    "forward_target",
    "compute_values",
    "compute_q_values",
    "compute_advantage_distribution",
    "values_of_sampled_actions",
)

# NVIDIA's first GPUs with bfloat16 arithmetic (Ampere). Others emulate it, slower than float32.
_FIRST_CAPABILITY = (8, 0)


class Execution:
    """Runs a learner's networks as configured: compiled, under ``torch.autocast``, or as they are.

    With autocast, outputs are float32. Losses are computed outside of it, so probabilities, values and errors are
    float32, as are weights, gradients and the optimizers' state.

    Args:
        config: Read for ``torch_compile_learner…`` and ``torch_amp_dtype``.
        device: Device of the modules.

    Attributes:
        is_compiled: Whether something is compiled.
        compiles_complete_update: Whether it is the forward pass with the losses.

    Raises:
        ConfigurationError: The backend does not exist, or fails to compile ``x + 1`` on this machine; or the device has
            no bfloat16 arithmetic.
    """

    def __init__(self, config: BaseConfig, device: torch.device) -> None:
        self._backend: str = config.torch_compile_learner_dynamo_backend
        self._mode: str | None = config.torch_compile_learner_dynamo_mode
        self.is_compiled: bool = config.torch_compile_learner
        what = config.torch_compile_learner_what_to_compile
        self.compiles_complete_update: bool = self.is_compiled and what == "complete_update"
        if self.is_compiled:
            self._check_backend(device)
        self._device_type = device.type
        self._dtype: torch.dtype | None = None
        if config.torch_amp_dtype is not None:
            self._dtype = getattr(torch, config.torch_amp_dtype)
            _check_arithmetic(config.torch_amp_dtype, device)

    def _check_backend(self, device: torch.device) -> None:
        import torch._dynamo

        known = torch._dynamo.list_backends(exclude_tags=())
        if self._backend not in known:
            raise ConfigurationError(
                f"config.torch_compile_learner_dynamo_backend={self._backend!r}: torch {torch.__version__} has no "
                f"such backend, but {', '.join(known)}.{did_you_mean(self._backend, known)}"
            )
        if self._mode is not None and self._backend != "inductor":
            raise ConfigurationError(
                f"config.torch_compile_learner_dynamo_mode={self._mode!r}: the backend {self._backend!r} has no "
                "modes, only 'inductor' has."
            )
        try:
            self.compile(_add_one)(torch.zeros(2, device=device))
        except Exception as error:
            raise ConfigurationError(
                f"config.torch_compile_learner: the backend {self._backend!r} (mode {self._mode!r}) cannot be used "
                f"here, it fails even on x + 1 on {device}: {type(error).__name__}: {str(error)[:500]} "
                "('inductor' needs a C++ compiler on the CPU, Triton on a GPU; 'aot_eager' needs nothing.)"
            ) from error

    def compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, which compiles itself at its first call and for new shapes."""
        return torch.compile(function, backend=self._backend, mode=self._mode)

    def prepare(self, module: object) -> None:
        """Let a module's networks run as configured from now on. Modules without networks are unchanged.

        Args:
            module: An RLModule, or the MultiRLModule, which may run networks outside of its modules, e.g. an encoder
                that they share.
        """
        if self.is_compiled and not self.compiles_complete_update and isinstance(module, torch.nn.Module):
            _replace(module, "_forward_train", self.compile_in_parts)
        if self._dtype is not None:
            for name in [name for name in _METHODS if hasattr(module, name)]:
                _replace(module, name, self._lowered)

    def compile_in_parts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of a module, or of a minibatch's losses, compiled with its backward pass."""
        compiled = self.compile(function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with warnings.catch_warnings():
                # Dynamo reads the .grad of tensors between two of its graphs, and instantiates autograd functions.
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
                warnings.filterwarnings("ignore", message=".*autograd.function.Function.*instantiated")
                return compiled(*args, **kwargs)

        return run

    def _lowered(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            # The cache would give weights that were first used under torch.no_grad() no gradients afterwards.
            with torch.autocast(self._device_type, self._dtype, cache_enabled=False):
                outputs = method(*args, **kwargs)
            return tree_map(self._to_float32, outputs)

        return run

    def _to_float32(self, leaf: object) -> object:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype is self._dtype else leaf


def _replace(module: object, name: str, prepared: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a module's method. The new one is bound, so that a deep copy of the module has one of its own."""
    object.__setattr__(module, name, MethodType(prepared(getattr(type(module), name)), module))


def _check_arithmetic(amp_dtype: str, device: torch.device) -> None:
    if device.type == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(device)
        if capability < _FIRST_CAPABILITY:
            raise ConfigurationError(
                f"config.torch_amp_dtype={amp_dtype!r}: {device} has compute capability "
                f"{capability[0]}.{capability[1]}, and bfloat16 needs 8.0 or above. Leave torch_amp_dtype at None, "
                "or use another GPU."
            )


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1
