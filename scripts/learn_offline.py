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
from typing import NamedTuple, Self

from rlzmq.algorithms.registry import Preset, find_preset, get_config_class
from rlzmq.cli.main import main as rlzmq
from rlzmq.replay import open_shards
from scripts.learn import TASKS as ONLINE
from scripts.learn import configure, mean_return, recorder, thinned


class Task(NamedTuple):
    """A learning task: a preset, its data, and other targets than the preset's."""

    preset: Preset
    data: str
    target: float
    num_env_steps: int

    @classmethod
    def of(cls, algorithm: str, name: str, data: str) -> Self:
        """Return the task of a preset with a target."""
        preset = find_preset(algorithm, name)
        assert preset.target is not None
        assert preset.budget is not None
        return cls(preset, data, preset.target, preset.budget)


TASKS = {
    "bc": Task.of("bc", "cartpole-expert", "expert"),
    "marwil": Task.of("marwil", "cartpole-mixed", "mixed"),
    "bc-mixed": Task(find_preset("bc", "cartpole-expert"), "mixed", 250.0, 512_000),
    "cql": Task.of("cql", "pendulum-recorded", "pendulum"),
    "iql": Task.of("iql", "pendulum-recorded", "pendulum"),
}


def record_pendulum(place: Path) -> None:
    """Record a SAC run."""
    task = ONLINE["pendulum-rllib-sac"]
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
) -> tuple[bool, list[tuple[int, float]], float]:
    """Run a task. Return whether the target was reached, trained env steps and mean return of each evaluation, seconds.

    Args:
        name: A key of `TASKS`.
        place: Directory of the recorded data.
        mode: "serial" or "distributed".
        seed: Seed of all random streams.
        runs: Directory for the run directories, which ``rlzmq plot`` reads.
        every: Iterations between evaluations; default: the preset's.
    """
    task, start = TASKS[name], time.perf_counter()
    ranks = {"serial": 0, "distributed": 2}[mode]
    config = get_config_class(task.preset.algorithm)()
    task.preset.apply(config)
    config.offline_data(input_=str(place / task.data)).debugging(seed=seed)
    if every is not None:
        config.evaluation(evaluation_interval=every)
    batch = config.train_batch_size_per_learner
    config.learners(num_learners=ranks).training(train_batch_size_per_learner=batch // max(ranks, 1))
    num_iterations = task.num_env_steps // (batch * config.dataset_num_iters_per_learner)
    curve: list[tuple[int, float]] = []
    with config.build() as algo, recorder(runs, f"{name}-{mode}-{seed}", config) as log:
        while algo.iteration < num_iterations:
            result = algo.train()
            log(result)
            if "evaluation" in result:
                steps = result["num_env_steps_trained_lifetime"]
                curve.append((steps, mean_return(result["evaluation"]["env_runners"])))
                if curve[-1][1] >= task.target:
                    break
    return curve[-1][1] >= task.target, curve, time.perf_counter() - start


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
    parser.add_argument("--every", type=int, help="iterations between evaluations (default: the preset's)")
    parser.add_argument("--curve", action="store_true", help="print the curve as in presets.toml")
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
                reached, curve, seconds = learn(name, place, options.mode, seed, options.runs, options.every)
                failed += not reached
                outcome = "reached" if reached else "not reached"
                steps, mean = curve[-1]
                print(
                    f"{name:<10} {options.mode:<12} seed {seed}: {outcome} after {steps} trained env steps, "
                    f"{mean:.1f}, {seconds:.0f} s",
                    flush=True,
                )
                if options.curve:
                    print(f"curve = {thinned(curve)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
