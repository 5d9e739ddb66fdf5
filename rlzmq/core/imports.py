"""Imports: on first use, of optional packages with the command that installs them, and failures explained."""

from __future__ import annotations

import difflib
import dis
import importlib
import importlib.machinery
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from pkgutil import iter_modules
from traceback import walk_tb
from types import FrameType, ModuleType, TracebackType
from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import RLLIB_PACKAGES, did_you_mean, instead_of, instead_of_algorithm

__all__ = [
    "LazyModule",
    "MissingNameFinder",
    "MissingPackageError",
    "hidden_modules",
    "import_failure",
    "import_optional",
    "names_to_load",
]


# What RLlib has in `ray.rllib.core`, which is also a package here, and rlzmq's own does not have.
_RLLIB_CORE = ("columns", "distribution", "learner", "models", "rl_module", "testing")


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


class MissingPackageError(ConfigurationError, ImportError):
    """An optional package is not installed."""


def import_optional(module: str, what: str, install: str) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: The module's full name.
        what: The feature that needs it, e.g. ``"A video"``.
        install: The argument of ``pip install``, e.g. ``"rlzmq[video]"``.

    Raises:
        MissingPackageError: The module cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = f"'{install}'" if "[" in install else install
        raise MissingPackageError(
            f"{what} needs {module.partition('.')[0]}: pip install {name} ({error})."
        ) from error


class _RLlibModule(ModuleType):
    """A module that only RLlib has (``rlzmq.core.rl_module.rl_module``), with rlzmq's names, wherever these are."""

    def __getattr__(self, name: str) -> Any:
        parent, _, _ = self.__name__.rpartition(".")
        places = parent, "rlzmq", RLLIB_PACKAGES[self.__name__.split(".")[1]]
        for module in () if name.startswith("__") else map(importlib.import_module, places):
            if hasattr(module, name):
                return getattr(module, name)
        hint = "" if name.startswith("__") else self.__spec__.loader.hint(name)  # type: ignore[union-attr]
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{hint}")

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return importlib.import_module, (self.__name__,)  # in functions and classes that are sent to actors


class MissingNameFinder:
    """Last finder on ``sys.meta_path``: RLlib's module paths, and useful errors for names that rlzmq does not have.

    ``from rlzmq import X`` first calls the package's ``__getattr__``, but Python drops its AttributeError and text.
    It then looks for a submodule ``X`` with this finder. The same holds for the package's parts (``rlzmq.tune``). A
    look-up without an import (``hasattr``, ``importlib.util.find_spec``) gives the usual answers: False, None.

    Args:
        exports: Public name -> the module that defines it, relative to ``rlzmq``.
    """

    def __init__(self, exports: Mapping[str, str]) -> None:
        self._exports = exports

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the modules that RLlib has; raise an error for unknown names in rlzmq; find no other module.

        Raises:
            ImportError: A name of the package, or of a part of it, is imported (``from rlzmq import X``).
            ModuleNotFoundError: A module of the package is imported (``import rlzmq.x``); the text names the whole
                path.
        """
        if isinstance(target, _RLlibModule):
            return target.__spec__
        if not fullname.startswith("rlzmq."):
            return None
        wanted, package = _being_imported(sys._getframe(1))
        if wanted is None:
            return None
        name = wanted.rpartition(".")[2]
        home = RLLIB_PACKAGES.get(fullname.split(".")[1])
        if package is None:
            parent, _, last = fullname.rpartition(".")
            ours = [] if parent == "rlzmq" else [module.name for module in iter_modules(path)]
            near = difflib.get_close_matches(last, ours, cutoff=0.8)
            known = last in _RLLIB_CORE if parent == "rlzmq.core" else home and not instead_of_algorithm(last)
            if known and not near:
                return importlib.machinery.ModuleSpec(fullname, self, is_package=True)  # type: ignore[arg-type]
            hint = f". Did you mean {parent}.{near[0]}?" if near else self.hint(name)
            raise ModuleNotFoundError(f"No module named {wanted!r}{hint}", name=wanted)
        try:
            if home == "rlzmq":  # as in RLlib: from rlzmq.algorithms.ppo import PPO
                setattr(package, name, getattr(sys.modules[home], name))
                return None
            text = ""
            getattr(package, name)
        except AttributeError as error:
            text = str(error)
        if "Instead:" not in text and "Did you mean" not in text:
            text = f"cannot import name {name!r} from {package.__name__!r}{self.hint(name)}"
        raise ImportError(text, name="rlzmq")

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return a module that only RLlib has."""
        return _RLlibModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: such a module has no code."""

    def hint(self, name: str) -> str:
        """Return the end of a sentence about a missing public name."""
        ours = next((one for one in self._exports if one.lower() == name.replace("_", "").lower()), None)
        instead = f"from rlzmq import {ours}" if ours else instead_of(name, self._exports)
        return f". Instead: {instead}." if instead else f".{did_you_mean(name, self._exports)}"


def _being_imported(frame: FrameType | None) -> tuple[str | None, ModuleType | None]:
    """Return the dotted name in the import statement that called a finder, and ``package`` of a ``from`` one."""
    # Python imports parents first, and passes only these to a finder.
    wanted: str | None = None
    while frame is not None and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
        function = frame.f_code.co_name
        if function == "_find_and_load":
            wanted = frame.f_locals["name"]
        elif function == "_handle_fromlist" and wanted is not None:
            return wanted, frame.f_locals["module"]
        frame = frame.f_back
    return wanted, None


def import_failure(what: str, error: Exception) -> ImportError | None:
    """Return the error to raise instead of an error raised by the import of a lazily loaded module.

    Returns:
        None if the error can be raised unchanged. Otherwise an ImportError: always for an AttributeError, which
        Python would interpret as a missing name; and if the user's files hide modules that were needed.
    """
    if isinstance(error, ImportError) and error.name == "rlzmq":  # already explained by an inner import
        return None
    hidden = hidden_modules(error.__traceback__)
    if not hidden and not isinstance(error, AttributeError):
        return None
    text = f"{what} could not be loaded: {type(error).__name__}: {error}"
    return ImportError("\n".join([text, *hidden]), name="rlzmq")


def hidden_modules(traceback: TracebackType | None) -> list[str]:
    """List imported modules hidden by a file next to the user's script (``queue.py``).

    Args:
        traceback: Traceback of a failed import. A file that fails during its import appears only there.

    Returns:
        One line per module: the file, the module, and what to do.
    """
    stdlib = sysconfig.get_path("stdlib")
    first = sys.path.index(stdlib) if stdlib in sys.path else 0
    ran = {frame.f_code.co_filename for frame, _ in walk_tb(traceback)}
    found = []
    for place, directory in enumerate(sys.path[:first]):
        for name, path in _modules_in(directory or os.getcwd()):
            loaded = getattr(sys.modules.get(name), "__file__", None)
            if path not in ran and path != loaded:
                continue
            other = importlib.machinery.PathFinder.find_spec(name, sys.path[place + 1 :])
            if other is not None and other.origin not in (None, path):
                where = (
                    "Python" if name in sys.stdlib_module_names else f"an installed package ({other.origin})"
                )
                found.append(f"{path} hides the module {name!r} of {where}: rename that file.")
    return found


def _modules_in(directory: str) -> Iterable[tuple[str, str]]:
    for _, name, is_package in iter_modules([directory]):
        yield name, os.path.join(directory, *([name, "__init__.py"] if is_package else [f"{name}.py"]))
