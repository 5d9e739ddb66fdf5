"""Replay buffers: what goes in comes out as its episodes' transitions and sequences, by priority; buffers by class."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import msgpack
import numpy as np
import pytest
import torch

from rlzmq import (
    DQN,
    Algorithm,
    ConfigurationError,
    DQNConfig,
    HindsightEpisodeReplayBuffer,
    ReplayBuffer,
    SingleAgentEpisode,
)
from rlzmq.connectors.env_to_module import MeanStdFilter
from rlzmq.core.plain import from_plain, to_plain
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.learners.replay_learner import EpisodeReplay
from rlzmq.replay import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer
from rlzmq.replay.step_store import PriorityTree
from tests.support.runs import small

BUFFERS = (EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer)


def number(episode: int, t: int) -> int:
    """The observation of an episode at a time step: tells where it comes from."""
    return 1000 * episode + t


def episode_of(
    index: int,
    begin: int,
    end: int,
    *,
    terminated: bool = False,
    truncated: bool = False,
    dtype: Any = np.int64,
) -> SingleAgentEpisode:
    """Steps ``begin…end-1``: observation 1000 e + t, action t, reward t + 1."""
    steps = np.arange(begin, end)
    return SingleAgentEpisode(
        id_=f"e{index}",
        observations=np.array([number(index, t) for t in range(begin, end + 1)], dtype),
        actions=steps,
        rewards=(steps + 1).astype(np.float32),
        extra_model_outputs={"logp": steps.astype(np.float32) / 8},
        terminated=terminated,
        truncated=truncated,
        t_started=begin,
        len_lookback_buffer=0,
    )


def rows_of(batch: EpisodeBatch) -> list[tuple[int, int, int, float, bool, bool]]:
    """(obs, next obs, action, reward, terminated, truncated) of each transition."""
    columns, slots = batch.columns, batch.start
    return list(
        zip(
            columns["obs"][slots].tolist(),
            columns["obs"][slots + 1].tolist(),
            columns["actions"][slots].tolist(),
            columns["rewards"][slots].tolist(),
            batch.terminated.tolist(),
            batch.truncated.tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize("cls", BUFFERS)
@pytest.mark.parametrize("n_step", [1, 3, 5])
def test_transitions_are_the_episodes_whole_and_in_chunks(cls: Any, n_step: int) -> None:
    lengths = {0: (7, "terminated"), 1: (4, "truncated"), 2: (9, ""), 3: (1, "terminated")}
    buffer = cls(1000, seed=1)
    shuffled = random.Random(n_step)
    at = dict.fromkeys(lengths, 0)
    while any(at[e] < lengths[e][0] for e in lengths):  # chunks of several episodes, interleaved
        chunks = []
        for e, (length, end) in lengths.items():
            stop = min(length, at[e] + shuffled.randint(0, 3))
            if stop > at[e]:
                flags = {end: True} if end and stop == length else {}
                chunks.append(episode_of(e, at[e], stop, **flags))
                at[e] = stop
        buffer.add(chunks)
    assert len(buffer) == 21
    assert buffer.get_num_episodes() == 4
    gamma, expected = 0.9, set()
    for e, (length, end) in lengths.items():
        for t in range(length):
            n = min(n_step, length - t)
            reward = np.float32(sum(gamma**k * (t + k + 1) for k in range(n)))
            is_end = t + n == length
            expected.add(
                (
                    number(e, t), number(e, t + n), t, float(reward),
                    is_end and end == "terminated", is_end and end == "truncated",
                )
            )  # fmt: skip
    batch = buffer.sample(3000, n_step=n_step, gamma=gamma)
    assert set(rows_of(batch)) == expected
    # What learners train on, without episodes.
    (drawn,) = buffer.sample_transitions(3000, rng=np.random.default_rng(0), n_step=n_step, gamma=gamma)
    rows = drawn.rows(next_observations=True)
    names = ("obs", "new_obs", "actions", "rewards", "terminateds", "truncateds")
    assert set(zip(*(rows[name].tolist() for name in names), strict=True)) == expected
    for (obs, following, *_), n in zip(
        rows_of(batch), batch.columns["n_step"][batch.start].tolist(), strict=True
    ):
        assert following - obs == n


def test_sums_of_whole_rewards_are_no_whole_numbers() -> None:
    buffer = EpisodeReplayBuffer(100, seed=1)
    buffer.add(
        SingleAgentEpisode(observations=[0, 1, 2], actions=[0, 0], rewards=[1, 1], len_lookback_buffer=0)
    )
    assert set(buffer.sample(50, n_step=2, gamma=0.5).columns["rewards"].tolist()) == {1.5, 1.0}


def test_draws_are_uniform_and_follow_from_the_seed() -> None:
    first, second = EpisodeReplayBuffer(100, seed=5), EpisodeReplayBuffer(100, seed=5)
    for buffer in (first, second):
        buffer.add([episode_of(0, 0, 10), episode_of(1, 0, 30)])
    drawn = [row[0] for row in rows_of(first.sample(40_000))]
    assert drawn == [row[0] for row in rows_of(second.sample(40_000))]
    counts = np.unique(drawn, return_counts=True)[1]
    assert len(counts) == 40
    assert np.abs(counts - 1000).max() < 200


@pytest.mark.parametrize("cls", BUFFERS)
def test_the_oldest_episodes_leave_whole(cls: Any) -> None:
    buffer = cls(100, seed=0)
    for e in range(50):
        buffer.add(episode_of(e, 0, 7 + e % 5, terminated=True))
        assert len(buffer) <= 100
    drawn = {row[0] // 1000 for row in rows_of(buffer.sample(2000))}
    assert drawn == set(range(50 - buffer.get_num_episodes(), 50))
    metrics = buffer.get_metrics()
    assert buffer.get_added_timesteps() == sum(7 + e % 5 for e in range(50))
    assert metrics["num_env_steps_evicted_lifetime"] == buffer.get_added_timesteps() - len(buffer)
    assert buffer.get_num_episodes_evicted() == 50 - buffer.get_num_episodes()


@pytest.mark.parametrize("cls", BUFFERS)
def test_the_mean_number_of_summed_rewards_is_that_of_the_newest_samples(cls: Any) -> None:
    buffer = cls(100, seed=0, metrics_num_episodes_for_smoothing=2)
    buffer.add(episode_of(0, 0, 4, terminated=True))
    buffer.sample(10)
    assert "actual_n_step" not in buffer.get_metrics()
    means = [float(buffer.sample(10, n_step=3).columns["n_step"].mean()) for _ in range(3)]
    assert buffer.get_metrics()["actual_n_step"] == pytest.approx(sum(means[1:]) / 2)
    assert 1.0 < means[0] < 3.0
    with pytest.raises(ValueError, match="metrics_num_episodes_for_smoothing"):
        cls(100, metrics_num_episodes_for_smoothing=0)


def test_after_a_gap_an_episode_goes_on_as_another_stretch() -> None:
    buffer = EpisodeReplayBuffer(100, seed=0)
    buffer.add(episode_of(0, 0, 4))
    buffer.add(episode_of(0, 6, 9, terminated=True))
    rows = {row[0]: row for row in rows_of(buffer.sample(500, n_step=3, gamma=1.0))}
    assert rows[3][1] == 4
    assert not rows[3][4]
    assert rows[6][1] == 9
    assert rows[6][4]
    assert buffer.get_num_episodes() == 1


def test_observations_are_stored_once_with_their_dtype() -> None:
    buffer = EpisodeReplayBuffer(1000)
    image = np.zeros((101, 84, 84, 4), np.uint8)
    steps = np.zeros(100, np.float32)
    for first in range(0, 100, 10):
        buffer.add(
            SingleAgentEpisode(
                id_="e",
                observations=image[first : first + 11],
                actions=steps[first : first + 10],
                rewards=steps[first : first + 10],
                t_started=first,
                len_lookback_buffer=0,
            )
        )
    assert image.nbytes < buffer.num_bytes < 1.02 * image.nbytes
    drawn = buffer.sample(8).columns["obs"]
    assert drawn.dtype == np.uint8
    assert drawn.shape == (16, 84, 84, 4)


def test_sequences_with_lookback_come_from_the_episodes() -> None:
    buffer = EpisodeReplayBuffer(1000, seed=3)
    for first in range(0, 30, 6):
        buffer.add([episode_of(e, first, first + 6, terminated=first == 24) for e in range(3)])
    batch = buffer.sample(batch_size_B=300, batch_length_T=8, lookback=2, min_batch_length_T=3)
    assert set(batch.length.tolist()) == set(range(3, 9))
    for episode in batch:
        e, t = divmod(int(episode.get_observations(0)), 1000)
        assert episode.t_started == t
        num_before = min(2, t)
        whole = episode.get_observations(slice(-num_before, None), neg_index_as_lookback=True)
        assert whole.tolist() == [number(e, t + k) for k in range(-num_before, len(episode) + 1)]
        assert episode.get_actions().tolist() == [t + k for k in range(len(episode))]
        assert episode.is_terminated == (t + len(episode) == 30)
        assert len(episode) == 8 or episode.is_terminated


def test_too_short_episodes_are_an_error_and_no_endless_loop() -> None:
    buffer = EpisodeReplayBuffer(1000, seed=3)
    with pytest.raises(ValueError, match="empty"):
        buffer.sample(1)
    buffer.add(episode_of(0, 0, 4, terminated=True))
    with pytest.raises(ValueError, match="the longest stored one has 4"):
        buffer.sample(batch_size_B=4, batch_length_T=8, min_batch_length_T=5)
    assert buffer.sample(8, n_step=7).num_env_steps == 8


def test_wrong_calls_are_told() -> None:
    buffer = EpisodeReplayBuffer(100)
    buffer.add(episode_of(0, 0, 4))
    with pytest.raises(ValueError, match="got both"):
        buffer.sample(4, batch_size_B=4)
    with pytest.raises(ValueError, match="not for sequences"):
        buffer.sample(4, batch_length_T=2, n_step=3)
    with pytest.raises(TypeError, match="MultiAgentEpisode"):
        buffer.add([MultiAgentEpisode()])
    with pytest.raises(TypeError, match="got int"):
        buffer.add(3)
    with pytest.raises(ValueError, match="dtype int64"):
        buffer.add(episode_of(1, 0, 4, dtype=np.float32))
    with pytest.raises(ValueError, match="capacity >= 1"):
        EpisodeReplayBuffer(0)


def priorities_of(buffer: Any) -> Any:
    return buffer._store.tree.get(buffer._store.ordered_steps()).tolist()


@pytest.mark.parametrize("cls", BUFFERS)
def test_a_restored_buffer_goes_on_as_the_first_would_have(cls: Any) -> None:
    buffer = cls(200, seed=1)
    for first in range(0, 60, 5):
        buffer.add([episode_of(e, first, first + 5, terminated=first == 55) for e in range(6)])
        if cls is PrioritizedEpisodeReplayBuffer:
            batch = buffer.sample(20)
            buffer.update_priorities(batch.columns["actions"][batch.start])
    state = from_plain(msgpack.unpackb(msgpack.packb(to_plain(buffer.get_state()))))
    saved = EpisodeBatch.from_wire(*state["episodes"])
    assert not saved.columns["actions"][saved.start + saved.length].any(), "evicted steps, or other memory"
    other = cls(200, seed=99)
    other.add(episode_of(77, 0, 5))
    other.set_state(state)
    again = cls(200, seed=99)
    again.set_state(state)
    assert other.get_metrics() == again.get_metrics() == buffer.get_metrics()
    assert rows_of(other.sample(50, n_step=3)) == rows_of(again.sample(50, n_step=3))
    stored = [one._store.columns["obs"][one._store.ordered_slots()[1]].tolist() for one in (buffer, other)]
    assert stored[0] == stored[1]
    if isinstance(buffer, PrioritizedEpisodeReplayBuffer):
        priorities = [priorities_of(one) for one in (buffer, other)]
        assert priorities[0] == priorities[1]
        assert len(set(priorities[0])) > 20
    else:
        assert set(rows_of(other.sample(5000, n_step=3))) == set(rows_of(buffer.sample(5000, n_step=3)))
    for one in (buffer, other):
        one.add(episode_of(0, 60, 65))
    assert len(other) == len(buffer)


def test_draws_and_weights_follow_the_priorities() -> None:
    buffer = PrioritizedEpisodeReplayBuffer(100, alpha=0.5, seed=0)
    buffer.add(episode_of(0, 0, 20))
    batch = buffer.sample(2000)
    steps = batch.columns["actions"][batch.start]
    buffer.update_priorities(steps + 1.0)  # those of the last sample, in order
    share = np.sqrt(np.arange(20) + 1.0)
    share /= share.sum()
    batch = buffer.sample(50_000, beta=0.7)
    steps = batch.columns["actions"][batch.start]
    assert np.bincount(steps) / 50_000 == pytest.approx(share, abs=0.01)
    weights = (20 * share) ** -0.7
    expected = (weights / weights.max())[steps]
    assert batch.columns["weights"][batch.start] == pytest.approx(expected, rel=1e-5)
    buffer.add(episode_of(1, 0, 1))  # a new step has the largest priority
    batch = buffer.sample(50_000)
    is_new = batch.columns["obs"][batch.start] == number(1, 0)
    assert is_new.mean() == pytest.approx(share[-1] / (1 + share[-1]), abs=0.005)


def test_a_row_without_error_does_not_scale_down_the_weights_of_the_others() -> None:
    def mean_weight(errors: Any) -> float:
        buffer = PrioritizedEpisodeReplayBuffer(1000, alpha=0.6, seed=0)
        buffer.add(episode_of(0, 0, 1000))
        keys = buffer._keys(buffer._store.ordered_steps())
        buffer.update_priorities(errors, keys)
        return float(np.mean([buffer.sample(32, beta=0.4).columns["weights"].mean() for _ in range(20)]))

    errors = np.random.default_rng(0).exponential(size=1000) + 0.05
    usual, errors[7] = mean_weight(errors), 0.0
    assert usual > 0.5
    assert mean_weight(errors) == pytest.approx(usual, rel=0.1)


def test_keys_name_rows_in_any_order_and_know_what_has_left() -> None:
    buffer = PrioritizedEpisodeReplayBuffer(20, alpha=1.0, seed=0)
    buffer.add([episode_of(0, 0, 5), episode_of(1, 0, 5)])
    batch = buffer.sample(100)
    keys, obs = batch.columns["replay_key"][batch.start], batch.columns["obs"][batch.start]
    order = np.random.default_rng(0).permutation(100)
    # episodes 0 and 1 leave, slots are used again
    buffer.add([episode_of(2, 0, 5), episode_of(3, 0, 12)])
    buffer.update_priorities(obs[order] + 50.0, keys[order])
    assert sum(priorities_of(buffer)) == pytest.approx(17.0)
    assert {row[0] // 1000 for row in rows_of(buffer.sample(500))} == {2, 3}


def test_a_smaller_buffer_restores_the_priorities_of_the_newest_steps() -> None:
    buffer = PrioritizedEpisodeReplayBuffer(20, alpha=1.0, seed=0)
    buffer.add([episode_of(0, 0, 5), episode_of(1, 0, 5)])
    batch = buffer.sample(500)
    buffer.update_priorities(batch.columns["obs"][batch.start] + 1.0)
    smaller = PrioritizedEpisodeReplayBuffer(5, alpha=1.0, seed=0)
    smaller.set_state(buffer.get_state())
    assert priorities_of(smaller) == [1001.0 + t for t in range(5)]


def test_errors_that_are_no_numbers_are_refused() -> None:
    buffer = PrioritizedEpisodeReplayBuffer(20, seed=0)
    buffer.add(episode_of(0, 0, 5))
    buffer.sample(4)
    with pytest.raises(ValueError, match=r"\(3,\) and \(4,\)"):
        buffer.update_priorities([1.0] * 3)
    with pytest.raises(ValueError, match="NaN"):
        buffer.update_priorities([1.0, 2.0, 3.0, np.nan])


def test_many_random_additions_agree_with_a_list() -> None:  # the store against a plain model
    rng = random.Random(7)
    for trial in range(30):
        capacity = rng.choice([5, 30, 120])
        buffer = rng.choice(BUFFERS)(capacity, seed=trial)
        at, next_episode, added = {}, 0, 0
        for _ in range(40):
            chunks = []
            for _ in range(rng.randint(1, 3)):
                if not at or rng.random() < 0.4:
                    at[next_episode] = 0
                    next_episode += 1
                e = rng.choice(sorted(at))
                length = rng.randint(1, 9)
                is_end = rng.random() < 0.4
                chunks.append(episode_of(e, at[e], at[e] + length, terminated=is_end))
                at[e] += length
                if is_end:
                    del at[e]
            undone = rng.random() < 0.2
            if undone:
                buffer.mark()
                buffer.add([episode_of(900, 0, rng.randint(1, 9))])
                buffer.undo()
            buffer.add(chunks)
            added += sum(map(len, chunks))
            assert buffer.get_added_timesteps() == added
            assert len(buffer) == added - buffer.get_metrics()["num_env_steps_evicted_lifetime"]
            drawn = {row[:3] for row in rows_of(buffer.sample(20 * capacity))}
            assert all(following - obs == 1 and obs % 1000 == action for obs, following, action in drawn)
            assert 0.9 * len(buffer) <= len(drawn) <= len(buffer)


@pytest.mark.parametrize("buffer_class", BUFFERS)
def test_stored_episodes_and_columns_of_a_sample_can_be_looked_at(buffer_class: Any) -> None:
    buffer = buffer_class(capacity=100)
    assert len(buffer.episodes) == 0
    buffer.add([episode_of(0, 0, 3), episode_of(1, 0, 4, terminated=True)])
    buffer.add([episode_of(0, 3, 5, truncated=True)])
    found = {episode.id_: episode for episode in buffer.episodes}
    assert found["e0"].get_observations().tolist() == [number(0, t) for t in range(6)]
    assert (len(found["e1"]), found["e1"].is_terminated, found["e0"].is_truncated) == (4, True, True)
    sample = buffer.sample(64)
    assert len(sample["obs"]) == len(sample["actions"]) == 64
    assert (sample["obs"] % 1000 == sample["actions"]).all()


# -- the tree of priorities ----------------------------------------------------------------------------


SIZE = 70_000  # two levels above the indices


@pytest.mark.parametrize("num", [1, 7, 2000])
def test_any_number_of_changes_gives_the_tree_of_the_final_priorities(num: int) -> None:
    rng = np.random.default_rng(num)
    tree, priorities = PriorityTree(SIZE), np.zeros(SIZE)
    for _ in range(20):
        indices = rng.integers(SIZE, size=num)  # some of them twice
        values = rng.random(num) * (rng.random(num) < 0.8)
        tree.set(indices, values)
        for index, value in zip(indices, values, strict=True):
            priorities[index] = value
        assert np.array_equal(tree.get(np.arange(SIZE)), priorities)
        whole = PriorityTree(SIZE)
        whole.set(np.arange(SIZE), priorities)
    assert np.array_equal(*(one.draw(50, np.random.default_rng(0)) for one in (tree, whole)))
    drawn = tree.draw(1000, rng)
    assert np.all(priorities[drawn] > 0.0)


@pytest.mark.parametrize("size", [1, 5, 5000, 70_000])
def test_only_indices_with_priorities_are_drawn_and_as_often_as_they_should(size: int) -> None:
    rng = np.random.default_rng(size)
    priorities = 10.0 ** rng.uniform(-9, 3, size) * (rng.random(size) < 0.3)
    priorities[-1] = priorities.max() or 1.0
    tree = PriorityTree(size)
    tree.set(np.arange(size), priorities)
    drawn = np.bincount(tree.draw(200_000, rng), minlength=size)
    assert not drawn[priorities == 0.0].any()
    expected = 200_000 * priorities / priorities.sum()
    assert (np.abs(drawn - expected) < 6.0 * np.sqrt(expected) + 3.0).all()


# -- buffers by class ----------------------------------------------------------------------------------


class Transitions(ReplayBuffer):
    """The newest transitions in a list, with the least that a buffer has."""

    def __init__(self, capacity: int, noted: int = 0) -> None:
        self.capacity, self.noted = capacity, noted
        self.items: list[SingleAgentEpisode] = []

    def __len__(self) -> int:
        return len(self.items)

    def add(self, episodes: Any) -> None:
        for episode in episodes:
            self.items += [episode[t : t + 1] for t in range(len(episode))]
        del self.items[: -self.capacity]

    def sample(self, num_items: int | None = None, *, rng: Any = None, **options: Any) -> Any:
        return [self.items[i] for i in rng.integers(len(self.items), size=num_items)]

    def get_state(self) -> dict[str, Any]:
        return {"noted": self.noted}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.noted = state["noted"] + 1


def config(**replay_buffer_config: Any) -> Any:
    sizes = {"min_sample_timesteps_per_iteration": 60, "min_time_s_per_iteration": 0, "train_batch_size": 8}
    return small(
        DQNConfig,
        num_envs_per_env_runner=1,
        num_steps_sampled_before_learning_starts=20,
        replay_buffer_config=replay_buffer_config,
        **sizes,
    )


def the_buffer(algo: Algorithm) -> Any:
    return algo.learner_group.foreach_learner(lambda learner: learner)[0].source.buffer


def test_a_run_trains_from_a_buffer_of_ones_own_and_accounts_for_its_steps(tmp_path: Any) -> None:
    made = config(type=Transitions, capacity=30, noted=7).checkpointing(checkpoint_replay=True)
    with made.build() as algo:
        result = algo.train()
        buffer = the_buffer(algo)
        assert isinstance(buffer, Transitions)
        assert (buffer.capacity, buffer.noted, len(buffer)) == (30, 7, 30)
        assert result["learners"]["default_policy"]["qf_loss"] > 0
        assert result["accounting"]["dropped"] == {}
        path = algo.save(str(tmp_path / "saved"))
    with DQN.from_checkpoint(path) as other:
        assert the_buffer(other).noted == 8


def test_a_buffer_of_ones_own_that_takes_td_errors_gets_them() -> None:
    class Takes(Transitions):
        def update_priorities(self, td_errors: Any, keys: Any = None) -> None:
            self.noted = float(td_errors[0])

    source = EpisodeReplay(Takes(9), batch_size=1, train_ratio=1.0)
    source.update_priorities("default_policy", torch.tensor([2.5]), np.array([0]))
    assert (source.uses_priorities, source.buffer.noted) == (True, 2.5)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"type": dict}, "expected a ReplayBuffer of one agent .*or your own subclass"),
        ({"type": Transitions, "capacity": 100, "notd": 1}, "'notd'.*no such key.*noted"),
        ({"type": "PrioritisedEpisodeReplayBuffer"}, "PrioritizedEpisodeReplayBuffer"),
        ({"type": "HindsightEpisodeReplayBuffer"}, "CartPoleEnv has no method compute_reward"),
    ],
)
def test_what_is_no_such_buffer_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        config(**given).build()


class FlipBits(gym.Env[Any, Any]):
    """Flip one of n bits per step until they equal the goal, in n steps: -1 per step, 0 at the goal."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        n = self.n = int(config["n"])
        bits = gym.spaces.Box(0.0, 1.0, (n,), np.float32)
        names = "observation", "achieved_goal", "desired_goal"
        self.observation_space = gym.spaces.Dict(dict.fromkeys(names, bits))
        self.action_space = gym.spaces.Discrete(n)

    def _observed(self) -> dict[str, Any]:
        return {
            "observation": self.bits.copy(),
            "achieved_goal": self.bits.copy(),
            "desired_goal": self.goal.copy(),
        }

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.bits, self.goal = self.np_random.integers(2, size=(2, self.n)).astype(np.float32)
        self.t = 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.bits[action] = 1 - self.bits[action]
        self.t += 1
        reward = float(self.compute_reward(self.bits[None], self.goal[None], [{}])[0])
        done = self.compute_terminated(self.bits, self.goal, {})
        return self._observed(), reward, done, self.t >= self.n, {}

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        assert len(achieved_goal) == len(info)
        return (achieved_goal == desired_goal).all(-1).astype(np.float32) - 1.0

    def compute_terminated(self, achieved_goal: Any, desired_goal: Any, info: Any) -> bool:
        return bool((achieved_goal == desired_goal).all())


