"""How torch runs a learner: device, threads, random numbers, ``torch.compile`` and mixed precision."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.process import num_usable_cores
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tree import tree_map
from rlzmq.modules.weights import has_convolutions

__all__ = [
    "UNCHANGED",
    "LearnerCompiler",
    "MixedPrecision",
    "auto_num_threads",
    "learner_device",
    "seeded",
    "set_torch_threads",
    "torch_threads",
]

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

    def compile_module(self, module: object) -> None:
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

    def _functions_of(self, module: object) -> dict[str, Callable[..., Any]]:
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

    def _to_float32(self, leaf: object) -> object:
        return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype is self._dtype else leaf


# Of a learner that chooses the number itself. Two were measured; minibatches of images are too small for very many.
_MAX_AUTO_THREADS = 8
UNCHANGED = nullcontext()


def learner_device(config: BaseConfig, rank: int) -> torch.device:
    """Return the device of a learner: the CPU, or a GPU of this machine, chosen by its rank."""
    wanted, num_learners = getattr(config, "num_gpus_per_learner", 0), getattr(config, "num_learners", 0)
    num_gpus = torch.cuda.device_count() if wanted and torch.cuda.is_available() else 0
    is_auto = wanted == "auto"
    if is_auto:  # NCCL needs a GPU for each rank, and ranks on other machines must decide alike
        wanted = num_gpus >= max(1, num_learners) and not getattr(config, "num_remote_learners", 0)
    if not wanted:
        return torch.device("cpu")
    if not num_gpus:
        raise RuntimeError(
            f"num_gpus_per_learner={wanted}, but torch sees no CUDA device here: "
            "set num_gpus_per_learner=0 or install a CUDA build of torch."
        )
    local = getattr(config, "local_gpu_idx", 0) if num_learners == 0 else rank
    device = torch.device("cuda", local % num_gpus)
    if is_auto:
        name = torch.cuda.get_device_name(device)
        print(f"learner {rank} trains on {name} ({device}): num_gpus_per_learner is 'auto'", file=sys.stderr)
    return device


def set_torch_threads(config: BaseConfig) -> None:
    """Set the number of torch threads with which a process starts: one if ``config.torch_num_threads`` is "auto"."""
    num_threads = 1 if config.torch_num_threads == "auto" else config.torch_num_threads
    if num_threads > 1:
        _use_one_thread_in_forks()
    torch.set_num_threads(num_threads)


def auto_num_threads(config: BaseConfig, device: torch.device, modules: Iterable[Any], num_ranks: int) -> int:
    """Return the number of torch threads that pays for each of the ranks on this host.

    Networks without convolutions are mostly faster on one.
    """
    if device.type != "cpu" or not has_convolutions(modules):
        return 1
    samples_meanwhile = config.update_plan().staleness > 0
    num_free = num_usable_cores() - (config.num_env_runners if samples_meanwhile else 0)
    return min(_MAX_AUTO_THREADS, max(1, num_free // num_ranks))


def torch_threads(num_threads: int | None) -> AbstractContextManager[None]:
    """Use this number of torch threads in the block and restore the number afterwards; None: no change."""
    if num_threads is None:
        return UNCHANGED
    if num_threads > 1:
        _use_one_thread_in_forks()
    before = torch.get_num_threads()
    return UNCHANGED if num_threads == before else _changed_threads(num_threads, before)


@contextmanager
def _changed_threads(num_threads: int, before: int) -> Iterator[None]:
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators for a device in the block, and restore them afterwards."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    before = list(map(torch.Generator.get_state, generators))
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


@functools.cache
def _use_one_thread_in_forks() -> None:
    """Make forked processes, e.g. vector envs' workers, use one torch thread: threads of the parent are missing there.

    Without this, a worker that uses torch waits for them forever.
    """
    if hasattr(os, "register_at_fork"):  # where processes fork
        os.register_at_fork(after_in_child=functools.partial(torch.set_num_threads, 1))
