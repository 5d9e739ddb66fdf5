"""Saving and loading modules: spec and weights as checkpoint components, without pickle.

A path may lead to a module's own checkpoint, to an algorithm's checkpoint, or into one::

    checkpoint/learner_group/learner/rl_module              all of an algorithm's modules
    checkpoint/learner_group/learner/rl_module/MODULE_ID    one of them
    modules/MODULE_ID                                       one of a MultiRLModule's own checkpoint
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from rlzmq.core.checkpoint import find_inside, read_checkpoint, read_manifest, write_checkpoint
from rlzmq.core.errors import CheckpointError
from rlzmq.core.suggest import did_you_mean
from rlzmq.modules.multi_rl_module import MultiRLModule, MultiRLModuleSpec, set_whole_state
from rlzmq.modules.rl_module import RLModule
from rlzmq.modules.spec import RLModuleSpec

__all__ = [
    "load_module",
    "module_components",
    "module_from_components",
    "read_module_states",
    "restore_module",
    "save_module",
]

_ROOT = "rl_module"
_LEARNER = "learner_group/learner"  # of an algorithm's checkpoint
_MODULES = f"{_LEARNER}/rl_module"


def module_components(module: Any, root: str = _ROOT) -> dict[str, Any]:
    """Convert a module to components of a checkpoint, for :func:`rlzmq.core.checkpoint.write_checkpoint`.

    ``root`` holds the spec, ``root/<quoted module id>`` (or ``root/weights`` of a single module) the
    weights.
    """
    module = module.unwrapped()
    if isinstance(module, MultiRLModule):
        spec = MultiRLModuleSpec.from_module(module).to_dict()
        states = module.get_state()
        return {
            root: {"kind": "multi", "spec": spec},
            **{f"{root}/modules/{_quoted(mid)}": state for mid, state in states.items()},
        }
    spec = RLModuleSpec.from_module(module).to_dict()
    return {root: {"kind": "single", "spec": spec}, f"{root}/weights": module.get_state()}


def module_from_components(
    components: Mapping[str, Any], module_class: Any = None, root: str = _ROOT, *, where: str = ""
) -> Any:
    """Build the module that :func:`module_components` described, with its weights.

    Args:
        components: Component name -> state.
        module_class: The class to build, or for a MultiRLModule a dict ``{module id: class}``; None
            imports those that are named.
        root: As of :func:`module_components`.
        where: Where the components come from, for error messages.
    """
    about = components.get(root)
    if not isinstance(about, Mapping) or about.get("kind") not in ("single", "multi"):
        raise CheckpointError(f"the checkpoint {where} has no module under {root!r}")
    specs = about["spec"]["rl_module_specs"].values() if about["kind"] == "multi" else [about["spec"]]
    if None in specs:
        raise CheckpointError(
            f"{where} has the weights of its modules, but not all that they are built from. Build them from specs "
            f"of your own, with RLModuleSpec(…, load_state_path={where!r})"
        )
    module: Any
    if about["kind"] == "multi":
        outer = module_class if isinstance(module_class, type) else None
        classes = None if isinstance(module_class, type) else module_class
        multi_spec = MultiRLModuleSpec.from_dict(
            {**about["spec"], "load_state_path": None},
            multi_rl_module_class=outer,
            module_classes=classes,
        )
        module = multi_spec.build()
    else:
        plain = {**about["spec"], "load_state_path": None}
        module = RLModuleSpec.from_dict(plain, module_class=module_class).build()
    set_whole_state(module, _states(components, about, root), strict=True)
    return module


def save_module(module: RLModule, path: str | Path) -> Path:
    """Write a module as its own checkpoint."""
    return write_checkpoint(path, module_components(module), about={"module": type(module).__qualname__})


def load_module(path: str | Path, module_class: Any = None) -> Any:
    """Build the module at a path (see above), with its weights.

    Of an algorithm's whole checkpoint with one module it is that one, unless `module_class` is a MultiRLModule.
    """
    components = _read(path)
    about = components.get(_ROOT)
    if isinstance(about, Mapping) and about.get("is_whole"):
        states = _states(components, about, _ROOT)
        wants_multi = isinstance(module_class, type) and issubclass(module_class, MultiRLModule)
        if len(states) == 1 and not wants_multi:
            components = _only(components, *states, where=path)
    return module_from_components(components, module_class, where=str(path))


def read_module_states(path: str | Path, module_id: str | None = None) -> dict[str, Any]:
    """Read the weights at a path (see above), without building a module.

    Args:
        path: Where they are.
        module_id: For which module. Where several are at the path, it is the one of this id; a single one is
            taken whatever its id. None: all, by module id.

    Raises:
        CheckpointError: If there is no such module.
    """
    components = _read(path)
    states = _states(components, _about(components, path), _ROOT)
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


def restore_module(module: RLModule, path: str | Path, *, module_ids: Collection[str] | None = None) -> None:
    """Load a checkpoint's weights into a module that exists.

    Args:
        module: A single module or a MultiRLModule. A single one also takes the weights of a
            MultiRLModule's only module, or of the one with its ``module_id``; the other way round a
            single module's weights go to the only module.
        path: Where the weights are (see above).
        module_ids: Of a MultiRLModule, only these.

    Raises:
        CheckpointError: If no checkpoint, or none that has the module.
        ValueError: If its weights do not fit.
    """
    components = _read(path)
    about = _about(components, path)
    state = _states(components, about, _ROOT)
    saved_multi = about.get("kind") == "multi"
    if isinstance(module, MultiRLModule):
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
    """Read a path (see above) as components of `module_components`."""
    folder, inside = find_inside(path)
    if f"{_LEARNER}/state.json" not in read_manifest(folder)["files"]:
        components = read_checkpoint(folder)
        return _only(components, inside, where=path) if inside else components
    components = _of_algorithm(folder)
    if inside.startswith(f"{_MODULES}/"):
        return _only(components, inside.removeprefix(f"{_MODULES}/"), where=path)
    if inside and not f"{_MODULES}/".startswith(f"{inside}/"):
        raise CheckpointError(f"the checkpoint {folder} has no modules at {inside!r}, but at {_MODULES!r}")
    components[_ROOT]["is_whole"] = not inside
    return components


def _of_algorithm(folder: Path) -> dict[str, Any]:
    """Return all modules of an algorithm's checkpoint, as components."""
    states = read_checkpoint(folder, _LEARNER)[_LEARNER][_ROOT]
    about = {}
    if "modules/state.json" in read_manifest(folder)["files"]:
        about = read_checkpoint(folder, "modules")["modules"]
    specs = {module_id: (about.get("specs") or {}).get(module_id) for module_id in states}
    spec: dict[str, Any] = {
        # The weights are loaded from here, not from where the run started.
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
    states = _states(components, about, _ROOT)
    if about.get("kind") != "multi" or module_id not in states:
        names = did_you_mean(module_id, states) if about.get("kind") == "multi" else ""
        raise CheckpointError(f"there is no module {module_id!r} at {where}.{names}")
    spec = about["spec"]["rl_module_specs"].get(module_id)
    return {_ROOT: {"kind": "single", "spec": spec}, f"{_ROOT}/weights": states[module_id]}


def _about(components: Mapping[str, Any], where: str | Path) -> Mapping[str, Any]:
    about = components.get(_ROOT)
    if not isinstance(about, Mapping):
        raise CheckpointError(f"the checkpoint {where} has no module under {_ROOT!r}")
    return about


def _states(components: Mapping[str, Any], about: Mapping[str, Any], root: str) -> dict[str, Any]:
    if about.get("kind") == "multi":
        prefix = f"{root}/modules/"
        return {
            unquote(name.removeprefix(prefix)): state
            for name, state in components.items()
            if name.startswith(prefix)
        }
    weights: dict[str, Any] = components.get(f"{root}/weights", {})
    return weights


def _quoted(module_id: str) -> str:
    """Quote a module id as one folder name: no slash, no leading dot."""
    name = quote(module_id, safe=" ")
    return "%2E" + name[1:] if name.startswith(".") else name
