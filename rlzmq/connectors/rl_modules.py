"""Queries about RLModules of any class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import DEFAULT_MODULE_ID

__all__ = ["initial_state", "is_multi_rl_module", "max_seq_len", "module_for_key", "stateful_module_for_key"]

AUTO_MAX_SEQ_LEN = 20
"""Steps of a training sequence where the model's settings leave it open."""


def is_multi_rl_module(rl_module: Any) -> bool:
    """Return whether it maps module ids to modules (MultiRLModule, or a plain dict)."""
    return hasattr(rl_module, "foreach_module") or isinstance(rl_module, Mapping)


def module_for_key(rl_module: Any, key: tuple[Any, ...] | None) -> Any:
    """Return the module that the items under a batch key are for; None when it is not there."""
    if not is_multi_rl_module(rl_module):
        return rl_module
    module_id = key[2] if key is not None and len(key) == 3 else DEFAULT_MODULE_ID
    return rl_module.get(module_id)


def stateful_module_for_key(rl_module: Any, key: tuple[Any, ...] | None) -> Any:
    """Like `module_for_key`, and None when that module is not stateful."""
    module = module_for_key(rl_module, key)
    return module if module is not None and module.is_stateful() else None


def is_stateful(rl_module: Any) -> bool:
    """Return whether any module has a state; False for None."""
    if rl_module is None:
        return False
    if isinstance(rl_module, Mapping):
        return any(module.is_stateful() for module in rl_module.values())
    return bool(rl_module.is_stateful())


def initial_state(module: Any) -> Any:
    """Return the state that episodes begin with: a tree of numpy arrays without batch axis."""
    return tree_map(as_numpy, module.get_initial_state())


def as_numpy(leaf: Any) -> Any:
    """Return a numpy array of a tensor (or of anything else that is array-like)."""
    if hasattr(leaf, "detach"):
        return leaf.detach().cpu().numpy()
    return np.asarray(leaf)


def max_seq_len(module: Any, key: tuple[Any, ...] | None = None) -> int:
    """Return the length of the sequences that a stateful module is trained on.

    ``model_config["max_seq_len"]``; "auto", and none for ``use_lstm``, mean 20 steps.

    Raises:
        ValueError: If its model_config has none.
    """
    config = module.model_config
    value = config.get("max_seq_len") if isinstance(config, Mapping) else getattr(config, "max_seq_len", None)
    if value == "auto" or (value is None and isinstance(config, Mapping) and config.get("use_lstm")):
        return AUTO_MAX_SEQ_LEN
    if not value:
        raise ValueError(
            f"module {key[2] if key and len(key) == 3 else DEFAULT_MODULE_ID!r} is stateful (it has an "
            "initial "
            'state) but its model_config has no "max_seq_len": set it to the length of its training '
            "sequences, "
            'e.g. model_config={"max_seq_len": 20}.'
        )
    return int(value)
