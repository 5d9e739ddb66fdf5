"""StructureCache: values that depend on which submodules and tensors some modules hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any, Generic, TypeVar

from torch import nn

__all__ = ["StructureCache"]

T = TypeVar("T")


class StructureCache(Generic[T]):
    """A value computed from modules, e.g. a list of their tensors, recomputed when their structure changed.

    The structure is the identity of every submodule, parameter and buffer. Comparing it costs a fraction of listing the
    tensors of small networks, which takes longer than copying them.

    Args:
        compute: Returns the value for a list of modules. It may depend on nothing but their structure.
    """

    __slots__ = ("_compute", "_empty", "_filled", "_modules", "_value")

    def __init__(self, compute: Callable[[list[Any]], T]) -> None:
        self._compute = compute
        self._modules: list[Any] | None = None
        self._filled: list[tuple[dict[str, Any], tuple[Any, ...]]] = []  # what parts of modules hold
        self._empty: list[dict[str, Any]] = []  # where they hold nothing
        self._value: T

    def of(self, modules: Iterable[Any]) -> T:
        """Return the value for these modules; those that are no ``nn.Module`` have no structure."""
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
            and not any(self._empty)
            and all(
                len(held) == len(values) and all(map(is_, held.values(), values))
                for held, values in self._filled
            )
        )

    def _note(self, modules: list[Any]) -> None:
        self._modules, self._filled, self._empty = modules, [], []
        for module in modules:
            for part in module.modules() if isinstance(module, nn.Module) else ():
                for held in (part._modules, part._parameters, part._buffers):
                    if held:
                        self._filled.append((held, tuple(held.values())))
                    else:
                        self._empty.append(held)
