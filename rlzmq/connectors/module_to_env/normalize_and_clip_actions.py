"""NormalizeAndClipActions: converts the module's actions to the env's."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.torch_piece import Batch, Memory, TorchPiece
from rlzmq.connectors.writing import agent_space
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import Columns

__all__ = ["NormalizeAndClipActions"]


class NormalizeAndClipActions(ConnectorV2):
    """Adds ``actions_for_env``. The column ``actions``, which the episode stores, is unchanged.

    With `normalize_actions`, parts of bounded float Boxes are scaled from [-1, 1] to the Box:
    ``low + (action + 1) * (high - low) / 2``, then clipped; Boxes without some of their bounds are only clipped, to
    those they have. With `clip_actions` (and not `normalize_actions`), parts of Boxes are clipped. Parts of bounded
    integer Boxes always count from 0, as modules choose them, and are shifted by `low`. All other parts are unchanged.

    Args:
        input_observation_space, input_action_space: See ConnectorV2. The action space is the env's.
        normalize_actions: Whether to scale actions from [-1, 1] to the space.
        clip_actions: Whether to clip actions to the space.
    """

    stage: ClassVar[int] = 6

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        normalize_actions: bool = True,
        clip_actions: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.normalize_actions = normalize_actions
        self.clip_actions = clip_actions
        self._maps: dict[Any, Any] = {}

    def recompute_output_action_space(self, input_observation_space: Any, input_action_space: Any) -> Any:
        """Return the action space unchanged."""
        self._maps = {}
        return input_action_space

    @property
    def changes_actions(self) -> bool:
        """Whether the env's actions may differ from the module's. If not, there is no ``actions_for_env``."""
        return self.normalize_actions or self.clip_actions or _has_integers(self.input_action_space)

    @property
    def changes_rows(self) -> bool:
        """Whether `apply_vectorized` may return other actions than it gets."""
        return self.changes_actions and (self.input_action_space is None or self._compiled(None) is not None)

    def __call__(self, *, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ConfigurationError: The action space is unknown.
        """
        if not self.changes_actions:
            return batch
        actions = batch[Columns.ACTIONS]
        if isinstance(actions, list):
            batch[Columns.ACTIONS_FOR_ENV] = [self.apply_vectorized(action) for action in actions]
        else:
            batch[Columns.ACTIONS_FOR_ENV] = {
                key: [self.apply_vectorized(action, key[1] if len(key) == 3 else None) for action in items]
                for key, items in actions.items()
            }
        return batch

    def apply_vectorized(self, actions: Any, agent_id: Hashable = None) -> Any:
        """Convert the module's actions to the env's, one or many at once.

        Args:
            actions: An action, or a tree of arrays ``[N, ...]`` of actions; not modified in place.
            agent_id: The acting agent, if the action space is a Dict by agent id.

        Returns:
            The same structure; the same object if no change is needed.

        Raises:
            ConfigurationError: The action space is unknown.
        """
        maps = self._maps.get(agent_id, self)
        if maps is self:
            maps = self._maps[agent_id] = self._compiled(agent_id)
        if maps is None:
            return actions
        if callable(maps):
            return maps(actions)
        return tree_map(lambda leaf_map, leaf: leaf if leaf_map is None else leaf_map(leaf), maps, actions)

    def _compiled(self, agent_id: object) -> Any:
        """Return a function per leaf of the action space (None: no change), or None if no leaf changes."""
        if self.input_action_space is None:
            raise ConfigurationError(
                "NormalizeAndClipActions needs the action space: pass input_action_space to the constructor, "
                "or put the piece into a pipeline that has one."
            )
        maps = self._maps_of(agent_space(self.input_action_space, agent_id))
        found: list[Any] = []
        tree_map(found.append, maps)
        return maps if any(leaf_map is not None for leaf_map in found) else None

    def _maps_of(self, space: gym.Space[Any]) -> Any:
        if isinstance(space, gym.spaces.Dict):
            return {key: self._maps_of(part) for key, part in space.spaces.items()}
        if isinstance(space, gym.spaces.Tuple):
            return tuple(self._maps_of(part) for part in space.spaces)
        if not isinstance(space, gym.spaces.Box):
            return None
        clip = partial(_clip, space.low, space.high, space.dtype)
        clips = self.clip_actions and not self.normalize_actions
        if _counts_from_0(space):
            return partial(_shift, space.low, space.dtype, clip if clips else None)
        if clips:
            return clip
        if not self.normalize_actions:
            return None
        if not space.is_bounded():
            return clip if np.any(space.bounded_below | space.bounded_above) else None
        return partial(_stretch, space.low, space.high, space.dtype)

    def __repr__(self) -> str:
        return (
            f"NormalizeAndClipActions(normalize_actions={self.normalize_actions}, "
            f"clip_actions={self.clip_actions})"
        )

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2."""
        if not self.changes_actions:
            return TorchPiece()
        maps = self._compiled(agent_id)
        if maps is not None:
            maps = tree_map(lambda leaf_map: None if leaf_map is None else _on_tensors(leaf_map), maps)

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            actions = batch[Columns.ACTIONS]
            if maps is not None:
                actions = tree_map(
                    lambda leaf_map, leaf: leaf if leaf_map is None else leaf_map(leaf), maps, actions
                )
            return {**batch, Columns.ACTIONS_FOR_ENV: actions}, memory

        return TorchPiece(forward=forward)


def _has_integers(space: Any) -> bool:
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, gym.spaces.Dict) else space.spaces
        return any(_has_integers(part) for part in parts)
    return isinstance(space, gym.spaces.Box) and _counts_from_0(space)


def _counts_from_0(space: gym.spaces.Box) -> bool:
    return bool(np.issubdtype(space.dtype, np.integer)) and space.is_bounded()


def _stretch(low: Any, high: Any, dtype: Any, action: Any) -> Any:
    return np.clip(low + (action + 1.0) * ((high - low) / 2.0), low, high).astype(dtype, copy=False)


def _shift(low: Any, dtype: Any, clip: Any, action: Any) -> Any:
    shifted = np.asarray(low + action)
    return (shifted if clip is None else clip(shifted)).astype(dtype, copy=False)


def _clip(low: Any, high: Any, dtype: Any, action: Any) -> Any:
    return np.clip(action, low, high).astype(dtype, copy=False)


def _on_tensors(leaf_map: partial[Any]) -> Callable[[Any], Any]:
    """Return the tensor form of `_stretch`, `_shift` or `_clip` with its arguments."""
    import torch

    def constant(bound: Any) -> Any:
        return torch.from_numpy(np.array(bound))

    if leaf_map.func is _shift:
        first, dtype, clip = leaf_map.args
        low, to_range = constant(first), None if clip is None else _on_tensors(clip)
        kind = constant(np.zeros(0, dtype)).dtype
        return lambda action: (low + action).to(kind) if to_range is None else to_range(low + action).to(kind)
    low, high = map(constant, leaf_map.args[:2])
    kind = constant(np.zeros(0, leaf_map.args[2])).dtype
    if leaf_map.func is _clip:
        return lambda action: torch.minimum(torch.maximum(action, low), high).to(kind)
    half = (high - low) / 2.0
    return lambda action: torch.minimum(torch.maximum(low + (action + 1.0) * half, low), high).to(kind)
