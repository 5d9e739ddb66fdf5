"""Environments that never return are noticed in time: from the first step on, in resets, in constructors."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlzmq.core.call_watch import EnvWatch, UpdateWatch
from rlzmq.core.errors import DeadlineError
from scripts import hangs

# -- the watch alone ----------------------------------------------------------------------------------


class FakeEnv:
    """A vector env that waits where it is told to.

    Args:
        is_resetting: What it says of itself while it steps; None: it says nothing.
    """

    def __init__(self, is_resetting: bool | None = None) -> None:
        if is_resetting is not None:
            self.is_resetting = is_resetting
        self.is_over = False
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.waits_in = ""

    def reset(self) -> Any:
        self._wait("reset")
        return np.zeros(1), {}

    def step(self, actions: Any) -> Any:
        self._wait("step")
        return np.zeros(1), np.zeros(1), np.full(1, self.is_over), np.zeros(1, np.bool_), {}

    def _wait(self, call: str) -> None:
        if self.waits_in == call:
            self.entered.set()
            assert self.go_on.wait(30.0)


class Sampling:
    """A watched thread that resets an env, then steps it `num_steps` times."""

    def __init__(self, env: FakeEnv, num_steps: int, *, step_s: float | None, reset_s: float) -> None:
        self.hang: list[DeadlineError] = []
        self.noticed = threading.Event()
        self.finished = threading.Event()
        self.env = env
        self._num_steps = num_steps
        self.watch = EnvWatch(
            "runner", env_step_timeout_s=step_s, env_reset_timeout_s=reset_s, on_hang=self._on_hang
        )
        self.watch.attend(env)
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _on_hang(self, error: DeadlineError) -> None:
        self.hang.append(error)
        self.noticed.set()

    def _sample(self) -> None:
        with self.watch.call(self.watch.STEPS):
            self.env.reset()
            for _ in range(self._num_steps):
                self.env.step(None)
        self.finished.set()

    def end(self) -> None:
        self.env.go_on.set()
        self._thread.join()
        self.watch.close()


@pytest.mark.parametrize("call", ["reset", "step"])
def test_the_first_call_that_never_returns_is_noticed_in_its_time(
    call: str, capfd: pytest.CaptureFixture[str]
) -> None:
    env = FakeEnv(is_resetting=False)
    env.waits_in = call
    sampling = Sampling(env, 1, step_s=0.3, reset_s=0.6)
    assert env.entered.wait(10.0)
    start = time.monotonic()
    assert sampling.noticed.wait(10.0)
    took_s = time.monotonic() - start
    sampling.end()
    assert took_s >= (0.3 if call == "step" else 0.6) - 0.1
    what, setting = {
        "reset": ("making or resetting its environments", "env_reset_timeout_s=0.6"),
        "step": ("its first vector step", "env_step_timeout_s=0.3"),
    }[call]
    text = str(sampling.hang[0])
    assert text.startswith(f"runner hangs: {what} has not returned for ")
    place = r"\S+test_hang_watch\.py:\d+ in _wait"
    assert re.search(rf" s \({setting}\), at {place}\. Its stack is on stderr\.$", text)
    assert "in _wait" in capfd.readouterr().err


@pytest.mark.parametrize("is_resetting", [True, None])
def test_a_step_that_begins_an_episode_may_take_as_long_as_a_reset(is_resetting: bool | None) -> None:
    """An env in this process tells by itself; of another one the step before tells that an episode begins."""
    env = FakeEnv(is_resetting)
    sampling = Sampling(env, 0, step_s=0.1, reset_s=30.0)
    assert sampling.finished.wait(10.0)
    env.is_over = True
    with sampling.watch.call(sampling.watch.STEPS):
        env.step(None)
    env.waits_in = "step"
    stepping = threading.Thread(target=lambda: _step_watched(sampling))
    stepping.start()
    assert env.entered.wait(10.0)
    assert not sampling.noticed.wait(0.5)
    sampling.end()
    stepping.join()


def _step_watched(sampling: Sampling) -> None:
    with sampling.watch.call(sampling.watch.STEPS):
        sampling.env.step(None)


# -- whole runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=[pytest.mark.slow] * (mode == "vector_entry_point")) for mode in hangs.MODES],
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
    assert any("hangs: its first vector step has not returned for 1" in text for text in notices.texts), (
        notices.texts
    )


@pytest.mark.slow
async def test_a_hang_in_the_drivers_own_process_ends_the_run(tmp_path: Path) -> None:
    config = hangs.make_config("sync", tmp_path, {0: [("step", 5)]}, 0)
    async with config.build_async() as algo:
        with pytest.raises(DeadlineError, match="a vector step has not returned for 1"):
            async with asyncio.timeout(60):
                await algo.train()


# -- updates ------------------------------------------------------------------------------------------


class Rank:
    """A learner whose progress the test sets, and its watch."""

    def __init__(self, **settings: float) -> None:
        self.progress, self.is_waiting, self.is_alone = 0, False, False
        self.hang: list[DeadlineError] = []
        self.noticed = threading.Event()
        self.watch = UpdateWatch(
            "learner-1",
            lambda: self.progress,
            lambda: self.is_waiting,
            lambda: self.is_alone,
            on_hang=self._on_hang,
            **settings,
        )

    def _on_hang(self, error: DeadlineError) -> None:
        self.hang.append(error)
        self.noticed.set()


def test_an_update_that_never_returns_is_noticed_and_waiting_for_others_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlzmq.core.call_watch.ANSWER_S", 0.5)
    rank = Rank(learner_timeout_s=0, process_start_timeout_s=0)
    rank.is_waiting = True
    with rank.watch.call("an update"):
        assert not rank.noticed.wait(1.0)
        rank.is_waiting = False
        assert rank.noticed.wait(10.0)
    assert "learner-1 hangs: an update has not returned for" in str(rank.hang[0])
    rank.watch.close()


def test_how_long_an_update_may_make_no_progress() -> None:
    rank = Rank(learner_timeout_s=60.0, process_start_timeout_s=300.0)
    assert rank.watch.patience_s == 60.0, "its first one"
    rank.is_alone = True
    assert rank.watch.patience_s == 300.0
    with rank.watch.call("an update"):
        time.sleep(1.0)
    assert rank.watch.patience_s == 30.0
    rank.is_alone = False
    assert 4.0 <= rank.watch.patience_s < 20.0, "five times its longest"
    rank.watch.close()
