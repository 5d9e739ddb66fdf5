"""Saving and loading of modules: spec and weights as checkpoint components, without pickle.

A path may lead to a module's own checkpoint, to an algorithm's checkpoint, or to a part of one::

    checkpoint/learner_group/learner/rl_module              all of an algorithm's modules
    checkpoint/learner_group/learner/rl_module/MODULE_ID    one of them
    modules/MODULE_ID                                       one of a MultiRLModule's own checkpoint
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from rlzmq.core.checkpoint import (
    find_inside,
    open_checkpoint,
    read_checkpoint,
    read_manifest,
    write_checkpoint,
)
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.trust import CALLER, Trust, find_code

__all__ = ["load_module", "read_module_states", "restore_module", "save_module", "set_whole_state"]

_ROOT = "rl_module"
_LEARNER = "learner_group/learner"  # path within an algorithm's checkpoint
_MODULES = f"{_LEARNER}/rl_module"
# The spec classes by the kind in a checkpoint. They are given by name, because their files import this one.
_SPECS = {
    "single": "rlzmq.modules.spec:RLModuleSpec",
    "multi": "rlzmq.modules.multi_rl_module_spec:MultiRLModuleSpec",
}


def save_module(module: Any, path: str | Path) -> Path:
    """Write a module as a checkpoint.

    Component ``rl_module`` has the spec. The weights are in ``rl_module/modules/<quoted module id>``, or for a single
    module in ``rl_module/weights``.
    """
    about = {"module": type(module).__qualname__}
    kind = "multi" if module.is_multi else "single"
    components = {_ROOT: {"kind": kind, "spec": _spec_class(kind).from_module(module).to_dict()}}
    state = module.get_state()
    if module.is_multi:
        components |= {f"{_ROOT}/modules/{_quoted(mid)}": weights for mid, weights in state.items()}
    else:
        components[f"{_ROOT}/weights"] = state
    return write_checkpoint(path, components, about=about)


def load_module(
    path: str | Path, module_class: type | Mapping[str, type] | None = None, trust: Collection[str] = ()
) -> Any:
    """Build the module at a path (see the module docstring), with its weights.

    For an algorithm's whole checkpoint with a single module, this is that module, unless `module_class` is a
    MultiRLModule.

    Args:
        path: Path of the module.
        module_class: The class to build, or for a MultiRLModule a dict ``{module id: class}``; None: import the
            classes that the checkpoint names.
        trust: Packages whose classes the checkpoint may name; all for one with this user's signature.

    Raises:
        CheckpointError: There is no module, or its class is neither given nor trusted.
    """
    components, is_mine = _read_with_trust(path)
    about = components.get(_ROOT)
    if isinstance(about, Mapping) and about.get("is_whole"):
        states = _states(components, about)
        if len(states) == 1 and not getattr(module_class, "is_multi", False):
            components = _only(components, *states, where=path)
            about = components[_ROOT]
    if not isinstance(about, Mapping) or about.get("kind") not in _SPECS:
        raise CheckpointError(f"the checkpoint {path} has no module under {_ROOT!r}")
    is_multi = about["kind"] == "multi"
    if None in (about["spec"]["rl_module_specs"].values() if is_multi else [about["spec"]]):
        raise CheckpointError(
            f"{path} has the weights of its modules, but not all that they are built from. Build them from specs "
            f"of your own, with RLModuleSpec(…, load_state_path={str(path)!r})"
        )
    classes: dict[str, Any] = {"module_class": module_class}
    if is_multi:
        is_class = isinstance(module_class, type)
        classes = {"multi_rl_module_class" if is_class else "module_classes": module_class}
    try:
        spec = _spec_class(about["kind"]).from_dict(
            {**about["spec"], "load_state_path": None}, **classes, trust=Trust.of(trust, is_signed=is_mine)
        )
    except ConfigurationError as error:
        specs = about["spec"]["rl_module_specs"].values() if is_multi else [about["spec"]]
        homes = {str(one.get("module_class")).partition(":")[0].partition(".")[0] for one in specs} - {
            "rlzmq"
        }
        signed = (
            "" if is_mine else f" It does not carry your signature: if you trust it, trust={sorted(homes)}."
        )
        raise CheckpointError(
            f"The class of the module at {path}: {error} Pass the class, module_class=….{signed}"
        ) from error
    module = spec.build()
    set_whole_state(module, _states(components, about), strict=True)
    return module


def set_whole_state(module: Any, state: Mapping[str, Any], *, strict: bool | None) -> None:
    """Call ``module.set_state``, with ``strict`` only if the module's class accepts it."""
    asks = strict is not None and "strict" in inspect.signature(module.set_state).parameters
    module.set_state(state, **({"strict": strict} if asks else {}))


def read_module_states(path: str | Path, module_id: str | None = None) -> dict[str, Any]:
    """Read the weights at a path (see the module docstring), without building a module.

    Args:
        path: Path of the weights.
        module_id: The module to read. If there are several at the path, the one with this id is read; a single one is
            read regardless of its id. None: all modules, by id.

    Raises:
        CheckpointError: There is no such module.
    """
    components = _read(path)
    states = _states(components, _about(components, path))
    is_multi = components[_ROOT].get("kind") == "multi"
    if module_id is None:
        if not is_multi:
            raise CheckpointError(f"{path} holds a single module: specify which module gets its weights")
        return states
    if not is_multi:
        return states
    if module_id not in states and len(states) != 1:
        raise CheckpointError(
            f"{path} has no module {module_id!r}.{did_you_mean(module_id, states)} Add the id of one to the path."
        )
    weights: dict[str, Any] = states[module_id] if module_id in states else next(iter(states.values()))
    return weights


