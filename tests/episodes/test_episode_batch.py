"""EpisodeBatch: views on shared columns, cutting by steps, joining (also fragments of one runner), packing."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlzmq import Columns, PPOConfig, SingleAgentEnvRunner
from rlzmq.core.tree import tree_leaves
from rlzmq.episodes.batch_columns import steps_window
from rlzmq.episodes.episode_batch import EpisodeBatch, concat_joined
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from tests.episodes.multi_agent_model import facts
from tests.runners.sampling_cases import assert_same
from tests.runners.test_multi_agent_env_runner import make_runner, restless_config


def runner_batch(num_envs: int = 3, horizon: int = 8, lookback: int = 2) -> EpisodeBatch:
    """What a runner fills: a row of slots per env, an autoreset step between two chunks of a row."""
    width = lookback + horizon + 1
    slots = np.arange(num_envs * width)
    columns: dict[str, Any] = {
        Columns.OBS: {"x": np.stack([slots, -slots], 1).astype(np.float32), "y": (slots % 5,)},
        Columns.ACTIONS: slots + 1000,
        Columns.REWARDS: slots / 8,
        Columns.ACTION_LOGP: (-slots).astype(np.float32),
        Columns.STATE_OUT: {"h": slots[:, None] * np.ones((1, 4))},
    }
    table = []
    for env in range(num_envs):
        row = env * width
        first = 2 + env
        table.append((row + lookback, first, lookback, 7, True, False, env))
        table.append((row + lookback + first + 1, horizon - first - 1, 0, 0, False, env == 1, env))
    names = ("start", "length", "lookback", "t_started", "terminated", "truncated", "env_index")
    parts = dict(zip(names, zip(*table, strict=True), strict=True))
    return EpisodeBatch(
        columns,
        **parts,
        episode_ids=[f"e{i}" for i in range(len(table))],
        initial_state={"h": np.arange(len(table))[:, None] * np.full((1, 4), -1.0)},
        infos={2: {"k": 1}, width - 1: {"k": 2}, width + 2: {"k": 3}},
        custom_data={1: {"mine": 4}},
        duration_s=np.arange(len(table)) + 1.0,
        observation_space=gym.spaces.Dict(
            {"x": gym.spaces.Box(-99, 99, (2,)), "y": gym.spaces.Tuple([gym.spaces.Discrete(5)])}
        ),
        action_space=gym.spaces.Discrete(9999),
        meta={"runner": "r"},
    )


def assert_same_episodes(actual: Any, expected: Any, *, drop: tuple[str, ...] = ()) -> None:
    actual, expected = list(actual), list(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        left, right = facts(a), facts(e)
        for name in drop:
            del left[name], right[name]
        assert left == right


def test_items_are_views_on_the_columns() -> None:
    batch = runner_batch()
    assert len(batch) == 6
    episode = batch[0]
    assert episode.is_numpy
    assert (episode.id_, episode.t_started, episode.t, len(episode)) == ("e0", 7, 9, 2)
    assert (episode.is_terminated, episode.is_truncated) == (True, False)
    assert episode.get_actions().tolist() == [1002, 1003]
    assert episode.get_actions(-4) == 1000
    assert episode.get_observations()["x"][:, 0].tolist() == [2, 3, 4]
    assert episode.get_observations(-5)["y"] == (0,)
    assert episode.get_infos() == [{"k": 1}, {}, {}]
    assert episode.get_extra_model_outputs("state_out")["h"][:, 0].tolist() == [2, 3]
    assert episode.initial_state["h"].tolist() == [0] * 4
    assert batch[1].custom_data == {"mine": 4}
    assert batch[1].get_duration_s() == 2.0
    assert episode.observation_space is batch.observation_space
    for column in (episode.observations, episode.actions, episode.rewards):
        for leaf in tree_leaves(column.data):
            assert any(np.shares_memory(leaf, other) for other in tree_leaves(batch.columns))
    assert batch[-1].id_ == "e5"
    with pytest.raises(IndexError):
        batch[6]
    assert (batch[np.int64(1)].id_, len(batch[:0]), batch.num_env_steps) == ("e1", 0, 21)


def test_returns_and_step_slots_agree_with_the_episodes() -> None:
    batch = runner_batch()
    assert batch.get_returns().tolist() == [episode.get_return() for episode in batch]
    assert batch.get_returns().dtype == np.float64
    actions = batch.columns[Columns.ACTIONS][batch.step_slots()].tolist()
    assert actions == [action for episode in batch for action in episode.get_actions()]
    assert batch.step_chunks().tolist() == [i for i, e in enumerate(batch) for _ in range(len(e))]
    assert batch.num_slots == 33
    assert batch.num_bytes == sum(leaf.nbytes for leaf in tree_leaves(batch.columns))
    assert batch.extra_names == ["action_logp", "state_out"]
    assert "chunks=6, env_steps=21, slots=33" in repr(batch)


def test_a_chunk_cut_in_two_is_what_slicing_its_episode_gives() -> None:
    batch = runner_batch()[2:3]
    for k in range(1, 3):
        head, tail = batch.split(k)
        episode = batch[0]
        assert_same_episodes(head, [episode[:k]], drop=("custom_data",))
        assert_same_episodes(tail, [episode.slice(slice(k, None), len_lookback_buffer=99)])
        assert not head.terminated.any()
        assert tail.terminated.all()
        assert tail.lookback[0] == 2 + k


@given(st.lists(st.integers(0, 4), max_size=8), st.data())
def test_slices_of_steps_agree_with_a_list_of_steps(lengths: list[int], data: st.DataObject) -> None:
    starts = np.cumsum([0, *(n + 1 for n in lengths)])
    num_slots = int(starts[-1])
    columns = {name: np.arange(num_slots, dtype=float) for name in ("obs", "actions", "rewards")}
    batch = EpisodeBatch(columns, start=starts[:-1], length=lengths, terminated=[True] * len(lengths))
    steps = batch.step_slots().tolist()
    begin = data.draw(st.integers(0, len(steps)))
    end = data.draw(st.integers(begin, len(steps)))
    part = batch.slice_steps(begin, end)
    assert part.step_slots().tolist() == steps[begin:end]
    head, tail = batch.split(begin)
    assert len(head) + len(tail) <= len(lengths) + 1
    # Chunks without steps are in exactly one of the two parts.
    ids = head.episode_ids + tail.episode_ids
    assert sorted(set(ids)) == sorted(batch.episode_ids)
    assert sum(head.length == 0) + sum(tail.length == 0) == lengths.count(0)
    with pytest.raises(ValueError, match="expected"):
        batch.slice_steps(0, len(steps) + 1)
    window = steps_window(np.array(lengths, np.int64), begin, end)
    assert 0 <= window[0] <= window[1] <= len(lengths)


def test_compacting_keeps_the_episodes_and_drops_other_slots() -> None:
    batch = runner_batch()
    for part in (batch, batch[1:4], batch.split(7)[1], batch.select([3, 0])):
        dense = part.compact()
        assert dense.num_slots == int((part.lookback + part.length + 1).sum())
        assert_same_episodes(dense, part)
        assert dense.meta == part.meta


def test_joining_batches_on_different_columns() -> None:
    a, b = runner_batch(), runner_batch(2, 9, 1)
    joined = EpisodeBatch.concat([a, b[1:], a[:0]])
    assert_same_episodes(joined, [*a, *b[1:]])
    assert joined.meta == {}
    assert EpisodeBatch.concat([b]) is b
    assert len(EpisodeBatch.concat([])) == 0
    assert len(EpisodeBatch.concat([a[:0], a[:0]])) == 0
    del b.columns[Columns.ACTION_LOGP]
    with pytest.raises(ValueError, match=r"batch 1: expected the columns \['action_logp'"):
        EpisodeBatch.concat([a, b])
    b = runner_batch()
    b.columns = {**b.columns, Columns.ACTIONS: np.zeros((33, 2))}
    with pytest.raises(ValueError, match="column 'actions' of the batches"):
        EpisodeBatch.concat([a, b])


def mixed_episodes() -> list[SingleAgentEpisode]:
    episodes = []
    for i, num_steps in enumerate((4, 0, 1, 7)):
        episode = SingleAgentEpisode(
            f"e{i}", observation_space=gym.spaces.Discrete(99), agent_id=i, module_id="m", t_started=i
        )
        episode.add_env_reset(0, {"start": i})
        for t in range(num_steps):
            outputs = {"logp": np.float32(t), "state_out": {"h": np.full(3, t, np.float32)}}
            episode.add_env_step(t + 1, (t, np.ones(2)), 0.5, {"t": t} if t % 2 else None,
                                 terminated=t == 6, extra_model_outputs=outputs)  # fmt: skip
        if num_steps:
            episode.custom_data["n"] = num_steps
        episodes.append(episode if i != 2 else episode.to_numpy())
    long = episodes[0]
    episodes.append(long.cut(2))
    episodes.append(long.slice(slice(2, None), len_lookback_buffer=1))
    return episodes


@pytest.mark.parametrize("numpy_ones", ["none", "some", "all"])
def test_from_episodes_keeps_everything(numpy_ones: str) -> None:
    episodes = mixed_episodes()
    for i, episode in enumerate(episodes):
        if numpy_ones == "all" or (numpy_ones == "some" and i % 2):
            episode.to_numpy()
    batch = EpisodeBatch.from_episodes(episodes)
    assert batch.length.tolist() == [4, 0, 1, 7, 0, 2]
    assert batch.lookback.tolist() == [0, 0, 0, 0, 2, 1]
    assert batch.agent_ids == [0, 1, 2, 3, 0, 0]
    for original, item in zip(episodes, batch, strict=True):
        if len(original):
            original.to_numpy()
            states = facts(original), facts(item)
            for state in states:
                del state["initial_state"]
            assert states[0] == states[1]
        else:
            assert item.get_observations().tolist() == original.get_observations()
            assert item.get_infos() == original.get_infos()
            assert item.get_rewards(slice(None), fill=0).tolist() == []
        assert item.get_duration_s() == original.get_duration_s()
    again = EpisodeBatch.from_episodes(list(batch))
    assert_same_episodes(again, batch)


def test_initial_states_are_kept_when_all_are_known() -> None:
    episodes = mixed_episodes()
    assert EpisodeBatch.from_episodes(episodes).initial_state is None
    assert EpisodeBatch.from_episodes(episodes[-2:]).initial_state["h"].tolist() == [[3.0] * 3, [1.0] * 3]


def test_from_episodes_refuses_what_does_not_fit_together() -> None:
    def episode(*outputs: dict[str, Any], observation: Any = 0) -> SingleAgentEpisode:
        new = SingleAgentEpisode("e")
        new.add_env_reset(observation)
        for output in outputs:
            new.add_env_step(observation, 0, 0.0, extra_model_outputs=output)
        return new

    with pytest.raises(ValueError, match="'e', column 'logp': expected 1 items"):
        EpisodeBatch.from_episodes([episode({"logp": 1}), episode({})])
    with pytest.raises(ValueError, match="one observation more than rewards"):
        EpisodeBatch.from_episodes([SingleAgentEpisode("e")])
    for to_numpy, other in itertools.product((False, True), (np.zeros(2), "x")):
        parts = [episode({}), episode({}, observation=other)]
        with pytest.raises(ValueError, match="column 'obs'"):
            EpisodeBatch.from_episodes([part.to_numpy() if to_numpy else part for part in parts])
    assert len(EpisodeBatch.from_episodes([])) == 0
    spaced = episode({})
    spaced.action_space = gym.spaces.Box(-1, 1, (3,))
    bare = SingleAgentEpisode(action_space=gym.spaces.Box(-1, 1, (3,)))
    bare.add_env_reset(0)
    assert EpisodeBatch.from_episodes([bare]).columns[Columns.ACTIONS].shape == (1, 3)


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
