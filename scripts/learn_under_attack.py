"""Learns CartPole twice per seed, undisturbed and under attack, and compares the numbers of env steps.

    python scripts/learn_under_attack.py kills --seeds 10 --every-s 5     # SIGKILL of a random process every 5 s
    python scripts/learn_under_attack.py poison --seeds 10 --rate 0.001   # NaN, infinity or a wrong shape in 1 of
                                                                          # 1,000 fragments

Two runners and two learner ranks train to a mean return of 450 over 100 episodes. Exit code 1: a run did not reach it
within 300,000 steps; under kills the mean number of steps is more than 1.25 times that of the undisturbed runs; a
poisoned fragment was not put into quarantine, or a weight is not finite; the 95 % intervals of the mean do not overlap.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from learn import TASKS, configure, mean_return

from rlzmq.core.update_plan import derive_seed
from rlzmq.runners.vector_env_runners import SingleAgentEnvRunner

TASK = TASKS["cartpole"]
POISONS = ("nan", "inf", "shape")
# Quantiles 0.975 of Student's t distribution, by degrees of freedom from 1.
STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


class Outcome(NamedTuple):
    """Outcome of a run: its env steps, whether it reached the target, faults that fired, fragments in quarantine."""

    num_env_steps: int
    reached: bool
    num_faults: int
    num_quarantined: int
    are_weights_finite: bool


class PoisonousRunner(SingleAgentEnvRunner):
    """Corrupts a random fragment, and records it in a file. Its class is pickled with these attributes."""

    poison_rate = 0.0
    poison_notes = ""

    def sample_lease(self, *args: Any, **kwargs: Any) -> Any:
        batch = super().sample_lease(*args, **kwargs)
        if not hasattr(self, "_dice"):
            self._dice = random.Random(
                derive_seed(self.config.seed, "poison", self.worker_index, os.getpid())
            )
        if batch.num_env_steps and self._dice.random() < self.poison_rate:
            kind = self._dice.choice(POISONS)
            slot = int(batch.step_slots()[self._dice.randrange(batch.num_env_steps)])
            if kind == "shape":
                batch.columns["obs"] = np.ascontiguousarray(batch.columns["obs"][:, :-1])
            else:
                batch.columns["rewards"][slot] = float(kind)
            with open(self.poison_notes, "a") as file:
                file.write(f"{kind}\n")
        return batch


async def kill_now_and_then(algo: Any, every_s: float, dice: random.Random) -> int:
    """Kill a runner, a rank that is not the last one, or the broker, until cancelled."""
    session, count = algo.session, 0
    try:
        while True:
            await asyncio.sleep(every_s)
            learners = [handle for handle in session.learner_group.handles if not handle.exited.done()]
            candidates = [
                *session.env_runner_group.handles,
                *(learners if len(learners) > 1 else []),
                session.pipeline._broker.handle,
            ]
            handle = dice.choice([handle for handle in candidates if not handle.exited.done()])
            handle.send_signal(signal.SIGKILL)
            status = await handle.exited
            count += status.signal_number == signal.SIGKILL
    except asyncio.CancelledError:
        return count


async def run(
    seed: int, change: Callable[[Any], None], attack: Callable[[Any], Awaitable[int]] | None
) -> Outcome:
    """Train to the target or the budget."""
    config = configure(TASK, "distributed", seed)
    change(config)
    async with config.build_async() as algo:
        attacking = asyncio.create_task(attack(algo)) if attack is not None else None
        while True:
            result = await algo.train()
            num_steps = result["num_env_steps_sampled_lifetime"]
            reached = mean_return(result["env_runners"]) >= TASK.target
            if reached or num_steps >= TASK.budget:
                break
        num_faults = 0
        if attacking is not None:
            attacking.cancel()
            num_faults = await attacking
        weights = (await algo.get_module()).get_state()
        is_finite = all(np.isfinite(value).all() for value in weights.values())
    account = result["accounting"]
    assert account["sampled"] == account["trained"] + sum(account["dropped"].values()) + account["pending"]
    return Outcome(num_steps, reached, num_faults, account["dropped"].get("rejected", 0), is_finite)


def under_kills(seed: int, every_s: float) -> Outcome:
    """Run with processes that die."""
    dice = random.Random(seed)
    return asyncio.run(run(seed, lambda config: None, lambda algo: kill_now_and_then(algo, every_s, dice)))


def poisoned(seed: int, rate: float) -> Outcome:
    """Run with runners that corrupt fragments, which count as faults."""
    with tempfile.TemporaryDirectory() as directory:
        notes, quarantine = Path(directory, "notes"), Path(directory, "quarantine")
        notes.touch()
        PoisonousRunner.poison_rate, PoisonousRunner.poison_notes = rate, str(notes)

        def change(config: Any) -> None:
            config.env_runners(env_runner_cls=PoisonousRunner, rollout_fragment_length=16)
            config.fault_tolerance(quarantine_dir=str(quarantine))

        outcome = asyncio.run(run(seed, change, None))
        num_faults = len(notes.read_text().splitlines())
        return outcome._replace(num_faults=num_faults, num_quarantined=len(list(quarantine.glob("*.json"))))


def alone(seed: int, fragment_length: int | None) -> Outcome:
    """Run undisturbed."""

    def change(config: Any) -> None:
        if fragment_length is not None:
            config.env_runners(rollout_fragment_length=fragment_length)

    return asyncio.run(run(seed, change, None))


def interval(values: list[int]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean."""
    if len(values) < 2:
        return -math.inf, math.inf
    half = (
        STUDENT_T[min(len(values) - 2, len(STUDENT_T) - 1)]
        * statistics.stdev(values)
        / math.sqrt(len(values))
    )
    return statistics.mean(values) - half, statistics.mean(values) + half


