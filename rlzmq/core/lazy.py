"""Modules and names that are imported on first use."""

from __future__ import annotations

import dis
import importlib
import itertools
import sys
from typing import Any

__all__ = ["LazyModule", "names_to_load"]


class LazyModule:
    """Proxy of a module that is slow to import. The first attribute access imports it.

    Type checkers also need the import itself, under ``if TYPE_CHECKING``.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def names_to_load(package: str) -> dict[str, str]:
    """Return the names that a package imports under ``if TYPE_CHECKING``, with their modules relative to the package.

    Args:
        package: The package's ``__name__``. Its bytecode is read: nothing there is executed, and applications
            may be shipped without sources.
    """
    code = sys.modules[package].__spec__.loader.get_code(package)  # type: ignore[union-attr]
    # Beyond 255 names, arguments have a part in an instruction of its own.
    instructions = [one for one in dis.get_instructions(code) if one.opname != "EXTENDED_ARG"]
    begin = next(index for index, instruction in enumerate(instructions) if "JUMP" in instruction.opname)
    found = {}
    for before, instruction in itertools.pairwise(instructions[begin:]):
        if instruction.offset >= instructions[begin].argval:  # the end of the block
            break
        if instruction.opname == "IMPORT_NAME":
            module, names = instruction.argval, before.argval
            if names == ("*",):  # only of modules that consist of constants
                names = [name for name in vars(importlib.import_module(module)) if not name.startswith("_")]
            found.update(dict.fromkeys(names, module.removeprefix(f"{package}.")))
    return found
