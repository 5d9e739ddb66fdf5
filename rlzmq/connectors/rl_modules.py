"""Queries about RLModules of any class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlzmq.core.tree import as_numpy, tree_map
from rlzmq.episodes.columns import DEFAULT_MODULE_ID

__all__ = ["initial_state", "is_multi_rl_module", "max_seq_len", "module_for_key", "stateful_module_for_key"]

AUTO_MAX_SEQ_LEN = 20
"""Number of steps of a training sequence if the model's settings do not define it."""


def is_multi_rl_module(rl_module: Any) -> bool:
    """Return whether `rl_module` maps module ids to modules (MultiRLModule, or a plain dict)."""
    return hasattr(rl_module, "foreach_module") or isinstance(rl_module, Mapping)


def module_for_key(rl_module: Any, key: tuple[Any, ...] | None) -> Any:
    """Return the module for the items under a batch key; None if it does not exist."""
    if not is_multi_rl_module(rl_module):
        return rl_module
    module_id = key[2] if key is not None and len(key) == 3 else DEFAULT_MODULE_ID
    return rl_module.get(module_id)


def stateful_module_for_key(rl_module: Any, key: tuple[Any, ...] | None) -> Any:
    """Return the result of `module_for_key` if that module is stateful, else None."""
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
    """Return the state at the beginning of an episode: a tree of numpy arrays without batch axis."""
    return tree_map(as_numpy, module.get_initial_state())


def max_seq_len(module: Any, key: tuple[Any, ...] | None = None) -> int:
    """Return the length of a stateful module's training sequences.

    It is ``model_config["max_seq_len"]``. "auto", and a missing value with ``use_lstm``, mean 20 steps.

    Raises:
        ValueError: The module's model_config has none.
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