def main() -> int:
    """Run, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("attack", choices=["kills", "poison"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--every-s", type=float, default=10.0, help="seconds between two kills")
    parser.add_argument("--rate", type=float, default=0.001, help="share of fragments that are spoilt")
    options = parser.parse_args()
    clean, hurt = [], []
    for seed in range(1, options.seeds + 1):
        if options.attack == "kills":
            clean.append(alone(seed, None))
            hurt.append(under_kills(seed, options.every_s))
        else:
            clean.append(alone(seed, 16))
            hurt.append(poisoned(seed, options.rate))
        print(f"seed {seed}: alone {clean[-1]}; {options.attack}: {hurt[-1]}", flush=True)
    means = [statistics.mean(one.num_env_steps for one in runs) for runs in (clean, hurt)]
    (low_a, high_a), (low_b, high_b) = (
        interval([one.num_env_steps for one in runs]) for runs in (clean, hurt)
    )
    print(f"alone     {means[0]:9,.0f} env steps, 95 % interval of the mean {low_a:,.0f} … {high_a:,.0f}")
    print(
        f"{options.attack:9s} {means[1]:9,.0f} env steps, 95 % interval of the mean {low_b:,.0f} … {high_b:,.0f}"
    )
    num_faults = sum(one.num_faults for one in hurt)
    print(
        f"ratio {means[1] / means[0]:.2f}; {num_faults} faults, {sum(o.num_quarantined for o in hurt)} in quarantine"
    )
    failures = [
        *(["a run did not get there"] if not all(one.reached for one in (*clean, *hurt)) else []),
        *(["no fault fired"] if not num_faults else []),
        *(["weights are not finite"] if not all(one.are_weights_finite for one in hurt) else []),
        *(["the intervals do not overlap"] if low_b > high_a or low_a > high_b else []),
    ]
    if options.attack == "kills" and means[1] > 1.25 * means[0]:
        failures.append("more than 1.25 times the steps")
    if options.attack == "poison" and any(one.num_quarantined != one.num_faults for one in hurt):
        failures.append("not every spoilt fragment is in quarantine")
    print("; ".join(failures) or "all promises kept")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
