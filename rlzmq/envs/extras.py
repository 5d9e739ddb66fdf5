"""Optional libraries of environments: which extra installs them, and the hint shown when one is missing."""

from __future__ import annotations

import fnmatch
import importlib

from rlzmq.core.errors import ConfigurationError

__all__ = ["EXTRAS", "extra_hint", "import_family"]

# Top-level module -> what to install: an extra of rlzmq, or a package without wheels for some systems.
EXTRAS = {
    "ale_py": "rlzmq[atari]",
    "cv2": "rlzmq[atari]",
    "Box2D": "rlzmq[box2d]",
    "dm_control": "rlzmq[dm-control]",
    "envpool": "envpool",
    "minigrid": "rlzmq[minigrid]",
    "mujoco": "rlzmq[mujoco]",
    "pettingzoo": "rlzmq[marl]",
    "shimmy": "rlzmq[dm-control]",
}

# Pattern of ids -> the module that registers them with Gymnasium when it is imported.
_FAMILIES = {
    "ALE/*": "ale_py",
    "*NoFrameskip-v[04]": "ale_py",
    "MiniGrid-*": "minigrid",
    "BabyAI-*": "minigrid",
    "dm_control/*": "shimmy",
}


def import_family(env_id: str) -> None:
    """Import the library that registers a Gymnasium id, if the id's form tells which library it is.

    Raises:
        ConfigurationError: The library cannot be imported. The text names the extra to install.
    """
    for pattern, module in _FAMILIES.items():
        if fnmatch.fnmatchcase(env_id, pattern):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ConfigurationError(
                    f"config.env={env_id!r} needs {module}, which cannot be imported ({error}).{extra_hint(error)}"
                ) from error
            return


def extra_hint(error: BaseException) -> str:
    """Return a sentence that names what to install after a failed import; "" if unknown.

    Example:
        >>> extra_hint(ModuleNotFoundError("No module named 'ale_py'", name="ale_py"))
        " Install it: pip install 'rlzmq[atari]'."
    """
    cause: BaseException | None = error
    while cause is not None:
        module = (getattr(cause, "name", None) or "") if isinstance(cause, ImportError) else ""
        if package := EXTRAS.get(module.partition(".")[0]):
            return f" Install it: pip install {package!r}."
        cause = cause.__cause__ or cause.__context__
    return ""
