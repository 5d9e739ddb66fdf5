"""Model settings that ask for previous actions and rewards bring the connector piece that gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlzmq import DefaultModelConfig, MeanStdFilter, PrevActionsPrevRewards
from rlzmq.envs.examples import StatelessCartPole
from tests.support.runs import small as small_run
from tests.support.runs import two_agents


def small(**model: Any) -> Any:
    return small_run(
        env=StatelessCartPole, train_batch_size_per_learner=80, model_config={"lstm_cell_size": 8, **model}
    )


def test_an_lstm_gets_its_previous_action_and_reward_by_itself() -> None:
    config = small(use_lstm=True, lstm_use_prev_action=True, lstm_use_prev_reward=True)
    with config.build() as algo:
        observations = algo.env_runner.sample(num_timesteps=8)[0].get_observations()
        assert observations["prev_n_actions"].shape[1] == 2
        assert observations["prev_n_rewards"].shape[1] == 1
        assert observations["prev_n_rewards"][1] == 1.0
        result = algo.train()
        assert np.isfinite(result["learners"]["default_policy"]["total_loss"])


def test_only_what_is_asked_for_and_after_the_users_pieces() -> None:
    config = small(use_lstm=True, lstm_use_prev_reward=True).env_runners(
        env_to_module_connector=MeanStdFilter
    )
    pipeline = config.build_env_to_module_connector()
    assert pipeline.piece_names[:2] == ["MeanStdFilter", "PrevActionsPrevRewards"]
    assert sorted(pipeline.observation_space.spaces) == ["_orig_obs", "prev_n_rewards"]


def test_the_users_own_piece_is_enough() -> None:
    config = small(use_lstm=True, lstm_use_prev_action=True).env_runners(
        env_to_module_connector=lambda: PrevActionsPrevRewards(n_prev_actions=3)
    )
    pipeline = config.build_env_to_module_connector()
    assert pipeline.piece_names.count("PrevActionsPrevRewards") == 1
    assert pipeline.observation_space["prev_n_actions"].shape == (6,)


def test_settings_as_a_dataclass_and_of_several_agents() -> None:
    config = two_agents().rl_module(
        model_config=DefaultModelConfig(fcnet_hiddens=[8], lstm_cell_size=8, lstm_use_prev_action=True)
    )
    with config.build() as algo:
        algo.train()
        space = algo.get_module("p1").observation_space
        assert sorted(space.spaces) == ["_orig_obs", "prev_n_actions"]


@pytest.mark.parametrize("length", [{}, {"max_seq_len": "auto"}])
def test_sequences_have_a_length_without_being_told(length: dict[str, Any]) -> None:
    with small(use_lstm=True, **length).build() as algo:
        algo.train()
