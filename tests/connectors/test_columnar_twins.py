"""The columnar twins give the very numbers of the per-episode pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
from connector_fakes import call
from hypothesis import given, settings
from hypothesis import strategies as st

from rlzmq.connectors.learner import ComputeReturnsToGo, FrameStackingLearner
from rlzmq.connectors.rows import ColumnRows
from rlzmq.core.tree import tree_leaves
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode


def assert_same(left: Any, right: Any) -> None:
    leaves_left, leaves_right = tree_leaves(left), tree_leaves(right)
    assert len(leaves_left) == len(leaves_right)
    for a, b in zip(leaves_left, leaves_right, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


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
    rows = ColumnRows.of_batch(batch, slots, chunk_of)
    columnar = piece.transform_observations(batch.columns["obs"][slots], rows)
    assert_same(columnar, np.concatenate([np.asarray(items[0]) for items in by_key.values()]))
    returns = ComputeReturnsToGo(gamma=0.9)
    per_episode = call(returns, batch)["returns_to_go"]
    assert_same(
        returns.compute_columns(batch)["returns_to_go"],
        np.concatenate([np.asarray(items[0]) for items in per_episode.values()]),
    )
