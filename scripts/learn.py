"""Train a task, a preset with a target, and print the env steps and seconds until the target.

``python scripts/learn.py cartpole --mode serial --seeds 1 2 3``; ``--list`` shows the tasks. With several seeds it
also prints the median and the quartiles of each mode, e.g. for ``learn.py cartpole-tuned --mode serial one-runner
one-learner --seeds $(seq 20)``. Exit code 0 if every run reached its target within its budget.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlzmq.algorithms.registry import ALGORITHMS, Preset, get_config_class, presets_of, short_name
from rlzmq.telemetry.run_directory import RunDirectory


def _tasks() -> dict[str, Preset]:
    """Return the presets that sample and have a target, by their short names, and the algorithm's unless it is PPO."""
    found = {}
    for algorithm in ALGORITHMS:
        if not get_config_class(algorithm)().is_online:
            continue  # scripts/learn_offline.py
        for preset in presets_of(algorithm).values():
            suffix = "" if algorithm == "ppo" else f"-{algorithm}"
            if preset.target is not None:
                found[short_name(preset.name) + suffix] = preset
    return found


TASKS = _tasks()


MODES = {"serial": (0, 0), "one-runner": (1, 1), "one-learner": (2, 1), "distributed": (2, 2)}
"""Numbers of runners and learners."""


def configure(task: Preset, mode: str, seed: int) -> Any:
    """Return the preset's config in a mode, with the same number of envs and the same global batch and minibatch."""
    config: Any = get_config_class(task.algorithm)().debugging(seed=seed)
    task.apply(config)
    num_runners, num_learners = MODES[mode]
    num_envs = config.num_envs_per_env_runner * max(config.num_env_runners, 1)
    ranks = max(num_learners, 1)
    config.env_runners(
        num_env_runners=num_runners, num_envs_per_env_runner=max(num_envs // max(num_runners, 1), 1)
    )
    batch = config.total_train_batch_size
    config.learners(num_learners=num_learners)
    if config.minibatch_size is not None:
        config.training(minibatch_size=config.minibatch_size // ranks)
    return config.training(train_batch_size_per_learner=batch // ranks)


def mean_return(metrics: dict[str, Any], trained: Collection[str] | None = None) -> float:
    """Return the newest episodes' mean return, of several modules the worst trained one; NaN before the first episode.

    Args:
        metrics: ``result["env_runners"]``.
        trained: ``config.policies_to_train``.
    """
    by_module = metrics.get("module_episode_return_mean", {})
    if len(by_module) > 1:
        return float(min(by_module[module_id] for module_id in trained or by_module))
    return float(metrics.get("episode_return_mean", math.nan))


class Outcome(NamedTuple):
    """Outcome of a run: its env steps and seconds, the last mean return, and all (env steps, mean return)."""

    reached: bool
    num_env_steps: int
    mean_return: float
    seconds: float
    curve: list[tuple[int, float]]


@contextmanager
def recorder(runs: Path | None, name: str, config: Any) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes a result to the run directory `name` in `runs`, if given."""
    if runs is None:
        yield lambda result: None
        return
    directory = RunDirectory.create(runs / name, config)
    try:
        yield directory.log
    finally:
        directory.close()


def learn(
    name: str,
    mode: str,
    seed: int,
    *,
    target: float | None = None,
    budget: int | None = None,
    verbose: bool = False,
    runs: Path | None = None,
) -> Outcome:
    """Train a task until its target is reached or its budget of env steps is spent.

    Args:
        name: A key of `TASKS`.
        mode: A key of `MODES`.
        seed: Seed of all random streams.
        target: Mean return to reach; default: the task's.
        budget: Number of env steps; default: the task's.
        verbose: Print a line every ten iterations.
        runs: Directory for the run directories, which ``rlzmq plot`` reads.
    """
    task = TASKS[name]
    target = task.target if target is None else target
    budget = task.budget if budget is None else budget
    assert target is not None
    assert budget is not None
    start = time.perf_counter()
    curve: list[tuple[int, float]] = []
    config = configure(task, mode, seed)
    with config.build() as algo, recorder(runs, f"{name}-{mode}-{seed}", config) as log:
        while True:
            result = algo.train()
            log(result)
            steps = result["num_env_steps_sampled_lifetime"]
            mean = mean_return(result["env_runners"], config.policies_to_train)
            curve.append((steps, mean))
            if verbose and result["training_iteration"] % 10 == 0:
                print(f"  {steps:>8} {mean:9.2f}  {time.perf_counter() - start:6.1f} s", flush=True)
            if mean >= target or steps >= budget:
                break
    accounting = result["accounting"]
    assert (
        accounting["sampled"]
        == accounting["trained"] + sum(accounting["dropped"].values()) + accounting["pending"]
    )
    return Outcome(mean >= target, steps, mean, time.perf_counter() - start, curve)


def thinned(curve: list[tuple[int, float]], num_points: int = 16) -> list[list[float]]:
    """Return points of a curve that are evenly spaced, the last among them: `curve` of a preset."""
    known = [(steps, value) for steps, value in curve if not math.isnan(value)]
    places = np.unique(np.linspace(0, len(known) - 1, num_points).round().astype(int)) if known else []
    return [[known[place][0], float(f"{known[place][1]:.3g}")] for place in places]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", nargs="*", choices=[*TASKS, []], help="tasks (default: all)")
    parser.add_argument("--mode", choices=list(MODES), nargs="+", default=["serial"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--target", type=float, help="mean return to reach (default: the task's)")
    parser.add_argument("--budget", type=int, help="env steps to reach it within (default: the task's)")
    parser.add_argument("--verbose", action="store_true", help="print the curve while it grows")
    parser.add_argument("--curve", action="store_true", help="print the curve as in presets.toml")
    parser.add_argument("--runs", type=Path, help="write a run directory for each below this one")
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
            outcome = learn(
                name,
                mode,
                seed,
                target=target,
                budget=options.budget,
                verbose=options.verbose,
                runs=options.runs,
            )
            failed += not outcome.reached
            num_env_steps.append(outcome.num_env_steps)
            verdict = "reached" if outcome.reached else "NOT reached"
            print(
                f"{name:<26} {mode:<11} seed {seed}: {target:g} {verdict}: {outcome.mean_return:.1f} "
                f"after {outcome.num_env_steps} env steps, {outcome.seconds:.1f} s",
                flush=True,
            )
            if options.curve:
                print(f"curve = {thinned(outcome.curve)}", flush=True)
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
