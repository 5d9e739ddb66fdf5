"""Conversion of classes to importable names and back, for specs and checkpoints without pickle."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from rlzmq.core.errors import ConfigurationError

__all__ = ["attribute_at", "callable_names", "class_from_name", "class_name"]


def class_name(cls: type[Any] | str) -> str:
    """Return ``"package.module:Qualified.Name"`` of a class, which may be given by this name."""
    return cls if isinstance(cls, str) else f"{cls.__module__}:{cls.__qualname__}"


def attribute_at(module: ModuleType, qualname: str) -> Any:
    """Return the object with a dotted name in a module, e.g. ``"Outer.Inner"``.

    Raises:
        AttributeError: There is no such object.
    """
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def callable_names(module: ModuleType) -> list[str]:
    """Return the public names of a module's classes and functions, for suggestions."""
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


def class_from_name(name: str, base: type[Any]) -> type[Any]:
    """Import and return the class with a name from :func:`class_name`.

    Args:
        name: ``"package.module:Qualified.Name"``.
        base: Required base class.

    Raises:
        ConfigurationError: The name is malformed, cannot be imported, or is not a subclass of ``base``.
    """
    module_name, colon, qualname = name.partition(":")
    advice = f"Pass the class itself instead, e.g. from_checkpoint(path, module_class=My{base.__name__})."
    if not colon or not module_name or not qualname:
        raise ConfigurationError(f"expected a class as 'package.module:Class', got {name!r}. {advice}")
    if "<locals>" in qualname:
        raise ConfigurationError(
            f"the class {name!r} was defined inside a function and cannot be found by name. {advice}"
        )
    try:
        found = attribute_at(sys.modules.get(module_name) or importlib.import_module(module_name), qualname)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"the class {name!r} cannot be found here ({error}). {advice}") from error
    if not isinstance(found, type) or not issubclass(found, base):
        raise ConfigurationError(f"{name!r} is not a subclass of {base.__name__}. {advice}")
    return found
