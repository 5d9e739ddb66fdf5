"""Functions shared by the samplers' states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlzmq.core.tree import tree_map
from rlzmq.envs.sync_vector import LeanSyncVectorEnv

__all__ = ["by_env", "check_sampler", "keep_actions"]


def by_env(steps: Sequence[Any]) -> Any:
    """Stack batched actions of T vector steps, leaves ``[N, ...]``, into a tree of arrays ``[N, T, ...]``."""
    return tree_map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves], axis=1), *steps)


def check_sampler(sampler: Any, state: Mapping[str, Any], kind: str, num_envs: int) -> None:
    """Raise ValueError if the state is of another kind of sampler or of other sizes."""
    found = (state["kind"], state["lookback"], num_envs)
    expected = (kind, sampler.lookback, sampler.num_envs)
    if found != expected:
        raise ValueError(f"expected a sampler of kind, lookback and envs {expected}, got {found}")


def keep_actions(env: Any, actions: Any, num_steps: int, convert: Callable[[Any], Any] | None = None) -> None:
    """Record a fragment's actions in the history of an env that keeps one (see `StepHistory.add`)."""
    if type(env) is LeanSyncVectorEnv and num_steps:
        env.history.add(actions, num_steps, convert)
