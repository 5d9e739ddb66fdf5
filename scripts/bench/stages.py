"""When each stage of a start begins and ends: 2 runners, a broker and 2 ranks, until the first batch is trained."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

STAGES = {
    "environment made once, for its spaces": (
        "algorithms.algorithm_config",
        "AlgorithmConfig",
        "single_spaces",
    ),
    "fork server": ("actors.system", "ActorSystem", "start"),
    "broker": ("driver.broker_pipeline", "BrokerPipeline", "start_broker"),
    "env runners": ("driver.async_env_runner_group", "AsyncEnvRunnerGroup", "start"),
    "learner ranks": ("driver.async_learner_group", "AsyncLearnerGroup", "start"),
    "all connected, learner group formed": ("driver.broker_pipeline", "BrokerPipeline", "start"),
    "first batch sampled and trained": ("driver.session", "Session", "run_update"),
}
"""By stage, the method whose first call it is: module below ``rlzmq``, class, name."""


def stages() -> list[tuple[str, float, float]]:
    """(stage, its begin and end in seconds after this process's start) of one start, in the order of their ends."""
    import psutil

    from rlzmq.actors import forkserver

    forkserver.prestart()  # as `rlzmq train` does: it imports torch while this process does
    started = psutil.Process(os.getpid()).create_time()
    found: list[tuple[str, float, float]] = []

    def note(stage: str, begin: float) -> None:
        if stage not in (known for known, _, _ in found):
            found.append((stage, begin - started, time.time() - started))

    for stage, (module, class_name, name) in STAGES.items():
        owner = getattr(importlib.import_module(f"rlzmq.{module}"), class_name)
        setattr(owner, name, _timed(getattr(owner, name), functools.partial(note, stage)))
    import torch  # noqa: F401

    from rlzmq import PPOConfig

    config = PPOConfig.preset("CartPole-v1").env_runners(num_env_runners=2).learners(num_learners=2)
    note("imports", started)
    with config.build() as algo:
        algo.train()
    return found


def _timed(method: Callable[..., Any], note: Callable[[float], None]) -> Callable[..., Any]:
    if not inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.time()
            result = method(*args, **kwargs)
            note(begin)
            return result

        return call

    @functools.wraps(method)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        begin = time.time()
        result = await method(*args, **kwargs)
        note(begin)
        return result

    return call_async


def report(options: argparse.Namespace) -> Iterator[str]:
    yield f"{'stage':40} {'begins':>8} {'ends':>8} {'takes':>8}"
    for stage, begin, end in stages():
        yield f"{stage:40} {begin:7.2f}s {end:7.2f}s {end - begin:7.2f}s"
