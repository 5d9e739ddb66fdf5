"""Modules on disk: spec and weights as checkpoint components, without pickle."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from rlzmq.core.checkpoint import read_checkpoint, write_checkpoint
from rlzmq.core.errors import CheckpointError
from rlzmq.modules.multi_rl_module import MultiRLModule, MultiRLModuleSpec
from rlzmq.modules.rl_module import RLModule
from rlzmq.modules.spec import RLModuleSpec

__all__ = [
    "load_module",
    "module_components",
    "module_from_components",
    "restore_module",
    "save_module",
]

_ROOT = "rl_module"


def module_components(module: Any, root: str = _ROOT) -> dict[str, Any]:
    """A module as components of a checkpoint, for :func:`rlzmq.core.checkpoint.write_checkpoint`.

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
    """Builds the module that :func:`module_components` described, with its weights.

    Args:
        components: Component name -> state.
        module_class: The class to build, or for a MultiRLModule a dict ``{module id: class}``; None
            imports those that are named.
        root: As of :func:`module_components`.
        where: Where the components come from, for error texts.
    """
    about = components.get(root)
    if not isinstance(about, Mapping) or about.get("kind") not in ("single", "multi"):
        raise CheckpointError(f"the checkpoint {where} holds no module under {root!r}")
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
    module.set_state(_states(components, about, root))
    return module


def save_module(module: RLModule, path: str | Path) -> Path:
    """Writes a module as a checkpoint of its own."""
    return write_checkpoint(path, module_components(module), about={"module": type(module).__qualname__})


def load_module(path: str | Path, module_class: Any = None) -> Any:
    """Builds the module that a checkpoint holds, with its weights."""
    return module_from_components(read_checkpoint(path), module_class, where=str(path))


def restore_module(module: RLModule, path: str | Path, *, module_ids: Collection[str] | None = None) -> None:
    """Loads a checkpoint's weights into a module that exists.

    Args:
        module: A single module or a MultiRLModule. A single one also takes the weights of a
            MultiRLModule's only module, or of the one with its ``module_id``; the other way round a
            single module's weights go to the only module.
        path: The checkpoint.
        module_ids: Of a MultiRLModule, only these.

    Raises:
        CheckpointError: No checkpoint, or none that has the module.
        ValueError: Its weights do not fit.
    """
    components = read_checkpoint(path)
    about = components.get(_ROOT)
    if not isinstance(about, Mapping):
        raise CheckpointError(f"the checkpoint {path} holds no module under {_ROOT!r}")
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
                f"the checkpoint {path} has modules {sorted(state)}; which one is meant cannot be told"
            )
    module.set_state(state)


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
    """A module id as one folder name: no slash, no leading dot."""
    name = quote(module_id, safe=" ")
    return "%2E" + name[1:] if name.startswith(".") else name
