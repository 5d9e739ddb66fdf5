"""An offline algorithm's checkpoint as the start of an online run (CQL and IQL → SAC; BC and MARWIL → PPO, APPO)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlzmq.algorithms.checkpoints import to_parts
from rlzmq.algorithms.registry import config_class_named
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.checkpoint import find_inside, read_manifest
from rlzmq.core.errors import CheckpointError

if TYPE_CHECKING:
    from rlzmq.modules.multi_rl_module import MultiRLModule

__all__ = ["online_state", "starts_online_run"]

_log = logging.getLogger("rlzmq.checkpoints")

_LEARNER = "learner_group/learner"
_PAIRS = "Continue CQL and IQL as SAC, BC and MARWIL as PPO, APPO or IMPALA, with the same model_config and spaces."


def starts_online_run(path: str | Path, config: BaseConfig) -> bool:
    """Return whether the checkpoint at a path is an offline algorithm's, and `config` an online one's."""
    if _is_offline(config):
        return False
    folder, _ = find_inside(path)
    try:
        saved = read_manifest(folder)["about"].get("config")
        return saved is not None and _is_offline(config_class_named(str(saved))())
    except CheckpointError:
        return False


def _is_offline(config: BaseConfig) -> bool:
    return config.update_plan().num_env_steps == 0


def online_state(
    state: Mapping[str, Any], modules: MultiRLModule, optimizers: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return what an online run takes over: the learners' weights, and the state of optimizers of the same name.

    Networks that the online modules lack (IQL's value function) and their optimizers are left out; networks that only
    they have (the temperature, after IQL) keep their initial weights. One log line names both. Target networks that
    only they have (APPO's) become copies of the loaded ones. Counts start at zero, since schedules, warm-up and replay
    ratio follow the env steps of the new run.

    Args:
        state: The offline run's state, or a part of it.
        modules: The online run's modules.
        optimizers: State of the online run's optimizers, by module id and name.
        where: The checkpoint's path, for messages.

    Raises:
        CheckpointError: The online run has no module of a saved one's id, the checkpoint lacks a network that the
            online modules act with, or its networks have other shapes.
    """
    learner = to_parts(state).get(_LEARNER, {})
    if "rl_module" not in learner:
        return dict(state)
    taken: dict[str, Any] = {"rl_module": {}, "optimizer": {}}
    left_out: set[str] = set()
    fresh: set[str] = set()
    for module_id, weights in learner["rl_module"].items():
        if module_id not in modules:
            raise CheckpointError(
                f"{where}: expected modules {sorted(modules.keys())} of this run, got {module_id!r}. Name this run's "
                "module so, or load the weights into one of its modules: learner_group.load_module_state("
                f"rl_module_ckpt_dirs={{{min(modules.keys())!r}: '{where}/{_LEARNER}/rl_module/{module_id}'}})."
            )
        own = modules[module_id].unwrapped()
        names = own.get_state()
        parts, saved_parts = _parts(names), _parts(weights)
        unable = sorted(_parts(own.get_state(inference_only=True)) - saved_parts)
        if unable:
            raise CheckpointError(
                f"{where}: {own.describe()} acts with {', '.join(unable)}, which the checkpoint lacks; it has "
                f"{', '.join(sorted(saved_parts))}. {_PAIRS}"
            )
        unfit = [
            f"{name} has the shape {np.shape(value)}, expected {np.shape(names[name])}"
            for name, value in weights.items()
            if name in names and np.shape(value) != np.shape(names[name])
        ]
        if unfit:
            raise CheckpointError(
                f"{where}: {own.describe()} has other networks than the checkpoint: {'; '.join(unfit[:4])}. {_PAIRS}"
            )
        taken["rl_module"][module_id] = {
            name: value for name, value in weights.items() if _part(name) in parts
        }
        left_out |= saved_parts - parts
        fresh |= parts - saved_parts - {_part(name) for name in own.targets_missing_in(weights).values()}
        mine = optimizers.get(module_id, {})
        taken["optimizer"][module_id] = {
            name: saved
            for name, saved in learner.get("optimizer", {}).get(module_id, {}).items()
            if name in mine and set(saved["state"]) <= set(names)
        }
    _log.warning(
        "%s: this run continues from recorded data with the weights%s%s%s; its counts start at 0.",
        where,
        " and the optimizers" if any(taken["optimizer"].values()) else "",
        _named("; left out: ", left_out),
        _named("; with initial weights: ", fresh),
    )
    return {
        "learner_group": {"learner": {name: value for name, value in taken.items() if any(value.values())}}
    }


def _part(name: str) -> str:
    """Return the network that a parameter belongs to."""
    return name.partition(".")[0]


def _parts(names: Iterable[str]) -> set[str]:
    return {_part(name) for name in names}


def _named(what: str, names: set[str]) -> str:
    return what + ", ".join(sorted(names)) if names else ""
