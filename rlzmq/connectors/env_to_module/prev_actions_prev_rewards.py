"""PrevActionsPrevRewards: adds the last actions and rewards to observations."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlzmq.connectors.connector_v2 import Batch, Memory, TorchPiece
from rlzmq.connectors.env_to_module.flatten_observations import flat_size, flatten_tensors, flatten_values
from rlzmq.connectors.observation_pieces import ObservationPiece, agent_space, rewrite_last_observation
from rlzmq.connectors.rows import RowsContext, window_mask
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tree import tree_map, tree_stack
from rlzmq.episodes.columns import Columns

__all__ = ["PrevActionsPrevRewards"]


class PrevActionsPrevRewards(ObservationPiece):
    """Replaces observations with Dicts of the original one, the last actions and the last rewards.

    ``{"_orig_obs": …, "prev_n_actions": float32[n_prev_actions * A], "prev_n_rewards":
    float32[n_prev_rewards]}``, oldest first, with zeros before an episode's first step. A is the size of a flattened
    action (discrete parts are one-hot). The result is written back into the episodes.

    Args:
        input_observation_space, input_action_space, multi_agent: See ObservationPiece.
        n_prev_actions: Number of actions; 0: the key is left out.
        n_prev_rewards: Number of rewards; 0: the key is left out.
    """

    writes_episodes: ClassVar[bool] = True

    ORIG_OBS_KEY = "_orig_obs"
    PREV_ACTIONS_KEY = "prev_n_actions"
    PREV_REWARDS_KEY = "prev_n_rewards"

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        n_prev_actions: int = 1,
        n_prev_rewards: int = 1,
        multi_agent: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space, multi_agent=multi_agent)
        if n_prev_actions < 0 or n_prev_rewards < 0:
            raise ConfigurationError(
                f"n_prev_actions, n_prev_rewards: expected at least 0, got {n_prev_actions}, "
                f"{n_prev_rewards}."
            )
        self.n_prev_actions = n_prev_actions
        self.n_prev_rewards = n_prev_rewards

    @property
    def required_lookback(self) -> int:
        """The larger of n_prev_actions and n_prev_rewards."""
        return max(self.n_prev_actions, self.n_prev_rewards)

    def recompute_output_observation_space(
        self, input_observation_space: Any, input_action_space: Any
    ) -> Any:
        """See ObservationPiece; None while the action space is unknown."""
        if input_action_space is None:
            return None
        return super().recompute_output_observation_space(input_observation_space, input_action_space)

    def new_space(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], agent_id: Hashable
    ) -> gym.spaces.Dict:
        """Return the Dict of the original observations, the last actions and the last rewards."""
        spaces: dict[str, gym.Space[Any]] = {self.ORIG_OBS_KEY: observation_space}
        if self.n_prev_actions:
            size = self.n_prev_actions * flat_size(action_space)
            discrete = (gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
            low, high = (0.0, 1.0) if isinstance(action_space, discrete) else (-np.inf, np.inf)
            spaces[self.PREV_ACTIONS_KEY] = gym.spaces.Box(low, high, (size,), np.float32)
        if self.n_prev_rewards:
            spaces[self.PREV_REWARDS_KEY] = gym.spaces.Box(
                -np.inf, np.inf, (self.n_prev_rewards,), np.float32
            )
        return gym.spaces.Dict(spaces)

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2. The batch is unchanged.

        Raises:
            ValueError: The action space is unknown.
        """
        for episode in self.single_agent_episode_iterator(episodes):
            augmented = {self.ORIG_OBS_KEY: episode.get_observations(-1)}
            if self.n_prev_actions:
                action_space = self._action_space_of(episode.agent_id, episode.action_space)
                size = flat_size(action_space)
                flat = np.zeros((self.n_prev_actions, size), np.float32)
                actions = episode.get_actions(slice(-self.n_prev_actions, None))
                num = min(self.n_prev_actions, episode.actions.len_incl_lookback())
                if num:
                    stacked = tree_stack(actions) if isinstance(actions, list) else actions
                    flat[-num:] = flatten_values(action_space, stacked, 1)
                augmented[self.PREV_ACTIONS_KEY] = flat.reshape(-1)
            if self.n_prev_rewards:
                rewards = np.zeros(self.n_prev_rewards, np.float32)
                num = min(self.n_prev_rewards, episode.rewards.len_incl_lookback())
                if num:
                    rewards[-num:] = episode.get_rewards(slice(-num, None))
                augmented[self.PREV_REWARDS_KEY] = rewards
            rewrite_last_observation(
                episode, augmented, agent_space(self.observation_space, episode.agent_id)
            )
        return batch

    def _action_space_of(self, agent_id: object, fallback: object) -> Any:
        space = agent_space(self.input_action_space, agent_id)
        space = fallback if space is None else space
        if space is None:
            raise ValueError(
                "PrevActionsPrevRewards needs the action space: pass input_action_space to the constructor, "
                "or put the piece into a pipeline that has one."
            )
        return space

    def transform_observations(self, observations: Any, rows: RowsContext) -> Any:
        """Row form of `__call__`. The step that led to `observations` is in the columns already."""
        augmented = {self.ORIG_OBS_KEY: observations}
        if self.n_prev_actions:
            num = self.n_prev_actions
            action_space = self._action_space_of(rows.agent_id, None)
            missing = window_mask(rows.num_previous, num, current=False)
            size = flat_size(action_space)
            if missing is not None and missing.all():
                flat: npt.NDArray[np.float32] = np.zeros((rows.num_rows, num, size), np.float32)
            else:
                actions = rows.window(Columns.ACTIONS, num, current=False)
                flat = _flatten_existing(action_space, actions, missing, size)
            augmented[self.PREV_ACTIONS_KEY] = flat.reshape(rows.num_rows, num * size)
        if self.n_prev_rewards:
            num = self.n_prev_rewards
            missing = window_mask(rows.num_previous, num, current=False)
            if missing is not None and missing.all():
                rewards: npt.NDArray[np.float32] = np.zeros((rows.num_rows, num), np.float32)
            else:
                rewards = rows.window(Columns.REWARDS, num, current=False).astype(np.float32)
            augmented[self.PREV_REWARDS_KEY] = rewards
        return augmented

    def __repr__(self) -> str:
        counts = f"n_prev_actions={self.n_prev_actions}, n_prev_rewards={self.n_prev_rewards}"
        return f"PrevActionsPrevRewards({counts})"

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2. The memory is the previous flattened actions and rewards."""
        import torch

        action_space = self._action_space_of(agent_id, None)

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            augmented, memory = {self.ORIG_OBS_KEY: batch[Columns.OBS]}, dict(memory)
            if self.n_prev_actions:
                augmented[self.PREV_ACTIONS_KEY] = memory[self.PREV_ACTIONS_KEY].flatten(1)
            if self.n_prev_rewards:
                newest = batch[Columns.REWARDS].unsqueeze(1)
                memory[self.PREV_REWARDS_KEY] = torch.cat([memory[self.PREV_REWARDS_KEY][:, 1:], newest], 1)
                augmented[self.PREV_REWARDS_KEY] = memory[self.PREV_REWARDS_KEY]
            return {**batch, Columns.OBS: augmented}, memory

        def remember(batch: Batch, memory: Memory) -> Memory:
            if not self.n_prev_actions:
                return memory
            newest = flatten_tensors(action_space, batch[Columns.ACTIONS]).unsqueeze(1)
            actions = torch.cat([memory[self.PREV_ACTIONS_KEY][:, 1:], newest], 1)
            return {**memory, self.PREV_ACTIONS_KEY: actions}

        blank: dict[str, Any] = {}
        if self.n_prev_actions:
            size = flat_size(action_space)
            blank[self.PREV_ACTIONS_KEY] = np.zeros((self.n_prev_actions, size), np.float32)
        if self.n_prev_rewards:
            blank[self.PREV_REWARDS_KEY] = np.zeros(self.n_prev_rewards, np.float32)
        return TorchPiece(
            forward=forward,
            initial_memory=blank,
            remember=remember,
            reads_rewards=self.n_prev_rewards > 0,
        )


def _flatten_existing(
    space: gym.Space[Any], actions: Any, missing: npt.NDArray[np.bool_] | None, size: int
) -> npt.NDArray[np.float32]:
    """Return the flattened actions ``[N, num, size]``; missing ones are zeros, which need not be valid actions."""
    if missing is None:
        return flatten_values(space, actions, 2)
    flat = np.zeros((*missing.shape, size), np.float32)
    there = ~missing
    flat[there] = flatten_values(space, tree_map(lambda leaf: leaf[there], actions), 1)
    return flat
