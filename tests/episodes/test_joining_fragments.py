"""Fragments of one runner joined for training: a return does not end where a fragment did."""

from __future__ import annotations

import numpy as np
import pytest

from rlzmq import Columns, PPOConfig, SingleAgentEnvRunner
from rlzmq.episodes.episode_batch import EpisodeBatch, concat_joined


@pytest.fixture
def runner() -> SingleAgentEnvRunner:
    """Three CartPoles."""
    config = PPOConfig().environment("CartPole-v1").debugging(seed=3).env_runners(num_envs_per_env_runner=3)
    return SingleAgentEnvRunner(config=config)


def fragments(runner: SingleAgentEnvRunner, lengths: tuple[int, ...]) -> list[EpisodeBatch]:
    return [runner.sample_lease(length) for length in lengths]


def test_chunks_that_continue_each_other_become_one(runner: SingleAgentEnvRunner) -> None:
    parts = fragments(runner, (30, 1, 1, 20))
    joined = concat_joined(parts)
    whole = {
        id_: np.concatenate([e.get_rewards() for part in parts for e in part if e.id_ == id_ and len(e)])
        for part in parts
        for id_ in part.episode_ids
    }
    assert joined.num_env_steps == sum(part.num_env_steps for part in parts)
    assert sorted(joined.episode_ids) == sorted(whole), "one chunk per episode"
    for episode in joined:
        steps = [e for part in parts for e in part if e.id_ == episode.id_ and len(e)]
        np.testing.assert_array_equal(episode.get_rewards(), whole[episode.id_])
        observations = np.concatenate(
            [e.get_observations(slice(0, len(e))) for e in steps] + [steps[-1].get_observations()[-1:]]
        )
        np.testing.assert_array_equal(episode.get_observations(), observations)
        np.testing.assert_array_equal(episode.get_actions(), np.concatenate([e.get_actions() for e in steps]))
        assert (episode.is_terminated, episode.is_truncated) == (
            steps[-1].is_terminated,
            steps[-1].is_truncated,
        )
        assert episode.t_started == steps[0].t_started


def test_the_first_chunk_of_an_episode_keeps_its_lookback(runner: SingleAgentEnvRunner) -> None:
    fragments(runner, (5,))
    parts = fragments(runner, (4, 4))
    joined = concat_joined(parts)
    before = dict(zip(parts[0].episode_ids, parts[0].lookback.tolist(), strict=True))
    assert dict(zip(joined.episode_ids, joined.lookback.tolist(), strict=True)) == {
        id_: before.get(id_, 0) for id_ in joined.episode_ids
    }


def test_chunks_under_other_weights_stay_apart(runner: SingleAgentEnvRunner) -> None:
    first = runner.sample_lease(3)
    runner.weights_seq_no += 1
    second = runner.sample_lease(3)
    joined = concat_joined([first, second])
    assert len(joined) == len(first) + len(second)
    assert joined.columns[Columns.WEIGHTS_VERSION][joined.start[-1]] == runner.weights_seq_no


def test_infos_and_durations_go_along() -> None:
    config = PPOConfig().environment("CartPole-v1").debugging(seed=3)
    runner = SingleAgentEnvRunner(config=config)
    parts = fragments(runner, (4, 4))
    (episode,) = concat_joined(parts)
    assert episode.get_duration_s() == pytest.approx(sum(e.get_duration_s() for part in parts for e in part))
