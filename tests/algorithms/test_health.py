"""Health: injected faults are named with cause and remedy, runs that learn are left alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import DQNConfig, PPOConfig, SACConfig
from rlzmq.algorithms.health import HealthWatch
from rlzmq.algorithms.ppo.ppo_learner import PPOLearner
from rlzmq.algorithms.registry import Preset, get_config_class
from scripts import learn


class Unrewarding(gym.Env[Any, Any]):
    """Nothing to see, and always the same reward."""

    def __init__(self, reward: float = 0.0, num_steps: int = 20) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._reward, self._num_steps = reward, num_steps

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return np.zeros(4, np.float32), self._reward, False, self._t >= self._num_steps, {}


class LossOfNothing(PPOLearner):
    def compute_loss_for_module(self, **kwargs: Any) -> Any:
        return 0.0 * super().compute_loss_for_module(**kwargs)


def ppo(env: Any = "CartPole-v1", env_config: Any = None, **training: Any) -> Any:
    config: Any = PPOConfig().environment(env, env_config=env_config or {})
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=4)
    settings = {
        "train_batch_size_per_learner": 128,
        "minibatch_size": 32,
        "num_epochs": 4,
        "lr": 1e-3,
        **training,
    }
    return config.training(**settings).rl_module(model_config={"fcnet_hiddens": [16]})


def off_policy(config: Any, env: str, **training: Any) -> Any:
    config.environment(env).reporting(min_sample_timesteps_per_iteration=100, min_time_s_per_iteration=0)
    config.env_runners(num_envs_per_env_runner=4, rollout_fragment_length=4)
    settings = {"num_steps_sampled_before_learning_starts": 100, "train_batch_size": 32, **training}
    return config.training(**settings).rl_module(model_config={"fcnet_hiddens": [16]})


FAULTS: dict[str, tuple[set[str], Callable[[], Any]]] = {
    "the reward is always 0": (
        {"no advantages"},
        lambda: ppo(Unrewarding, lambda_=0.0),
    ),
    "lr is 0": ({"no learning rate"}, lambda: ppo(lr=0.0)),
    "lr is far too high": ({"ratios clipped", "KL too high", "entropy gone"}, lambda: ppo(lr=1.0)),
    "the loss is multiplied by 0": (
        {"no gradients"},
        lambda: ppo(learner_class=LossOfNothing),
    ),
    "no ratio is inside of the clip range": (
        {"ratios clipped"},
        lambda: ppo(clip_param=0.0, entropy_coeff=0.01),
    ),
    "the entropy bonus has the wrong sign": (
        {"entropy gone"},
        lambda: ppo(Unrewarding, {"reward": 1.0}, entropy_coeff=[(0, -1.0), (10**9, -1.0)], lr=0.05),
    ),
    "value errors are clipped at a small number": (
        {"value gradients clipped"},
        lambda: ppo("Pendulum-v1", vf_clip_param=10.0),
    ),
    "gradients are clipped at a tiny number": ({"gradients clipped"}, lambda: ppo(grad_clip=1e-6)),
    "episodes never end": (
        {"no episode ends"},
        lambda: ppo(Unrewarding, {"num_steps": 10**9}, train_batch_size_per_learner=2500, minibatch_size=500),
    ),
    "returns are beyond the atoms": (
        {"targets outside of the support"},
        lambda: off_policy(DQNConfig(), "CartPole-v1", num_atoms=11, v_min=-0.5, v_max=0.5),
    ),
    "DQN's lr is far too high": (
        {"values diverge"},
        lambda: off_policy(DQNConfig(), "CartPole-v1", lr=3.0, target_network_update_freq=4, grad_clip=None),
    ),
    "every action is random": (
        {"epsilon stuck"},
        lambda: off_policy(DQNConfig(), "CartPole-v1", epsilon=1.0),
    ),
    "the temperature does not move": (
        {"alpha stuck"},
        lambda: off_policy(SACConfig(), "Pendulum-v1", alpha_lr=1e-12, target_entropy=-8.0),
    ),
    "the temperature runs away": (
        {"alpha stuck"},
        lambda: off_policy(SACConfig(), "Pendulum-v1", alpha_lr=0.3, target_entropy=50.0),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_is_named_with_cause_and_remedy(fault: str, caplog: Any) -> None:
    names, make = FAULTS[fault]
    found: dict[str, Any] = {}
    with caplog.at_level(logging.WARNING, "rlzmq.algorithms"), make().debugging(seed=1).build() as algo:
        for _ in range(6):
            found = found or algo.train()["health"]
    assert next(iter(found), None) in names, found
    first = next(iter(found.values()))
    told = [record for record in caplog.messages if first["cause"] in record]
    assert len(told) == 1  # once
    assert first["remedy"] in told[0]


def preset_runs(preset: Preset, num_env_steps: int, seed: int) -> Any:
    config: Any = get_config_class(preset.algorithm)().debugging(seed=seed)
    preset.apply(config)
    config.env_runners(num_env_runners=0).learners(num_learners=0)
    with config.build() as algo:
        while True:
            result = algo.train()
            yield result
            if result["num_env_steps_sampled_lifetime"] >= num_env_steps:
                return


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", learn.TASKS)
def test_runs_of_presets_are_healthy(name: str) -> None:
    try:
        results = [result["health"] for result in preset_runs(learn.TASKS[name], 20_000, seed=1)]
    except Exception as error:  # its library is an extra
        pytest.skip(str(error))
    assert not any(results)


def test_two_iterations_in_a_row_are_no_finding_and_a_healthy_one_begins_anew() -> None:
    watch = HealthWatch(PPOConfig())

    def examine(share: float) -> dict[str, Any]:
        return watch.examine(
            {
                "env_runners": {"episode_return_mean": 1.0, "num_episodes_lifetime": 1},
                "learners": {"default_policy": {"clip_fraction": share}, "__all_modules__": {}},
                "num_env_steps_sampled_lifetime": 100,
                "accounting": {"dropped": {}},
            }
        )

    assert [bool(examine(share)) for share in (0.9, 0.9, 0.1, 0.9, 0.9, 0.9)] == [False] * 5 + [True]
