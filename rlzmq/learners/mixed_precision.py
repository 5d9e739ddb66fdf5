"""Mixed precision for learners: ``config.framework(torch_amp_dtype="bfloat16")``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tree import tree_map

__all__ = ["MixedPrecision"]

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


class MixedPrecision:
    """Runs the networks of modules under ``torch.autocast`` and returns their outputs in float32.

    Losses are computed outside of it, so probabilities, values and errors are float32, as are weights, gradients and
    the optimizers' state.

    Args:
        amp_dtype: ``config.torch_amp_dtype``.
        device: Device of the modules.

    Raises:
        ConfigurationError: The device has no bfloat16 arithmetic.
    """

    def __init__(self, amp_dtype: str, device: torch.device) -> None:
        if device.type == "cuda" and torch.version.hip is None:
            capability = torch.cuda.get_device_capability(device)
            if capability < _FIRST_CAPABILITY:
                raise ConfigurationError(
                    f"config.torch_amp_dtype={amp_dtype!r}: {device} has compute capability "
                    f"{capability[0]}.{capability[1]}, and bfloat16 needs 8.0 or above. Leave torch_amp_dtype at None, "
                    "or use another GPU."
                )
        self._device_type = device.type
        self._dtype: torch.dtype = getattr(torch, amp_dtype)
        # The functions are kept, since compiled code is compiled again for new ones.
        self._functions: dict[Any, dict[str, Callable[..., Any]]] = {}

    @contextmanager
    def on(self, modules: Any) -> Iterator[None]:
        """Run the networks in lower precision in the block, whoever calls them. Acting is not affected.

        Args:
            modules: The MultiRLModule.
        """
        # A MultiRLModule may also run networks outside of its modules, e.g. an encoder that they share.
        members = [modules, *(module.unwrapped() for module in modules.values())]
        self._functions = {
            module: self._functions.get(module) or self._functions_of(module) for module in members
        }
        own = [(vars(module), functions) for module, functions in self._functions.items()]
        replaced = [{name: of[name] for name in functions if name in of} for of, functions in own]
        try:
            for of, functions in own:
                of.update(functions)
            yield
        finally:
            for (of, functions), before in zip(own, replaced, strict=True):
                for name in functions:
                    del of[name]
                of.update(before)

    def _functions_of(self, module: Any) -> dict[str, Callable[..., Any]]:
        return {
            name: self._in_lower_precision(getattr(module, name))
            for name in _METHODS
            if hasattr(module, name)
        }

    def _in_lower_precision(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            # The cache would give weights that were first used under torch.no_grad() no gradients afterwards.
            with torch.autocast(self._device_type, self._dtype, cache_enabled=False):
                outputs = method(*args, **kwargs)
            return tree_map(self._to_float32, outputs)

        return run

    def _to_float32(self, leaf: Any) -> Any:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype is self._dtype else leaf
