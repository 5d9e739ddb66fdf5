"""Every order of the shipped pieces either trains or is refused when the run is built."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rlzmq import (
    Columns,
    ConfigurationError,
    ConnectorV2,
    FlattenObservations,
    FrameStackingEnvToModule,
    FrameStackingLearner,
    MeanStdFilter,
    PPOConfig,
    PrevActionsPrevRewards,
    SingleAgentObservationPreprocessor,
    WriteObservationsToEpisodes,
)
from rlzmq.connectors.common import AddObservationsFromEpisodesToBatch
from rlzmq.envs.examples import MultiAgentCartPole


class Halved(SingleAgentObservationPreprocessor):
    def preprocess(self, observation: Any, episode: Any) -> Any:
        return np.asarray(observation, np.float32) / 2


PIECES: dict[str, Callable[[bool], ConnectorV2]] = {
    "filter": lambda multi: MeanStdFilter(multi_agent=multi),
    "flatten": lambda multi: FlattenObservations(multi_agent=multi),
    "previous": lambda multi: PrevActionsPrevRewards(multi_agent=multi),
    "stack": lambda multi: FrameStackingEnvToModule(num_frames=2, multi_agent=multi),
    "write": lambda multi: WriteObservationsToEpisodes(),
}
REFUSED = {
    ("stack", "stack"): "is there twice",
    ("stack", "filter"): "MeanStdFilter comes after FrameStackingEnvToModule",
    ("stack", "flatten"): "FlattenObservations comes after FrameStackingEnvToModule",
    ("stack", "previous"): "PrevActionsPrevRewards comes after FrameStackingEnvToModule",
    ("stack", "write"): "would store stacked observations",
    ("previous", "stack"): "expected a Box with at least one axis",
    **{pair: "no piece before it adds any" for pair in itertools.product(PIECES, repeat=2) if "write" in pair},
}  # fmt: skip
REFUSED[("stack", "write")] = "would store stacked observations"


def config_of(pieces: Callable[[], Sequence[ConnectorV2]], multi_agent: bool, is_stacked: bool) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1")
    if multi_agent:
        config.environment(MultiAgentCartPole, env_config={"num_agents": 2})
        config.multi_agent(policies={"p"}, policy_mapping_fn=lambda agent_id, episode, **_: "p")
    config.env_runners(env_to_module_connector=lambda: list(pieces()))
    config.training(train_batch_size_per_learner=20, minibatch_size=10, num_epochs=1)
    if is_stacked:
        config.training(learner_connector=lambda: FrameStackingLearner(num_frames=2, multi_agent=multi_agent))
    return config.rl_module(model_config={"fcnet_hiddens": [4]})


PAIRS = list(itertools.product(PIECES, repeat=2))


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_pairs_of_env_to_module_pieces(names: tuple[str, str]) -> None:
    multi_agent = PAIRS.index(names) % 2 == 0
    wanted = REFUSED.get(names)
    chosen = list(names)
    if wanted is None and names[1] == "previous":
        chosen.append("flatten")  # its result is a Dict, for which there is no default model
    config = config_of(lambda: [PIECES[name](multi_agent) for name in chosen], multi_agent, "stack" in names)
    if wanted is not None:
        with pytest.raises(ConfigurationError, match=re.escape(wanted)):
            config.build()
        return
    with config.build() as algo:
        assert algo.train()["num_env_steps_trained_lifetime"] >= 20


def test_a_custom_preprocessor_after_frames_were_stacked_is_refused() -> None:
    config = config_of(lambda: [FrameStackingEnvToModule(num_frames=2), Halved()], False, True)
    with pytest.raises(ConfigurationError, match="what Halved makes of them"):
        config.build()


def test_pieces_that_write_observations_of_the_batch_may_follow_custom_ones() -> None:
    class AddsHalved(ConnectorV2):
        def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
            for episode in self.single_agent_episode_iterator(episodes):
                self.add_batch_item(batch, Columns.OBS, episode.get_observations(-1) / 2, episode)
            return batch

    with config_of(lambda: [AddsHalved(), WriteObservationsToEpisodes()], False, False).build() as algo:
        algo.train()
    config = config_of(
        lambda: [AddObservationsFromEpisodesToBatch(), FrameStackingEnvToModule(num_frames=2)], False, True
    )
    with pytest.raises(ConfigurationError, match="has added the single frames already"):
        config.build()


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        (lambda: [FrameStackingLearner(num_frames=2)] * 2, "is there twice"),
        (
            lambda: [FrameStackingLearner(num_frames=2), FlattenObservations(as_learner_connector=True)],
            "cannot both be in a learner pipeline",
        ),
    ],
)
def test_learner_pieces_that_exclude_each_other(pieces: Any, wanted: str) -> None:
    config = config_of(lambda: [FrameStackingEnvToModule(num_frames=2)], False, False)
    config.training(learner_connector=lambda: pieces())
    with pytest.raises(ConfigurationError, match=wanted):
        config.build()
