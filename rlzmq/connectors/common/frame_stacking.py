"""FrameStacking: concatenates the last observations; one class for both pipelines."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlzmq.connectors.common.layout import OBSERVATION_READERS
from rlzmq.connectors.connector_v2 import Batch, Memory, TorchPiece
from rlzmq.connectors.observation_pieces import ObservationPiece, agent_space
from rlzmq.connectors.rows import RowsContext
from rlzmq.core.errors import UnsupportedSpaceError
from rlzmq.episodes.columns import Columns

__all__ = ["FrameStacking", "FrameStackingEnvToModule", "FrameStackingLearner"]


class FrameStacking(ObservationPiece):
    """Concatenates the last `num_frames` observations along their last axis, for the module.

    Box ``(84, 84, 1)`` becomes ``(84, 84, num_frames)``, Box ``(4,)`` becomes ``(4 * num_frames,)``. The oldest frame
    comes first; frames before an episode's first observation are zeros. Episodes keep the single frames, so the
    learner pipeline needs the corresponding piece, and chunks need a lookback of ``num_frames - 1`` steps
    (``config.env_runners(episode_lookback_horizon=...)``).

    Args:
        input_observation_space, input_action_space, multi_agent: See ObservationPiece.
        num_frames: Number of observations, >= 1.
        as_learner_connector: Whether to stack the observations of all steps instead of the last one.
    """

    agent_by_agent: ClassVar[bool] = False

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        num_frames: int = 1,
        as_learner_connector: bool = False,
        multi_agent: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space, multi_agent=multi_agent)
        if num_frames < 1:
            raise ValueError(f"num_frames: expected at least 1, got {num_frames}.")
        self.num_frames = num_frames
        self._all_steps = as_learner_connector

    @property
    def last_step_only(self) -> bool:
        """Whether the piece handles only the last step: True in env-to-module pipelines."""
        return not self._all_steps

    @property
    def required_lookback(self) -> int:
        """Number of earlier steps needed: ``num_frames - 1``."""
        return self.num_frames - 1

    def new_space(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], agent_id: Hashable
    ) -> gym.spaces.Box:
        """Return the Box with its last axis repeated `num_frames` times."""
        space = observation_space
        if not isinstance(space, gym.spaces.Box) or not space.shape:
            raise UnsupportedSpaceError(
                f"{type(self).__name__}: expected a Box with at least one axis, got {space}. Put a piece that makes "
                "one (FlattenObservations) before it. For a Dict by agent id, pass multi_agent=True."
            )
        # Zeros stand for missing frames, so they are part of the space.
        low = np.minimum(space.low, np.zeros((), space.dtype))
        high = np.maximum(space.high, np.zeros((), space.dtype))
        return gym.spaces.Box(
            np.concatenate([low] * self.num_frames, axis=-1),
            np.concatenate([high] * self.num_frames, axis=-1),
            dtype=space.dtype,
        )

    def __call__(
        self,
        *,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """See ConnectorV2. Adds the ``obs`` column, and stacks ``new_obs`` if it exists."""
        if not self._all_steps:
            for episode in self.single_agent_episode_iterator(episodes):
                num_observations = len(episode.observations)
                stacked = self.observations_of(episode, num_observations - 1, num_observations)[0]
                self.add_batch_item(batch, Columns.OBS, stacked, episode)
            return batch
        batch.pop(Columns.OBS, None)  # of a piece before
        columns = {Columns.OBS: 0}
        if batch.pop(Columns.NEXT_OBS, None) is not None:
            columns[Columns.NEXT_OBS] = 1
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            num_steps = len(episode)
            for column, start in columns.items() if num_steps else ():
                stacked = self.observations_of(episode, start, start + num_steps)
                self.add_n_batch_items(batch, column, stacked, num_steps, episode)
        if shared_data is not None:
            shared_data.setdefault(OBSERVATION_READERS, []).append(self)
        return batch

    def observations_of(self, episode: Any, start: int, stop: int) -> npt.NDArray[Any]:
        """Return the stacked observations of time steps ``start … stop - 1`` of a chunk, ``[stop - start, ...]``."""
        num_before = min(self.num_frames - 1, start + episode.observations.lookback)
        frames = episode.get_observations(slice(start - num_before, stop), neg_index_as_lookback=True)
        frames = np.stack(frames) if isinstance(frames, list) else frames
        num_missing = self.num_frames - 1 - num_before
        if num_missing:
            blank = np.zeros((num_missing, *frames.shape[1:]), frames.dtype)
            frames = np.concatenate([blank, frames])
        windows = np.lib.stride_tricks.sliding_window_view(frames, self.num_frames, axis=0)
        return _join_frames(np.moveaxis(windows, -1, 1))

    def transform_observations(self, observations: Any, rows: RowsContext) -> Any:
        """Row form of `__call__`. The `observations` are in their slots already."""
        return _join_frames(rows.window(Columns.OBS, self.num_frames, current=True))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_frames={self.num_frames})"

    def to_torch(self, *, rl_module: Any, agent_id: Any) -> TorchPiece:
        """See ConnectorV2. The memory is the previous frames."""
        import torch

        num_previous = self.num_frames - 1
        if num_previous == 0:
            return TorchPiece()
        space = agent_space(self.input_observation_space, agent_id)

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            frames = torch.cat([memory["frames"], batch[Columns.OBS].unsqueeze(1)], 1)
            stacked = frames.movedim(1, -2).flatten(-2)
            return {**batch, Columns.OBS: stacked}, {"frames": frames[:, 1:]}

        blank = np.zeros((num_previous, *space.shape), space.dtype)
        return TorchPiece(forward=forward, initial_memory={"frames": blank})


def _join_frames(windows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Turn ``[N, num_frames, ..., C]`` into ``[N, ..., num_frames * C]``."""
    shape = windows.shape
    if len(shape) > 3:
        windows = np.moveaxis(windows, 1, -2)
    return windows.reshape(shape[0], *shape[2:-1], shape[1] * shape[-1])


class FrameStackingEnvToModule(FrameStacking):
    """FrameStacking for env-to-module pipelines, with the same arguments.

    Example:
        >>> import gymnasium as gym
        >>> FrameStackingEnvToModule(gym.spaces.Box(-1, 1, (4,)), num_frames=3).observation_space.shape
        (12,)
    """


class FrameStackingLearner(FrameStacking):
    """FrameStacking for learner pipelines, the counterpart of FrameStackingEnvToModule; with the same arguments."""

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        num_frames: int = 1,
        multi_agent: bool = False,
    ) -> None:
        spaces = input_observation_space, input_action_space
        super().__init__(*spaces, num_frames=num_frames, as_learner_connector=True, multi_agent=multi_agent)
