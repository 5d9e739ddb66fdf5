"""Reading and writing of algorithms' checkpoints: their components and config."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from rlzmq.algorithms.registry import ALGORITHMS, config_class_named
from rlzmq.algorithms.state_tree import to_parts, to_tree
from rlzmq.algorithms.stored_modules import with_stored_modules
from rlzmq.config.base_config import BaseConfig
from rlzmq.config.plain import load_named, names_code
from rlzmq.core.checkpoint import find_inside, local_path, read_checkpoint, read_manifest, write_checkpoint
from rlzmq.core.checkpoint_series import find_checkpoint
from rlzmq.core.checkpointable import part_of
from rlzmq.core.class_names import class_name
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.printable import printable
from rlzmq.modules.saving import read_module_states

__all__ = [
    "check_algorithm_class",
    "checkpoint_place",
    "latest_checkpoint",
    "load_config",
    "load_config_class",
    "newest_to_resume",
    "read_algorithm",
    "read_component",
    "resume_config",
    "revive_config",
    "to_components",
    "with_stored_seed",
    "write_algorithm",
]

_log = logging.getLogger("rlzmq.checkpoints")

_Config = TypeVar("_Config", bound=BaseConfig)
_CONFIG = "config"
# Settings for where a run keeps its data on its machine. They are not stored and must be set again for a resumed run.
_PLACES = ("record_dir", "trace")
_CONFIG_CLASS = ("config", "config_class")
_NEEDED = ("algorithm", "learner_group/learner", "env_runner", "accounting")
_MODULES = "learner_group/learner/rl_module"


def write_algorithm(
    path: str | Path | None, algorithm: Any, config: BaseConfig, state: Mapping[str, Any]
) -> str:
    """Write state and config as one checkpoint and return its absolute path.

    Without `path`, it is written to a new directory in the temporary directory. The path is logged, and the directory
    is removed if writing fails.
    """
    components, about = to_components(algorithm, config, state)
    if path is not None:
        return str(write_checkpoint(path, components, about=about))
    made = Path(tempfile.mkdtemp(prefix="rlzmq-checkpoint-"))
    try:
        written = write_checkpoint(made / "checkpoint", components, about=about)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    _log.warning(
        "checkpoint  %s (in the temporary directory, which the system may empty; pass save_to_path a path to keep it)",
        written,
    )
    return str(written)


def to_components(
    algorithm: Any, config: BaseConfig, state: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `write_checkpoint`: components (state and config) and metadata for the manifest."""
    stored = config.to_stored(without=_PLACES)
    about = {"algorithm": type(algorithm).__name__, **{key: stored.pop(key) for key in _CONFIG_CLASS}}
    return {**to_parts(state), _CONFIG: stored}, about


def latest_checkpoint(path: str | Path) -> Path | None:
    """Return the newest intact checkpoint of a run; None if there is none.

    Incomplete or altered checkpoints are skipped, each with a warning.

    Args:
        path: A run directory, a directory of checkpoints, or a checkpoint.
    """
    found = find_checkpoint(path)
    for skipped, why in found.skipped:
        _log.warning("skipped the checkpoint %s: %s", skipped, printable(why))
    return found.path


def newest_to_resume(path: str | Path, config: BaseConfig | None) -> Path | None:
    """Return `latest_checkpoint`; None for a new run.

    Raises:
        CheckpointError: There is no checkpoint, and no config for a new run.
    """
    newest = latest_checkpoint(path)
    if newest is None and config is None:
        raise CheckpointError(f"{path} holds no intact checkpoint. Pass config=… to start a new run.")
    return newest


def checkpoint_place(path: str | Path) -> Path:
    """Return the checkpoint at `path`, or the newest intact one if it is a run directory."""
    place = local_path(path)
    if (place / "manifest.json").exists() or not place.is_dir():
        return place
    return latest_checkpoint(place) or place


def read_algorithm(path: str | Path) -> dict[str, Any]:
    """Return the state that `write_algorithm` wrote, after checking every byte.

    Args:
        path: A checkpoint, or a run directory, whose newest intact checkpoint is read.

    Raises:
        CheckpointError: The checkpoint is incomplete, altered, of an unknown version, or not that of an algorithm.
    """
    path = checkpoint_place(path)
    state = read_checkpoint(path)
    for name in _NEEDED:
        if name not in state:
            raise CheckpointError(
                f"{path} is not a checkpoint of an algorithm: it has no component {name!r}."
            )
    state.pop(_CONFIG, None)
    return state


def load_config(path: str | Path, *, trust_code: bool = False) -> BaseConfig:
    """Return the config that a checkpoint was written with.

    Args:
        path: The checkpoint's directory, or a run directory.
        trust_code: Whether to import functions and classes that the config names. An untrusted checkpoint could
            name any code on this machine, so the default is False.

    Raises:
        CheckpointError: The config contains code or is of a custom class, and `trust_code` is False; or it had values
            that cannot be stored.
    """
    path = checkpoint_place(path)
    about = read_manifest(path)["about"]
    stored = read_checkpoint(path, _CONFIG)[_CONFIG]
    classes = {key: about.get(key) for key in _CONFIG_CLASS}
    return revive_config({**stored, **classes}, str(path), trust_code=trust_code)


