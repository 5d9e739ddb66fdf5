"""torch.compile for learners: ``config.framework(torch_compile_learner=True, …)``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean

__all__ = ["LearnerCompiler"]


class LearnerCompiler:
    """Compiles the parts that the config names, with its backend and mode.

    Args:
        config: Read for ``torch_compile_learner_what_to_compile``, ``…_dynamo_backend`` and ``…_dynamo_mode``.
        device: Device of the modules.

    Raises:
        ConfigurationError: The backend does not exist, or fails to compile ``x + 1`` on this machine.
    """

    def __init__(self, config: BaseConfig, device: torch.device) -> None:
        import torch._dynamo

        self._backend: str = config.torch_compile_learner_dynamo_backend
        self._mode: str | None = config.torch_compile_learner_dynamo_mode
        self.compiles_complete_update: bool = (
            config.torch_compile_learner_what_to_compile == "complete_update"
        )
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

    def compile_losses(self, losses: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a learner's function of a minibatch's losses, compiled with its backward pass."""
        return self._compile_in_parts(losses)

    def compile_module(self, module: Any) -> None:
        """Compile the module's training forward pass. Modules without one are unchanged."""
        if isinstance(module, torch.nn.Module):
            forward = self._compile_in_parts(module._forward_train)  # type: ignore[arg-type]
            object.__setattr__(module, "_forward_train", forward)

    def _compile_in_parts(self, function: Callable[..., Any]) -> Callable[..., Any]:
        compiled = self.compile(function)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with warnings.catch_warnings():
                # Dynamo reads the .grad of tensors between two of its graphs, and instantiates autograd functions.
                warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
                warnings.filterwarnings("ignore", message=".*autograd.function.Function.*instantiated")
                return compiled(*args, **kwargs)

        return run


def _add_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1
