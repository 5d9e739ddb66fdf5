"""A broker that dies or hangs is started again: nothing accepted is lost or trained twice."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from recovery_runs import check_account, kill, small

from rlzmq.actors.process_state import ActorLostError
from tests.support.runs import until_async


def broker_of(algo: Any) -> Any:
    return algo.session.pipeline._broker


async def block_loop(role: Any) -> None:
    time.sleep(600)  # noqa: ASYNC251


@pytest.mark.alone
async def test_a_killed_broker_is_replaced_on_the_same_addresses() -> None:
    async with small(2, 2).build_async() as algo:
        await algo.train()
        keeper = broker_of(algo)
        addresses, old = dict(keeper.addresses), keeper.handle
        start = time.monotonic()
        await kill(old)
        check_account(await algo.train(), 2)
        took_s = time.monotonic() - start
        assert keeper.addresses == addresses
        assert keeper.handle.pid != old.pid
        result = await algo.train()
        check_account(result, 3)
        hashes = await algo.learner_group.foreach_learner(lambda learner: learner.parameter_hash())
    assert took_s < 5.0, "3 s on a machine that is not busy"
    assert len(set(hashes)) == 1
    assert result["learners"]["default_policy"]["weights_seq_no"] == 3
    assert result["fault_tolerance"]["num_broker_restarts"] == 1
    assert result["fault_tolerance"]["num_env_steps_without_report"] == 0
    assert result["fault_tolerance"]["num_remote_worker_restarts"] == 0


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("broker.OpenUpdate:kill:2", marks=pytest.mark.slow),
        "broker.Fragment:kill:3",  # in the ledger, not acknowledged
        pytest.param("broker.ShardReady:kill:2", marks=pytest.mark.slow),
        "broker.UpdateDone:kill:3",  # trained, the driver not told
        pytest.param("broker.UpdateDone:kill:4", marks=pytest.mark.slow),
        "broker.Weights:kill:2",
        pytest.param("broker.DriverState:kill:2", marks=pytest.mark.slow),
    ],
)
async def test_a_broker_that_dies_at_a_chosen_place(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLZMQ_FAULT", fault)
    monkeypatch.setenv("RLZMQ_FAULT_LOG", str(tmp_path / "fired"))
    async with small(1, 2).build_async() as algo:
        number, keeper = 0, broker_of(algo)
        while number < 4 or keeper.num_restarts == 0:
            result = await algo.train()
            number += 1
            check_account(result, number)
            assert result["learners"]["default_policy"]["weights_seq_no"] == number
        result = await algo.train()
    name, action, count = fault.split(":")
    assert (tmp_path / "fired").read_text().split() == [name, "broker", action, count]
    assert result["fault_tolerance"]["num_broker_restarts"] == 1
    assert result["fault_tolerance"]["num_env_steps_without_report"] == 0


async def test_a_broker_whose_loop_is_blocked_is_killed_and_replaced() -> None:
    async with small(1, 1).build_async() as algo:
        await algo.train()
        keeper = broker_of(algo)
        with pytest.raises(ActorLostError, match="no answer"):
            await keeper.handle.apply(block_loop)
        check_account(await algo.train(), 2)
        assert keeper.num_restarts == 1


async def test_stopped_processes_are_seen_without_a_broker(caplog: pytest.LogCaptureFixture) -> None:
    async with small(2, 2).build_async() as algo:
        await algo.train()
        stopped = [algo.env_runner_group.handles[0], algo.learner_group.handles[1], broker_of(algo).handle]
        for handle in stopped:
            psutil.Process(handle.pid).suspend()
        async with asyncio.timeout(60):
            for handle in stopped:
                assert (await handle.exited).signal_number == signal.SIGKILL
        check_account(await algo.train(), 2)
    killed = sorted(
        text.split()[0] for text in caplog.messages if "SIGSTOP" in text and "Killing it." in text
    )
    assert killed == ["broker", "learner-1", "runner-0"]


async def test_without_restarts_its_death_ends_the_run() -> None:
    config = small(1, 1).fault_tolerance(restart_failed_broker=False)
    async with config.build_async() as algo:
        await algo.train()
        await kill(broker_of(algo).handle)
        with pytest.raises(ActorLostError, match=r"broker .*SIGKILL"):
            await algo.train()


async def test_runner_learner_and_broker_may_die_at_once() -> None:
    async with small(2, 2).build_async() as algo:
        await algo.train()
        group = algo.env_runner_group
        handles = [group.handles[0], algo.learner_group.handles[0], broker_of(algo).handle]
        for handle in handles:
            handle.send_signal(signal.SIGKILL)
        for number in range(2, 5):
            result = await algo.train()
            check_account(result, number)
        await until_async(lambda: group.num_healthy_remote_workers() == 2)
    assert result["fault_tolerance"]["num_broker_restarts"] == 1


async def test_a_run_ends_although_processes_are_frozen() -> None:
    async with small(2, 2).build_async() as algo:
        await algo.train()
        for handle in (algo.learner_group.handles[0], algo.env_runner_group.handles[0]):
            psutil.Process(handle.pid).suspend()
        start = time.monotonic()
    assert time.monotonic() - start < 20.0, "3 s for their goodbye, 5 s for their end"
