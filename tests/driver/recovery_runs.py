"""Small runs that are hurt on purpose, and what every one of them must still keep."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from tests.support.runs import assert_accounted
from tests.support.runs import small as small_run

BATCH = 240


def small(num_env_runners: int, num_learners: int, **settings: Any) -> Any:
    return small_run(
        num_env_runners=num_env_runners,
        num_envs_per_env_runner=4,
        num_learners=num_learners,
        train_batch_size_per_learner=BATCH // max(num_learners, 1),
        **{"minibatch_size": 40, "num_epochs": 2, "lr": 1e-3, **settings},
    )


def check_account(result: dict[str, Any], num_updates: int) -> None:
    """Every update trained its whole batch, and every sampled step is accounted for."""
    assert assert_accounted(result)["trained"] >= num_updates * BATCH


async def kill(handle: Any, number: signal.Signals = signal.SIGKILL) -> None:
    """Send the signal, and make sure that it ended the process (a stopped one: that its supervisor did)."""
    handle.send_signal(number)
    async with asyncio.timeout(60):
        status = await handle.exited
    assert status.signal_number == signal.SIGKILL
