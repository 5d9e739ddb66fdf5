"""A part of a fragment, sent alone, is what a learner would have cut out of the whole."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.roles.learner_link import BatchCheck, decode_steps
from rlzmq.runners.vector_env_runners import MultiAgentEnvRunner
from rlzmq.wire.codec import ArrayMismatchError
from rlzmq.wire.messages import Fragment
from rlzmq.wire.payloads import (
    check_claims,
    decode_fragment,
    encode_fragment,
    slice_fragment,
)
from tests.runners.test_multi_agent_env_runner import restless_config

LENGTHS = (5, 3, 4)


def fragment(batch: Any, num_env_steps: int = sum(LENGTHS)) -> list[bytes]:
    header, arrays = batch.to_wire()
    message = Fragment("r", 0, 7, 1, num_env_steps, 1, 0, header)
    frames = encode_fragment(message, arrays, {"episodes": list(range(5000))})
    return [bytes(memoryview(frame).cast("B")) for frame in frames]


def episodes() -> EpisodeBatch:
    made = []
    for length in LENGTHS:
        episode = SingleAgentEpisode(observation_space=gym.spaces.Box(-99, 99, (256,), np.float32))
        episode.add_env_reset(np.zeros(256, np.float32), infos={"t": 0})
        for t in range(length):
            episode.add_env_step(np.full(256, t, np.float32), t % 2, 0.5 * t, infos={"t": t})
        made.append(episode)
    return EpisodeBatch.from_episodes(made)


def facts(frames: Any, first: int, num_steps: int) -> Any:
    batch = decode_steps(frames, BatchCheck(), first, num_steps)
    states = [episode.get_state() for episode in batch]
    return batch.meta, repr(states)


@pytest.mark.parametrize(
    ("first", "num_steps"), [(0, 12), (0, 5), (0, 6), (2, 1), (4, 5), (5, 3), (6, 6), (11, 1)]
)
def test_a_part_opens_to_the_same_episodes_as_the_whole(first: int, num_steps: int) -> None:
    whole = fragment(episodes())
    part = slice_fragment(whole, first, num_steps)
    assert facts(part, first, num_steps) == facts(whole, first, num_steps)
    assert decode_fragment(part)[2].size == 0, "the meta stays with the whole"


@pytest.mark.parametrize("claimed", [11, 13, 4000])
def test_a_fragment_that_claims_other_env_steps_than_it_holds_is_refused(claimed: int) -> None:
    check_claims(fragment(episodes()))
    with pytest.raises(ArrayMismatchError, match=f"of 12 env steps claims {claimed}"):
        check_claims(fragment(episodes(), claimed))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_part_of_agents_episodes_opens_to_the_same_as_the_whole(seed: int) -> None:
    env_config = {"p_birth": 0.4, "p_death": 0.2, "p_wait": 0.4, "p_end": 0.1}
    runner = MultiAgentEnvRunner(config=restless_config(seed, env_config=env_config))
    runner.sample_lease(3)  # the next fragment begins within episodes, with lookback
    batch = runner.sample_lease(12)
    size = batch.num_env_steps
    assert len(batch) > 2
    whole = fragment(batch, size)
    for first in range(size):
        for num_steps in {1, 2, 7, size - first - 1, size - first}:
            if not 0 < num_steps <= size - first or num_steps == size:
                continue
            part = slice_fragment(whole, first, num_steps)
            assert decode_fragment(part)[0].num_env_steps == num_steps
            assert facts(part, first, num_steps) == facts(whole, first, num_steps)


def test_what_cannot_be_cut_is_sent_whole() -> None:
    multi = MultiAgentEpisode()
    multi.add_env_reset(observations={"a": np.zeros(2, np.float32)})
    multi.add_env_step({"a": np.ones(2, np.float32)}, {"a": 0}, {"a": 0.5})
    of_agents = fragment(EpisodeBatch.from_episodes([multi]), 1)
    for broken in ([b""], [b"x", b"y"], fragment(episodes())[:-1], of_agents[:-1]):
        assert slice_fragment(broken, 0, 1) is broken


def test_a_fragment_that_claims_more_steps_than_it_has_gives_no_step_twice() -> None:
    whole = fragment(episodes(), 24)
    for first in (6, 12):
        part = slice_fragment(whole, first, 12)
        assert part is whole
        with pytest.raises(ValueError, match="are wanted of a fragment of 12"):
            facts(part, first, 12)
