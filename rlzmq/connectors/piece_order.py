"""Checks the order of connector pieces: of those that write observations, and of those that stack frames."""

from __future__ import annotations

from collections.abc import Sequence

from rlzmq.connectors import common, env_to_module
from rlzmq.connectors.common.frame_stacking import FrameStacking
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.plans import flat_pieces
from rlzmq.core.errors import ConfigurationError

__all__ = ["check_env_to_module_order", "check_learner_order"]

_HERE = "config.env_runners(env_to_module_connector=…)"
_PREPROCESSORS = (
    env_to_module.FlattenObservations,
    env_to_module.SingleAgentObservationPreprocessor,
    env_to_module.MultiAgentObservationPreprocessor,
)


def check_env_to_module_order(pieces: Sequence[ConnectorV2]) -> None:
    """Check the order of an env-to-module pipeline's pieces. Of custom pieces it is not known what they add.

    Raises:
        ConfigurationError: Observations are rewritten after they were added to the batch, stacked twice, or missing in
            the batch; the text says where the piece belongs.
    """
    adder: ConnectorV2 | None = None  # the piece that has added observations to the batch
    may_be_added = False
    for piece in flat_pieces(pieces):
        name = type(piece).__name__
        if isinstance(piece, FrameStacking):
            if isinstance(adder, FrameStacking):
                raise ConfigurationError(
                    f"{_HERE}: {name} is there twice, and both stack the episodes' single frames. Keep one, with a "
                    "larger num_frames."
                )
            if adder is not None:
                raise ConfigurationError(
                    f"{_HERE}: {name} comes after {type(adder).__name__}, which has added the single frames already. "
                    "Put it before."
                )
            adder = piece
        elif isinstance(piece, common.AddObservationsFromEpisodesToBatch):
            adder = adder or piece
        elif isinstance(piece, env_to_module.WriteObservationsToEpisodes):
            if isinstance(adder, FrameStacking):
                raise ConfigurationError(
                    f"{_HERE}: {name} after {type(adder).__name__} would store stacked observations, which are "
                    "stacked again at the next step. Episodes keep single frames: leave it out."
                )
            if adder is None and not may_be_added:
                raise ConfigurationError(
                    f"{_HERE}: {name} copies observations from the batch, and no piece before it adds any. Put it "
                    "after your piece that does."
                )
        elif _rewrites(piece):
            if adder is not None:
                raise ConfigurationError(
                    f"{_HERE}: {name} comes after {type(adder).__name__}, which has added the observations to the "
                    f"batch already, so the module would not get what {name} makes of them. Put it before."
                )
        else:
            may_be_added = True


def check_learner_order(pieces: Sequence[ConnectorV2]) -> None:
    """Check the pieces of a learner pipeline.

    Raises:
        ConfigurationError: Frames are stacked twice, or flattened on the learner; the text says what to do instead.
    """
    flat = flat_pieces(pieces)
    stacking = [piece for piece in flat if isinstance(piece, FrameStacking)]
    where = "config.training(learner_connector=…)"
    if len(stacking) > 1:
        raise ConfigurationError(
            f"{where}: {type(stacking[1]).__name__} is there twice, and both stack the episodes' single frames. Keep "
            "one, with the num_frames of the env runners."
        )
    if stacking and any(isinstance(piece, env_to_module.FlattenObservations) for piece in flat):
        raise ConfigurationError(
            f"{where}: FlattenObservations and {type(stacking[0]).__name__} cannot both be in a learner pipeline. "
            "Flatten in config.env_runners(env_to_module_connector=…), before frames are stacked: episodes then hold "
            "flat observations, which the learner gets."
        )


def _rewrites(piece: ConnectorV2) -> bool:
    """Return whether a piece rewrites the episodes' last observations."""
    return piece.writes_episodes or (isinstance(piece, _PREPROCESSORS) and piece.last_step_only)
