"""Saving and loading of modules: specs and weights as checkpoint components, without pickle.

A module's own checkpoint has the components of an algorithm's that modules are loaded from: ``modules``, with what they
are built from, and ``learner_group/learner``, with their weights. A path may lead to a checkpoint of a module, of an
algorithm, or to a part of one::

    checkpoint/learner_group/learner/rl_module              all of an algorithm's modules
    checkpoint/learner_group/learner/rl_module/MODULE_ID    one of them
    modules/MODULE_ID                                       one of a MultiRLModule's own checkpoint
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlzmq.core.checkpoint import find_inside, open_checkpoint, read_manifest, write_checkpoint
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.trust import CALLER, Trust, find_code
from rlzmq.episodes.columns import DEFAULT_MODULE_ID

__all__ = ["load_module", "read_module_states", "restore_module", "save_module", "set_whole_state"]

_LEARNER = "learner_group/learner"
_MODULES = f"{_LEARNER}/rl_module"  # path within an algorithm's checkpoint
_MULTI_CLASS = "multi_rl_module_class"
# The spec classes are given by name, because their files import this one.
_SPEC, _MULTI_SPEC = "rlzmq.modules.spec:RLModuleSpec", "rlzmq.modules.multi_rl_module_spec:MultiRLModuleSpec"


@dataclass(frozen=True)
class _Stored:
    """The modules at a path.

    Attributes:
        specs: Plain spec by module id; None: not stored.
        states: Weights by module id.
        outer: The rest of a MultiRLModule's plain spec; None: a single module.
        is_whole: Whether the path leads to an algorithm's checkpoint, not to a part of it.
        is_mine: Whether the checkpoint carries this user's signature.
    """

    specs: dict[str, Any]
    states: dict[str, Any]
    outer: dict[str, Any] | None
    is_whole: bool
    is_mine: bool

    def only(self, module_id: str) -> _Stored:
        """Return one of the modules."""
        states = {module_id: self.states[module_id]}
        return replace(self, specs={module_id: self.specs[module_id]}, states=states, outer=None)


def save_module(module: Any, path: str | Path) -> Path:
    """Write a module as a checkpoint; see the module docstring."""
    spec = find_code(_MULTI_SPEC if module.is_multi else _SPEC, CALLER).from_module(module).to_dict()
    state, modules = module.get_state(), {}
    if module.is_multi:
        specs, modules = spec.pop("rl_module_specs"), spec
    else:
        specs, state = {DEFAULT_MODULE_ID: spec}, {DEFAULT_MODULE_ID: state}
    components = {"modules": {"specs": specs, **modules}, _LEARNER: {"rl_module": state}}
    return write_checkpoint(path, components, about={"module": type(module).__qualname__})


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
    stored = _read(path)
    if stored.is_whole and len(stored.states) == 1 and not getattr(module_class, "is_multi", False):
        stored = stored.only(*stored.states)
    if None in stored.specs.values():
        raise CheckpointError(
            f"{path} has the weights of its modules, but not all that they are built from. Build them from specs "
            f"of your own, with RLModuleSpec(…, load_state_path={str(path)!r})"
        )
    # The weights are loaded from here, not from where the run started.
    specs = {module_id: {**plain, "load_state_path": None} for module_id, plain in stored.specs.items()}
    trusted = Trust.of(trust, is_signed=stored.is_mine)
    try:
        if stored.outer is None:
            (plain,) = specs.values()
            spec = find_code(_SPEC, CALLER).from_dict(plain, module_class=module_class, trust=trusted)
        else:
            name = _MULTI_CLASS if isinstance(module_class, type) else "module_classes"
            plain = {**stored.outer, "rl_module_specs": specs, "load_state_path": None}
            spec = find_code(_MULTI_SPEC, CALLER).from_dict(plain, **{name: module_class}, trust=trusted)
    except ConfigurationError as error:
        names = [str(plain["module_class"]) for plain in specs.values()]
        homes = {name.partition(":")[0].partition(".")[0] for name in names} - {"rlzmq"}
        signed = (
            ""
            if stored.is_mine
            else f" It does not carry your signature: if you trust it, trust={sorted(homes)}."
        )
        raise CheckpointError(
            f"The class of the module at {path}: {error} Pass the class, module_class=….{signed}"
        ) from error
    module = spec.build()
    states = stored.states
    set_whole_state(module, next(iter(states.values())) if stored.outer is None else states, strict=True)
    return module


def set_whole_state(module: Any, state: Mapping[str, Any], *, strict: bool | None) -> None:
    """Call ``module.set_state``, with ``strict`` only if the module's class accepts it."""
    asks = strict is not None and "strict" in inspect.signature(module.set_state).parameters
    module.set_state(state, **({"strict": strict} if asks else {}))


