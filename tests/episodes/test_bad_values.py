"""Values that no loss can use are found wherever the loss would read them, and left out with their chunk."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlzmq.episodes.bad_values import LARGEST, find_bad_values
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode


def batch_of(num_steps: int = 6, *, num_episodes: int = 2, is_stateful: bool = False) -> EpisodeBatch:
    """Each step's reward is its number; observations and outputs likewise."""
    episodes = []
    for _ in range(num_episodes):
        episode = SingleAgentEpisode()
        episode.add_env_reset(np.zeros(2, np.float32))
        for t in range(num_steps):
            outputs = {"vf_preds": np.float32(t), "action_dist_inputs": np.zeros(2, np.float32)}
            if is_stateful:
                outputs[Columns.STATE_OUT] = np.full(3, t, np.float32)
            episode.add_env_step(np.full(2, t + 1, np.float32), t, float(t), extra_model_outputs=outputs)
        episodes.append(episode)
    batch = EpisodeBatch.from_episodes(episodes)
    if is_stateful:
        batch.initial_state = np.full((num_episodes, 3), -1, np.float32)
    return batch


def rest_of(batch: Any) -> Any:
    found = find_bad_values(batch)
    assert found is not None
    rest = found.left_out_of(batch)
    assert find_bad_values(rest) is None
    return rest


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -2 * LARGEST])
@pytest.mark.parametrize(("column", "slot"), [("rewards", 2), ("vf_preds", 0), ("obs", 3), ("obs", 6)])
def test_the_chunk_that_holds_the_value_is_left_out(column: str, slot: int, value: float) -> None:
    batch = batch_of()
    batch.columns[column][slot] = value
    batch.columns["rewards"][7:13] += 1
    (rest,) = rest_of(batch)
    assert rest.get_rewards().tolist() == [1, 2, 3, 4, 5, 6]


def test_what_nobody_reads_does_not_count() -> None:
    batch = batch_of()
    assert find_bad_values(batch) is None
    batch.columns["rewards"][6] = np.nan  # the slot of the last observation, where no step lies
    assert find_bad_values(batch) is None


def test_logits_of_masked_actions_may_be_minus_infinity_and_nothing_else() -> None:
    batch = batch_of()
    batch.columns["action_dist_inputs"][2] = [-np.inf, -3.4e38]
    assert find_bad_values(batch) is None
    batch.columns["action_dist_inputs"][2] = [np.nan, 0]
    assert len(rest_of(batch)) == 1


def test_values_in_a_lookback_part_or_a_state_count() -> None:
    batch = batch_of(num_episodes=1).slice_steps(4, 6)
    batch.columns["rewards"][1] = np.nan
    assert len(rest_of(batch)) == 0
    batch = batch_of(is_stateful=True)
    batch.columns[Columns.STATE_OUT][2] = np.nan
    assert len(rest_of(batch)) == 1
    batch.initial_state[1] = np.inf
    assert len(rest_of(batch)) == 0


def test_the_first_value_of_each_chunk_is_described() -> None:
    batch = batch_of()
    batch.columns["obs"] = {"a": (np.zeros(14), batch.columns["obs"])}
    batch.columns["obs"]["a"][1][3, 1] = np.inf
    # of the step that led there: later than its observation, sooner than 3's
    batch.columns["rewards"][2] = np.nan
    batch.columns["vf_preds"][10] = -1e30
    batch.env_index[:] = [4, 5]
    found = find_bad_values(batch)
    assert found is not None
    assert list(map(str, found.values)) == [
        "column 'rewards' holds nan at step 3 of an episode (env 4)",
        "column 'vf_preds' holds -1.0000000150474662e+30 at step 3 of an episode (env 5)",
    ]
    assert [value.is_of_env for value in found.values] == [True, False]
    assert found.num == 2
