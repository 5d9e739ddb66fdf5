"""The columns that a module adds to episodes, known from a trial step."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch

from rlzmq.core.tree import tree_stack
from rlzmq.episodes.columns import Columns
from rlzmq.modules.rl_module import RLModule
from rlzmq.runners.module_step import ModuleStep

__all__ = ["module_outputs"]

_log = logging.getLogger("rlzmq.learner")
_NUM_ROWS = 2


def module_outputs(module: RLModule, *, explore: bool) -> dict[str, Any]:
    """Return the columns that a runner's step with this module adds to episodes, actions left out.

    A copy of the module acts on observations drawn from its space, so neither the module nor torch's random state
    changes.

    Args:
        module: One policy's module, e.g. a learner's.
        explore: Whether runners explore.

    Returns:
        Trees of arrays ``[rows, ...]`` by name; {} if the module cannot be tried, e.g. because it has no spaces or
        reads columns of custom connector pieces.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            own = copy.deepcopy(module.unwrapped())
            own.inference_only = True
            if isinstance(own, torch.nn.Module):
                own = own.cpu().eval()
            space = copy.deepcopy(own.observation_space)
            if space is None:
                return {}
            space.seed(0)
            step = ModuleStep(own, torch.Generator())
            step.begin(explore=explore)
            state = step.initial_state(_NUM_ROWS) if step.is_stateful else None
            columns, _ = step(tree_stack([space.sample() for _ in range(_NUM_ROWS)]), state, 0)
    except Exception as error:
        _log.debug("no trial step of module %s: %s", type(module).__name__, error)
        return {}
    return {
        name: column
        for name, column in columns.items()
        if name not in (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV)
    }
