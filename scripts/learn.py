"""Train a task to its target and say how many env steps and seconds it took.

``python scripts/learn.py cartpole --mode serial --seeds 1 2 3``; ``--list`` shows the tasks. Exit code 0 when
every run reached its target within its budget.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlzmq import PPOConfig
from rlzmq.connectors.env_to_module import MeanStdFilter
from rlzmq.envs.examples import MultiAgentCartPole, StatelessCartPole


@dataclass(frozen=True)
class Task:
    """What to learn, how, how well, and within how many env steps."""

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


def acrobot() -> Any:
    return (
        PPOConfig()
        .environment("Acrobot-v1")
        .training(lr=5e-4, num_epochs=6, minibatch_size=128, lambda_=0.95, vf_loss_coeff=0.05, entropy_coeff=0.005)
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


def mean_std_filter(env: Any = None, spaces: Any = None, device: Any = None) -> Any:
    return MeanStdFilter()


TASKS = {
    "cartpole": Task(cartpole, 450.0, 300_000, 8, 1024),
    "acrobot": Task(acrobot, -100.0, 300_000, 8, 2000),
    "pendulum": Task(pendulum, -300.0, 400_000, 8, 2048),
    "pendulum-filtered": Task(pendulum_filtered, -300.0, 400_000, 8, 2048),
    "stateless-cartpole": Task(stateless_cartpole, 350.0, 300_000, 8, 1024),
    "multi-agent-cartpole": Task(multi_agent_cartpole, 450.0, 400_000, 8, 1024),
}


def configure(task: Task, mode: str, seed: int) -> Any:
    """The task's config, serial or distributed (2 runners, 2 learners), with the same global batch."""
    config = task.make().debugging(seed=seed)
    if mode == "serial":
        return (
            config.env_runners(num_env_runners=0, num_envs_per_env_runner=task.num_envs)
            .learners(num_learners=0)
            .training(train_batch_size_per_learner=task.batch)
        )
    return (
        config.env_runners(num_env_runners=2, num_envs_per_env_runner=task.num_envs // 2)
        .learners(num_learners=2)
        .training(train_batch_size_per_learner=task.batch // 2, minibatch_size=config.minibatch_size // 2)
    )


def mean_return(metrics: dict[str, Any]) -> float:
    """The mean return of the newest episodes; of several modules, the worst one's. NaN before the first end."""
    by_module = metrics.get("module_episode_return_mean", {})
    if len(by_module) > 1:
        return float(min(by_module.values()))
    return float(metrics.get("episode_return_mean", math.nan))


def learn(name: str, mode: str, seed: int, *, verbose: bool = False) -> tuple[bool, int, float, float]:
    """(whether the target was reached, env steps, last mean return, seconds) of one run."""
    task = TASKS[name]
    start = time.perf_counter()
    with configure(task, mode, seed).build() as algo:
        while True:
            result = algo.train()
            steps = result["num_env_steps_sampled_lifetime"]
            mean = mean_return(result["env_runners"])
            if verbose and result["training_iteration"] % 10 == 0:
                print(f"  {steps:>8} {mean:9.2f}  {time.perf_counter() - start:6.1f} s", flush=True)
            if mean >= task.target or steps >= task.budget:
                break
    accounting = result["accounting"]
    assert accounting["sampled"] == accounting["trained"] + sum(accounting["dropped"].values()) + accounting["pending"]
    return mean >= task.target, steps, mean, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="*", choices=[*TASKS, []], help="tasks (default: all)")
    parser.add_argument("--mode", choices=["serial", "distributed"], default="serial")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    names = options.task or list(TASKS)
    if options.list:
        for name in names:
            print(f"{name:<20} return {TASKS[name].target:g} within {TASKS[name].budget} env steps")
        return 0
    failed = 0
    for name in names:
        for seed in options.seeds:
            reached, steps, mean, seconds = learn(name, options.mode, seed, verbose=options.verbose)
            failed += not reached
            verdict = "reached" if reached else "NOT reached"
            print(f"{name:<12} {options.mode:<12} seed {seed}: {TASKS[name].target:g} {verdict}: "
                  f"{mean:.1f} after {steps} env steps, {seconds:.1f} s", flush=True)  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
