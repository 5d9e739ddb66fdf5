"""Pieces for module-to-env pipelines: they choose actions and turn a module's outputs into an env's actions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from rlzmq.connectors.common.agent_to_module_mapping import (
    MAP_STRUCTURE,
    is_multi_rl_module,
    stateful_module_for_key,
)
from rlzmq.connectors.common.layout import SINGLE_TIME_RANK_FLAG, to_tensor
from rlzmq.connectors.connector_v2 import (
    LAST_STAGE,
    Batch,
    ConnectorV2,
    Memory,
    TorchPiece,
    unchanged_on_tensors,
)
from rlzmq.connectors.observation_pieces import agent_space
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.spaces import counts_from_0, leaf_spaces, space_tree, stretched
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tree import tree_leaves, tree_map, tree_unstack
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns

__all__ = [
    "GetActions",
    "ListifyDataForVectorEnv",
    "ModuleToAgentUnmapping",
    "NormalizeAndClipActions",
    "RemoveSingleTsTimeRankFromBatch",
    "TensorToNumpy",
    "UnBatchToIndividualItems",
    "draw_actions",
    "given_actions_logp",
]


class GetActions(ConnectorV2):
    """Adds ``actions`` and ``action_logp`` if the module returned only ``action_dist_inputs``.

    With ``explore=True``, actions are sampled from the module's exploration distribution. Otherwise they are the most
    likely actions of its inference distribution. Random numbers come from the torch.Generator in
    ``shared_data["generator"]``, or from torch's global stream without one. Rows are sampled in order.

    Actions that the module returned itself are used unchanged. While exploring, they get their ``action_logp`` if the
    module also returned ``action_dist_inputs``.
    """

    stage: ClassVar[int] = 1

    def __call__(
        self,
        *,
        rl_module: Any,
        batch: dict[str, Any],
        explore: bool | None = None,
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: A module returned neither ``actions`` nor ``action_dist_inputs``.
        """
        generator = (shared_data or {}).get("generator")
        if is_multi_rl_module(rl_module):
            for module_id, outputs in batch.items():
                _add_actions(outputs, rl_module[module_id], explore, generator, f"module {module_id!r}")
        else:
            _add_actions(batch, rl_module, explore, generator, type(rl_module).__name__)
        return batch

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2. Without exploration, the actions are the most likely ones."""

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            return _with_actions(rl_module, batch, False, None), memory

        def forward_exploration(batch: Batch, memory: Memory, generator: Any) -> tuple[Batch, Memory]:
            return _with_actions(rl_module, batch, True, generator), memory

        return TorchPiece(forward=forward, forward_exploration=forward_exploration)


def _with_actions(module: object, batch: Batch, explore: bool, generator: object) -> Batch:
    batch = dict(batch)
    _add_actions(batch, module, explore, generator, type(module).__name__, wants_logp=False)
    return batch


def _add_actions(
    outputs: dict[str, Any],
    module: Any,
    explore: bool | None,
    generator: Any,
    where: str,
    *,
    wants_logp: bool = True,
) -> None:
    inputs = outputs.get(Columns.ACTION_DIST_INPUTS)
    if Columns.ACTIONS in outputs:
        if explore and inputs is not None and Columns.ACTION_LOGP not in outputs:
            distribution = module.get_exploration_action_dist_cls().from_logits(inputs)
            outputs |= given_actions_logp(distribution, outputs[Columns.ACTIONS])
        return
    if inputs is None:
        raise ValueError(
            f"{where}: expected the outputs to have {Columns.ACTIONS!r} or {Columns.ACTION_DIST_INPUTS!r}, "
            f"got {sorted(outputs)}. Return one of them from "
            f"_forward_{'exploration' if explore else 'inference'}()."
        )
    dist_cls = module.get_exploration_action_dist_cls() if explore else module.get_inference_action_dist_cls()
    actions, logp = draw_actions(
        dist_cls.from_logits(inputs),
        explore,
        generator,
        wants_logp=wants_logp and Columns.ACTION_LOGP not in outputs,
    )
    outputs[Columns.ACTIONS] = actions
    if logp is not None:
        outputs[Columns.ACTION_LOGP] = logp


def given_actions_logp(distribution: Any, actions: Any) -> dict[str, Any]:
    """Return the column ``action_logp`` for actions that a module chose itself.

    Args:
        distribution: Distribution of the ``action_dist_inputs`` that the module returned with them.
        actions: Tree of tensors (or arrays) ``[B, ...]``.

    Returns:
        ``{"action_logp": float tensor [B]}``; ``{}`` if a deterministic distribution has none.
    """
    if not getattr(distribution, "has_logp", True):
        return {}
    return {Columns.ACTION_LOGP: distribution.logp(tree_map(to_tensor, actions))}


def draw_actions(
    distribution: Any, explore: bool | None, generator: Any, *, wants_logp: bool = True
) -> tuple[Any, Any]:
    """Return actions drawn from a distribution, and their log-probabilities.

    Args:
        distribution: The module's action distribution.
        explore: Whether to sample; otherwise take the most likely actions.
        generator: torch.Generator for sampling, or None.
        wants_logp: Whether to compute log-probabilities.

    Returns:
        (actions, log-probabilities). The latter are None if not requested, or if a deterministic distribution has none.
    """
    has_logp = wants_logp and getattr(distribution, "has_logp", True)
    if not explore:
        actions = distribution.to_deterministic().sample(generator=generator)
        return actions, distribution.logp(actions) if has_logp else None
    if has_logp:
        actions, logp = distribution.sample_and_logp(generator=generator)
        return actions, logp
    return distribution.sample(generator=generator), None


class TensorToNumpy(ConnectorV2):
    """Converts all tensors of the batch, at any depth, to numpy arrays (on the CPU, without gradients)."""

    stage: ClassVar[int] = 2
    to_torch = unchanged_on_tensors

    def __call__(self, *, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2."""
        return {name: tree_map(_to_numpy, data) for name, data in batch.items()}


