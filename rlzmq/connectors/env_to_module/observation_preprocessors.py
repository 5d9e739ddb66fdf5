"""Base classes for the user's observation preprocessing."""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from typing import Any

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.torch_piece import TorchPiece
from rlzmq.connectors.writing import agent_space, rewrite_last_observation
from rlzmq.core.signatures import check_takes
from rlzmq.episodes.columns import Columns

__all__ = [
    "MultiAgentObservationPreprocessor",
    "SingleAgentObservationPreprocessor",
    "WriteObservationsToEpisodes",
]


class SingleAgentObservationPreprocessor(ConnectorV2):
    """Replaces every new observation in the episode with ``preprocess(observation, episode)``.

    Learners therefore see the result. If it is in another space, also override `recompute_output_observation_space`. In
    multi-agent use, `preprocess` is called per agent.

    Example::

        class Negate(SingleAgentObservationPreprocessor):
            def preprocess(self, observation, episode):
                return -observation
    """

    @abc.abstractmethod
    def preprocess(self, observation: Any, episode: Any) -> Any:
        """Return the processed observation.

        Args:
            observation: The episode's last observation.
            episode: The SingleAgentEpisode so far, including `observation`.
        """

    def check_signatures(self) -> None:
        """See ConnectorV2."""
        super().check_signatures()
        check_takes(self.preprocess, f"{type(self).__name__}.preprocess", "observation", "episode")

    @property
    def last_step_only(self) -> bool:
        """Whether the piece handles only the last step: True unless a subclass overrides `__call__`."""
        return type(self).__call__ is SingleAgentObservationPreprocessor.__call__

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2. The batch is unchanged."""
        for episode in self.single_agent_episode_iterator(episodes):
            processed = self.preprocess(episode.get_observations(-1), episode)
            space = agent_space(self.observation_space, episode.agent_id)
            rewrite_last_observation(episode, processed, space)
        return batch


class MultiAgentObservationPreprocessor(ConnectorV2):
    """Replaces all agents' new observations in the episodes with ``preprocess(observations, episode)``.

    If they are in other spaces, also override `recompute_output_observation_space` (a Dict by agent id).
    """

    @abc.abstractmethod
    def preprocess(self, observations: dict[Any, Any], episode: Any) -> dict[Any, Any]:
        """Return the processed observations.

        Args:
            observations: Agent id -> observation, for the agents with one at the last env step.
            episode: The MultiAgentEpisode so far.

        Returns:
            Agent id -> observation, for the same agents. Agents left out keep their observations.
        """

    def check_signatures(self) -> None:
        """See ConnectorV2."""
        super().check_signatures()
        check_takes(self.preprocess, f"{type(self).__name__}.preprocess", "observations", "episode")

    @property
    def last_step_only(self) -> bool:
        """Whether the piece handles only the last step: True unless a subclass overrides `__call__`."""
        return type(self).__call__ is MultiAgentObservationPreprocessor.__call__

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2. The batch is unchanged.

        Raises:
            ValueError: `preprocess` returned an agent without an observation at this step.
        """
        for episode in episodes:
            observations = {
                agent_episode.agent_id: agent_episode.get_observations(-1)
                for agent_episode in self.single_agent_episode_iterator([episode])
            }
            for agent_id, processed in self.preprocess(dict(observations), episode).items():
                if agent_id not in observations:
                    raise ValueError(
                        f"{type(self).__name__}.preprocess: episode {episode.id_!r} has no new observation "
                        f"of agent {agent_id!r}; expected some of {sorted(map(str, observations))}."
                    )
                space = agent_space(self.observation_space, agent_id)
                rewrite_last_observation(episode.agent_episodes[agent_id], processed, space)
        return batch


class WriteObservationsToEpisodes(ConnectorV2):
    """Overwrites every episode's last observation with its item of the ``obs`` column.

    Use it after pieces that put processed observations into the batch, so that learners see them, too. The batch is
    unchanged; episodes get this piece's observation space.
    """

    last_step_only = True

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: The batch has no ``obs`` column, or no item for one of the episodes.
        """
        if Columns.OBS not in batch:
            raise ValueError(
                f"WriteObservationsToEpisodes needs a column {Columns.OBS!r} in the batch, got columns "
                f"{sorted(batch)}. Put it after the piece that adds observations."
            )
        for episode, observation in self.single_agent_episode_iterator(
            episodes, zip_with_batch_column=batch[Columns.OBS]
        ):
            space = agent_space(self.observation_space, episode.agent_id)
            rewrite_last_observation(episode, observation, space)
        return batch

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2; tensors have this layout already."""
        return TorchPiece()
