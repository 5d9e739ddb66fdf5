"""RLlib's helpers that its examples import."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import torch

import rlzmq
from rlzmq import PPOConfig
from rlzmq.algorithms import rllib_helpers as helpers
from tests.support.runs import small


def test_one_hots_are_those_of_the_space() -> None:
    discrete, multi = gym.spaces.Discrete(3), gym.spaces.MultiDiscrete([2, 3])
    assert helpers.one_hot(torch.tensor([2, 0]), discrete).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert helpers.one_hot(np.array([[1, 2]]), multi).tolist() == [[0, 1, 0, 0, 1]]
    assert helpers.one_hot(torch.tensor(1), 2).tolist() == [0, 1]


def test_trees_are_converted_and_stacked() -> None:
    tree = {"a": torch.ones(2, requires_grad=True), "b": (np.zeros(1), 3)}
    array = helpers.convert_to_numpy(tree, reduce_type=True)
    assert isinstance(array["a"], np.ndarray)
    assert array["b"][0].dtype == np.float32
    assert helpers.convert_to_torch_tensor(array)["b"][1].item() == 3
    assert rlzmq.batch([{"x": 1}, {"x": 2}])["x"].tolist() == [1, 2]
    spaces = gym.spaces.Dict({"b": gym.spaces.Discrete(2), "a": gym.spaces.Tuple((gym.spaces.Discrete(4),))})
    assert [space.n for space in helpers.flatten_space(spaces)] == [4, 2]
    np.testing.assert_allclose(helpers.softmax([0.0, np.log(3.0)]), [0.25, 0.75])


def test_paddings_give_the_sizes_of_the_convolution() -> None:
    images = torch.zeros(1, 1, 42, 21)
    padding, size = helpers.same_padding((42, 21), (4, 4), (2, 2))
    layers = torch.nn.Sequential(torch.nn.ZeroPad2d(padding), torch.nn.Conv2d(1, 1, 4, 2))
    assert layers(images).shape[2:] == size == (21, 11)
    assert torch.nn.Conv2d(1, 1, 4, 2)(images).shape[2:] == helpers.valid_padding((42, 21), 4, 2)


def test_networks() -> None:
    network = torch.nn.Linear(3, 2)
    target = helpers.make_target_network(network)
    assert not any(parameter.requires_grad for parameter in target.parameters())
    helpers.normc_initializer(0.5)(network.weight)
    np.testing.assert_allclose(network.weight.norm(dim=1).detach(), 0.5, rtol=1e-5)
    assert helpers.get_activation_fn("relu") is torch.nn.ReLU
    assert helpers.get_activation_fn("swish") is torch.nn.SiLU
    assert helpers.get_activation_fn("linear") is None


def test_a_policy_spec_has_settings_of_its_own() -> None:
    specs = {
        name: rlzmq.PolicySpec(config=PPOConfig.overrides(lr=lr)) for name, lr in (("a", 0.1), ("b", 0.2))
    }
    config = PPOConfig().multi_agent(policies=specs, policy_mapping_fn=lambda agent_id, episode: "a")
    assert [config.get_config_for_module(name).lr for name in "ab"] == [0.1, 0.2]
    assert config.lr == PPOConfig().lr


def test_what_rllibs_scripts_call_on_an_algorithm() -> None:
    config = small().evaluation(evaluation_interval=2, evaluation_duration=1)
    with config.build() as algo:
        results = [algo.train() for _ in range(3)]
        assert ["evaluation" in result for result in results] == [False, True, True]
        assert results[2]["evaluation"] == results[1]["evaluation"], "the last one stays until the next"
        algo.set_weights(algo.get_weights())
        assert Path(algo.save().checkpoint.path).is_dir()
        assert algo.env_runner_group.foreach_env_runner(lambda runner: (x for x in (1, 2))) == [[1, 2]]
        encoder = algo.get_module().encoder
        assert encoder.actor_encoder is not encoder.critic_encoder
        assert type(algo).default_resource_request(config) == {"cpu": 1.0}
