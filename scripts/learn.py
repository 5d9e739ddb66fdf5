"""Train a task to its target and say how many env steps and seconds it took.

``python scripts/learn.py cartpole --mode serial --seeds 1 2 3``; ``--list`` shows the tasks. With several seeds the
median and the quartiles of each mode follow, e.g. for ``learn.py cartpole-tuned --mode serial one-runner one-learner
--seeds $(seq 20)``. Exit code 0 when every run reached its target within its budget.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rlzmq import APPOConfig, DQNConfig, IMPALAConfig, PPOConfig, SACConfig
from rlzmq.connectors.env_to_module import MeanStdFilter
from rlzmq.envs.examples import MultiAgentCartPole, StatelessCartPole


@dataclass(frozen=True)
class Task:
    """What to learn, how, how well, and within how many env steps.

    Attributes:
        make: Gives the config without what differs between the modes.
        target: Mean return of the newest episodes (of each agent, where there are several).
        budget: Env steps.
        num_envs: Envs of all runners together.
        batch: Env steps of each update, of all learners together.
    """

    make: Callable[[], Any]
    target: float
    budget: int
    num_envs: int
    batch: int


# What CartPole takes in all its forms: a value function of its own, so that the size of its errors
# cannot drown the policy's gradients, and steps large enough for it to reach values of 100 in 50 updates.
_CARTPOLE: dict[str, Any] = {
    "lr": 1e-3,
    "num_epochs": 10,
    "minibatch_size": 128,
    "lambda_": 0.95,
    "clip_param": 0.2,
    "use_kl_loss": False,
    "vf_loss_coeff": 0.5,
    "vf_clip_param": None,
}


def cartpole() -> Any:
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .training(**_CARTPOLE)
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "vf_share_layers": False})
    )


def cartpole_tuned() -> Any:
    """RLlib's settings for its own learning test; the mean return is that of 8 episodes."""
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .training(lr=3e-4, num_epochs=6, vf_loss_coeff=0.01)
        .rl_module(
            model_config={"fcnet_hiddens": [32], "fcnet_activation": "linear", "vf_share_layers": True}
        )
        .reporting(metrics_num_episodes_for_smoothing=8)
    )


def acrobot() -> Any:
    return (
        PPOConfig()
        .environment("Acrobot-v1")
        .training(
            lr=5e-4, num_epochs=6, minibatch_size=128, lambda_=0.95, vf_loss_coeff=0.05, entropy_coeff=0.005
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64]})
    )


def pendulum() -> Any:
    return (
        PPOConfig()
        .environment("Pendulum-v1")
        .training(
            lr=1e-3, num_epochs=10, minibatch_size=64, gamma=0.9, lambda_=0.95, vf_loss_coeff=0.5, vf_clip_param=None,
            clip_param=0.2, use_kl_loss=False, grad_clip=0.5,
        )
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "free_log_std": True})
    )  # fmt: skip


def pendulum_filtered() -> Any:
    return pendulum().env_runners(env_to_module_connector=mean_std_filter)


def stateless_cartpole() -> Any:
    return (
        PPOConfig()
        .environment(StatelessCartPole)
        .env_runners(env_to_module_connector=mean_std_filter)
        .training(**_CARTPOLE)
        .rl_module(
            model_config={
                "fcnet_hiddens": [32],
                "use_lstm": True,
                "lstm_cell_size": 64,
                "max_seq_len": 20,
                "vf_share_layers": False,
            }
        )
    )


def multi_agent_cartpole() -> Any:
    return (
        PPOConfig()
        .environment(MultiAgentCartPole, env_config={"num_agents": 2})
        .multi_agent(policies=["p0", "p1"], policy_mapping_fn=lambda agent_id, episode: f"p{agent_id}")
        .training(**_CARTPOLE)
        .rl_module(model_config={"fcnet_hiddens": [64, 64], "vf_share_layers": False})
    )


# RLlib's settings for its own learning tests of these two.
_ASYNCHRONOUS: dict[str, Any] = {"vf_loss_coeff": 0.05, "entropy_coeff": 0.0}


def cartpole_impala() -> Any:
    return (
        IMPALAConfig()
        .environment("CartPole-v1")
        .env_runners(env_to_module_connector=mean_std_filter)
        .training(**_ASYNCHRONOUS)
        .reporting(min_time_s_per_iteration=1)
    )


