"""A search of 8 PPO trials on CartPole-v1, two of them killed by ``kill -9``, then the driver, which is restored.

    python scripts/tune_kills.py [--iterations 6]

Its results are compared with those of an undisturbed search: each trial must have each iteration once, and those that
were not resumed (which begins new episodes) the same metrics, except times and process ids. At the end no process may
be left.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from rlzmq import PPOConfig, tune
from rlzmq.telemetry.runs import flatten
from rlzmq.tune.trial import read_results

NUM_TRIALS = 8
METRIC = "env_runners/episode_return_mean"
_DIFFERS = (
    "bottleneck",
    "env_runners/sample",
    "time",
    "date",
    "pid",
    "hostname",
    "duration",
    "throughput",
    "restore",
    "perf",
    "checkpoint",
)


def tuner(path: Path, iterations: int) -> tune.Tuner:
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0)
        .training(
            lr=tune.loguniform(1e-4, 1e-2),
            gamma=tune.choice([0.95, 0.99]),
            train_batch_size_per_learner=512,
            minibatch_size=128,
            num_epochs=4,
        )
        .rl_module(model_config={"fcnet_hiddens": [32]})
    )
    return tune.Tuner(
        "PPO",
        param_space=config,
        tune_config=tune.TuneConfig(
            metric=METRIC,
            mode="max",
            num_samples=NUM_TRIALS,
            max_concurrent_trials=2,
            search_alg=tune.search.BasicVariantGenerator(random_state=1),
        ),
        run_config=tune.RunConfig(
            name=path.name,
            storage_path=path.parent,
            stop={"training_iteration": iterations},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1, num_to_keep=1),
        ),
    )


def comparable(result: tune.Result) -> dict[str, Any]:
    """Return the metrics that do not depend on the machine's speed or on what was killed."""
    flat = flatten(result.metrics)
    return {path: value for path, value in flat.items() if not any(word in path for word in _DIFFERS)}


def run_with_kills(path: Path, iterations: int) -> tuple[list[int], float]:
    """Start a driver, kill two of its trials and then the driver; return the killed trials, and the seconds."""
    start = time.perf_counter()
    driver = subprocess.Popen(
        [sys.executable, __file__, "--drive", str(path), "--iterations", str(iterations)]
    )
    killed: list[int] = []
    processes: set[psutil.Process] = set()
    while driver.poll() is None:
        time.sleep(0.02)  # reads files of another process
        lines = [read_results(path / f"PPO_{index:05d}") for index in range(NUM_TRIALS)]
        children = {child.pid: child for child in psutil.Process(driver.pid).children(recursive=True)}
        processes.update(children.values())
        for index, each in enumerate(lines):
            is_due = len(killed) < 2 and index not in killed and 2 <= len(each) < iterations - 1
            if is_due and (trial := children.get(each[-1]["pid"])) is not None:
                trial.kill()
                killed.append(index)
                print(f"killed trial {index} (pid {each[-1]['pid']}) after iteration {len(each)}", flush=True)
        num_ended = sum(bool(each) and each[-1]["done"] for each in lines)
        if len(killed) == 2 and num_ended >= 3 and any(1 <= len(each) < iterations for each in lines):
            driver.kill()
            driver.wait()
            print(f"killed the driver (pid {driver.pid}) after {num_ended} trials had ended", flush=True)
    _, left = psutil.wait_procs(processes, timeout=20)
    if left:
        raise SystemExit(f"left after the driver's end: {left}")
    return killed, time.perf_counter() - start


def main(arguments: list[str] | None = None) -> int:
    """Run both searches and compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.drive is not None:
        tuner(options.drive, options.iterations).fit()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        alone = tuner(Path(folder) / "alone", options.iterations).fit()
        seconds_alone = time.perf_counter() - start
        path = Path(folder) / "killed"
        killed, seconds = run_with_kills(path, options.iterations)
        start = time.perf_counter()
        results = tune.Tuner.restore(path, "PPO").fit()
        seconds += time.perf_counter() - start
        same = [comparable(one) == comparable(other) for one, other in zip(alone, results, strict=True)]
        lines = [read_results(Path(result.path)) for result in results]
        every = list(range(1, options.iterations + 1))
        once = [[line["training_iteration"] for line in each] == every for each in lines]
        resumed = [len({line["pid"] for line in each}) > 1 for each in lines]
        same = [is_same for is_same, is_resumed in zip(same, resumed, strict=True) if not is_resumed]
        num_metrics = len(comparable(results[0]))
        best, best_alone = (grid.get_best_result().metrics["env_runners"] for grid in (results, alone))
        print(
            f"{len(results)} trials, {results.num_errors} errors; killed: trials {killed} and the driver, once"
        )
        print(f"trials with each iteration once: {sum(once)}")
        print(
            f"the same {num_metrics} metrics as in the search left alone: {sum(same)} of {len(same)} not resumed"
        )
        print(
            f"best mean return {best['episode_return_mean']:.1f}, alone {best_alone['episode_return_mean']:.1f}"
        )
        print(f"{seconds:.0f} s, alone {seconds_alone:.0f} s")
        good = (
            len(results) == NUM_TRIALS
            and same
            and all(same)
            and all(once)
            and not results.num_errors
            and len(killed) == 2
        )
    names = [child.name() for child in psutil.Process().children(recursive=True)]
    left = [name for name in names if name != "rlzmq-forks" and "tracker" not in name]
    print("no process is left" if not left else f"left: {left}")
    return 0 if good and not left else 1


if __name__ == "__main__":
    sys.exit(main())