def test_other_goals_are_what_the_episode_achieves_later_and_their_rewards_are_the_envs() -> None:
    env = FlipBits({"n": 6})
    buffer = HindsightEpisodeReplayBuffer(
        1000, compute_reward=env.compute_reward, compute_terminated=env.compute_terminated, seed=3
    )
    episodes = []
    for number in range(20):
        observations, actions, rewards, done = [env.reset(seed=number)[0]], [], [], False
        while not done and len(actions) < 6:
            actions.append((number + 5 * len(actions)) % 6)
            obs, reward, done, _, _ = env.step(actions[-1])
            observations.append(obs)
            rewards.append(reward)
        for obs in observations:
            obs["observation"][:] = number / 20  # tells the episodes apart
        episodes.append(
            SingleAgentEpisode(
                observations=observations,
                actions=actions,
                rewards=rewards,
                terminated=done,
                truncated=not done,
                observation_space=env.observation_space,
                action_space=env.action_space,
                len_lookback_buffer=0,
            )
        )
    buffer.add(episodes)
    episodes = [episode.to_numpy() for episode in episodes]
    num_changed = 0
    for one in buffer.sample(2000):
        drawn, t = one.get_observations(), one.t_started
        recorded = episodes[round(20 * drawn["observation"][0, 0])].get_observations()
        goal = drawn["desired_goal"][0]
        assert (drawn["desired_goal"] == goal).all()
        assert (drawn["achieved_goal"] == recorded["achieved_goal"][t : t + 2]).all()
        if not (goal == recorded["desired_goal"][t]).all():
            num_changed += 1
            assert (goal == recorded["achieved_goal"][t + 1 :]).all(1).any()
        reached = (drawn["achieved_goal"][1] == goal).all()
        assert one.get_rewards(0) == reached - 1.0
        assert one.is_terminated == reached
    assert 0.7 < num_changed / 2000 < 0.85  # four of five, but for those whose own goal was reached


def test_a_run_trains_with_hindsight() -> None:
    kind = {"type": "HindsightEpisodeReplayBuffer", "capacity": 100}
    filtered = config(**kind).env_runners(env_to_module_connector=lambda: MeanStdFilter())
    with pytest.raises(ConfigurationError, match=r"the stored goals to Box\(-10.0"):
        filtered.environment(FlipBits, env_config={"n": 4}).build()
    with config(**kind).environment(FlipBits, env_config={"n": 4}).build() as algo:
        assert algo.train()["learners"]["default_policy"]["qf_loss"] > 0
        batch = the_buffer(algo).sample(200)
        for name, value in (("n_step", 3), ("batch_length_T", 4)):
            with pytest.raises(ValueError, match=f"{name}={value}"):
                the_buffer(algo).sample(8, **{name: value})
    assert {reward for one in batch for reward in one.get_rewards()} == {-1.0, 0.0}


def test_prioritized_draws_are_stratified() -> None:
    tree, rng = PriorityTree(64), np.random.default_rng(0)
    tree.set(np.arange(64), 1.0)
    for _ in range(20):
        assert np.array_equal(tree.draw(64, rng), np.arange(64))
        assert np.bincount(tree.draw(32, rng) // 2).tolist() == [1] * 32