def restore_module(module: Any, path: str | Path, *, module_ids: Collection[str] | None = None) -> None:
    """Load a checkpoint's weights into an existing module.

    Args:
        module: A single module or a MultiRLModule. A single one also accepts the weights of a MultiRLModule's only
            module, or of the one with its ``module_id``; a MultiRLModule with a single module accepts a single
            module's weights.
        path: Path of the weights (see the module docstring).
        module_ids: For a MultiRLModule, the modules to load; None: all.

    Raises:
        CheckpointError: There is no checkpoint, or none that contains the module.
        ValueError: The weights do not fit.
    """
    components = _read(path)
    about = _about(components, path)
    state = _states(components, about)
    saved_multi = about.get("kind") == "multi"
    if module.is_multi:
        if not saved_multi:
            state = dict.fromkeys(list(module.keys())[:1], state)
        if module_ids is not None:
            state = {module_id: state[module_id] for module_id in module_ids if module_id in state}
        if not any(module_id in module for module_id in state):
            raise CheckpointError(
                f"the checkpoint {path} has modules {sorted(state)}, and none of {sorted(module.keys())}"
            )
    elif saved_multi:
        if len(state) == 1:
            (state,) = state.values()
        elif module.module_id in state:
            state = state[module.module_id]
        else:
            raise CheckpointError(
                f"the checkpoint {path} has modules {sorted(state)}; the one to load is ambiguous"
            )
    set_whole_state(module, state, strict=True)


def _read(path: str | Path) -> dict[str, Any]:
    """Read a path (see the module docstring) as components of a module's checkpoint."""
    return _read_with_trust(path)[0]


def _read_with_trust(path: str | Path) -> tuple[dict[str, Any], bool]:
    """Return `_read` and whether the checkpoint carries this user's signature."""
    folder, inside = find_inside(path)
    files = read_manifest(folder)["files"]
    is_algorithm = f"{_LEARNER}/state.json" in files
    # The component that names classes is the one whose signature counts.
    names = (
        "modules" if is_algorithm and "modules/state.json" in files else _LEARNER if is_algorithm else None
    )
    stored = open_checkpoint(folder, names)
    components = stored.components
    if not is_algorithm:
        return _only(components, inside, where=path) if inside else components, stored.is_mine
    components = _of_algorithm(read_checkpoint(folder, _LEARNER) | components)
    if inside.startswith(f"{_MODULES}/"):
        return _only(components, inside.removeprefix(f"{_MODULES}/"), where=path), stored.is_mine
    if inside and not f"{_MODULES}/".startswith(f"{inside}/"):
        raise CheckpointError(f"the checkpoint {folder} has no modules at {inside!r}, but at {_MODULES!r}")
    components[_ROOT]["is_whole"] = not inside
    return components, stored.is_mine


def _of_algorithm(components: Mapping[str, Any]) -> dict[str, Any]:
    """Return all modules of an algorithm's checkpoint, as components of a module's."""
    states = components[_LEARNER][_ROOT]
    about = components.get("modules", {})
    specs = {module_id: (about.get("specs") or {}).get(module_id) for module_id in states}
    spec: dict[str, Any] = {
        # Load the weights from here, not from where the run started.
        "rl_module_specs": {mid: plain and {**plain, "load_state_path": None} for mid, plain in specs.items()}
    }
    if about.get("multi_rl_module_class"):
        spec["multi_rl_module_class"] = about["multi_rl_module_class"]
    return {
        _ROOT: {"kind": "multi", "spec": spec},
        **{f"{_ROOT}/modules/{_quoted(mid)}": state for mid, state in states.items()},
    }


def _only(components: Mapping[str, Any], module_id: str, *, where: str | Path) -> dict[str, Any]:
    """Return one of several modules, as components of a single one."""
    about = _about(components, where)
    states = _states(components, about)
    if about.get("kind") != "multi" or module_id not in states:
        names = did_you_mean(module_id, states) if about.get("kind") == "multi" else ""
        raise CheckpointError(f"there is no module {module_id!r} at {where}.{names}")
    spec = about["spec"]["rl_module_specs"].get(module_id)
    return {_ROOT: {"kind": "single", "spec": spec}, f"{_ROOT}/weights": states[module_id]}


def _spec_class(kind: str) -> Any:
    return find_code(_SPECS[kind], CALLER)


def _about(components: Mapping[str, Any], where: str | Path) -> Mapping[str, Any]:
    about = components.get(_ROOT)
    if not isinstance(about, Mapping):
        raise CheckpointError(f"the checkpoint {where} has no module under {_ROOT!r}")
    return about


def _states(components: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    if about.get("kind") == "multi":
        prefix = f"{_ROOT}/modules/"
        return {
            unquote(name.removeprefix(prefix)): state
            for name, state in components.items()
            if name.startswith(prefix)
        }
    weights: dict[str, Any] = components.get(f"{_ROOT}/weights", {})
    return weights


def _quoted(module_id: str) -> str:
    """Quote a module id as one folder name: no slash, no leading dot."""
    name = quote(module_id, safe=" ")
    return "%2E" + name[1:] if name.startswith(".") else name
