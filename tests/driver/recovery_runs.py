"""Small runs that are hurt on purpose, and what every one of them must still keep."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from rlzmq import PPOConfig

BATCH = 240


def small(num_env_runners: int, num_learners: int) -> PPOConfig:
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=4)
        .learners(num_learners=num_learners)
        .training(
            train_batch_size_per_learner=BATCH // max(num_learners, 1),
            minibatch_size=40,
            num_epochs=2,
            lr=1e-3,
        )
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .debugging(seed=1)
    )


def check_account(result: dict[str, Any], num_updates: int) -> None:
    """Every update trained its whole batch, and every sampled step is accounted for."""
    account = result["accounting"]
    assert account["trained"] >= num_updates * BATCH
    assert account["sampled"] == account["trained"] + sum(account["dropped"].values()) + account["pending"]
    assert account["pending"] >= 0


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (facts of other objects, without events)
            await asyncio.sleep(0.005)


async def kill(handle: Any, number: signal.Signals = signal.SIGKILL) -> None:
    """Send the signal, and make sure that it ended the process (a stopped one: that its supervisor did)."""
    handle.send_signal(number)
    async with asyncio.timeout(60):
        status = await handle.exited
    assert status.signal_number == signal.SIGKILL
