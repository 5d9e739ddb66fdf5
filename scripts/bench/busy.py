"""How the learner of an asynchronous run spends its time: IMPALA and APPO.

CartPole-v1 with two runner processes and a learner process. For each update, in milliseconds: the learner
connector, the rest of the update, and the time between two updates (publication of the weights, the next batch if
it is not there yet).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator


def report(options: argparse.Namespace) -> Iterator[str]:
    for name in ("impala", "appo"):
        yield busy_share(name, options.seconds or 30.0)


def busy_share(name: str, seconds: float) -> str:
    """Train for some seconds; return a line with the learner's times."""
    from rlzmq import APPOConfig, IMPALAConfig

    config = (
        {"impala": IMPALAConfig, "appo": APPOConfig}[name]()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=5)
        .learners(num_learners=1)
        .reporting(min_time_s_per_iteration=2)
        .debugging(seed=0)
    )
    times: dict[str, list[float]] = {"connector": [], "update": [], "between": []}
    with config.build_algo() as algo:
        before = algo.train()["num_env_steps_sampled_lifetime"]
        began_at = time.monotonic()
        while (elapsed_s := time.monotonic() - began_at) < seconds:
            result = algo.train()
            timers, learners = result["timers"], result["learners"]["__all_modules__"]
            times["connector"].append(learners["learner_connector"]["connector_pipeline_timer"])
            times["update"].append(timers["learner_thread_update_timer"])
            times["between"].append(timers["learner_thread_in_queue_wait_timer"])
        steps = result["num_env_steps_sampled_lifetime"] - before
    connector, update, between = (1e3 * statistics.fmean(values) for values in times.values())
    return (
        f"{name:7} busy {update / (update + between):.2f}: connector {connector:.1f} ms, rest of the update "
        f"{update - connector:.1f} ms, between updates {between:.1f} ms; {steps / elapsed_s:,.0f} env steps/s"
    )
