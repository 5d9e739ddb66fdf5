"""BC and MARWIL on CartPole, CQL and IQL on Pendulum, from self-recorded data.

    python scripts/learn_offline.py --seeds 1 2 3
    python scripts/learn_offline.py --tasks marwil --mode distributed --seeds 1

One PPO run on CartPole records its samples until its mean return is 450: the data of MARWIL, of all qualities. Then
episodes of its last policy are recorded with sampled actions: the data of BC. One SAC run on Pendulum records its
samples until it has learned: the data of CQL and IQL. Each task then learns from its data, evaluated on ten episodes
after every few iterations, until the target is reached or the budget of iterations is spent.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rlzmq import BCConfig, CQLConfig, IQLConfig, MARWILConfig
from rlzmq.cli.main import main as rlzmq
from rlzmq.replay import open_shards
from scripts.learn import TASKS as ONLINE
from scripts.learn import configure, mean_return, recorder


class Task(NamedTuple):
    """A learning task: the algorithm, its data, and the target."""

    config_class: Any
    training: dict[str, Any]
    data: str
    target: float
    num_iterations: int
    batch: int = 1024
    batches_per_iteration: int = 5
    every: int = 5  # iterations between evaluations
    model: dict[str, Any] = {"fcnet_hiddens": [256, 256]}  # noqa: RUF012


_TRAINING: dict[str, Any] = {"lr": 8e-4}
_CQL: dict[str, Any] = {
    "bc_iters": 200, "tau": 9.5e-3, "min_q_weight": 5.0, "actor_lr": 1.7e-3, "critic_lr": 2.5e-3, "alpha_lr": 1e-3,
}  # fmt: skip
_IQL: dict[str, Any] = {
    "beta": 3.0, "expectile": 0.8, "tau": 0.005, "actor_lr": 1e-3, "critic_lr": 1e-3, "value_lr": 1e-3,
}  # fmt: skip
_SMALL: dict[str, Any] = {"fcnet_hiddens": [64, 64], "fcnet_activation": "relu"}
TASKS = {
    "bc": Task(BCConfig, _TRAINING, "expert", 350.0, 350),
    "marwil": Task(MARWILConfig, {**_TRAINING, "beta": 1.0}, "mixed", 250.0, 100),  # 500,000 env steps
    "bc-mixed": Task(BCConfig, _TRAINING, "mixed", 250.0, 100),
    "cql": Task(CQLConfig, _CQL, "pendulum", -700.0, 60, 128, 100, 2, _SMALL),
    "iql": Task(IQLConfig, _IQL, "pendulum", -300.0, 60, 256, 100, 2, _SMALL),
}


def record_pendulum(place: Path) -> None:
    """Record a SAC run."""
    task = ONLINE["pendulum-sac"]
    config = configure(task, "serial", 0).offline_data(output=str(place / "pendulum"))
    with config.build() as algo:
        while not mean_return(algo.train()["env_runners"]) >= task.target:
            pass
    describe(place, "pendulum")


def record_cartpole(place: Path) -> None:
    """Record a PPO run and the episodes of its last policy."""
    task = ONLINE["cartpole"]
    config = configure(task, "serial", 0).offline_data(output=str(place / "mixed"))
    with config.build() as algo:
        while not mean_return(algo.train()["env_runners"]) >= task.target:
            pass
        algo.save_to_path(place / "ppo")
    rlzmq(["record", str(place / "ppo"), "--output", str(place / "expert"), "--episodes", "100", "--explore"])
    describe(place, "mixed", "expert")


def describe(place: Path, *names: str) -> None:
    """Print figures of the recorded data."""
    for name in names:
        shards = open_shards(place / name).shards
        returns = [float(value) for shard in shards for value in shard.get_returns()]
        steps = sum(shard.num_env_steps for shard in shards)
        print(
            f"{name}: {len(returns)} episodes, {steps} env steps, mean return {sum(returns) / len(returns):.1f}",
            flush=True,
        )


def learn(
    name: str, place: Path, mode: str, seed: int, runs: Path | None = None, every: int | None = None
) -> tuple[bool, int, float, float]:
    """Run a task. Return whether the target was reached, iterations, the last mean return, and seconds.

    Args:
        name: A key of `TASKS`.
        place: Directory of the recorded data.
        mode: "serial" or "distributed".
        seed: Seed of all random streams.
        runs: Directory for the run directories, which ``rlzmq plot`` reads.
        every: Iterations between evaluations; default: the task's.
    """
    task, start = TASKS[name], time.perf_counter()
    ranks = {"serial": 0, "distributed": 2}[mode]
    config = (
        task.config_class()
        .environment("Pendulum-v1" if task.data == "pendulum" else "CartPole-v1")
        .offline_data(input_=str(place / task.data), dataset_num_iters_per_learner=task.batches_per_iteration)
        .training(train_batch_size_per_learner=task.batch // max(ranks, 1), **task.training)
        .learners(num_learners=ranks)
        .evaluation(
            evaluation_interval=every or task.every,
            evaluation_duration=10,
            evaluation_config={"num_envs_per_env_runner": 10, "explore": task.data != "pendulum"},
        )
        .rl_module(model_config=task.model)
        .debugging(seed=seed)
    )
    mean = float("nan")
    with config.build() as algo, recorder(runs, f"{name}-{mode}-{seed}", config) as log:
        while algo.iteration < task.num_iterations:
            result = algo.train()
            log(result)
            if "evaluation" in result:
                mean = mean_return(result["evaluation"]["env_runners"])
                if mean >= task.target:
                    break
        return mean >= task.target, algo.iteration, mean, time.perf_counter() - start


def main() -> int:
    """Record, then run every task with every seed. Return 0 if all targets were reached."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["bc", "marwil"], choices=TASKS)
    parser.add_argument("--mode", default="serial", choices=["serial", "distributed"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--data", type=Path, help="directory for the data, reused if it is there")
    parser.add_argument("--runs", type=Path, help="write a run directory for each below this one")
    parser.add_argument("--every", type=int, help="iterations between evaluations (default: the task's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = options.data or Path(temporary)
        failed = 0
        needed = {TASKS[name].data == "pendulum" for name in options.tasks}
        if False in needed and not (place / "expert").is_dir():
            record_cartpole(place)
        if True in needed and not (place / "pendulum").is_dir():
            record_pendulum(place)
        for name in options.tasks:
            for seed in options.seeds:
                reached, iterations, mean, seconds = learn(
                    name, place, options.mode, seed, options.runs, options.every
                )
                failed += not reached
                outcome = "reached" if reached else "not reached"
                print(
                    f"{name:<10} {options.mode:<12} seed {seed}: {outcome} after {iterations} iterations, {mean:.1f}, "
                    f"{seconds:.0f} s",
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