def _to_numpy(leaf: Any) -> object:
    return leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else leaf


class UnBatchToIndividualItems(ConnectorV2):
    """Splits every column into items, under the keys that env-to-module used.

    Without these keys in `shared_data`, columns become plain lists.
    """

    stage: ClassVar[int] = 3
    to_torch = unchanged_on_tensors

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """See ConnectorV2. Multi-agent: ``{module_id: {column: {(episode, agent, module): [item]}}}``.

        Raises:
            ValueError: A module's outputs have another number of rows than its inputs.
        """
        structure = (shared_data or {}).get(MAP_STRUCTURE)
        if structure is None:
            return {name: tree_unstack(data) for name, data in batch.items()}
        if isinstance(structure, list):
            if is_multi_rl_module(rl_module) and DEFAULT_MODULE_ID in batch:
                batch = batch[DEFAULT_MODULE_ID]
            rows = [(episode_id,) for episode_id in structure]
            return {name: _by_key(name, data, rows, None) for name, data in batch.items()}
        unbatched = {}
        for module_id, columns in batch.items():
            if module_id not in structure:
                raise ValueError(
                    f"module {module_id!r} has outputs, but no agent had inputs for it at this step."
                    f"{did_you_mean(module_id, structure)}"
                )
            keys = [(episode_id, agent_id, module_id) for episode_id, agent_id in structure[module_id]]
            unbatched[module_id] = {
                name: _by_key(name, data, keys, module_id) for name, data in columns.items()
            }
        return unbatched


def _by_key(name: str, data: object, keys: list[Any], module_id: object) -> dict[Any, list[Any]]:
    items = tree_unstack(data)
    if len(items) != len(keys):
        raise ValueError(
            f"column {name!r}{f' of module {module_id!r}' if module_id is not None else ''}: expected "
            f"{len(keys)} rows, as many as the module's inputs had, got {len(items)}."
        )
    by_key: dict[Any, list[Any]] = {}
    for key, item in zip(keys, items, strict=True):
        by_key.setdefault(key, []).append(item)
    return by_key


