"""Environments that never return are noticed in time: from the first step on, in resets, in constructors."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq import MultiAgentEnvRunner
from rlzmq.core.call_watch import EnvWatch
from rlzmq.core.errors import DeadlineError
from rlzmq.envs.examples import MultiAgentCartPole
from scripts import hangs
from tests.support.runs import two_agents


class SlowAtTheStart:
    """A vector env whose first step after an episode's end, in which it resets, takes half a second."""

    is_over = False

    def reset(self) -> Any:
        return np.zeros(1), {}

    def step(self, actions: Any) -> Any:
        if self.is_over:
            threading.Event().wait(0.5)
        self.is_over = not self.is_over
        return np.zeros(1), np.zeros(1), np.full(1, self.is_over), np.zeros(1, np.bool_), {}


@pytest.mark.parametrize("says_so", [True, False])
def test_a_step_that_begins_an_episode_may_take_as_long_as_a_reset(says_so: bool) -> None:
    """An env in this process tells by itself; of another one the step before tells that an episode begins."""
    env, hangs = SlowAtTheStart(), list[DeadlineError]()
    if says_so:
        env.is_resetting = True  # type: ignore[attr-defined]
    watch = EnvWatch("runner", env_step_timeout_s=0.1, env_reset_timeout_s=30.0, on_hang=hangs.append)
    watch.attend(env)
    with watch.call(watch.STEPS):
        env.reset()
        env.step(None)
    with watch.call(watch.STEPS):
        env.step(None)
    watch.close()
    assert hangs == []


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[pytest.mark.slow] * (mode in ("vector_entry_point", "async")))
        for mode in hangs.MODES
    ],
)
async def test_hangs_in_first_and_random_calls_while_the_broker_is_replaced(
    mode: str, tmp_path: Path
) -> None:
    """Of two training runners and one that evaluates beside them: in each of these at once."""
    number = int(np.random.default_rng().integers(2, 12))
    traps = {1: [("step", 1)], 1_000_001: [("step", number)]}
    if mode == "sync":
        traps[2] = [("reset", 2)]
    config = hangs.make_config(mode, tmp_path, traps, len(traps) - 1)
    hangs.evaluated(config, 1, parallel=True)
    num_traps = sum(map(len, traps.values()))
    notices = await hangs.run_until_noticed(config, tmp_path, num_traps, kill_broker=mode == "sync")
    for name, late_s in hangs.judge(mode, hangs.caught(tmp_path), notices.at):
        assert -hangs.EARLY_S <= late_s < 5.0, f"{name}; half a second on a machine that is not busy"
    told = "\n".join(notices.texts)
    assert "hangs: its first vector step has not returned for 1" in told, told
    assert mode != "sync" or re.search(r"at .*hangs\.py:\d+ in \w+\. Restarted", told), told


@pytest.mark.slow
async def test_a_hang_in_the_drivers_own_process_ends_the_run(tmp_path: Path) -> None:
    config = hangs.make_config("sync", tmp_path, {0: [("step", 5)]}, 0)
    async with config.build_async() as algo:
        with pytest.raises(DeadlineError, match="a vector step has not returned for 1"):
            async with asyncio.timeout(60):
                await algo.train()


def test_steps_of_several_agents_count_as_progress() -> None:
    class Slow(MultiAgentCartPole):
        def step(self, action_dict: Any) -> Any:
            threading.Event().wait(0.15)
            return super().step(action_dict)

    config = two_agents(num_envs_per_env_runner=1).environment(Slow)
    hangs: list[DeadlineError] = []
    watch = EnvWatch("runner", env_step_timeout_s=0.4, env_reset_timeout_s=30.0, on_hang=hangs.append)
    with MultiAgentEnvRunner(config=config) as runner:
        watch.attend(runner.env)
        with watch.call(watch.STEPS):
            runner.sample(num_timesteps=6)
    watch.close()
    assert hangs == []
