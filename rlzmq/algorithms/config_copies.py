"""What a copy of a config shares with it, and what it does not."""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["copy_value"]


def copy_value(value: Any) -> Any:
    """Containers, module specs and configs are copied; what they hold (spaces, classes, functions) is shared."""
    if value is None or isinstance(value, str | int | float | type):
        return value
    if isinstance(value, dict):
        return {key: copy_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_value(item) for item in value]
    if type(value) is tuple:
        return tuple(copy_value(item) for item in value)
    if isinstance(value, set):
        return set(value)
    from rlzmq.algorithms.algorithm_config import AlgorithmConfig
    from rlzmq.modules.model_config import DefaultModelConfig
    from rlzmq.modules.multi_rl_module import MultiRLModuleSpec
    from rlzmq.modules.spec import RLModuleSpec

    if isinstance(value, AlgorithmConfig):
        return value.copy()
    if isinstance(value, DefaultModelConfig):
        return copy.deepcopy(value)
    if isinstance(value, RLModuleSpec | MultiRLModuleSpec):
        new = copy.copy(value)
        new.model_config = copy_value(value.model_config)
        if isinstance(new, MultiRLModuleSpec):
            new.rl_module_specs = copy_value(new.rl_module_specs)
        return new
    return value
