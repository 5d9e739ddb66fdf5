"""Module-to-env pieces, each called alone."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from connector_fakes import ValueModule, call

from rlzmq.connectors.module_to_env import (
    GetActions,
    NormalizeAndClipActions,
    UnBatchToIndividualItems,
)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- GetActions --------------------------------------------------------------------------------------


def test_sampled_actions_come_from_the_shared_generator() -> None:
    torch.manual_seed(7)
    state = torch.get_rng_state()
    results = []
    for seed in (0, 0, 1):
        batch = {"action_dist_inputs": torch.zeros(50, 3)}
        shared_data = {"generator": generator(seed)}
        outputs = call(GetActions(), [], batch, rl_module=ValueModule(), shared_data=shared_data)
        np.testing.assert_allclose(outputs["action_logp"], np.log(1 / 3), rtol=1e-5)
        results.append(outputs["actions"].tolist())
    assert results[0] == results[1] != results[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_module_without_actions_or_distribution_inputs_is_named() -> None:
    with pytest.raises(ValueError, match=r"expected.*'action_dist_inputs'"):
        call(GetActions(), [], {"m": {"vf_preds": torch.zeros(1)}}, rl_module={"m": ValueModule()})


# -- TensorToNumpy … Listify -------------------------------------------------------------------------


def test_rows_go_back_to_the_episodes_they_came_from() -> None:
    batch = {"actions": np.array([1, 2]), "state_out": {"h": np.array([[1.0], [2.0]])}}
    outputs = call(UnBatchToIndividualItems(), [], batch, shared_data={"memorized_map_structure": ["A", "B"]})
    assert outputs["actions"] == {("A",): [1], ("B",): [2]}
    assert outputs["state_out"][("B",)][0]["h"].tolist() == [2.0]


def test_a_wrong_number_of_rows_is_an_error_that_names_module_and_column() -> None:
    shared_data = {"memorized_map_structure": {"m": [("E", "a")]}}
    with pytest.raises(ValueError, match="column 'actions' of module 'm'"):
        call(UnBatchToIndividualItems(), [], {"m": {"actions": np.zeros(2)}}, shared_data=shared_data)
    with pytest.raises(ValueError, match="module 'x' has outputs"):
        call(UnBatchToIndividualItems(), [], {"x": {"actions": np.zeros(2)}}, shared_data=shared_data)


# -- NormalizeAndClipActions -------------------------------------------------------------------------


def normalized(space: gym.Space[Any], actions: Any, **kwargs: Any) -> Any:
    batch = {"actions": {("A",): [actions]}}
    outputs = call(NormalizeAndClipActions(input_action_space=space, **kwargs), [], batch)
    assert outputs["actions"] == {("A",): [actions]}
    return outputs["actions_for_env"][("A",)][0]


def test_bounded_float_boxes_are_stretched_and_clipped() -> None:
    space = gym.spaces.Box(np.array([0.0, -10.0], np.float32), np.array([4.0, 10.0], np.float32))
    assert normalized(space, np.array([0.0, 0.5], np.float32)).tolist() == [2.0, 5.0]
    stretched = normalized(space, np.array([-3.0, 3.0], np.float32))
    assert stretched.tolist() == [0.0, 10.0]
    assert stretched.dtype == np.float32


@pytest.mark.parametrize("clip_actions", [False, True])
def test_bounded_integer_boxes_are_shifted_with_and_without_normalising(clip_actions: bool) -> None:
    box = gym.spaces.Box(-2, 2, (2,), np.int32)
    off = {"normalize_actions": False, "clip_actions": clip_actions}
    for kwargs in ({}, off):
        shifted = normalized(box, np.array([0, 4]), **kwargs)
        assert shifted.tolist() == [-2, 2]
        assert shifted.dtype == np.int32
    nested = gym.spaces.Dict({"i": box, "x": gym.spaces.Box(-1, 1, (1,))})
    result = normalized(nested, {"i": np.array([1, 9]), "x": np.array([3.0], np.float32)}, **off)
    assert result["i"].tolist() == ([-1, 2] if clip_actions else [-1, 7])
    assert result["x"].tolist() == ([1.0] if clip_actions else [3.0])


@pytest.mark.parametrize("space", [gym.spaces.Discrete(3), gym.spaces.Box(-np.inf, np.inf, (1,))])
def test_discrete_and_unbounded_actions_are_not_touched(space: gym.Space[Any]) -> None:
    action = np.array([1.0])
    assert normalized(space, action) is action


def test_clipping_is_for_when_normalising_is_off() -> None:
    space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action = np.array([3.0], np.float32)
    assert normalized(space, action, normalize_actions=False, clip_actions=True).tolist() == [1.0]
    batch = {"actions": {("A",): [action]}}
    piece = NormalizeAndClipActions(input_action_space=space, normalize_actions=False)
    assert "actions_for_env" not in call(piece, [], batch)


@pytest.mark.parametrize("normalize", [True, False])
def test_boxes_without_some_of_their_bounds_are_clipped_to_the_others(normalize: bool) -> None:
    low, high = np.array([-np.inf, 0.0, -2.0, -np.inf]), np.array([1.0, np.inf, 2.0, np.inf])
    space = gym.spaces.Box(low.astype(np.float32), high.astype(np.float32))
    action = np.array([5.0, -5.0, 5.0, 5.0], np.float32)
    options = {"normalize_actions": normalize, "clip_actions": not normalize}
    assert normalized(space, action, **options).tolist() == [1.0, 0.0, 2.0, 5.0]
    piece = NormalizeAndClipActions(input_action_space=space, **options)
    made, _ = piece.to_torch(rl_module=None, agent_id=None).forward({"actions": torch.from_numpy(action)}, {})
    assert made["actions_for_env"].tolist() == [1.0, 0.0, 2.0, 5.0]
    inside = np.array([-7.0, 0.5, -1.0, 9.0], np.float32)  # and nothing is stretched
    assert normalized(space, inside, **options).tolist() == inside.tolist()


def test_each_agent_has_its_own_action_space() -> None:
    space = gym.spaces.Dict({"a": gym.spaces.Box(0, 2, (1,)), "b": gym.spaces.Box(0, 4, (1,))})
    action = np.array([1.0], np.float32)
    batch = {"actions": {("E", "a", "m"): [action], ("E", "b", "m"): [action]}}
    outputs = call(NormalizeAndClipActions(input_action_space=space), [], batch)["actions_for_env"]
    assert [items[0].item() for items in outputs.values()] == [2.0, 4.0]
