"""A broker that dies or hangs is started again: nothing accepted is lost or trained twice."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from recovery_runs import check_account, kill, small, until

from rlzmq.actors.exit_status import ActorLostError
from rlzmq.core.errors import DeadlineError, PeerLostError
from rlzmq.driver import broker_supervision, process_health


def broker_of(algo: Any) -> Any:
    return algo.session._pipeline._broker


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


@pytest.mark.parametrize("is_seen", [True, False])
async def test_a_stopped_broker_is_killed_and_replaced(
    is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen at once in the process table; without that, by its silence."""
    if is_seen:
        monkeypatch.setattr(broker_supervision, "_BEAT_DEADLINE_S", 300.0)
    else:
        monkeypatch.setattr(process_health, "is_stopped", lambda pid: False)
    async with small(1, 1).build_async() as algo:
        await algo.train()
        keeper = broker_of(algo)
        psutil.Process(keeper.handle.pid).suspend()
        check_account(await algo.train(), 2)
        assert keeper.num_restarts == 1


async def test_a_silent_broker_gets_more_time_after_each_kill_until_an_update_is_committed() -> None:
    deadlines: list[float] = []

    class Silent:
        pid = 1

        def __init__(self) -> None:
            self.exited = asyncio.get_running_loop().create_future()

        async def call(self, method: str, deadline_s: float) -> None:
            deadlines.append(deadline_s)
            raise DeadlineError("as always")

        async def kill_hanging(self) -> None:
            self.exited.set_result(None)

    system = SimpleNamespace(run_directory=SimpleNamespace(address=str))
    keeper = broker_supervision.BrokerKeeper(system, "run", small(1, 1))
    for _ in range(6):
        await keeper._wait_for_end(Silent())
    keeper.worked()
    await keeper._wait_for_end(Silent())
    assert deadlines == [3.0, 6.0, 12.0, 24.0, 30.0, 30.0, 3.0]


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
    killed = [text for text in caplog.messages if "Killing it." in text]
    assert len(killed) == 3
    assert sum("its process is stopped (SIGSTOP)" in text for text in killed) == 1, killed
    assert sum("hangs in its work (SIGSTOP): its process is stopped" in text for text in killed) == 1, killed
    assert sum("The broker" in text for text in killed) == 1, killed


async def test_without_restarts_its_death_ends_the_run() -> None:
    config = small(1, 1).fault_tolerance(restart_failed_broker=False)
    async with config.build_async() as algo:
        await algo.train()
        await kill(broker_of(algo).handle)
        with pytest.raises(ActorLostError, match=r"broker .*SIGKILL"):
            await algo.train()


async def test_without_restarts_a_stopped_broker_ends_the_run_as_such() -> None:
    config = small(1, 1).fault_tolerance(restart_failed_broker=False)
    async with config.build_async() as algo:
        await algo.train()
        psutil.Process(broker_of(algo).handle.pid).suspend()
        with pytest.raises(
            PeerLostError, match=r"The broker \(pid \d+\) (is stopped|gave no answer for \S+ s)\. It was"
        ):
            await algo.train()


async def test_without_restarts_the_error_in_the_broker_ends_the_run() -> None:
    config = small(1, 1).fault_tolerance(restart_failed_broker=False)
    async with config.build_async() as algo:
        await algo.train()

        def fail(role: Any) -> None:
            def beat() -> None:
                raise ZeroDivisionError("in the broker")

            role.beat = beat

        await broker_of(algo).handle.apply(fail)

        async def train_on() -> None:
            while True:
                await algo.train()

        with pytest.raises(ZeroDivisionError, match="in the broker"):
            await train_on()


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
        await until(lambda: group.num_healthy_remote_workers() == 2)
    assert result["fault_tolerance"]["num_broker_restarts"] == 1


@pytest.mark.alone
async def test_processes_that_were_frozen_when_the_broker_died_are_missed_by_the_next_one() -> None:
    async with small(2, 2).build_async() as algo:
        await algo.train()
        group, runners = algo.learner_group, algo.env_runner_group
        keeps_the_state = group.handles[0]
        for handle in (keeps_the_state, runners.handles[0]):
            psutil.Process(handle.pid).suspend()
        frozen = runners.handles[0]
        await kill(broker_of(algo).handle)
        await kill(group.handles[1])
        start = time.monotonic()
        result = await algo.train()
        check_account(result, 2)
        number = 2
        while runners.supervisor.num_restarts == 0:
            result = await algo.train()
            number += 1
            check_account(result, number)
        took_s = time.monotonic() - start
        assert keeps_the_state in group.handles
    assert frozen.exited.done()
    assert result["fault_tolerance"]["num_learner_rollbacks"] == 0, "one rank still held the state"
    assert result["fault_tolerance"]["num_learner_group_reforms"] == 1
    assert took_s < 12.0, "4 s on a machine that is not busy"


async def test_a_run_ends_although_processes_are_frozen() -> None:
    async with small(2, 2).build_async() as algo:
        await algo.train()
        for handle in (algo.learner_group.handles[0], algo.env_runner_group.handles[0]):
            psutil.Process(handle.pid).suspend()
        start = time.monotonic()
    assert time.monotonic() - start < 20.0, "3 s for their goodbye, 5 s for their end"
