"""FlattenObservations, and PrevActionsPrevRewards, which adds the last actions and rewards to observations."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from rlzmq.connectors.common.layout import AddObservationsFromEpisodesToBatch
from rlzmq.connectors.connector_v2 import Batch, Memory, TorchPiece, name_set
from rlzmq.connectors.observation_pieces import (
    ObservationPiece,
    agent_space,
    rewrite_all_observations,
)
from rlzmq.connectors.rows import RowsContext, window_mask
from rlzmq.core.errors import ConfigurationError, UnsupportedSpaceError
from rlzmq.core.spaces import leaf_spaces, one_hot
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.tree import tree_map, tree_unstack
from rlzmq.episodes.columns import Columns

__all__ = ["FlattenObservations", "PrevActionsPrevRewards", "flat_size", "flatten_tensors", "flatten_values"]


def flat_size(space: gym.Space[Any]) -> int:
    """Return the number of floats that `flatten_values` makes of one element.

    Raises:
        UnsupportedSpaceError: The space has no fixed size.
    """
    sizes = []
    for leaf in leaf_spaces(space):
        if isinstance(leaf, gym.spaces.Discrete):
            sizes.append(int(leaf.n))
        elif isinstance(leaf, gym.spaces.MultiDiscrete):
            sizes.append(int(leaf.nvec.sum()))
        elif isinstance(leaf, (gym.spaces.Box, gym.spaces.MultiBinary)):
            sizes.append(int(np.prod(leaf.shape, dtype=np.int64)))
        else:
            raise UnsupportedSpaceError(
                f"expected Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them, got {leaf}: it "
                "has no fixed size to flatten to. Convert it with a SingleAgentObservationPreprocessor first."
            )
    return sum(sizes)


def flatten_values(space: gym.Space[Any], values: Any, num_lead: int = 0) -> npt.NDArray[np.float32]:
    """Flatten elements of a space to float32 vectors: Dict parts in sorted key order, discrete parts one-hot.

    Args:
        space: The space of one element.
        values: An element, or a batch of elements with `num_lead` leading axes in every leaf.
        num_lead: Number of leading axes.

    Returns:
        float32 ``[*lead, flat_size(space)]``.

    Raises:
        ValueError: A discrete value is outside of its space.
    """
    parts: list[npt.NDArray[np.float32]] = []
    _collect(space, values, num_lead, parts)
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _collect(space: gym.Space[Any], values: Any, num_lead: int, parts: list[npt.NDArray[np.float32]]) -> None:
    if isinstance(space, gym.spaces.Dict):
        for key in sorted(space.spaces):
            _collect(space.spaces[key], values[key], num_lead, parts)
    elif isinstance(space, gym.spaces.Tuple):
        for part, value in zip(space.spaces, values, strict=True):
            _collect(part, value, num_lead, parts)
    elif isinstance(space, (gym.spaces.Discrete, gym.spaces.MultiDiscrete)):
        parts.append(one_hot(space, values))
    else:
        array = np.asarray(values, np.float32)
        parts.append(array.reshape(*array.shape[:num_lead], flat_size(space)))


def flatten_tensors(space: gym.Space[Any], values: Any) -> Any:
    """Return `flatten_values` of a batch of tensors, float32 ``[B, flat_size(space)]``. Values are not checked."""
    import torch

    parts: list[Any] = []
    _collect_tensors(space, values, parts)
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _collect_tensors(space: gym.Space[Any], values: Any, parts: list[Any]) -> None:
    import torch

    if isinstance(space, gym.spaces.Dict):
        for key in sorted(space.spaces):
            _collect_tensors(space.spaces[key], values[key], parts)
    elif isinstance(space, gym.spaces.Tuple):
        for part, value in zip(space.spaces, values, strict=True):
            _collect_tensors(part, value, parts)
    elif isinstance(space, gym.spaces.Discrete):
        choices = torch.arange(int(space.start), int(space.start) + int(space.n))
        parts.append((values.unsqueeze(-1) == choices).to(torch.float32))
    elif isinstance(space, gym.spaces.MultiDiscrete):
        lens, first = space.nvec.reshape(-1), space.start.reshape(-1)
        columns = values.flatten(1)
        for index, (start, num) in enumerate(zip(first, lens, strict=True)):
            choices = torch.arange(int(start), int(start + num))
            parts.append((columns[:, index, None] == choices).to(torch.float32))
    else:
        parts.append(values.reshape(values.shape[0], flat_size(space)).to(torch.float32))


class FlattenObservations(ObservationPiece):
    """Flattens observations to float32 vectors in the episodes, and on the learner also in the batch.

    Parts of a Dict are sorted by key; Discrete and MultiDiscrete parts are one-hot encoded.

    Example:
        >>> import gymnasium as gym
        >>> space = gym.spaces.Dict({"door": gym.spaces.Discrete(3), "pos": gym.spaces.Box(-1, 1, (2,))})
        >>> FlattenObservations(space).observation_space.shape
        (5,)

    Args:
        input_observation_space, input_action_space, multi_agent: See ObservationPiece.
        agent_ids: The agents (or one agent) whose observations to flatten; None: all.
        keys_to_remove: Keys (or one key) of (each agent's) Dict observations to leave out.
        as_learner_connector: Whether to flatten all observations of the episodes instead of the last ones, and to
            fill the ``obs`` column with those of their steps, unless it exists already.
    """

    writes_episodes: ClassVar[bool] = True

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        agent_ids: Collection[Any] | str | None = None,
        keys_to_remove: Collection[str] | str | None = None,
        as_learner_connector: bool = False,
        multi_agent: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space, multi_agent=multi_agent)
        self._agent_ids = name_set(agent_ids)
        self._keys_to_remove = frozenset(name_set(keys_to_remove) or ())
        self._as_learner_connector = as_learner_connector

    @property
    def last_step_only(self) -> bool:
        """Whether the piece handles only the last step: True unless `as_learner_connector`."""
        return not self._as_learner_connector

    def new_space(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], agent_id: Hashable
    ) -> Any:
        """Return a Box ``(flat_size,)``; the space itself of agents whose observations are not flattened."""
        if not self._is_mine(agent_id):
            return observation_space
        return gym.spaces.Box(-np.inf, np.inf, (flat_size(self._kept(observation_space)),), np.float32)

    def _kept(self, space: gym.Space[Any]) -> Any:
        """Return the space without the keys to remove."""
        if not self._keys_to_remove:
            return space
        if not isinstance(space, gym.spaces.Dict):
            raise ConfigurationError(
                f"FlattenObservations(keys_to_remove={sorted(self._keys_to_remove)}): expected a Dict space, "
                f"got {space}."
            )
        for key in self._keys_to_remove - space.spaces.keys():
            raise ConfigurationError(
                f"FlattenObservations: keys_to_remove has {key!r}, which {space} lacks."
                f"{did_you_mean(key, space.spaces)}"
            )
        return gym.spaces.Dict({key: s for key, s in space.spaces.items() if key not in self._keys_to_remove})

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: The input observation space is unknown, or a discrete value is not in its space.
        """
        if not self._as_learner_connector:
            return super().__call__(batch=batch, episodes=episodes)
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            if self._is_mine(episode.agent_id):
                input_space = self._input_space_of(episode.agent_id)
                buffer = episode.observations
                if buffer.finalized:
                    flat: Any = flatten_values(input_space, buffer.data, 1)
                else:
                    flat = [flatten_values(input_space, item) for item in tree_unstack(buffer.data)]
                rewrite_all_observations(episode, flat, agent_space(self.observation_space, episode.agent_id))
        return AddObservationsFromEpisodesToBatch(as_learner_connector=True)(batch=batch, episodes=episodes)

    def _is_mine(self, agent_id: object) -> bool:
        return self._agent_ids is None or agent_id is None or agent_id in self._agent_ids

    def _input_space_of(self, agent_id: object) -> Any:
        if self.input_observation_space is None:
            raise ValueError(
                "FlattenObservations needs its input_observation_space: pass it to the constructor, or put "
                "the piece into a pipeline that has one."
            )
        return self._kept(agent_space(self.input_observation_space, agent_id))

    def transform_observations(self, observations: Any, rows: RowsContext) -> Any:
        """Row form of `__call__`."""
        if not self._is_mine(rows.agent_id):
            return observations
        return flatten_values(self._input_space_of(rows.agent_id), observations, 1)

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2."""
        if not self._is_mine(agent_id):
            return TorchPiece()
        space = self._input_space_of(agent_id)

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            return {**batch, Columns.OBS: flatten_tensors(space, batch[Columns.OBS])}, memory

        return TorchPiece(forward=forward)


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

    def _action_space_of(self, agent_id: object) -> Any:
        space = agent_space(self.input_action_space, agent_id)
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
            action_space = self._action_space_of(rows.agent_id)
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

        action_space = self._action_space_of(agent_id)

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