def load_config_class(path: str | Path, *, trust_code: bool = False) -> type[BaseConfig]:
    """Return the class of the config that a checkpoint was written with.

    Raises:
        CheckpointError: The class is custom and `trust_code` is False, or it cannot be imported.
    """
    path = checkpoint_place(path)
    about = read_manifest(path)["about"]
    return _config_class({key: about.get(key) for key in _CONFIG_CLASS}, str(path), trust_code)


def revive_config(stored: Mapping[str, Any], where: str, *, trust_code: bool = False) -> BaseConfig:
    """Return the config from a result of `AlgorithmConfig.to_stored`.

    Args:
        stored: The result of `to_stored`.
        where: Where it is stored, for error messages.
        trust_code: See `load_config`.

    Raises:
        CheckpointError: See `load_config`.
    """
    config_class = _config_class(stored, where, trust_code)
    code = [name for name, value in stored["values"].items() if names_code(value)]
    if stored["left_out"] or (code and not trust_code):
        names = ", ".join(sorted({*stored["left_out"], *code}))
        hint = "" if stored["left_out"] else ", or trust_code=True to import what the checkpoint names"
        raise CheckpointError(
            f"The config of {where} holds code ({names}), which a checkpoint does not carry. Pass config=…, built as "
            f"for the first run{hint}."
        )
    return config_class.from_state(stored["values"])


def _config_class(stored: Mapping[str, Any], where: str, trust_code: bool) -> type[BaseConfig]:
    """Return the class of the stored config. A custom class counts as code."""
    built_in = config_class_named(str(stored["config"]))
    named = stored["config_class"]
    if named is None or named == class_name(built_in):
        return built_in
    what = (
        f"The config of {where} is of the class {named!r}, which a checkpoint does not carry. Pass config=…, built as "
        "for the first run"
    )
    if not trust_code:
        raise CheckpointError(f"{what}, or trust_code=True to import the class.")
    try:
        found = load_named(named)
    except ConfigurationError as error:
        raise CheckpointError(f"{what}. {error}") from None
    if not (isinstance(found, type) and issubclass(found, built_in)):
        raise CheckpointError(f"{what}. Here {named!r} is no {built_in.__name__}.")
    return found


def resume_config(
    path: str | Path, state: Mapping[str, Any], config: BaseConfig | None, *, trust_code: bool = False
) -> BaseConfig:
    """Return the config of a run that continues from a checkpoint, with the checkpoint's modules and seed.

    Args:
        path: The checkpoint's directory, or a run directory.
        state: The return value of `read_algorithm`.
        config: Replaces the stored config; None: the stored one.
        trust_code: See `load_config`.

    Raises:
        CheckpointError: See `load_config` and `with_stored_modules`.
    """
    chosen = load_config(path, trust_code=trust_code) if config is None else with_stored_seed(config, path)
    return with_stored_modules(chosen, state.get("modules", {}), trust_code=trust_code)


def check_algorithm_class(path: str | Path, chosen: type) -> None:
    """Check that a checkpoint of a custom algorithm class is resumed by a class of the same name.

    Raises:
        CheckpointError: The checkpoint was saved by a custom class of another name, whose training step would be lost.
    """
    path = checkpoint_place(path)
    about = read_manifest(path)["about"]
    saved = about.get("algorithm")
    built_in = {"Algorithm", "AsyncAlgorithm", *(name.upper() for name in ALGORITHMS)}
    if saved is not None and saved != chosen.__name__ and saved not in built_in:
        raise CheckpointError(
            f"{path} was saved by {saved} and would be resumed as {chosen.__name__}: a checkpoint does not contain the "
            f"code of custom classes. Call {saved}.from_checkpoint(…) (or .resume), or pass "
            f"config={about.get('config')}(algo_class={saved})…"
        )


def read_component(path: str | Path, component: str) -> dict[str, Any]:
    """Return a state with only this component, for `Algorithm.set_state`.

    Args:
        path: An algorithm's checkpoint (or run directory) that has this component. Or a path into one, such as
            ``checkpoint/learner_group/learner/rl_module/p0``, or a module's checkpoint, whose content is then loaded
            as this component, regardless of its name there.
        component: A component, e.g. ``"learner_group/learner/rl_module/p1"``.

    Raises:
        CheckpointError: There is no such component.
    """
    component = component.strip("/")
    folder, inside = find_inside(checkpoint_place(path))
    if component == _MODULES or component.startswith(f"{_MODULES}/"):
        module_id = component.removeprefix(_MODULES).lstrip("/") or None
        states = read_module_states(path if inside else folder, module_id)
        modules = states if module_id is None else {module_id: states}
        return {"learner_group": {"learner": {"rl_module": modules}}}
    state = part_of(to_tree(read_checkpoint(folder)), inside or component)
    if state is None:
        raise CheckpointError(f"The checkpoint {folder} has no component {inside or component!r}.")
    for name in reversed(component.split("/")):
        state = {name: state}
    return state  # type: ignore[no-any-return]


def with_stored_seed(config: _Config, path: str | Path) -> _Config:
    """Return `config`, with the stored seed if it has none.

    Runners and learners that had joined the run must find the same config.
    """
    if config.seed is not None:
        return config
    seed = read_checkpoint(checkpoint_place(path), _CONFIG)[_CONFIG]["values"].get("seed")
    return config if seed is None else config.copy(copy_frozen=False).debugging(seed=seed)
