"""Import of optional packages, with an error that contains the command to install them."""

from __future__ import annotations

import importlib
from types import ModuleType

from rlzmq.core.errors import ConfigurationError

__all__ = ["MissingPackageError", "import_optional"]


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
