"""Tries the health checks: faults that are injected must be named, healthy runs of the presets must raise no alarm.

python -m scripts.health faults             # each fault: the names that are found, in order
python -m scripts.health healthy --runs 100# short runs of all presets, one after the other
"""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from rlzmq import DQNConfig, IMPALAConfig, PPOConfig, SACConfig
from rlzmq.algorithms.ppo.ppo_learner import PPOLearner
from rlzmq.algorithms.registry import get_config_class
from rlzmq.core.errors import RlzmqError
from rlzmq.envs.examples import MultiAgentCartPole
from scripts import learn

__all__ = ["FAULTS", "found_in", "main"]


class Unrewarding(gym.Env[Any, Any]):
    """Nothing to see, and always the same reward."""

    def __init__(self, reward: float = 0.0, num_steps: int = 20, noise: float = 0.0) -> None:
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._reward, self._num_steps, self._noise = reward, num_steps, noise

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        reward = self._reward + self._noise * self.np_random.normal()
        return np.zeros(4, np.float32), reward, False, self._t >= self._num_steps, {}


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


def off_policy(config: Any, env: Any, env_config: Any = None, **training: Any) -> Any:
    config.environment(env, env_config=env_config or {}).reporting(
        min_sample_timesteps_per_iteration=100, min_time_s_per_iteration=0
    )
    config.env_runners(num_envs_per_env_runner=4, rollout_fragment_length=4)
    settings = {"num_steps_sampled_before_learning_starts": 100, "train_batch_size": 32, **training}
    return config.training(**settings).rl_module(model_config={"fcnet_hiddens": [16]})


def impala(env: Any, **training: Any) -> Any:
    config: Any = IMPALAConfig().environment(env).env_runners(num_env_runners=0, num_envs_per_env_runner=4)
    config.training(**{"train_batch_size_per_learner": 128, **training}).rl_module(
        model_config={"fcnet_hiddens": [16]}
    )
    return config.env_runners(rollout_fragment_length=16).reporting(min_time_s_per_iteration=0)


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
        lambda: ppo(Unrewarding, {"reward": 1.0}, entropy_coeff=[(0, -1.0), (10**9, -1.0)], lr=0.02),
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
    "rewards are a thousand times too large": (
        {"rewards too large"},
        lambda: ppo(Unrewarding, {"reward": 1e5, "noise": 1e5}, grad_clip=0.5, grad_clip_by="global_norm"),
    ),
    "DQN's rewards are a thousand times too large": (
        {"rewards too large"},
        lambda: off_policy(DQNConfig(), Unrewarding, {"reward": 1e5}),
    ),
    "SAC's critic has an lr of 1": (
        {"values diverge"},
        lambda: off_policy(SACConfig(), "Pendulum-v1", critic_lr=1.0, tau=1.0, grad_clip=None),
    ),
    "DQN's lr is 0": ({"no learning rate"}, lambda: off_policy(DQNConfig(), "CartPole-v1", lr=0.0)),
    "returns are beyond large atoms": (
        {"targets outside of the support"},
        lambda: off_policy(
            DQNConfig(), Unrewarding, env_config={"reward": 100.0}, num_atoms=51, v_min=-10.0, v_max=10.0
        ),
    ),
    "one of two modules does not learn": (
        {"no learning rate"},
        lambda: ppo(MultiAgentCartPole, {"num_agents": 2}).multi_agent(
            policies={"a", "b"},
            policy_mapping_fn=lambda agent, episode: "ab"[agent],
            algorithm_config_overrides_per_module={"b": PPOConfig.overrides(lr=0.0)},
        ),
    ),
    "IMPALA's rewards are always 0": (
        {"no rewards"},
        lambda: impala(Unrewarding, train_batch_size_per_learner=512),
    ),
}


def found_in(make: Callable[[], Any], num_iterations: int = 8, seed: int = 1) -> dict[str, dict[str, str]]:
    """Return the first findings of a run, the likeliest root first; {} if there are none."""
    with make().debugging(seed=seed).build() as algo:
        for _ in range(num_iterations):
            if health := algo.train()["health"]:
                return health  # type: ignore[no-any-return]
    return {}


def try_faults() -> None:
    """Print what is found for each fault, and how often its name comes first or among the first three."""
    first = among = 0
    for fault, (names, make) in FAULTS.items():
        found = list(found_in(make))
        first += bool(names & set(found[:1]))
        among += bool(names & set(found[:3]))
        print(f"{fault:45} {', '.join(found) or 'nothing'}", flush=True)
    print(f"{len(FAULTS)} faults: named first {first}, among the first three {among}")


def try_healthy(num_runs: int, num_seconds: float) -> None:
    """Print the alarms in short runs of the presets, with another seed in each round."""
    num_done, alarms, missing = 0, [], set()
    for seed in itertools.count(1):
        for name, task in learn.TASKS.items():
            if name in missing:
                continue
            if num_done == num_runs:
                print(
                    f"{num_done} runs, {len(missing)} presets without their library or data: {sorted(missing)}"
                )
                print(f"alarms: {len(alarms)}")
                return
            config: Any = get_config_class(task.algorithm)().debugging(seed=seed)
            task.apply(config)
            config.env_runners(num_env_runners=0).learners(num_learners=0)
            try:
                algo = config.build()
            except (ImportError, RlzmqError, gym.error.Error) as error:
                missing.add(name)
                print(f"{name}: {str(error).splitlines()[0]:.120}", flush=True)
                continue
            found: dict[str, Any] = {}
            with algo:
                end, num_iterations = time.perf_counter() + num_seconds, 0
                while num_iterations < 4 or time.perf_counter() < end:
                    found = found or algo.train()["health"]
                    num_iterations += 1
            num_done += 1
            if found:
                alarms.append(name)
            print(f"{num_done:3} {name} seed {seed}: {num_iterations} iterations {found or ''}", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["faults", "healthy"])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each healthy run")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    try_faults() if args.what == "faults" else try_healthy(args.runs, args.seconds)


if __name__ == "__main__":
    main()
