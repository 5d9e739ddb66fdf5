"""What learners train on: every fresh batch once, or the newest ones several times."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlzmq import BCConfig, ConfigurationError, DQNConfig
from rlzmq.connectors.common import FrameStackingEnvToModule, FrameStackingLearner
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.defaults import add_next_observations
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.learners.batches import CircularBuffer
from rlzmq.learners.offline_learner import OfflineShards
from rlzmq.learners.replay_learner import EpisodeReplay
from rlzmq.replay import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer, open_shards, write_shard
from rlzmq.replay.step_store import Transitions
from tests.learners.cases import SquareLearner, episode, square_learner
from tests.learners.test_train_batch import assert_identical
from tests.support.runs import small
from tests.support.warm_process import run_warm


class OneStep(int):
    """A number that stands for a batch of one env step."""

    num_env_steps = 1


def train(source: CircularBuffer, batch: int, seed: int = 0) -> list[int]:
    source.add(OneStep(batch))
    return list(source.batches(source.plan_batches(1, 0, 1), np.random.default_rng([seed, batch])))


@pytest.mark.parametrize(("num_batches", "iterations"), [(8, 2), (4, 3), (1, 2), (3, 1)])
def test_a_circular_buffer_trains_the_newest_batches_up_to_k_times(num_batches: int, iterations: int) -> None:
    source = CircularBuffer(num_batches, iterations)
    uses, ages = Counter[int](), Counter[int]()
    num_trained = []
    for update in range(400):
        drawn = train(source, update)
        assert 1 <= len(drawn) <= iterations
        assert all(update - num_batches < batch <= update for batch in drawn)
        uses.update(drawn)
        num_trained.append(len(drawn))
        ages.update(update - batch for batch in drawn)
    assert max(uses.values()) <= iterations
    assert set(ages) == set(range(num_batches)) or iterations == 1
    # Once there is a store, nearly every use is made.
    assert np.mean(num_trained[num_batches * 4 :]) > 0.85 * iterations
    num_left = sum(uses for _, uses in source.checkpoint()[0])
    assert num_left == pytest.approx(num_batches * (iterations - 1) / 2, abs=iterations)


def test_a_rollback_undoes_what_a_failed_update_took() -> None:
    source = CircularBuffer(4, 2)
    for update in range(10):
        train(source, update)
    checkpoint = source.checkpoint()
    drawn = train(source, 10)
    source.rollback(checkpoint)
    assert source.checkpoint() == checkpoint
    assert train(source, 10) == drawn


# -- the ratio ------------------------------------------------------------------------------------


def fresh(seed: int, num_steps: int) -> EpisodeBatch:
    lengths = [num_steps // 3, num_steps - num_steps // 3]
    episodes = [episode(n, seed=2 * seed + i, terminated=i == 0) for i, n in enumerate(lengths)]
    return EpisodeBatch.from_episodes([one.to_numpy() for one in episodes])


def replay(ratio: float = 2.0, warm_up: int = 0, capacity: int = 500, **options: Any) -> EpisodeReplay:
    buffer = EpisodeReplayBuffer(capacity, seed=0)
    return EpisodeReplay(buffer, batch_size=16, train_ratio=ratio, warm_up=warm_up, **options)


@pytest.mark.parametrize("ratio", [0.37, 1.5, 65.5])
def test_a_learner_trains_as_many_batches_as_the_ratio_says(ratio: float) -> None:
    class Replaying(SquareLearner):
        def make_source(self) -> EpisodeReplay:
            return replay(ratio=ratio, warm_up=60, n_step=2, gamma=0.9)

    learner = square_learner(learner_class=Replaying, minibatch_size=None, num_epochs=1)
    trained = 0
    for update in range(20):
        before = learner.parameter_hash()
        results = learner.update(episodes=fresh(update, 20))["__all_modules__"]
        due = ratio * max(0, 20 * (update + 1) - 60)
        trained += results["num_env_steps_trained"]
        assert 0 <= due - trained < 16
        assert learner.weights_seq_no == update + 1, "an update that trains nothing is one all the same"
        assert (learner.parameter_hash() != before) == (results["num_env_steps_trained"] > 0)
        assert results["num_gradient_updates"] * 16 == results["num_env_steps_trained"]
        assert results["batch_source"]["num_env_steps"] == 20 * (update + 1)
    assert trained == results["num_env_steps_trained_lifetime"]


@pytest.mark.parametrize("kind", [EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer])
@pytest.mark.parametrize("n_step", [1, (1, 3)])
@pytest.mark.parametrize("next_observations", [False, True])
def test_drawn_transitions_give_the_train_batch_of_their_episodes(
    kind: Any, n_step: Any, next_observations: bool
) -> None:
    source = EpisodeReplay(kind(500, seed=0), batch_size=16, train_ratio=1.0, n_step=n_step, gamma=0.9)
    source.add(fresh(0, 40))

    def drawn() -> Transitions:
        (batch,) = source.batches(1, np.random.default_rng(7))
        assert isinstance(batch, Transitions)
        return batch

    learner = square_learner(minibatch_size=None, num_epochs=1)
    if next_observations:
        add_next_observations(learner._learner_connector)
    build = learner.prepare
    rows, first = build(drawn()), drawn()
    assert len(first) == first.num_env_steps == 16
    assert first.is_read
    others = [build(first), build(pickle.loads(pickle.dumps(drawn())))]
    learner._learner_connector.time_pieces = True
    others.append(build(drawn()))
    assert ("new_obs" in rows.columns["default_policy"]) == next_observations
    for other in others:
        assert_identical(rows, other)


@pytest.mark.parametrize("kind", [EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer])
@pytest.mark.parametrize("n_step", [1, (1, 3)])
@pytest.mark.parametrize("bytes_at_once", [1, 5000, 2**20])
def test_batches_drawn_at_once_are_those_drawn_one_by_one(
    kind: Any, n_step: Any, bytes_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlzmq.replay.episode_replay_buffer._BYTES_AT_ONCE", bytes_at_once)

    def drawn(*numbers: int) -> tuple[list[Any], Any]:
        source = EpisodeReplay(kind(500, seed=0), batch_size=15, train_ratio=1.0, n_step=n_step, gamma=0.9)
        source.add(fresh(0, 40))
        rng = np.random.default_rng(7)
        return [batch for number in numbers for batch in source.batches(number, rng)], source.get_metrics()

    learner = square_learner(minibatch_size=None, num_epochs=1)
    add_next_observations(learner._learner_connector)
    build = learner.prepare
    (together, metrics), (single, metrics_of_single) = drawn(5), drawn(1, 1, 1, 1, 1)
    assert len(together) == 5
    assert metrics == metrics_of_single
    for mine, other in zip(together, single, strict=True):
        assert type(mine) is Transitions
        assert len(mine) == 15
        assert mine.episode_ids == other.episode_ids
        assert_identical(build(mine), build(other))


def test_a_piece_of_the_users_gets_the_drawn_transitions_as_episodes() -> None:
    class CountsEpisodes(ConnectorV2):
        seen: ClassVar[list[int]] = []

        def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
            self.seen.append(sum(len(one) == 1 for one in episodes))
            return batch

    source = EpisodeReplay(EpisodeReplayBuffer(500, seed=0), batch_size=16, train_ratio=1.0, n_step=2)
    source.add(fresh(0, 40))
    learner = square_learner(minibatch_size=None, num_epochs=1)
    learner._learner_connector.prepend(CountsEpisodes())
    (batch,) = source.batches(1, np.random.default_rng(7))
    assert learner.prepare(batch).num_env_steps == 16
    assert CountsEpisodes.seen == [16]


@pytest.mark.parametrize("of", ["EpisodeReplayBuffer", "PrioritizedEpisodeReplayBuffer", "files"])
def test_drawn_steps_are_trained_with_the_frames_before_them(of: str, tmp_path: Path) -> None:
    frames = np.arange(1, 14, dtype=np.float32)
    data = SingleAgentEpisode(
        observations=frames[:, None],
        actions=np.zeros(12, np.int64),
        rewards=frames[:-1],
        len_lookback_buffer=0,
    )
    spaces = {"observation_space": gym.spaces.Box(0, 99, (1,)), "action_space": gym.spaces.Discrete(2)}
    settings: Any = {"learner_connector": lambda: FrameStackingLearner(num_frames=3), **spaces}
    settings["env_to_module_connector"] = lambda: FrameStackingEnvToModule(num_frames=3)
    if of == "files":
        write_shard(tmp_path, [data])
        learner = small(BCConfig, None, input_=str(tmp_path), train_batch_size=12, **settings).build_learner()
    else:
        settings["replay_buffer_config"] = {"type": of}
        with pytest.raises(ConfigurationError, match=r"n_step=2.*FrameStackObservation"):
            small(DQNConfig, None, n_step=2, **settings).build_learner()
        learner = small(DQNConfig, None, **settings).build_learner()
        learner.source.add([data])
    (batch,) = learner.source.batches(1, np.random.default_rng(0))
    rows = learner.prepare(batch).columns["default_policy"]
    last = rows["rewards"][:, None]
    assert (rows["obs"] == (last + torch.tensor([-2.0, -1.0, 0.0])).clamp(min=0)).all()
    if of != "files":
        assert (rows["new_obs"] == (last + torch.tensor([-1.0, 0.0, 1.0])).clamp(min=0)).all()
        assert {"weights", "n_step", "replay_key"} <= rows.keys()


def test_beta_follows_its_schedule_over_the_sampled_steps() -> None:
    buffer = PrioritizedEpisodeReplayBuffer(500, alpha=1.0, seed=0)
    source = EpisodeReplay(buffer, batch_size=16, train_ratio=1.0, beta=[(0, 0.0), (100, 1.0)])
    source.add([episode(4)])
    buffer.update_priorities([1.0, 1.0, 2.0, 4.0], buffer._keys(buffer._store.ordered_steps()))
    for num_sampled, beta in ((0, 0.0), (50, 0.5), (50, 1.0), (50, 1.0)):
        num_batches = source.plan_batches(num_sampled, 0, 1) or 1
        for batch in source.batches(num_batches, np.random.default_rng(0)):
            weights = np.unique(batch.columns["weights"])
            assert weights == pytest.approx(np.unique(np.array([1.0, 2.0, 4.0]) ** -beta))


# -- files ----------------------------------------------------------------------------------------


def recorded(path: Path, num_shards: int = 3, steps: int = 50) -> list[EpisodeBatch]:
    for index in range(num_shards):
        write_shard(path, fresh(index, steps))
    return open_shards(path).shards


def offline_source(
    shards: list[EpisodeBatch], rank: int = 0, num_ranks: int = 1, **options: Any
) -> OfflineShards:
    source = OfflineShards(shards, seed=3, **options)
    source.set_rank(rank, num_ranks)
    return source


def drawn(source: OfflineShards, num_batches: int) -> list[EpisodeBatch]:
    return list(source.batches(num_batches, np.random.default_rng(0)))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_epoch_has_every_recorded_step_once(num_ranks: int, tmp_path: Path) -> None:
    shards = recorded(tmp_path)
    seen: Counter[bytes] = Counter()
    for rank in range(num_ranks):
        source = offline_source(shards, rank, num_ranks, batch_size=7)
        orders = []
        for _epoch in range(2):
            batches = drawn(source, source.num_batches_per_epoch)
            assert {batch.num_env_steps for batch in batches} == {7}
            orders.append([row.tobytes() for b in batches for row in np.asarray(b.columns["obs"])[b.start]])
        assert source.num_epochs == 2
        assert orders[0] != orders[1]
        seen.update(orders[0])
    total = sum(shard.num_env_steps for shard in shards)
    assert max(seen.values()) == 1
    assert total - 7 * num_ranks < len(seen) <= total


@pytest.mark.parametrize("whole_episodes", [False, True])
def test_data_smaller_than_a_batch_is_one_batch(whole_episodes: bool, tmp_path: Path) -> None:
    shards = recorded(tmp_path)
    total = sum(shard.num_env_steps for shard in shards)
    source = offline_source(shards, batch_size=total + 1, whole_episodes=whole_episodes)
    assert source.num_batches_per_epoch == 1
    for batch in drawn(source, 3):
        assert batch.num_env_steps == total
        rows = [row.tobytes() for row in np.asarray(batch.columns["obs"])[batch.step_slots()]]
        assert len(set(rows)) == total, "each step once"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_whole_episodes_stay_whole_and_come_once_in_an_epoch(num_ranks: int, tmp_path: Path) -> None:
    shards = recorded(tmp_path)
    seen: list[str] = []
    for rank in range(num_ranks):
        source = offline_source(shards, rank, num_ranks, batch_size=30, whole_episodes=True)
        batches = drawn(source, source.num_batches_per_epoch)
        assert all(len(batch) for batch in batches)
        assert np.mean([batch.num_env_steps for batch in batches]) >= 30
        seen += [id_ for batch in batches for id_ in batch.episode_ids]
    whole = {
        id_: length for shard in shards for id_, length in zip(shard.episode_ids, shard.length, strict=True)
    }
    assert sorted(seen) == sorted(whole)
    assert {
        id_: n for b in batches for id_, n in zip(b.episode_ids, b.length, strict=True)
    }.items() <= whole.items()


def test_a_batch_of_a_few_long_episodes_is_never_empty(tmp_path: Path) -> None:
    shards = [EpisodeBatch.concat([shard.select([0]) for shard in recorded(tmp_path)])]
    source = offline_source(shards, batch_size=1, whole_episodes=True)
    assert source.num_batches_per_epoch == len(shards[0])
    assert [len(batch) for batch in drawn(source, 2 * len(shards[0]))] == [1] * 2 * len(shards[0])


@pytest.mark.parametrize("whole_episodes", [False, True])
def test_a_batch_follows_from_its_number_alone(whole_episodes: bool, tmp_path: Path) -> None:
    """So a resumed run, a repeated update and a group of another size draw what they should."""
    shards = recorded(tmp_path)

    def ids(batches: list[EpisodeBatch]) -> list[list[str]]:
        return [list(batch.episode_ids) for batch in batches]

    source = offline_source(shards, batch_size=20, whole_episodes=whole_episodes)
    expected = ids(drawn(source, 25))
    for first in (0, 1, 7, 24):
        source.progress.set_state({**source.progress.get_state(), "num_drawn": first})
        assert ids(drawn(source, 25 - first)) == expected[first:]
    source.set_rank(1, 2)
    other = offline_source(shards, 1, 2, batch_size=20, whole_episodes=whole_episodes)
    other.progress.set_state(source.progress.get_state())
    assert ids(drawn(source, 9)) == ids(drawn(other, 9))
    assert ids(drawn(source, 9)) != expected[:9]


def test_a_position_in_other_data_is_told_and_their_steps_are_not_mixed_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shards = recorded(tmp_path)
    source, other = offline_source(shards, batch_size=20), offline_source(shards[1:], batch_size=20)
    drawn(source, 1)
    for restored in (offline_source(shards, batch_size=20), other):
        assert not caplog.messages
        restored.progress.set_state(source.progress.get_state())
    num = [sum(shard.num_env_steps for shard in some) for some in (shards, shards[1:])]
    assert f"{num[0]} env steps were recorded where this training began, and {num[1]} are here" in caplog.text


def test_recorded_steps_with_nan_are_left_out(tmp_path: Path) -> None:
    shards = recorded(tmp_path, 1)
    columns = {name: np.array(column) for name, column in shards[0].columns.items()}
    columns["rewards"][shards[0].start] = np.nan
    shards[0].columns = columns
    batches = drawn(offline_source(shards, batch_size=10), 5)
    assert sum(batch.num_env_steps for batch in batches) == 50 - len(shards[0])
    assert all(np.isfinite(batch.columns["rewards"][batch.step_slots()]).all() for batch in batches)


def test_an_epoch_of_data_that_do_not_fit_into_memory_is_drawn(tmp_path: Path) -> None:
    """Of 96 MB of images; the process may have 48 MB more than before it opened the files."""
    for index in range(4):
        episode = SingleAgentEpisode(
            id_=str(index),
            observations=np.full((1201, 20_000), index, np.uint8),
            actions=np.zeros(1200, np.int64),
            rewards=np.zeros(1200, np.float32),
            observation_space=gym.spaces.Box(0, 255, (20_000,), np.uint8),
            action_space=gym.spaces.Discrete(2),
            terminated=True,
            len_lookback_buffer=0,
        )
        write_shard(tmp_path, [episode])
    program = """
import re, resource, sys
import numpy as np
from rlzmq.learners.offline_learner import OfflineShards
from rlzmq.replay import open_shards

used = 1024 * int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1])
resource.setrlimit(resource.RLIMIT_DATA, (used + 3 * 2**24, used + 3 * 2**24))
source = OfflineShards(open_shards(sys.argv[1]).shards, batch_size=32)
total = 0
for batch in source.batches(150, np.random.default_rng(0)):
    rows = batch.columns["obs"][batch.start]
    total += int(rows[:, 0].sum())
print(total)
try:
    np.ones(3 * 2**24, np.uint8)
except MemoryError:
    print("limited")
"""
    done = run_warm("-c", program, str(tmp_path), timeout=100)
    assert done.stdout.split() == [str(1200 * (0 + 1 + 2 + 3)), "limited"], done.stderr
