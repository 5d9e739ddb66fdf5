"""Random kills during training: nothing accepted is lost, nothing is trained twice."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from recovery_runs import kill

from rlzmq import IMPALAConfig
from rlzmq.core import faults
from scripts.nemesis import ROLES, Nemesis
from tests.support.fault_history import check_history, read_history
from tests.support.runs import small


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where every process of the test's run, this one too, says what it did."""
    with monkeypatch.context() as patch:
        patch.setenv("RLZMQ_HISTORY", str(tmp_path))
        faults.arm("driver")
        yield tmp_path
    faults.arm("driver")  # as the variables say: nothing any more


@contextmanager
def stopped_processes() -> Iterator[None]:
    """Stop all processes below this one in the block."""
    processes = psutil.Process().children(recursive=True)

    def send(number: int) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


@pytest.mark.timeout(600)
async def test_fifteen_kills_each_long_before_everybody_is_back(history: Path) -> None:
    sizes = {"num_env_runners": 2, "num_envs_per_env_runner": 4, "num_learners": 2}
    config = small(train_batch_size_per_learner=160, minibatch_size=40, **sizes)
    async with config.build_async() as algo:
        nemesis = Nemesis(algo, num_kills=15, roles=list(ROLES), seed=3, how="kill", is_impatient=True)
        await nemesis.run()
    verdict = check_history(read_history(history))
    assert verdict.num_killed == 15, "each of them seen in the exit status"
    assert set(nemesis.gaps_s) == set(ROLES), "runners, learner ranks and the broker were all hit"
    assert "0 lost, 0 trained twice" in str(verdict)


async def test_fragments_are_gone_only_if_their_runner_and_the_broker_die(history: Path) -> None:
    sizes = {"num_env_runners": 2, "num_envs_per_env_runner": 4, "rollout_fragment_length": 10}
    reports = {"min_time_s_per_iteration": 0, "min_sample_timesteps_per_iteration": 1}
    config = small(IMPALAConfig, num_learners=1, train_batch_size_per_learner=160, **sizes, **reports)

    async def train(num_updates: int) -> None:
        for _ in range(num_updates):
            await algo.train()

    def runner(index: int) -> Any:
        return algo.env_runner_group.handles[index]

    def broker() -> Any:
        return algo.session.pipeline._broker.handle

    async with config.build_async() as algo:
        await train(2)
        await kill(runner(0))
        await train(8)  # the broker has its fragments until they are trained
        await kill(broker())
        await train(8)  # the runners have theirs
        with stopped_processes():  # a file that is read early lacks what causes the others' events
            events = read_history(history)
        assert check_history(events).num_gone == 0
        for round_ in range(20):  # the learner may have all of a runner's fragments when it dies
            await asyncio.gather(kill(runner(round_ % 2)), kill(broker()))
            await train(8)
            with stopped_processes():
                events = read_history(history)
            if check_history(events).num_gone > 0:
                return
    pytest.fail("no fragment was lost with its runner and the broker")
