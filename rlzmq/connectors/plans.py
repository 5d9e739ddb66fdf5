"""Plans for running pipelines on whole columns.

Each `*_plan` function checks a pipeline's pieces and returns a small plan of the non-default ones, or None if a piece
needs the per-episode protocol. `rlzmq.connectors.columnar` shows how plans are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlzmq.connectors import common, learner, module_to_env
from rlzmq.connectors.columnar import FlatRows, RowsContext
from rlzmq.connectors.common.frame_stacking import FrameStacking
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.core.tree import tree_map, tree_rows
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch

if TYPE_CHECKING:
    import gymnasium as gym

    from rlzmq.connectors.learner.whole_batch_estimator import WholeBatchEstimator
    from rlzmq.connectors.module_to_env import NormalizeAndClipActions

__all__ = ["EnvToModulePlan", "LearnerPlan", "ModuleToEnvPlan"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class EnvToModulePlan:
    """The env-to-module pipeline on whole columns.

    Attributes:
        writers: Pieces whose results the episodes store, in order.
        readers: Pieces whose results go to the module only, in order.
        stored_observation_space: Space of the writers' result, the obs column (multi-agent: a Dict by agent id).
        observation_space: Space of the module's observations, before the mapping to modules.
        required_lookback: Number of slots to keep before each chunk, for readers and the next fragment.
        multi_agent: Whether the default pieces are the multi-agent ones.
        device: NumpyToTensor's device; None: CPU.
    """

    writers: tuple[ConnectorV2, ...]
    readers: tuple[ConnectorV2, ...]
    stored_observation_space: gym.Space[Any] | None
    observation_space: gym.Space[Any] | None
    required_lookback: int
    multi_agent: bool
    device: Any

    def write(self, observations: Any, rows: RowsContext) -> Any:
        """Convert the env's observations ``[N, ...]`` to the stored ones, and update statistics."""
        for piece in self.writers:
            observations = piece.transform_observations(observations, rows)
        return observations

    def read(self, observations: Any, rows: RowsContext) -> Any:
        """Convert stored observations ``[N, ...]`` to the module's."""
        for piece in self.readers:
            observations = piece.transform_observations(observations, rows)
        return observations


@dataclass(frozen=True)
class ModuleToEnvPlan:
    """The module-to-env pipeline on whole columns.

    Attributes:
        normalize: Piece that converts actions to the env's (`apply_vectorized`); None if they are equal.
    """

    normalize: NormalizeAndClipActions | None


@dataclass(frozen=True)
class LearnerPlan:
    """The learner pipeline on whole columns.

    Attributes:
        observation_pieces: Pieces that change observations, in order.
        column_pieces: Pieces that add columns, in order.
        add_one_ts: Whether every chunk gets an extra, masked step (AddOneTsToEpisodesAndTruncate).
        next_observations: Whether the batch has ``Columns.NEXT_OBS``.
        infos: Whether the batch has ``Columns.INFOS``.
        estimator: The last piece, which uses the weights (for advantages), or None.
        required_lookback: Number of steps that chunks should have before their start.
        multi_agent: Whether the default pieces are the multi-agent ones.
        device: NumpyToTensor's device; None: CPU.
    """

    observation_pieces: tuple[ConnectorV2, ...]
    column_pieces: tuple[ConnectorV2, ...]
    add_one_ts: bool
    next_observations: bool
    infos: bool
    estimator: WholeBatchEstimator | None
    required_lookback: int
    multi_agent: bool
    device: Any

    @property
    def is_default(self) -> bool:
        """Whether single-agent rows are the steps' own columns, with or without next observations."""
        return not (
            self.observation_pieces
            or self.column_pieces
            or self.add_one_ts
            or self.infos
            or self.estimator is not None
            or self.multi_agent
        )

    def observations(self, batch: EpisodeBatch, slots: IntArray, chunks: IntArray) -> Any:
        """Return the module's observations at any slots: gathered, then transformed.

        Args:
            batch: The chunks.
            slots: int64[M], within ``start - lookback … start + length`` of their chunks.
            chunks: int64[M], the chunk of each slot.

        Returns:
            Tree of arrays ``[M, ...]``.
        """
        if not self.observation_pieces:
            return tree_rows(batch.columns[Columns.OBS], slots)
        agent_ids = list(dict.fromkeys(batch.agent_ids or [None]))
        if len(agent_ids) == 1:
            return self._transformed(batch, slots, chunks, agent_ids[0])
        if not any(piece.agent_by_agent for piece in self.observation_pieces):
            return self._transformed(batch, slots, chunks, None)
        agent_of = np.array([agent_ids.index(agent_id) for agent_id in batch.agent_ids or ()])[chunks]
        order = np.argsort(agent_of, kind="stable")
        parts = [
            self._transformed(batch, slots[mine], chunks[mine], agent_ids[agent_of[mine[0]]])
            for mine in np.split(order, np.flatnonzero(np.diff(agent_of[order])) + 1)
            if len(mine)
        ]
        back = np.argsort(order)
        return tree_map(lambda *leaves: np.concatenate(leaves)[back], *parts)

    def _transformed(self, batch: EpisodeBatch, slots: IntArray, chunks: IntArray, agent_id: Any) -> Any:
        rows = FlatRows.of_batch(batch, slots, chunks, agent_id)
        observations = tree_rows(batch.columns[Columns.OBS], slots)
        for piece in self.observation_pieces:
            observations = piece.transform_observations(observations, rows)
        return observations

    def extra_columns(self, batch: EpisodeBatch) -> dict[str, Any]:
        """Return the columns added by user pieces: column name -> array ``[num_env_steps, ...]``."""
        columns: dict[str, Any] = {}
        for piece in self.column_pieces:
            columns.update(piece.compute_columns(batch))
        return columns