def cartpole_appo() -> Any:
    return (
        APPOConfig()
        .environment("CartPole-v1")
        .training(**_ASYNCHRONOUS)
        .rl_module(model_config={"vf_share_layers": True})
        .reporting(min_time_s_per_iteration=1)
    )


def multi_agent_cartpole_appo() -> Any:
    return (
        APPOConfig()
        .environment(MultiAgentCartPole, env_config={"num_agents": 2})
        .multi_agent(policies=["p0", "p1"], policy_mapping_fn=lambda agent_id, episode: f"p{agent_id}")
        .training(vf_loss_coeff=0.005, entropy_coeff=0.0)
        .rl_module(model_config={"vf_share_layers": True})
        .reporting(min_time_s_per_iteration=1)
    )


def cartpole_dqn() -> Any:
    """RLlib's settings for its own learning test."""
    return (
        DQNConfig()
        .environment("CartPole-v1")
        .training(n_step=(2, 5), epsilon=[(0, 1.0), (25_000, 0.02)])
        .rl_module(
            model_config={
                "fcnet_hiddens": [256],
                "head_fcnet_hiddens": [256],
                "fcnet_bias_initializer": "zeros_",
                "head_fcnet_bias_initializer": "zeros_",
            }
        )
    )


def pendulum_sac() -> Any:
    """RLlib's settings for its own learning test."""
    initial = {
        "fcnet_kernel_initializer": "xavier_uniform_",
        "head_fcnet_kernel_initializer": "xavier_uniform_",
    }
    return (
        SACConfig()
        .environment("Pendulum-v1")
        .training(
            actor_lr=2e-4,
            critic_lr=8e-4,
            alpha_lr=9e-4,
            initial_alpha=1.001,
            n_step=(2, 5),
            tau=0.005,
            target_network_update_freq=1,
            replay_buffer_config={"capacity": 100_000, "alpha": 1.0, "beta": 0.0},
            num_steps_sampled_before_learning_starts=256,
        )
        .rl_module(model_config={"fcnet_hiddens": [256, 256], "fcnet_activation": "relu", **initial})
        .reporting(min_time_s_per_iteration=0, metrics_num_episodes_for_smoothing=5)
    )


def multi_agent_cartpole_dqn() -> Any:
    """RLlib's settings for its own learning test."""
    return (
        DQNConfig()
        .environment(MultiAgentCartPole, env_config={"num_agents": 2})
        .multi_agent(policies=["p0", "p1"], policy_mapping_fn=lambda agent_id, episode: f"p{agent_id}")
        .training(lr=6.5e-4, n_step=(2, 5), epsilon=[(0, 1.0), (20_000, 0.02)])
        .rl_module(model_config={"fcnet_hiddens": [256, 256], "head_fcnet_hiddens": [256]})
    )


def mean_std_filter(env: Any = None, spaces: Any = None, device: Any = None) -> Any:
    return MeanStdFilter()


TASKS = {
    "cartpole": Task(cartpole, 450.0, 300_000, 8, 1024),
    "cartpole-tuned": Task(cartpole_tuned, 450.0, 1_000_000, 32, 4000),
    "acrobot": Task(acrobot, -100.0, 300_000, 8, 2000),
    "pendulum": Task(pendulum, -300.0, 400_000, 8, 2048),
    "pendulum-filtered": Task(pendulum_filtered, -300.0, 400_000, 8, 2048),
    "stateless-cartpole": Task(stateless_cartpole, 350.0, 300_000, 8, 1024),
    "multi-agent-cartpole": Task(multi_agent_cartpole, 450.0, 400_000, 8, 1024),
    "cartpole-impala": Task(cartpole_impala, 450.0, 2_000_000, 16, 500),
    "cartpole-appo": Task(cartpole_appo, 450.0, 1_000_000, 16, 500),
    "cartpole-dqn": Task(cartpole_dqn, 450.0, 200_000, 1, 32),
    "pendulum-sac": Task(pendulum_sac, -250.0, 20_000, 1, 256),
    "multi-agent-cartpole-dqn": Task(multi_agent_cartpole_dqn, 150.0, 500_000, 1, 48),
    "multi-agent-cartpole-appo": Task(multi_agent_cartpole_appo, 350.0, 2_000_000, 16, 500),
}