def read_module_states(path: str | Path, module_id: str | None = None) -> dict[str, Any]:
    """Return module id → weights at a path (see the module docstring), without building a module.

    Args:
        path: Path of the weights.
        module_id: The only module to return. If there are several at the path, the one with this id is read; a single
            one is read regardless of its id. None: all.

    Raises:
        CheckpointError: There is no such module.
    """
    stored = _read(path)
    states = stored.states
    if module_id is None:
        if stored.outer is None:
            raise CheckpointError(f"{path} holds a single module: specify which module gets its weights")
        return states
    if module_id not in states and len(states) != 1:
        raise CheckpointError(
            f"{path} has no module {module_id!r}.{did_you_mean(module_id, states)} Add the id of one to the path."
        )
    return {module_id: states[module_id] if module_id in states else next(iter(states.values()))}


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
    stored = _read(path)
    state = stored.states
    if module.is_multi:
        if stored.outer is None:
            state = dict.fromkeys(list(module.keys())[:1], *state.values())
        if module_ids is not None:
            state = {module_id: state[module_id] for module_id in module_ids if module_id in state}
        if not any(module_id in module for module_id in state):
            raise CheckpointError(
                f"the checkpoint {path} has modules {sorted(state)}, and none of {sorted(module.keys())}"
            )
    elif len(state) == 1:
        (state,) = state.values()
    elif module.module_id in state:
        state = state[module.module_id]
    else:
        raise CheckpointError(
            f"the checkpoint {path} has modules {sorted(state)}; the one to load is ambiguous"
        )
    set_whole_state(module, state, strict=True)


def _read(path: str | Path) -> _Stored:
    """Read the modules at a path; see the module docstring."""
    folder, inside = find_inside(path)
    manifest = read_manifest(folder)
    is_own = "module" in manifest["about"]
    is_part = inside.startswith(f"{_MODULES}/")
    if f"{_LEARNER}/state.json" not in manifest["files"]:
        raise CheckpointError(f"the checkpoint {folder} has no modules")
    if not (is_own or is_part) and inside and not f"{_MODULES}/".startswith(f"{inside}/"):
        raise CheckpointError(f"the checkpoint {folder} has no modules at {inside!r}, but at {_MODULES!r}")
    about: dict[str, Any] = {_MULTI_CLASS: None}
    if "modules/state.json" in manifest["files"]:
        about = open_checkpoint(folder, "modules").components["modules"]
    learner = open_checkpoint(folder, _LEARNER)
    states, specs = learner.components[_LEARNER]["rl_module"], about.get("specs") or {}
    outer = {key: value for key, value in about.items() if key != "specs" and value is not None}
    stored = _Stored(
        {module_id: specs.get(module_id) for module_id in states},
        states,
        outer if _MULTI_CLASS in about else None,
        not is_own and not inside,
        learner.is_mine,
    )
    module_id = inside.removeprefix(f"{_MODULES}/") if is_own or is_part else ""
    if module_id and (stored.outer is None or module_id not in states):
        names = "" if stored.outer is None else did_you_mean(module_id, states)
        raise CheckpointError(f"there is no module {module_id!r} at {path}.{names}")
    return stored.only(module_id) if module_id else stored
