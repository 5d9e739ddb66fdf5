"""Runs simulated fault schedules against the protocol cores and checks every history.

python scripts/simulate_faults.py --schedules 100000 --seed 0 --processes 2

A failure prints its seed; `--schedules 1 --seed N` replays it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests" / "protocol")]

_CHUNK = 50


def _run(first_seed: int, num_schedules: int) -> tuple[list[str], Counter[str]]:
    from simulation import run_schedule

    failures: list[str] = []
    counts: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + num_schedules):
        try:
            history = run_schedule(seed)
        except AssertionError as error:
            failures.append(str(error))
            continue
        counts.update(
            {
                "faults": history.num_faults,
                "brokers": history.num_brokers,
                "rollbacks": history.rollbacks,
                "quarantined": len(history.quarantined),
                "updates": len(history.chain),
                "schedules with faults": int(history.num_faults > 0),
            }
        )
    return failures, counts


def main() -> int:
    """Run the schedules; return 1 if a guarantee was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", type=int, default=100_000, help="how many (100000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule (0)")
    parser.add_argument("--processes", type=int, default=2, help="processes to use (2)")
    arguments = parser.parse_args()
    last = arguments.seed + arguments.schedules
    jobs = [(seed, min(_CHUNK, last - seed)) for seed in range(arguments.seed, last, _CHUNK)]
    start = time.perf_counter()
    num_failures, counts = 0, Counter[str]()
    # A fork's semaphores have no names in /dev/shm, so they end with the processes, whoever is killed.
    with multiprocessing.get_context("fork").Pool(max(1, min(arguments.processes, len(jobs)))) as pool:
        for failures, chunk in pool.imap_unordered(_run_job, jobs):
            counts.update(chunk)
            num_failures += len(failures)
            for failure in failures:
                print(failure, flush=True)
    seconds = time.perf_counter() - start
    print(
        f"{arguments.schedules} schedules from seed {arguments.seed} in {seconds:.0f} s: "
        f"{num_failures} broken promises; " + ", ".join(f"{n} {name}" for name, n in counts.items())
    )
    return 1 if num_failures else 0


def _run_job(job: tuple[int, int]) -> tuple[list[str], Counter[str]]:
    return _run(*job)


if __name__ == "__main__":
    sys.exit(main())
