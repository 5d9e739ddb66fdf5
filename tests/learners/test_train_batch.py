"""Train batches: the fused path gives what the per-episode protocol gives, to the last bit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlzmq.algorithms.ppo.ppo_learner import PPOLearner
from rlzmq.connectors.common.agent_to_module_mapping import initial_state as initial_state_of
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.env_to_module import FrameStackingEnvToModule
from rlzmq.connectors.learner import AddNextObservationsFromEpisodesToTrainBatch, FrameStackingLearner
from rlzmq.core.tree import tree_leaves, tree_map
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.learners.batches import TrainBatch
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
    result = learner._builder.of_episodes(data)
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


@settings(max_examples=30, deadline=None)
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


def test_a_list_of_episodes_gives_the_same_as_their_batch() -> None:
    learner = ppo_learner()
    one = built(learner, episode_batch(7, 12), fused=True)
    two = built(learner, episodes(7, 12), fused=False)
    assert_identical(one, two)


def test_several_batches_are_one_in_their_order() -> None:
    learner = ppo_learner()
    whole = episode_batch(7, 12, 5)
    parts = [whole[:1], whole[1:]]
    assert_identical(
        built(learner, parts, fused=True),
        built(learner, whole, fused=True),
    )
    mixed = [*whole[:1], whole[1:]]
    assert_identical(
        built(learner, mixed, fused=False),
        built(learner, whole, fused=True),
    )


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
        one._builder.of_episodes(data).columns["default_policy"][Columns.REWARDS]
        for one in (ppo_learner(), learner, learner)
    )
    assert torch.allclose(first, plain + 1.0, atol=1e-6)
    assert torch.equal(first, second)
    assert data.get_returns().tolist() == returns.tolist()
