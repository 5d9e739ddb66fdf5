"""Import of optional packages, with an error that has the command to install them."""

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
        module: Its full name.
        what: What it is needed for, e.g. ``"A video"``.
        install: What pip installs it by, e.g. ``"rlzmq[video]"``.

    Raises:
        MissingPackageError: It cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = f"'{install}'" if "[" in install else install
        raise MissingPackageError(
            f"{what} needs {module.partition('.')[0]}: pip install {name} ({error})."
        ) from error