def env_to_module_plan(pieces: Sequence[ConnectorV2]) -> EnvToModulePlan | None:
    """Return the plan of an env-to-module pipeline; None if it needs the per-episode protocol."""
    flat = flat_pieces(pieces)
    heads = (
        common.AddObservationsFromEpisodesToBatch,
        common.AddTimeDimToBatchAndZeroPad,
        common.AddStatesFromEpisodesToBatch,
    )
    tails = (common.BatchIndividualItems, common.NumpyToTensor)
    split = _split_defaults(flat, heads, (common.AgentToModuleMapping,), tails)
    if split is None:
        return None
    user, multi_agent = split
    if not all(_is_columnar(piece) for piece in user):
        return None
    num_writers = next((i for i, piece in enumerate(user) if not piece.writes_episodes), len(user))
    writers, readers = user[:num_writers], user[num_writers:]
    if len(readers) > 1 or any(piece.writes_episodes for piece in readers):
        return None
    first = flat[0]
    stored = writers[-1].observation_space if writers else first.input_observation_space
    return EnvToModulePlan(
        writers=tuple(writers),
        readers=tuple(readers),
        stored_observation_space=stored,
        observation_space=user[-1].observation_space if user else first.input_observation_space,
        required_lookback=max((piece.required_lookback for piece in user), default=0),
        multi_agent=multi_agent,
        device=flat[-1].device,  # type: ignore[attr-defined]
    )


def module_to_env_plan(pieces: Sequence[ConnectorV2]) -> ModuleToEnvPlan | None:
    """Return the plan of a module-to-env pipeline; None if it has user pieces."""
    types = [type(piece) for piece in flat_pieces(pieces)]
    single: list[type[ConnectorV2]] = [
        module_to_env.GetActions,
        module_to_env.TensorToNumpy,
        module_to_env.UnBatchToIndividualItems,
        module_to_env.RemoveSingleTsTimeRankFromBatch,
        module_to_env.NormalizeAndClipActions,
        module_to_env.ListifyDataForVectorEnv,
    ]
    if types not in (single, [*single[:3], module_to_env.ModuleToAgentUnmapping, *single[3:]]):
        return None
    piece = next(p for p in flat_pieces(pieces) if isinstance(p, module_to_env.NormalizeAndClipActions))
    return ModuleToEnvPlan(normalize=piece if piece.changes_actions else None)


