"""Trust: whose code a name in text may stand for, and the one function that follows such a name.

A file (a checkpoint, a log, a study) is data: what it names is imported only if it is rlzmq's own, if the caller has
named its package, or if the file carries this user's signature. A signature is an HMAC with a secret that only this
user can read, so what somebody else wrote or altered has none.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import importlib
import logging
import os
import secrets
import sys
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import make_directories, read_private_file, write_text
from rlzmq.core.synonyms import did_you_mean

__all__ = [
    "CALLER",
    "DOORS",
    "NOBODY",
    "PLACES",
    "Trust",
    "callable_names",
    "class_name",
    "find_code",
    "is_signed",
    "signature_of",
]

_log = logging.getLogger("rlzmq.checkpoints")

# Packages of rlzmq with classes that settings and checkpoints name. Those that start processes, connect or serve are
# not among them.
_OWN = tuple(
    f"rlzmq.{name}"
    for name in (
        *("algorithms", "config", "connectors", "core.callbacks", "core.metrics_stats", "envs", "learners"),
        *("modules", "replay", "runners", "tune"),
    )
)
_OWN_FUNCTIONS = ("rlzmq.envs.examples",)  # a function of another module may do more than return a value
_NUM_SECRET_BYTES = 32


@dataclass(frozen=True)
class Trust:
    """Whose code names may stand for, besides rlzmq's own.

    Attributes:
        packages: Packages and modules that the caller trusts, with all below them.
        is_full: Whether all names are followed, e.g. because this user wrote them.
    """

    packages: tuple[str, ...] = ()
    is_full: bool = False

    @classmethod
    def of(cls, given: Trust | Collection[str], *, is_signed: bool = False) -> Trust:
        """Return the trust for a caller's argument ``trust=["my_package"]``, full for a file with a signature.

        Raises:
            ConfigurationError: It is something else than names of packages.
        """
        if isinstance(given, Trust):
            return CALLER if is_signed else given
        names = (given,) if isinstance(given, str) else given
        if isinstance(names, bool) or not all(isinstance(name, str) and name for name in names or ()):
            raise ConfigurationError(
                f"trust={given!r}: expected the packages whose code a file may name, e.g. trust=['my_package']."
            )
        return cls(tuple(names or ()), is_full=is_signed)

    def covers(self, name: str) -> bool:
        """Return whether ``"package.module:name"`` may be followed. Nothing is imported."""
        return self.is_full or _is_below(name.partition(":")[0], (*_OWN, *self.packages))

    def harmless(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a file's settings without those that are read only from this user's own files."""
        if self.is_full:
            return settings
        return {name: value for name, value in settings.items() if name not in (*DOORS, *PLACES)}


PLACES = ("record_dir", "trace")
"""Settings for where a run keeps its data on its machine. They are set again for a resumed run."""

DOORS = ("advertise", "join_file", "listen", "num_remote_learners", "output", "quarantine_dir")
"""Settings that open ports or write files. They are read only from this user's own files."""

NOBODY = Trust()
"""For names in files: only rlzmq's own."""

CALLER = Trust(is_full=True)
"""For names that the program contains or that its user typed."""


def find_code(name: str, trust: Trust, base: type[Any] | None = None) -> Any:
    """Import and return the class, function or enum member with a name. Every name in a file is followed here.

    Args:
        name: ``"package.module:Qualified.Name"``.
        trust: Whose code it may be. Unless it is full, what is found must also be defined in that code: a module of a
            trusted package may have imported anything.
        base: Required base class; None: it need not be a class.

    Raises:
        ConfigurationError: The name is not trusted (then nothing is imported), is malformed, cannot be found, or is
            not a subclass of `base`.
    """
    module_name, _, qualname = name.partition(":")
    if not module_name or not qualname:
        raise ConfigurationError(f"expected code as 'package.module:name', got {name!r}.")
    if not trust.covers(name):
        raise ConfigurationError(f"{name!r} is not trusted.")
    if "<locals>" in qualname:
        raise ConfigurationError(f"{name!r} was defined inside a function and cannot be found by name.")
    found: Any = None
    try:
        found = module = sys.modules.get(module_name) or importlib.import_module(module_name)
        for part in qualname.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        if module_name == "__main__":
            raise ConfigurationError(f"{qualname}, of another script: this one has none") from error
        near = "" if found is None else did_you_mean(qualname, callable_names(module))
        raise ConfigurationError(f"{name!r} cannot be found ({error}).{near}") from error
    if not trust.is_full and not _is_own_code(found, qualname, trust.packages):
        raise ConfigurationError(f"{name!r} is not trusted: it is not defined where its name says.")
    if base is not None and not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigurationError(f"{name!r} is not a subclass of {base.__name__}.")
    return found


def class_name(cls: type[Any] | str) -> str:
    """Return ``"package.module:Qualified.Name"`` of a class, which may be given by this name."""
    return cls if isinstance(cls, str) else f"{cls.__module__}:{cls.__qualname__}"


def callable_names(module: types.ModuleType) -> list[str]:
    """Return the public names of a module's classes and functions, for suggestions."""
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


def _is_below(module_name: str, packages: Collection[str]) -> bool:
    return any(module_name == package or module_name.startswith(f"{package}.") for package in packages)


def _is_own_code(found: object, qualname: str, packages: Collection[str]) -> bool:
    """Return whether an object was defined in these packages, or is a class or harmless function of rlzmq's."""
    if any(part.startswith("__") for part in qualname.split(".")):
        return False
    home = str(getattr(type(found) if isinstance(found, enum.Enum) else found, "__module__", None))
    if _is_below(home, packages):
        return not isinstance(found, types.ModuleType)
    return _is_below(home, _OWN if isinstance(found, type | enum.Enum) else _OWN_FUNCTIONS)


# -- signatures -------------------------------------------------------------------------------------


def signature_of(kind: str, data: bytes) -> str:
    """Return this user's signature of a file's content; "" if the secret cannot be kept, with a warning.

    Args:
        kind: What is signed, so that a signature of one kind of file is not valid for another.
        data: The content.
    """
    try:
        return _signed(kind, data)
    except (OSError, ConfigurationError) as error:
        _log.warning("%s will not be recognized as this user's: %s", kind, error)
        return ""


def is_signed(kind: str, data: bytes, signature: object) -> bool:
    """Return whether `signature_of` gave this signature to this user."""
    if not isinstance(signature, str) or not signature:
        return False
    try:
        return hmac.compare_digest(_signed(kind, data).encode(), signature.encode(errors="replace"))
    except (OSError, ConfigurationError) as error:
        _log.warning("the signature of %s cannot be checked: %s", kind, error)
        return False


def _signed(kind: str, data: bytes) -> str:
    return hmac.new(_secret().encode(), kind.encode() + b"\0" + data, "sha256").hexdigest()


def _secret() -> str:
    """Return this user's secret, which the first call on a machine creates."""
    state = os.environ.get("XDG_STATE_HOME", "")
    base = Path(state) if os.path.isabs(state) else Path(os.path.expanduser("~/.local/state"))
    path = base / "rlzmq" / "signing.key"
    if not path.exists():
        make_directories(path.parent, mode=0o700)
        new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        write_text(new, secrets.token_hex(_NUM_SECRET_BYTES), is_private=True)
        try:
            with contextlib.suppress(FileExistsError):  # another process was faster; all use the first one
                os.link(new, path)
        finally:
            new.unlink()
    secret = read_private_file(path)
    if len(secret) != 2 * _NUM_SECRET_BYTES:
        raise ConfigurationError(f"{path} holds no secret. Remove it; a new one will be written.")
    return secret