MODES = {"serial": (0, 0), "one-runner": (1, 1), "one-learner": (2, 1), "distributed": (2, 2)}
"""Numbers of runners and learners."""


def configure(task: Task, mode: str, seed: int) -> Any:
    """The task's config in a mode, with the same number of envs and the same global batch."""
    config, (num_runners, num_learners) = task.make().debugging(seed=seed), MODES[mode]
    ranks = max(num_learners, 1)
    config.env_runners(
        num_env_runners=num_runners, num_envs_per_env_runner=max(task.num_envs // max(num_runners, 1), 1)
    )
    config.learners(num_learners=num_learners)
    if config.minibatch_size is not None:
        config.training(minibatch_size=config.minibatch_size // ranks)
    return config.training(train_batch_size_per_learner=task.batch // ranks)


def mean_return(metrics: dict[str, Any]) -> float:
    """The newest episodes' mean return; of several modules, the worst one's. NaN before the first end."""
    by_module = metrics.get("module_episode_return_mean", {})
    if len(by_module) > 1:
        return float(min(by_module.values()))
    return float(metrics.get("episode_return_mean", math.nan))


class Outcome(NamedTuple):
    """How a run ended: env steps and seconds that it took, and the last mean return."""

    reached: bool
    num_env_steps: int
    mean_return: float
    seconds: float


def learn(
    name: str,
    mode: str,
    seed: int,
    *,
    target: float | None = None,
    budget: int | None = None,
    verbose: bool = False,
) -> Outcome:
    """One run of a task, until its target is reached or its budget of env steps is spent.

    Args:
        name: A key of `TASKS`.
        mode: A key of `MODES`.
        seed: Of everything random.
        target: Another mean return than the task's.
        budget: Another number of env steps.
        verbose: Print a line every ten iterations.
    """
    task = TASKS[name]
    target = task.target if target is None else target
    budget = task.budget if budget is None else budget
    start = time.perf_counter()
    with configure(task, mode, seed).build() as algo:
        while True:
            result = algo.train()
            steps = result["num_env_steps_sampled_lifetime"]
            mean = mean_return(result["env_runners"])
            if verbose and result["training_iteration"] % 10 == 0:
                print(f"  {steps:>8} {mean:9.2f}  {time.perf_counter() - start:6.1f} s", flush=True)
            if mean >= target or steps >= budget:
                break
    accounting = result["accounting"]
    assert (
        accounting["sampled"]
        == accounting["trained"] + sum(accounting["dropped"].values()) + accounting["pending"]
    )
    return Outcome(mean >= target, steps, mean, time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="*", choices=[*TASKS, []], help="tasks (default: all)")
    parser.add_argument("--mode", choices=list(MODES), nargs="+", default=["serial"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--target", type=float, help="mean return to reach (default: the task's)")
    parser.add_argument("--budget", type=int, help="env steps to reach it within (default: the task's)")
    parser.add_argument("--verbose", action="store_true", help="print the curve")
    parser.add_argument("--list", action="store_true", help="print the tasks with their targets and budgets")
    options = parser.parse_args()
    names = options.task or list(TASKS)
    if options.list:
        for name in names:
            print(f"{name:<26} return {TASKS[name].target:g} within {TASKS[name].budget} env steps")
        return 0
    failed = 0
    for name, mode in itertools.product(names, options.mode):
        target = TASKS[name].target if options.target is None else options.target
        num_env_steps = []
        for seed in options.seeds:
            outcome = learn(name, mode, seed, target=target, budget=options.budget, verbose=options.verbose)
            failed += not outcome.reached
            num_env_steps.append(outcome.num_env_steps)
            verdict = "reached" if outcome.reached else "NOT reached"
            print(
                f"{name:<26} {mode:<11} seed {seed}: {target:g} {verdict}: {outcome.mean_return:.1f} "
                f"after {outcome.num_env_steps} env steps, {outcome.seconds:.1f} s",
                flush=True,
            )
        if len(options.seeds) > 1:
            low, middle, high = (round(x) for x in np.quantile(num_env_steps, (0.25, 0.5, 0.75)))
            print(
                f"{name:<26} {mode:<11} {len(options.seeds)} seeds: median {middle}, quartiles {low} and {high}, "
                f"{min(num_env_steps)} to {max(num_env_steps)} env steps",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