def learner_plan(pieces: Sequence[ConnectorV2]) -> LearnerPlan | None:
    """Return the plan of a learner pipeline; None if it needs the per-episode protocol."""
    flat = flat_pieces(pieces)
    add_one_ts = bool(flat) and type(flat[0]) is learner.AddOneTsToEpisodesAndTruncate
    rest = flat[int(add_one_ts) :]
    estimator = None
    if rest and isinstance(rest[-1], learner.WholeBatchEstimator) and rest[-1].is_columnar:
        estimator = rest.pop()
    if _changes_observations_after(learner.AddNextObservationsFromEpisodesToTrainBatch, rest):
        return None
    optional = (learner.AddNextObservationsFromEpisodesToTrainBatch, learner.AddInfosFromEpisodesToTrainBatch)
    added = {type(piece) for piece in rest} & set(optional)
    rest = [piece for piece in rest if type(piece) not in optional]
    heads = (
        common.AddObservationsFromEpisodesToBatch,
        learner.AddColumnsFromEpisodesToTrainBatch,
        common.AddTimeDimToBatchAndZeroPad,
        common.AddStatesFromEpisodesToBatch,
    )
    split = _split_defaults(
        rest, heads, (common.AgentToModuleMapping,), (common.BatchIndividualItems, common.NumpyToTensor)
    )
    if split is None:
        return None
    user, multi_agent = split
    if not all(_is_columnar(piece) for piece in user):
        return None
    column_pieces = [piece for piece in user if _overrides(piece, "compute_columns")]
    observation_pieces = [piece for piece in user if _overrides(piece, "transform_observations")]
    looking_back = [piece for piece in observation_pieces if piece.required_lookback]
    if looking_back and len(observation_pieces) > 1:
        return None
    return LearnerPlan(
        observation_pieces=tuple(observation_pieces),
        column_pieces=tuple(column_pieces),
        add_one_ts=add_one_ts,
        next_observations=learner.AddNextObservationsFromEpisodesToTrainBatch in added,
        infos=learner.AddInfosFromEpisodesToTrainBatch in added,
        estimator=estimator,  # type: ignore[arg-type]
        required_lookback=max((piece.required_lookback for piece in user), default=0),
        multi_agent=multi_agent,
        device=rest[-1].device,  # type: ignore[attr-defined]
    )


def flat_pieces(pieces: Sequence[ConnectorV2]) -> list[ConnectorV2]:
    """Return the pieces, with nested pipelines expanded."""
    flat: list[ConnectorV2] = []
    for piece in pieces:
        nested = getattr(piece, "connectors", None)
        flat.extend([piece] if nested is None else flat_pieces(nested))
    return flat


def _split_defaults(
    pieces: Sequence[ConnectorV2],
    heads: tuple[type[ConnectorV2], ...],
    multi_agent_only: tuple[type[ConnectorV2], ...],
    tails: tuple[type[ConnectorV2], ...],
) -> tuple[list[ConnectorV2], bool] | None:
    """Return (user pieces, whether multi-agent) if the pipeline ends with exactly the default pieces."""
    types = tuple(type(piece) for piece in pieces)
    for middle in ((), multi_agent_only):
        expected = (*heads, *middle, *tails)
        if len(types) >= len(expected) and types[len(types) - len(expected) :] == expected:
            return list(pieces[: len(types) - len(expected)]), bool(middle)
    return None


def _changes_observations_after(first: type[ConnectorV2], pieces: Sequence[ConnectorV2]) -> bool:
    """Return whether a piece after `first` changes observations without changing those already in the batch.

    Frame stacking changes both, for example.
    """
    types = [type(piece) for piece in pieces]
    after = pieces[types.index(first) + 1 :] if first in types else []
    return any(
        _overrides(piece, "transform_observations") and not isinstance(piece, FrameStacking)
        for piece in after
    )


def _is_columnar(piece: ConnectorV2) -> bool:
    """Return whether the columnar form is up to date: no subclass overrides only the per-episode form."""
    if not piece.columnar:
        return False
    mro = type(piece).__mro__
    called = next(i for i, cls in enumerate(mro) if "__call__" in vars(cls))
    twins = ("transform_observations", "compute_columns")
    return any(name in vars(cls) for cls in mro[: called + 1] for name in twins)


def _overrides(piece: ConnectorV2, name: str) -> bool:
    return getattr(type(piece), name) is not getattr(ConnectorV2, name)
