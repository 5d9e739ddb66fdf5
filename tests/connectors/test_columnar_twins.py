"""The columnar twins give the very numbers of the per-episode pieces."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from connector_fakes import call
from hypothesis import given, settings
from hypothesis import strategies as st

from rlzmq.connectors.common import (
    AddObservationsFromEpisodesToBatch,
    AddStatesFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
    BatchIndividualItems,
    NumpyToTensor,
)
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.env_to_module import (
    FlattenObservations,
    FrameStackingEnvToModule,
    MeanStdFilter,
    PrevActionsPrevRewards,
)
from rlzmq.connectors.learner import ComputeReturnsToGo, FrameStackingLearner
from rlzmq.connectors.pipelines import EnvToModulePipeline
from rlzmq.connectors.rows import FlatRows, VectorStepRows
from rlzmq.core.tree import tree_leaves, tree_map, tree_stack
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

BOX = gym.spaces.Box(-1, 1, (2,), np.float32)
OBS_SPACES: dict[str, gym.Space[Any]] = {
    "box": BOX,
    "image": gym.spaces.Box(0, 255, (3, 2, 1), np.uint8),
    "dict": gym.spaces.Dict({"z": gym.spaces.Discrete(3), "a": BOX}),
    "tuple": gym.spaces.Tuple([gym.spaces.MultiDiscrete([2, 3]), gym.spaces.MultiBinary(2)]),
}
ACTION_SPACES: dict[str, gym.Space[Any]] = {
    "discrete": gym.spaces.Discrete(3),
    "box": gym.spaces.Box(-1, 1, (2,), np.float32),
    "dict": gym.spaces.Dict({"x": gym.spaces.Discrete(2), "y": gym.spaces.Box(-1, 1, (1,))}),
}
PIECES: dict[str, tuple[str, Any]] = {
    "filter": ("any", lambda: [MeanStdFilter()]),
    "flatten": ("any", lambda: [FlattenObservations()]),
    "previous": ("any", lambda: [PrevActionsPrevRewards(n_prev_actions=2, n_prev_rewards=3)]),
    "stack": ("boxes", lambda: [FrameStackingEnvToModule(num_frames=3)]),
    "filter, stack": ("boxes", lambda: [MeanStdFilter(), FrameStackingEnvToModule(num_frames=2)]),
    "previous, flatten, filter, stack": (
        "any",
        lambda: [
            PrevActionsPrevRewards(),
            FlattenObservations(),
            MeanStdFilter(),
            FrameStackingEnvToModule(num_frames=2),
        ],
    ),
    "flatten, filter, stack": (
        "any",
        lambda: [
            FlattenObservations(),
            MeanStdFilter(clip_by_value=1.0),
            FrameStackingEnvToModule(num_frames=4),
        ],
    ),
}


def default_pieces() -> list[ConnectorV2]:
    return [
        AddObservationsFromEpisodesToBatch(),
        AddTimeDimToBatchAndZeroPad(),
        AddStatesFromEpisodesToBatch(),
        BatchIndividualItems(),
        NumpyToTensor(),
    ]


def assert_same(left: Any, right: Any) -> None:
    leaves_left, leaves_right = tree_leaves(left), tree_leaves(right)
    assert len(leaves_left) == len(leaves_right)
    for a, b in zip(leaves_left, leaves_right, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(sorted(PIECES)),
    st.sampled_from(sorted(OBS_SPACES)),
    st.sampled_from(sorted(ACTION_SPACES)),
    st.integers(1, 3),
    st.integers(0, 2**31),
    st.lists(st.sets(st.integers(0, 2)), min_size=1, max_size=8),
    st.integers(0, 3),
)
def test_env_runner_steps_give_the_same_on_columns_and_on_episodes(
    pieces: str, obs: str, act: str, num_envs: int, seed: int, dones: list[set[int]], cut_at: int
) -> None:
    """Vector steps with episode ends (and chunk cuts) at any place, through both forms of a pipeline."""
    kind, make = PIECES[pieces]
    if kind == "boxes" and obs not in ("box", "image"):
        obs = "box"
    obs_space, action_space = OBS_SPACES[obs], ACTION_SPACES[act]
    obs_space.seed(seed)
    action_space.seed(seed)
    rewards = np.random.default_rng(seed)

    generic = EnvToModulePipeline(obs_space, action_space, connectors=[*make(), *default_pieces()])
    columnar = EnvToModulePipeline(obs_space, action_space, connectors=[*make(), *default_pieces()])
    assert columnar.on_rows
    lookback = columnar.required_lookback
    num_slots = len(dones) + 1
    columns: dict[str, Any] = {
        "obs": _zeros(columnar.stored_observation_space, num_envs, num_slots),
        "actions": _zeros(action_space, num_envs, num_slots),
        "rewards": np.zeros((num_envs, num_slots)),
    }
    rows = VectorStepRows(columns, num_envs)
    num_previous = np.zeros(num_envs, np.int64)
    episodes = [
        SingleAgentEpisode(observation_space=obs_space, action_space=action_space) for _ in range(num_envs)
    ]
    is_first = np.ones(num_envs, bool)
    for slot in range(num_slots):
        observations = [obs_space.sample() for _ in range(num_envs)]
        if slot:
            for env, episode in enumerate(episodes):
                done = env in dones[slot - 1]
                action, reward = action_space.sample(), float(rewards.normal())
                is_first[env] = episode.is_done
                if episode.is_done:  # the autoreset step: its action and reward belong to nobody
                    episodes[env] = SingleAgentEpisode(observation_space=obs_space, action_space=action_space)
                    episodes[env].add_env_reset(observations[env])
                    num_previous[env] = 0
                else:
                    episode.add_env_step(observations[env], action, reward, terminated=done)
                    num_previous[env] += 1
                _write(columns["actions"], env, slot - 1, action)
                columns["rewards"][env, slot - 1] = reward
        else:
            for episode, observation in zip(episodes, observations, strict=True):
                episode.add_env_reset(observation)
        expected = call(generic, episodes)["obs"]
        rows.move_to(slot, is_first=is_first, num_previous=num_previous)
        stored = columnar.write(tree_stack(observations), rows)
        tree_map(
            lambda column, values, slot=slot: column[:, slot].__setitem__(..., values), columns["obs"], stored
        )
        assert_same(columnar.read(stored, rows), expected)
        assert_same(stored, tree_stack([episode.get_observations(-1) for episode in episodes]))
        if slot == cut_at:
            episodes = [e if e.is_done else e.cut(lookback) for e in episodes]
            num_previous = np.minimum(num_previous, lookback)
    np.testing.assert_equal(columnar.get_state(), generic.get_state())


def _zeros(space: Any, *lead: int) -> Any:
    return tree_map(lambda leaf: np.zeros((*lead, *np.shape(leaf)), np.asarray(leaf).dtype), space.sample())


def _write(column: Any, env: int, slot: int, value: Any) -> None:
    tree_map(lambda leaf, item: leaf[env].__setitem__(slot, item), column, value)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_learner_frame_stacking_gives_the_same_on_columns_and_on_episodes(
    chunks: list[tuple[int, int]], num_frames: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    episodes = []
    for length, lookback in chunks:
        total = length + lookback
        episodes.append(
            SingleAgentEpisode(
                observations=rng.normal(size=(total + 1, 3)).astype(np.float32),
                actions=np.zeros(total, np.int64),
                rewards=rng.normal(size=total),
                t_started=lookback,
                len_lookback_buffer=lookback,
            )
        )
    batch = EpisodeBatch.from_episodes(episodes)
    piece = FrameStackingLearner(num_frames=num_frames)
    by_key = call(piece, batch)["obs"]
    slots, chunk_of = batch.step_slots(), batch.step_chunks()
    rows = FlatRows.of_batch(batch, slots, chunk_of)
    columnar = piece.transform_observations(batch.columns["obs"][slots], rows)
    assert_same(columnar, np.concatenate([np.asarray(items[0]) for items in by_key.values()]))
    returns = ComputeReturnsToGo(gamma=0.9)
    per_episode = call(returns, batch)["returns_to_go"]
    assert_same(
        returns.compute_columns(batch)["returns_to_go"],
        np.concatenate([np.asarray(items[0]) for items in per_episode.values()]),
    )


def test_windows_are_filled_with_zeros_before_the_episodes_start() -> None:
    columns = {"obs": np.arange(10.0).reshape(2, 5)}
    rows = VectorStepRows(columns, 2)
    rows.move_to(3, is_first=np.array([False, True]), num_previous=np.array([2, 0]))
    assert rows.window("obs", 4, current=True).tolist() == [[0, 1, 2, 3], [0, 0, 0, 8]]
    assert rows.window("obs", 2, current=False).tolist() == [[1, 2], [0, 0]]
    assert rows.window("obs", 6, current=False).tolist() == [[0, 0, 0, 0, 1, 2], [0] * 6]
    flat = FlatRows(
        {"obs": np.arange(10.0)},
        np.array([3, 8]),
        is_first=np.array([False, True]),
        num_previous=np.array([2, 0]),
    )
    assert flat.window("obs", 4, current=True).tolist() == [[0, 1, 2, 3], [0, 0, 0, 8]]
    assert flat.window("obs", 2, current=False).tolist() == [[1, 2], [0, 0]]
    assert columns["obs"].tolist() == np.arange(10.0).reshape(2, 5).tolist()
