"""Fragments of one runner joined for training: a return does not end where a fragment did."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rlzmq import Columns, PPOConfig, SingleAgentEnvRunner
from rlzmq.episodes.episode_batch import concat_joined
from tests.runners.sampling_cases import assert_same
from tests.runners.test_multi_agent_env_runner import make_runner, restless_config


def three_cart_poles() -> SingleAgentEnvRunner:
    config = PPOConfig().environment("CartPole-v1").debugging(seed=3).env_runners(num_envs_per_env_runner=3)
    return SingleAgentEnvRunner(config=config)


def of_agents() -> Any:
    """Three environments in which agents come and go."""
    return make_runner(restless_config(num_envs=3), fused=True)


@pytest.mark.parametrize("make", [three_cart_poles, of_agents])
def test_fragments_are_joined_as_their_episodes_are_concatenated(make: Any) -> None:
    runner = make()
    runner.sample_lease(5)
    parts = [runner.sample_lease(length) for length in (30, 1, 1, 20)]
    joined = concat_joined(parts)
    whole: dict[str, Any] = {}
    for chunk in (chunk for part in parts for chunk in part if len(chunk)):
        if chunk.id_ in whole:
            whole[chunk.id_].concat_episode(chunk)
        else:
            whole[chunk.id_] = copy.deepcopy(chunk)
    assert joined.num_env_steps == sum(part.num_env_steps for part in parts)
    assert joined.num_agent_steps == sum(part.num_agent_steps for part in parts)
    assert sorted(joined.episode_ids) == sorted(whole), "one chunk per episode"
    for episode in joined:
        episode.validate()
        expected = whole[episode.id_]
        assert episode.get_duration_s() == pytest.approx(expected.get_duration_s())
        assert (episode.is_terminated, episode.is_truncated) == (
            expected.is_terminated,
            expected.is_truncated,
        )
        with_steps = {agent: own for agent, own in agents_of(expected).items() if len(own)}
        assert agents_of(episode).keys() == with_steps.keys()
        assert_same(agents_of(episode).values(), with_steps.values())


def agents_of(episode: Any) -> dict[Any, Any]:
    return dict(getattr(episode, "agent_episodes", {None: episode}))


def test_chunks_under_other_weights_stay_apart() -> None:
    runner = three_cart_poles()
    first = runner.sample_lease(3)
    runner.weights_seq_no += 1
    second = runner.sample_lease(3)
    joined = concat_joined([first, second])
    assert len(joined) == len(first) + len(second)
    assert joined.columns[Columns.WEIGHTS_VERSION][joined.start[-1]] == runner.weights_seq_no