class ModuleToAgentUnmapping(ConnectorV2):
    """Reverses AgentToModuleMapping for a module's outputs.

    ``{module: {column: {(episode, agent, module): [items]}}}`` becomes
    ``{column: {(episode, agent, module): [items]}}``.
    """

    stage: ClassVar[int] = 4
    to_torch = unchanged_on_tensors

    def __call__(self, *, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2."""
        by_column: dict[str, Any] = {}
        for columns in batch.values():
            for name, by_key in columns.items():
                by_column.setdefault(name, {}).update(by_key)
        return by_column


_WITHOUT_TIME_AXIS = (Columns.STATE_OUT, Columns.STATE_IN, Columns.INFOS)


class RemoveSingleTsTimeRankFromBatch(ConnectorV2):
    """Removes the time axis of length 1 from the items of stateful modules. States have no time axis."""

    stage: ClassVar[int] = 5

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: The length of an item's first axis is not 1.
        """
        if not shared_data or not shared_data.pop(SINGLE_TIME_RANK_FLAG, False):
            return batch
        for name, column in batch.items():
            if name in _WITHOUT_TIME_AXIS:
                continue
            for key, items in column.items() if isinstance(column, dict) else [(None, column)]:
                if rl_module is None or stateful_module_for_key(rl_module, key) is not None:
                    items[:] = [
                        tree_map(lambda leaf, name=name, key=key: _squeezed(leaf, name, key), item)
                        for item in items
                    ]
        return batch

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2."""
        if not rl_module.is_stateful():
            return TorchPiece()

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            return {
                name: column if name in _WITHOUT_TIME_AXIS else tree_map(lambda leaf: leaf[:, 0], column)
                for name, column in batch.items()
            }, memory

        return TorchPiece(forward=forward)


def _squeezed(leaf: Any, column: str, key: Any) -> object:
    shape = np.shape(leaf)
    if not shape or shape[0] != 1:
        raise ValueError(
            f"column {column!r}, key {key}: expected a time axis of length 1 first, got shape {tuple(shape)}. "
            "Stateful modules get [B, 1, ...] and return all columns but state_out as [B, 1, ...]."
        )
    return leaf[0]


_EPISODES_MAP = "vector_env_episodes_map"


class ListifyDataForVectorEnv(ConnectorV2):
    """Converts ``{column: {key: [item]}}`` to ``{column: [one entry per sub-env]}``.

    Single-agent: the items, in the order of the batch. Multi-agent: dicts ``{agent_id: item}``, one per episode of
    `episodes` (or at the index in ``shared_data["vector_env_episodes_map"]``).
    """

    stage: ClassVar[int] = LAST_STAGE
    to_torch = unchanged_on_tensors

    def __call__(
        self,
        *,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: Multi-agent data belongs to an episode that is not among `episodes`.
        """
        index_of = dict((shared_data or {}).get(_EPISODES_MAP) or {})
        if not index_of:
            index_of = {episode.id_: index for index, episode in enumerate(episodes)}
        return {name: self._listified(name, column, episodes, index_of) for name, column in batch.items()}

    def _listified(
        self, name: str, column: Any, episodes: Sequence[Any], index_of: dict[Any, int]
    ) -> list[Any]:
        if isinstance(column, list):
            return column
        if len(next(iter(column), ())) != 3:
            # No entries: no agent acted.
            return [item for items in column.values() for item in items] or [{} for _ in episodes]
        entries: list[Any] = [{} for _ in episodes]
        for (episode_id, agent_id, _), items in column.items():
            if episode_id not in index_of:
                raise ValueError(f"column {name!r}: episode {episode_id!r} is not one of the given episodes.")
            entries[index_of[episode_id]][agent_id] = items[0]
        return entries


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
        if self.normalize_actions or self.clip_actions:
            return True
        space: Any = self.input_action_space
        return any(map(counts_from_0, leaf_spaces(space)))

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

    def apply_vectorized(self, actions: object, agent_id: Hashable = None) -> Any:
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

    def _compiled(self, agent_id: object) -> object:
        """Return a function per leaf of the action space (None: no change), or None if no leaf changes."""
        if self.input_action_space is None:
            raise ConfigurationError(
                "NormalizeAndClipActions needs the action space: pass input_action_space to the constructor, "
                "or put the piece into a pipeline that has one."
            )
        maps = tree_map(self._map_of, space_tree(agent_space(self.input_action_space, agent_id)))
        return maps if any(leaf_map is not None for leaf_map in tree_leaves(maps)) else None

    def _map_of(self, space: gym.Space[Any]) -> object:
        if not isinstance(space, gym.spaces.Box):
            return None
        clip = partial(_clip, space.low, space.high, space.dtype)
        clips = self.clip_actions and not self.normalize_actions
        if counts_from_0(space):
            return partial(_shift, space.low, space.dtype, clip if clips else None)
        if clips:
            return clip
        if not self.normalize_actions:
            return None
        if not space.is_bounded():
            return clip if np.any(space.bounded_below | space.bounded_above) else None
        return partial(stretched, space.low, space.high, space.dtype)

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


def _shift(low: Any, dtype: Any, clip: Any, action: Any) -> object:
    shifted = np.asarray(low + action)
    return (shifted if clip is None else clip(shifted)).astype(dtype, copy=False)


def _clip(low: Any, high: Any, dtype: Any, action: Any) -> object:
    return np.clip(action, low, high).astype(dtype, copy=False)


def _on_tensors(leaf_map: partial[Any]) -> Callable[[Any], Any]:
    """Return the tensor form of `stretched`, `_shift` or `_clip` with its arguments."""
    import torch

    def constant(bound: object) -> Any:
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
