"""BC and MARWIL on CartPole from self-recorded data, with the settings of RLlib's learning tests.

    python scripts/learn_offline.py --seeds 1 2 3
    python scripts/learn_offline.py --tasks marwil --mode distributed --seeds 1

One PPO run on CartPole records what it samples until its mean return is 450: the data of MARWIL, of all qualities. Then
its last policy's episodes are recorded with sampled actions: the data of BC. Each task then learns from its data,
evaluated on ten episodes after every fifth iteration, until the target is reached or the budget of iterations is spent.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from rlzmq import BCConfig, MARWILConfig
from rlzmq.cli.main import main as rlzmq
from rlzmq.replay import open_shards
from scripts.learn import TASKS as ONLINE
from scripts.learn import configure, mean_return


class Task(NamedTuple):
    """What is learned from which data, and when it counts as learned."""

    config_class: Any
    training: dict[str, Any]
    data: str
    target: float
    num_iterations: int


_TRAINING: dict[str, Any] = {"lr": 8e-4}
TASKS = {
    "bc": Task(BCConfig, _TRAINING, "expert", 350.0, 350),
    "marwil": Task(MARWILConfig, {**_TRAINING, "beta": 1.0}, "mixed", 250.0, 100),  # 500,000 env steps
    "bc-mixed": Task(BCConfig, _TRAINING, "mixed", 250.0, 100),
}
_BATCH, _EVERY = 1024, 5


def record(place: Path) -> None:
    """Record a PPO run and the episodes of its last policy."""
    task = ONLINE["cartpole"]
    config = configure(task, "serial", 0).offline_data(output=str(place / "mixed"))
    with config.build() as algo:
        while mean_return(algo.train()["env_runners"]) < task.target:
            pass
        algo.save_to_path(place / "ppo")
    rlzmq(["record", str(place / "ppo"), "--output", str(place / "expert"), "--episodes", "100", "--explore"])
    for name in ("mixed", "expert"):
        shards = open_shards(place / name).shards
        returns = [float(value) for shard in shards for value in shard.get_returns()]
        steps = sum(shard.num_env_steps for shard in shards)
        print(
            f"{name}: {len(returns)} episodes, {steps} env steps, mean return {sum(returns) / len(returns):.1f}",
            flush=True,
        )


def learn(name: str, place: Path, mode: str, seed: int) -> tuple[bool, int, float, float]:
    """One run; return whether the target was reached, iterations, the last mean return, and seconds."""
    task, start = TASKS[name], time.perf_counter()
    ranks = {"serial": 0, "distributed": 2}[mode]
    config = (
        task.config_class()
        .environment("CartPole-v1")
        .offline_data(input_=str(place / task.data), dataset_num_iters_per_learner=5)
        .training(train_batch_size_per_learner=_BATCH // max(ranks, 1), **task.training)
        .learners(num_learners=ranks)
        .evaluation(
            evaluation_interval=_EVERY,
            evaluation_duration=10,
            evaluation_config={"num_envs_per_env_runner": 10},
        )
        .rl_module(model_config={"fcnet_hiddens": [256, 256]})
        .debugging(seed=seed)
    )
    mean = float("nan")
    with config.build() as algo:
        while algo.iteration < task.num_iterations:
            result = algo.train()
            if "evaluation" in result:
                mean = mean_return(result["evaluation"]["env_runners"])
                if mean >= task.target:
                    break
        return mean >= task.target, algo.iteration, mean, time.perf_counter() - start


def main() -> None:
    """Record, then run every task with every seed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=["bc", "marwil"], choices=TASKS)
    parser.add_argument("--mode", default="serial", choices=["serial", "distributed"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--data", type=Path, help="directory for the data, reused if it is there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = options.data or Path(temporary)
        if not (place / "expert").is_dir():
            record(place)
        for name in options.tasks:
            for seed in options.seeds:
                reached, iterations, mean, seconds = learn(name, place, options.mode, seed)
                outcome = "reached" if reached else "not reached"
                print(
                    f"{name:<10} {options.mode:<12} seed {seed}: {outcome} after {iterations} iterations, {mean:.1f}, "
                    f"{seconds:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
