"""WeightsLayout: a module's weights as one flat block of bytes, for publishing and loading."""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from rlzmq.episodes.columns import DEFAULT_MODULE_ID
from rlzmq.modules.rl_module import TorchRLModule

__all__ = [
    "StructureCache",
    "WeightsLayout",
    "frozen",
    "has_convolutions",
    "is_trainable",
    "parameters_of",
]


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


def is_trainable(module: object) -> bool:
    """Return whether a module has trainable parameters."""
    parts: list[nn.Module | None] = [module] if isinstance(module, nn.Module) else []
    while parts:  # depth first: the first dense layer mostly has one
        part = parts.pop()
        if part is not None:
            for parameter in part._parameters.values():
                if parameter is not None and parameter.requires_grad:
                    return True
            parts += reversed(part._modules.values())
    return False


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


# Every tensor starts at a multiple of this, as torch's own tensors do, so that views of the block compute the same.
_ALIGNMENT = 64
# Copying smaller blocks takes less time than the memory's pages do that a module reads first.
_MIN_KEPT_BYTES = 1 << 20


class _Slot(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class WeightsLayout:
    """The positions of the tensors of a module's state in a flat block of bytes.

    Tensors are in sorted order of ``"module_id/parameter"``, each aligned to 64 bytes, in native byte order. Two
    processes whose layouts have the same :attr:`digest` can exchange blocks.

    Attributes:
        num_bytes: Size of the block.
        digest: Hex SHA-256 of names, shapes and dtypes.
        names: ``"module_id/parameter"`` of every tensor, in order.

    Example:
        >>> layout = WeightsLayout.of(learner.module)
        >>> block = layout.snapshot(learner.module)
        >>> WeightsLayout.of(runner.module).load(runner.module, block)
    """

    __slots__ = ("_inference_only", "_listed", "_module_ids", "_slots", "digest", "names", "num_bytes")

    def __init__(
        self, slots: list[_Slot], *, inference_only: bool, module_ids: Collection[str] | None = None
    ) -> None:
        self._slots = slots
        self._inference_only = inference_only
        self._module_ids = module_ids
        self._listed: weakref.WeakKeyDictionary[Any, StructureCache[list[Tensor] | None]] = (
            weakref.WeakKeyDictionary()
        )
        self.names: list[str] = [slot.name for slot in slots]
        self.num_bytes: int = slots[-1].start + slots[-1].num_bytes if slots else 0
        facts = [[slot.name, list(slot.shape), str(slot.dtype)] for slot in slots]
        self.digest: str = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @classmethod
    def of(
        cls, module: object, inference_only: bool = True, module_ids: Collection[str] | None = None
    ) -> WeightsLayout:
        """Return the layout of a module's weights.

        Args:
            module: A MultiRLModule, or a single TorchRLModule (used as ``"default_policy"``).
            inference_only: Whether to include only the parts that acting needs, and no learner-only modules. A full
                module and its inference-only copy then have the same layout.
            module_ids: Ids of a MultiRLModule's modules to include; None: all.
        """
        slots, end = [], 0
        for name, tensor in _named_tensors(module, inference_only, module_ids):
            start = -(-end // _ALIGNMENT) * _ALIGNMENT
            num_bytes = tensor.numel() * tensor.element_size()
            slots.append(_Slot(name, tensor.dtype, tuple(tensor.shape), start, num_bytes))
            end = start + num_bytes
        return cls(slots, inference_only=inference_only, module_ids=module_ids)

    def snapshot(self, module: object, out: np.ndarray | None = None) -> np.ndarray:
        """Return a copy of the module's weights as one block.

        Args:
            module: A module of this layout.
            out: uint8 ``[num_bytes]`` to write into; None: a new array.

        Returns:
            uint8 ``[num_bytes]``.

        Raises:
            ValueError: The module has another layout, or ``out`` another size or dtype.
        """
        if out is None:
            out = _aligned_zeros(self.num_bytes)
        elif out.dtype != np.uint8 or out.shape != (self.num_bytes,):
            raise ValueError(
                f"snapshot: expected out to be uint8 of shape ({self.num_bytes},), "
                f"got {out.dtype} of {out.shape}"
            )
        if not self._slots:
            return out
        tensors = self._tensors(module)
        if not out.flags.aligned or out.ctypes.data % _ALIGNMENT:
            out[:] = self.snapshot(module)
            return out
        with torch.no_grad():
            torch._foreach_copy_(self._views(torch.from_numpy(out)), tensors)
        return out

    def load(self, module: object, buffer: Any, *, may_keep: bool = False) -> None:
        """Copy a block into the module's weights.

        Args:
            module: A module of this layout.
            buffer: ``num_bytes`` bytes: bytes, memoryview, or a uint8 array.
            may_keep: Whether large weights of a default module may be this memory itself, instead of a copy, until the
                next call. It must be writable, but nobody else may change it.

        Raises:
            ValueError: The block has another size, or the module another layout. No weights were loaded.
        """
        block = np.frombuffer(buffer, np.uint8)
        if block.size != self.num_bytes:
            raise ValueError(
                f"weights of {block.size} bytes do not fit: this module's inference weights take "
                f"{self.num_bytes} bytes (layout {self.digest[:12]}). Do both sides build the same module?"
            )
        if not self._slots:
            return
        tensors = self._tensors(module)
        if may_keep and self._can_keep(module, block):
            for tensor, view in zip(tensors, self._views(torch.from_numpy(block)), strict=True):
                tensor.data = view
            return
        if not block.flags.writeable:
            # torch warns about read-only memory, although it is only read here.
            block = np.asarray(_ClaimsWritable(block))
        if block.ctypes.data % _ALIGNMENT:
            aligned = _aligned_zeros(block.size)
            aligned[:] = block
            block = aligned
        with torch.no_grad():
            torch._foreach_copy_(tensors, self._views(torch.from_numpy(block)))

    def _can_keep(self, module: object, block: np.ndarray) -> bool:
        """Return whether a block can be the module's weights: others than default modules might hold views of them."""
        return (
            block.size >= _MIN_KEPT_BYTES
            and block.flags.writeable
            and not block.ctypes.data % _ALIGNMENT
            and all(
                type(single).__module__.startswith("rlzmq.")
                for _, single in _selected(module, self._module_ids)
            )
        )

    def copy(self, source: object, target: object) -> None:
        """Copy the weights of one module to another one in the same process; both have this layout.

        Raises:
            ValueError: One of them has another layout. No weights were copied.
        """
        tensors = self._tensors(source)
        with torch.set_grad_enabled(False):  # less than half of the cost of torch.no_grad()
            torch._foreach_copy_(self._tensors(target), tensors) if tensors else None

    def _views(self, flat: Tensor) -> list[Tensor]:
        views = []
        for slot in self._slots:
            piece = flat[slot.start : slot.start + slot.num_bytes]
            views.append(piece.view(slot.dtype).view(slot.shape))
        return views

    def _tensors(self, module: object) -> list[Tensor]:
        modules: list[Any] = []  # modules with their ids
        for module_id, single in _selected(module, self._module_ids):
            modules += module_id, single
        cache = self._listed.get(module)
        if cache is None:
            of = weakref.ref(module)  # so that the entry does not keep the module alive
            cache = self._listed[module] = StructureCache(
                lambda modules: self._list_tensors(of()) if _are_listed_by_structure(modules[1::2]) else None
            )
        tensors = cache.of(modules)
        return self._list_tensors(module) if tensors is None else tensors

    def _list_tensors(self, module: object) -> list[Tensor]:
        found = list(_named_tensors(module, self._inference_only, self._module_ids))
        if len(found) == len(self._slots) and all(
            name == slot.name and tensor.shape == slot.shape and tensor.dtype == slot.dtype
            for (name, tensor), slot in zip(found, self._slots, strict=True)
        ):
            return [tensor for _, tensor in found]
        theirs = dict(found)
        wrong = next(
            (s.name for s in self._slots if s.name not in theirs or theirs[s.name].shape != s.shape),
            next((name for name in theirs if name not in self.names), "a dtype"),
        )
        raise ValueError(
            f"the module's weights differ from the layout {self.digest[:12]} in {wrong!r}: make a new "
            "WeightsLayout after a module was added, removed or rebuilt"
        )


def _named_tensors(
    module: object, inference_only: bool, module_ids: Collection[str] | None
) -> Iterator[tuple[str, Tensor]]:
    pairs = []
    for module_id, single in _selected(module, module_ids):
        if not hasattr(single, "state_dict") or (inference_only and single.learner_only):
            continue
        tensors = single.inference_state_dict() if inference_only else single.state_dict(keep_vars=True)
        pairs += [(f"{module_id}/{name}", tensor) for name, tensor in tensors.items()]
    pairs.sort(key=lambda pair: pair[0])
    return iter(pairs)


def _selected(module: object, module_ids: Collection[str] | None) -> list[tuple[str, Any]]:
    modules = list(module.items()) if hasattr(module, "items") else [(DEFAULT_MODULE_ID, module)]
    return modules if module_ids is None else [pair for pair in modules if pair[0] in module_ids]


def _are_listed_by_structure(modules: list[Any]) -> bool:
    """Return whether equal submodules and tensors always give equal state dicts, by reference."""
    return all(
        type(module).inference_state_dict is TorchRLModule.inference_state_dict
        and all(map(_saves_by_reference, module.modules()))
        for module in modules
        if hasattr(module, "state_dict")
    )


def _saves_by_reference(part: nn.Module) -> bool:
    kind = type(part)
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and kind.get_extra_state is nn.Module.get_extra_state
        and not part._state_dict_hooks
        and not part._state_dict_pre_hooks
    )


def _aligned_zeros(num_bytes: int) -> np.ndarray:
    block = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return block[start : start + num_bytes]


class _ClaimsWritable:
    """Presents read-only memory as a writable array, for tensors that are only read."""

    def __init__(self, block: np.ndarray) -> None:
        self.__array_interface__ = {**block.__array_interface__, "data": (block.ctypes.data, False)}
        self._keep = block
