"""StructureCache: values that depend on the submodules and tensors of modules; and their parameters as constants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

__all__ = ["StructureCache", "frozen", "has_convolutions", "parameters_of"]

T = TypeVar("T")


class StructureCache(Generic[T]):
    """A value computed from modules, e.g. a list of their tensors, recomputed when their structure has changed.

    The structure is the identity of every submodule, parameter and buffer. Comparing it costs a fraction of listing the
    tensors, which for small networks takes longer than copying them.

    Args:
        compute: Returns the value for a list of modules. It may depend only on their structure.
    """

    __slots__ = ("_compute", "_filled", "_held", "_modules", "_parts", "_sizes", "_value")

    def __init__(self, compute: Callable[[list[Any]], T]) -> None:
        self._compute = compute
        self._modules: list[Any] | None = None
        self._parts: list[dict[str, Any]] = []  # the parts of the modules
        self._sizes: list[int] = []  # sizes of the parts
        self._filled: list[dict[str, Any]] = []  # the parts that are not empty
        self._held: list[Any] = []  # their contents, in order
        self._value: T

    def of(self, modules: Iterable[Any]) -> T:
        """Return the value for these modules. Modules that are not an ``nn.Module`` have no structure."""
        modules = list(modules)
        if self._modules is None or not self._is_unchanged(modules):
            self._value = self._compute(modules)
            self._note(modules)
        return self._value

    def _is_unchanged(self, modules: list[Any]) -> bool:
        known = self._modules or []
        return (
            len(modules) == len(known)
            and all(map(is_, modules, known))
            and list(map(len, self._parts)) == self._sizes
            and all(map(is_, chain.from_iterable(map(dict.values, self._filled)), self._held))
        )

    def _note(self, modules: list[Any]) -> None:
        self._modules = modules
        self._parts = [
            held
            for module in modules
            if isinstance(module, nn.Module)
            for part in module.modules()
            for held in (part._modules, part._parameters, part._buffers)
        ]
        self._sizes = list(map(len, self._parts))
        self._filled = [part for part in self._parts if part]
        self._held = list(chain.from_iterable(map(dict.values, self._filled)))


def parameters_of(module: nn.Module) -> list[Tensor]:
    """Return a module's parameters, each once: ``module.parameters()`` at a fraction of its cost, in another order.

    Modules of the same structure have their parameters in the same order.
    """
    found: dict[int, Tensor] = {}
    parts = [module]
    for part in parts:  # grows
        for parameter in part._parameters.values():
            if parameter is not None:
                found[id(parameter)] = parameter
        parts += [inner for inner in part._modules.values() if inner is not None]
    return list(found.values())


def has_convolutions(modules: Iterable[Any]) -> bool:
    """Return whether one of the modules contains convolutions."""
    return any(
        isinstance(part, _ConvNd)
        for module in modules
        if isinstance(module, nn.Module)
        for part in module.modules()
    )


@contextmanager
def frozen(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Use parameters as constants in the block: a policy's loss does not train the critics that it asks."""
    trained = [p for p in parameters if p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
