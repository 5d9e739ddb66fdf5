"""Fragments that would spoil an update are refused with the column's name."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.runtime.batch_check import BatchCheck


def batch_of(size: int = 4, reward: float = 1.0, **extras: Any) -> EpisodeBatch:
    episode = SingleAgentEpisode(observation_space=gym.spaces.Box(-1, 1, (4,), np.float32))
    episode.add_env_reset(np.zeros(size, np.float32))
    for _ in range(3):
        episode.add_env_step(np.zeros(size, np.float32), 1, reward, extra_model_outputs=extras or None)
    batch = EpisodeBatch.from_episodes([episode])
    batch.observation_space = gym.spaces.Box(-1, 1, (4,), np.float32)
    return batch


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="'rewards' is not finite at step 0"):
        BatchCheck().check(batch_of(reward=value))


def test_another_shape_than_what_was_trained_is_refused() -> None:
    check = BatchCheck()
    check.check(batch_of())
    check.trained()
    with pytest.raises(ValueError, match=r"'obs': expected shape \(4,\) per step .* got \(3,\)"):
        check.check(batch_of(3))
    check.check(batch_of())
    check.forget()
    check.check(batch_of(3))


def test_before_anything_was_trained_the_one_that_contradicts_its_space_is_wrong() -> None:
    check = BatchCheck()
    check.check(batch_of(3))  # alone, nobody can tell
    check.check(batch_of(4))
    with pytest.raises(ValueError, match="'obs'"):
        check.check(batch_of(3))


def test_other_columns_are_refused() -> None:
    check = BatchCheck()
    check.check(batch_of(logits=np.zeros(2, np.float32)))
    check.trained()
    with pytest.raises(ValueError, match="expected the columns"):
        check.check(batch_of())
