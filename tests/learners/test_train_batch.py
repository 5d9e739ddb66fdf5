"""Train batches and minibatches: the fused path gives what the per-episode protocol gives, to the last bit."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlzmq import PPOConfig, SingleAgentEpisode
from rlzmq.algorithms.ppo.ppo_learner import PPOLearner
from rlzmq.connectors.common.agent_to_module_mapping import initial_state as initial_state_of
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.env_to_module import FrameStackingEnvToModule
from rlzmq.connectors.learner import AddNextObservationsFromEpisodesToTrainBatch, FrameStackingLearner
from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.learners.batches import MinibatchIterator, TrainBatch
from tests.learners.cases import (
    ACTION_SPACE,
    OBSERVATION_SPACE,
    episode_batch,
    episodes,
    ppo_config,
    ppo_learner,
)

LSTM = {"fcnet_hiddens": [8], "use_lstm": True, "lstm_cell_size": 6, "max_seq_len": 5}


def built(learner: PPOLearner, data: Any, *, fused: bool) -> TrainBatch:
    """The train batch of some episodes; fails if pieces were called although the pipeline runs on rows."""
    learner._learner_connector.time_pieces = not fused
    result = learner.prepare(data)
    called = learner._learner_connector.take_piece_timers()
    assert not (fused and called)
    return result


def assert_identical(one: TrainBatch, other: TrainBatch) -> None:
    assert one.num_env_steps == other.num_env_steps
    assert one.num_module_steps == other.num_module_steps
    assert one.columns.keys() == other.columns.keys()
    for module_id, columns in one.columns.items():
        assert columns.keys() == other.columns[module_id].keys()
        for name, column in columns.items():
            if name == Columns.INFOS:
                assert column == other.columns[module_id][name]
                continue
            leaves, other_leaves = tree_leaves(column), tree_leaves(other.columns[module_id][name])
            for mine, theirs in zip(leaves, other_leaves, strict=True):
                assert mine.dtype == theirs.dtype, name
                assert torch.equal(mine, theirs), name


def chunks(
    learner: PPOLearner, seed: int, lengths: list[int], lookback: int, *, stored_state: bool = False
) -> EpisodeBatch:
    """Chunks of made-up episodes, some of them several chunks of one episode, with gaps between them."""
    rng = np.random.default_rng(seed)
    starts, slot = [], 1
    for length in lengths:
        starts.append(slot + lookback)
        slot += lookback + length + 1 + int(rng.integers(0, 3))
    num_slots, num_chunks = slot + 1, len(lengths)
    columns: dict[str, Any] = {
        Columns.OBS: rng.normal(size=(num_slots, 4)).astype(np.float32),
        Columns.ACTIONS: rng.integers(0, 2, num_slots),
        Columns.REWARDS: rng.normal(size=num_slots),
        Columns.ACTION_DIST_INPUTS: rng.normal(size=(num_slots, 2)).astype(np.float32),
        Columns.ACTION_LOGP: -rng.random(num_slots).astype(np.float32),
        Columns.WEIGHTS_VERSION: rng.integers(0, 4, num_slots),
    }
    terminated = rng.random(num_chunks) < 0.3
    t_started = rng.integers(1, 9, num_chunks) if lookback else np.zeros(num_chunks, np.int64)
    initial_state = None
    module = learner.module["default_policy"]
    if module.is_stateful():

        def states(num_rows: int) -> Any:
            return tree_map(
                lambda leaf: rng.normal(size=(num_rows, *leaf.shape)).astype(np.float32),
                initial_state_of(module),
            )

        columns[Columns.STATE_OUT] = states(num_slots)
        if stored_state:
            initial_state = states(num_chunks)
            if lookback:  # what is stored is what the step before the chunk left
                before = np.array(starts) - 1
                initial_state = tree_map(lambda leaf: leaf[before], columns[Columns.STATE_OUT])
    return EpisodeBatch(
        columns,
        start=starts,
        length=lengths,
        lookback=np.full(num_chunks, lookback),
        t_started=t_started,
        terminated=terminated,
        truncated=~terminated & (rng.random(num_chunks) < 0.3),
        episode_ids=[f"e{i // 2}" for i in range(num_chunks)],
        initial_state=initial_state,
        observation_space=OBSERVATION_SPACE,
        action_space=ACTION_SPACE,
    )


@functools.cache
def shared_learner(stateful: bool) -> PPOLearner:
    return ppo_learner(ppo_config(LSTM if stateful else None, lambda_=0.9))


@given(
    lengths=st.lists(st.integers(0, 14), min_size=1, max_size=5),
    lookback=st.integers(0, 2),
    seed=st.integers(0, 99),
    stateful=st.booleans(),
    stored_state=st.booleans(),
)
def test_the_fused_path_equals_the_per_episode_path_bit_for_bit(
    lengths: list[int], lookback: int, seed: int, stateful: bool, stored_state: bool
) -> None:
    learner = shared_learner(stateful)
    data = chunks(learner, seed, lengths, lookback, stored_state=stored_state)
    fused = built(learner, data, fused=True)
    generic = built(learner, data, fused=False)
    assert_identical(fused, generic)
    assert fused.num_env_steps == sum(lengths)
    assert fused.num_module_steps.get("default_policy", 0) == sum(lengths)
    if not stateful:
        for columns in fused.columns.values():
            assert Columns.LOSS_MASK not in columns
            assert len(columns[Columns.ADVANTAGES]) == sum(lengths)


def test_episodes_and_several_batches_are_one_in_their_order() -> None:
    learner = ppo_learner()
    whole = episode_batch(7, 12, 5)
    expected = built(learner, whole, fused=True)
    assert_identical(built(learner, [whole[:1], whole[1:]], fused=True), expected)
    for listed in ([*whole[:1], whole[1:]], episodes(7, 12, 5)):
        assert_identical(built(learner, listed, fused=False), expected)


def test_read_only_columns_from_the_wire_are_taken_without_a_warning() -> None:
    header, frames = episode_batch(7, 12).to_wire()
    for frame in frames:
        frame.flags.writeable = False
    results = ppo_learner().update(episodes=EpisodeBatch.from_wire(header, frames))
    assert results["__all_modules__"]["num_env_steps_trained"] == 19


def test_the_given_episodes_are_left_as_they_were() -> None:
    given = episodes(7, 12)
    ppo_learner().update(episodes=given)
    assert [len(one) for one in given] == [7, 12]
    assert [one.is_truncated for one in given] == [False, False]


def test_changes_to_items_of_a_batch_are_trained_on() -> None:
    data = episode_batch(7, 12)
    for one in data:
        one.set_rewards(new_data=one.get_rewards() + 5.0)
    for fused in (True, False):
        train_batch = built(ppo_learner(), data, fused=fused)
        rewards = train_batch.columns["default_policy"][Columns.REWARDS]
        assert rewards.tolist() == [reward for one in data for reward in one.get_rewards().astype(np.float32)]


def test_next_observations_are_stacked_wherever_their_piece_stands() -> None:
    stacking, adding = FrameStackingLearner(num_frames=2), AddNextObservationsFromEpisodesToTrainBatch()
    made = []
    for pieces, on_rows in (
        ([stacking, adding], True),
        ([stacking, adding], False),
        ([adding, stacking], False),
    ):
        config = ppo_config().learners(learner_connector=lambda pieces=pieces: pieces)
        config.env_runners(env_to_module_connector=lambda: FrameStackingEnvToModule(num_frames=2))
        made.append(built(config.build_learner(), episode_batch(7, 5), fused=on_rows))
    assert_identical(made[0], made[1])
    assert_identical(made[0], made[2])
    assert made[0].columns["default_policy"][Columns.NEXT_OBS].shape == (12, 8)


def test_what_a_users_piece_writes_into_a_batchs_items_is_trained_and_does_not_pile_up() -> None:
    class AddOneToRewards(ConnectorV2):
        def __call__(self, *, batch: Any, episodes: Any, **kwargs: Any) -> Any:
            for episode in self.single_agent_episode_iterator(episodes):
                episode.set_rewards(new_data=episode.get_rewards() + 1.0)
            return batch

    data = episode_batch(7, 12)
    returns = data.get_returns()
    learner = ppo_learner(ppo_config().learners(learner_connector=lambda obs, act: AddOneToRewards()))
    plain, first, second = (
        one.prepare(data).columns["default_policy"][Columns.REWARDS]
        for one in (ppo_learner(), learner, learner)
    )
    assert torch.allclose(first, plain + 1.0, atol=1e-6)
    assert torch.equal(first, second)
    assert data.get_returns().tolist() == returns.tolist()


# -- RLlib's advantages --------------------------------------------------------------------------------


# What RLlib 2.60's PPO learner connector gave, with compute_values(batch) = batch["obs"].sum(-1), γ = 0.95, λ = 0.9.
ADVANTAGES = [
    -1.0454, -1.4236, 0.8414, 1.7268, -0.1145, -0.1095, -1.4111, -1.4005, 0.9570, 0.7406, 1.6738, -0.1224, -1.6734,
    1.1798, -0.3988, 0.6205,
]  # fmt: skip
VALUE_TARGETS = [
    -2.1836, -1.7067, -1.1773, -1.1321, -0.2092, 0.1602, 0.1503, 1.1750, 2.0969, 1.3374, 1.6831, -0.4181, -1.0738,
    0.0284, 1.3602, 0.9897,
]  # fmt: skip


def random_episodes() -> list[SingleAgentEpisode]:
    rng = np.random.default_rng(0)
    made = []
    for length, terminated in ((5, True), (1, False), (7, False), (3, True)):
        episode = SingleAgentEpisode(
            observations=list(rng.normal(size=(length + 1, 4)).astype(np.float32)),
            actions=list(rng.integers(0, 2, length)),
            rewards=list(rng.normal(size=length)),
            terminated=terminated,
            truncated=not terminated and length == 1,
            len_lookback_buffer=0,
            observation_space=gym.spaces.Box(-9, 9, (4,)),
            action_space=gym.spaces.Discrete(2),
            extra_model_outputs={
                Columns.ACTION_LOGP: list(np.zeros(length, np.float32)),
                Columns.ACTION_DIST_INPUTS: list(np.zeros((length, 2), np.float32)),
            },
        )
        made.append(episode.to_numpy())
    return made


@pytest.mark.parametrize("standardize_advantages", ["as_rllib", "real_steps"])
def test_advantages_are_rllibs_number_for_number_on_request(standardize_advantages: str) -> None:
    config = PPOConfig().environment("CartPole-v1").training(lambda_=0.9, gamma=0.95)
    config.training(standardize_advantages=standardize_advantages)
    learner = config.build_learner(env=gym.make("CartPole-v1"))
    module = learner.module["default_policy"]
    module.compute_values = lambda batch, embeddings=None: batch[Columns.OBS].sum(-1)
    batch = learner._learner_connector(
        rl_module=learner.module, batch={}, episodes=random_episodes(), explore=False, shared_data={}
    )["default_policy"]
    is_real = batch[Columns.LOSS_MASK].numpy().astype(bool)
    advantages = batch[Columns.ADVANTAGES].numpy()[is_real]
    np.testing.assert_allclose(batch[Columns.VALUE_TARGETS].numpy()[is_real], VALUE_TARGETS, atol=6e-5)
    if standardize_advantages == "as_rllib":
        np.testing.assert_allclose(advantages, ADVANTAGES, atol=6e-5)
    else:
        assert abs(advantages.mean()) < 1e-6
        assert advantages.std() == pytest.approx(1.0, abs=1e-5)
        assert np.corrcoef(advantages, ADVANTAGES)[0, 1] > 0.999  # the same but for shift and scale


# -- minibatches ---------------------------------------------------------------------------------------


def batch_of(**num_rows: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {"obs": torch.arange(n), "actions": torch.arange(n) * 10} for name, n in num_rows.items()}


def iterate(batch: Any, **kwargs: Any) -> list[dict[str, Any]]:
    settings = {"minibatch_size": 8, "num_epochs": 1, "shuffle": True, "seed": 3} | kwargs
    iterator = MinibatchIterator(batch, **settings)
    return [minibatch for _, minibatch in iterator.take(iterator.num_of_modules)]


def test_unshuffled_rows_come_in_their_order_and_wrap_around() -> None:
    minibatches = iterate(batch_of(p=5), minibatch_size=3, shuffle=False, num_epochs=2)
    rows = [minibatch["p"]["obs"].tolist() for minibatch in minibatches]
    assert rows == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]


def test_the_first_epoch_is_shuffled_too() -> None:
    minibatches = iterate(batch_of(p=64), minibatch_size=64 // 2)
    rows = torch.cat([minibatch["p"]["obs"] for minibatch in minibatches])
    assert sorted(rows.tolist()) == list(range(64))
    assert rows.tolist() != list(range(64))


def test_a_rare_module_is_trained_for_as_many_epochs_as_a_frequent_one() -> None:
    minibatches = iterate(batch_of(rare=50, frequent=4000), minibatch_size=128, num_epochs=10)
    assert len(minibatches) == 313
    having = [index for index, minibatch in enumerate(minibatches) if "rare" in minibatch]
    assert len(having) == 4  # 512 rows: 10.24 epochs
    assert having[-1] == 312  # in the last epoch, whose statistics are reported
    assert np.diff(having).tolist() == [78, 78, 78]
    uses = np.bincount(torch.cat([m["rare"]["obs"] for m in minibatches if "rare" in m]).numpy())
    assert set(uses.tolist()) == {10, 11}
    assert all("frequent" in minibatch for minibatch in minibatches)


def test_a_modules_rows_do_not_depend_on_the_other_modules() -> None:
    alone = iterate(batch_of(a=30))
    together = iterate(batch_of(a=30, b=7))
    for one, two in zip(alone, together, strict=True):
        assert torch.equal(one["a"]["obs"], two["a"]["obs"])
    assert len(iterate(batch_of(b=7))) == sum("b" in minibatch for minibatch in together)


def test_the_same_seed_gives_the_same_minibatches_and_touches_no_global_generator() -> None:
    state = np.random.get_state()[1].copy()  # type: ignore[index]
    first, second, other = (iterate(batch_of(p=50), seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a["p"]["obs"], b["p"]["obs"]) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a["p"]["obs"], b["p"]["obs"]) for a, b in zip(first, other, strict=True))
    assert np.array_equal(np.random.get_state()[1], state)  # type: ignore[index]


def test_rows_that_hold_sequences_fill_the_minibatch_by_timesteps() -> None:
    batch = {"p": {"obs": torch.zeros(10, 20, 4), "seq_lens": torch.full((10,), 20)}}
    minibatches = iterate(batch, minibatch_size=40, timesteps={"p": 200})
    shapes = [minibatch["p"]["obs"].shape for minibatch in minibatches]
    assert shapes == [(2, 20, 4)] * 5


def test_nested_observations_and_infos_are_gathered_alike() -> None:
    batch = {
        "p": {"obs": {"a": torch.arange(9), "b": (torch.arange(9),)}, "infos": [{"i": i} for i in range(9)]}
    }
    for minibatch in iterate(batch, minibatch_size=4):
        rows = minibatch["p"]["obs"]["a"].tolist()
        assert minibatch["p"]["obs"]["b"][0].tolist() == rows
        assert [info["i"] for info in minibatch["p"]["infos"]] == rows


def test_a_number_of_minibatches_agreed_elsewhere_wins() -> None:
    assert len(iterate(batch_of(p=5), num_minibatches=7)) == 7


def test_columns_of_different_length_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'rewards'.*expected 4 rows.*\(3,\)"):
        iterate({"p": {"obs": torch.zeros(4), "rewards": torch.zeros(3)}})


@given(
    num_rows=st.integers(1, 70),
    minibatch_size=st.one_of(st.none(), st.integers(1, 90)),
    num_epochs=st.integers(1, 4),
    shuffle=st.booleans(),
)
def test_rows_are_used_evenly_whatever_the_sizes(
    num_rows: int, minibatch_size: int | None, num_epochs: int, shuffle: bool
) -> None:
    minibatches = iterate(
        batch_of(p=num_rows), minibatch_size=minibatch_size, num_epochs=num_epochs, shuffle=shuffle
    )
    assert len(minibatches) == (-(-num_epochs * num_rows // minibatch_size) if minibatch_size else num_epochs)
    counts = np.bincount(torch.cat([m["p"]["obs"] for m in minibatches]).numpy(), minlength=num_rows)
    assert counts.min() >= num_epochs
    assert counts.max() - counts.min() <= 1
    assert all(m["p"]["obs"].shape[0] == (minibatch_size or num_rows) for m in minibatches)
