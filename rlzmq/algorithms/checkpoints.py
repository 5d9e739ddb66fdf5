"""An algorithm's checkpoint: its components, its config, and the way back to both."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlzmq.algorithms.config_io import _plain
from rlzmq.algorithms.registry import config_class_named, name_of_config
from rlzmq.core.checkpoint import read_checkpoint, read_manifest, write_checkpoint
from rlzmq.core.checkpoint_series import find_checkpoint
from rlzmq.core.errors import CheckpointError, ConfigurationError

__all__ = [
    "latest_checkpoint",
    "load_config",
    "read_algorithm",
    "to_components",
    "with_stored_seed",
    "write_algorithm",
]

_log = logging.getLogger("rlzmq.checkpoints")

_CONFIG = "config"
# Where a run keeps its data on its machine: a run that goes on from a checkpoint says so anew.
_PLACES = ("durability", "journal_dir")
_NEEDED = ("algorithm", "learner_group/learner")


def write_algorithm(path: str | Path | None, algorithm: Any, config: Any, state: Mapping[str, Any]) -> str:
    """Write state and config as one checkpoint; the absolute path."""
    target = (
        Path(path) if path is not None else Path(tempfile.mkdtemp(prefix="rlzmq-checkpoint-")) / "checkpoint"
    )
    components, about = to_components(algorithm, config, state)
    return str(write_checkpoint(target, components, about=about))


def to_components(
    algorithm: Any, config: Any, state: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `write_checkpoint` takes: the components (state and config), and what the manifest says of them."""
    values, left_out = {}, []
    for name, value in config.diff().items():
        if name in _PLACES:
            continue
        try:
            values[name] = _plain(name, value)
        except ConfigurationError:
            left_out.append(name)
    about = {"algorithm": type(algorithm).__name__, "config": name_of_config(type(config))}
    return {**state, _CONFIG: {"values": values, "left_out": left_out}}, about


def latest_checkpoint(path: str | Path) -> Path | None:
    """The newest whole checkpoint of a run; None if there is none.

    What is torn or altered is skipped, and each said so in the log.

    Args:
        path: A run directory, a directory of checkpoints, or a checkpoint.
    """
    found = find_checkpoint(path)
    for skipped, why in found.skipped:
        _log.warning("skipped the checkpoint %s: %s", skipped, why)
    return found.path


def _resolve(path: str | Path) -> Path:
    """The checkpoint that is meant: the newest whole one if `path` is a run directory."""
    place = Path(path).expanduser().absolute()
    if (place / "manifest.json").exists() or not place.is_dir():
        return place
    return latest_checkpoint(place) or place


def read_algorithm(path: str | Path) -> dict[str, Any]:
    """The state that `write_algorithm` wrote, every byte checked.

    Args:
        path: A checkpoint, or a run directory: its newest whole one.

    Raises:
        CheckpointError: It is torn, altered, of an unknown version, or no algorithm's.
    """
    path = _resolve(path)
    state = read_checkpoint(path)
    for name in _NEEDED:
        if name not in state:
            raise CheckpointError(f"{path} is no checkpoint of an algorithm: it has no component {name!r}.")
    state.pop(_CONFIG, None)
    return state


def load_config(path: str | Path, *, trust_code: bool = False) -> Any:
    """The config that a checkpoint was written with.

    Args:
        path: The checkpoint's directory, or a run directory.
        trust_code: Whether functions and classes that the config names are imported. A checkpoint
            from a stranger could name any code on this machine, so this is asked for.

    Raises:
        CheckpointError: The config holds code and `trust_code` is False, or held what cannot be stored.
    """
    path = _resolve(path)
    about = read_manifest(path)["about"]
    stored = read_checkpoint(path, _CONFIG)[_CONFIG]
    config_class = config_class_named(str(about.get("config")))
    code = [name for name, value in stored["values"].items() if _names_code(value)]
    if stored["left_out"] or (code and not trust_code):
        names = ", ".join(sorted({*stored["left_out"], *code}))
        hint = "" if stored["left_out"] else ", or trust_code=True to import what the checkpoint names"
        raise CheckpointError(
            f"The config of {path} holds code ({names}), which a checkpoint does not carry. Pass config=…, built as "
            f"for the first run{hint}."
        )
    return config_class.from_dict(stored["values"])


def with_stored_seed(config: Any, path: str | Path) -> Any:
    """`config`, with the seed that the run before had if it names none: the run goes on, and whoever
    joined it before is still of the same config."""
    if config.seed is not None:
        return config
    seed = read_checkpoint(_resolve(path), _CONFIG)[_CONFIG]["values"].get("seed")
    return config if seed is None else config.copy(copy_frozen=False).debugging(seed=seed)


def _names_code(value: Any) -> bool:
    if isinstance(value, str):
        return value.startswith("@")
    if isinstance(value, dict):
        return any(_names_code(item) for item in value.values())
    return isinstance(value, list) and any(_names_code(item) for item in value)
