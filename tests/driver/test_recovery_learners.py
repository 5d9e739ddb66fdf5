"""Learner ranks that die or hang: survivors train on with the newest state, replacements join."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from recovery_runs import check_account, kill, small

from rlzmq.core.errors import PeerLostError
from tests.support.runs import until_async


async def hashes_of(algo: Any) -> list[str]:
    return await algo.learner_group.foreach_learner(lambda learner: learner.parameter_hash())  # type: ignore[no-any-return]


async def until_whole(algo: Any, num_updates: int) -> dict[str, Any]:
    """Train until_async the replacement has joined; the last result."""
    group = algo.learner_group
    result: dict[str, Any] = {}
    for number in range(num_updates + 1, num_updates + 2000):
        result = await algo.train()
        check_account(result, number)
        if len(group.handles) == 2:
            return result
    raise AssertionError("no replacement joined")


@pytest.mark.alone
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_rank_is_survived_and_replaced_without_losing_an_update(rank: int) -> None:
    async with small(1, 2).build_async() as algo:
        group = algo.learner_group
        for _ in range(2):
            await algo.train()
        survivor = group.handles[1 - rank]
        start = time.monotonic()
        await kill(group.handles[rank])
        result = await algo.train()
        took_s = time.monotonic() - start
        check_account(result, 3)
        assert result["learners"]["default_policy"]["weights_seq_no"] == 3
        assert group.handles == [survivor]
        result = await until_whole(algo, 3)
        assert group.handles[0] is survivor
        hashes = await hashes_of(algo)
        assert len(set(hashes)) == 1
        states = [
            await handle.apply(lambda role: role.learner.get_state("optimizer")) for handle in group.handles
        ]
        result = await algo.train()
    assert took_s < 3.0, "1 s on a machine that is not busy"
    assert repr(states[0]) == repr(states[1])
    assert result["fault_tolerance"]["num_learner_restarts"] == 1
    assert result["fault_tolerance"]["num_learner_group_reforms"] == 1


@pytest.mark.parametrize(
    "fault",
    [
        "learner.Shard@learner-1:kill:2",  # delivered, not decoded
        pytest.param("learner.Train@learner-0:kill:2", marks=pytest.mark.slow),  # told to train
        pytest.param("learner.train@learner-1:kill:2", marks=pytest.mark.slow),  # before its first collective
        "learner.vote@learner-0:kill:2",  # all steps done, no vote
        pytest.param("learner.voted@learner-1:kill:2", marks=pytest.mark.slow),  # voted, nobody told
        "learner.trained@learner-0:kill:2",  # trained, the broker not told
        pytest.param("learner.UpdateCommitted@learner-1:kill:1", marks=pytest.mark.slow),
        "learner.voted@learner-1:stop:2",  # hangs
    ],
)
async def test_a_rank_that_dies_at_a_chosen_place(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLZMQ_FAULT", fault)
    monkeypatch.setenv("RLZMQ_FAULT_LOG", str(tmp_path / "fired"))
    async with small(1, 2).build_async() as algo:
        for number in range(1, 5):
            result = await algo.train()
            check_account(result, number)
            assert result["learners"]["default_policy"]["weights_seq_no"] == number
        result = await until_whole(algo, 4)
        assert len(set(await hashes_of(algo))) == 1
    assert (tmp_path / "fired").read_text().split() == fault.replace("@", " ").replace(":", " ").split()
    assert result["fault_tolerance"]["num_learner_restarts"] == 1


@pytest.mark.alone
async def test_a_stopped_rank_is_noticed_killed_and_survived_within_five_seconds() -> None:
    async with small(1, 2).build_async() as algo:
        await algo.train()
        start = time.monotonic()
        psutil.Process(algo.learner_group.handles[1].pid).suspend()
        result = await algo.train()
        took_s = time.monotonic() - start
    check_account(result, 2)
    assert took_s < 8.0, "5 s on a machine that is not busy"


def hold_the_lock() -> None:
    ctypes.PyDLL(None).pause()


def wait_for_ever() -> None:
    threading.Event().wait()


@pytest.mark.alone
@pytest.mark.parametrize("hang", [hold_the_lock, wait_for_ever])
async def test_a_rank_that_hangs_in_its_loss_is_killed_and_survived(hang: Any) -> None:
    async with small(1, 2).build_async() as algo:
        group = algo.learner_group.supervisor
        seconds_of_work = time.monotonic() + 1.5
        while time.monotonic() < seconds_of_work:
            await algo.train()

        def break_loss(learner: Any) -> None:
            if learner.rank == 1:

                def compute_loss_for_module(**kwargs: Any) -> Any:
                    hang()

                learner.compute_loss_for_module = compute_loss_for_module

        await algo.learner_group.foreach_learner(break_loss)
        start = time.monotonic()
        await algo.train()
        took_s = time.monotonic() - start
        await until_async(lambda: group.num_reforms == 1)
    assert took_s < 10.0, "5 s on a machine that is not busy"


async def test_learners_are_not_replaced_where_they_shall_not() -> None:
    config = small(1, 2).fault_tolerance(restart_failed_learners=False)
    async with config.build_async() as algo:
        await algo.train()
        await kill(algo.learner_group.handles[0])
        for number in range(2, 5):
            check_account(await algo.train(), number)
        assert len(algo.learner_group.handles) == 1


@pytest.mark.parametrize(
    ("num_learners", "settings", "why"),
    [
        (2, {"min_learners": 2}, "min_learners=2"),
        (1, {"learner_snapshot_every_s": None}, "All learners have died"),
    ],
)
async def test_too_few_learners_or_the_death_of_all_without_a_copy_end_the_run_and_say_why(
    num_learners: int, settings: dict[str, Any], why: str
) -> None:
    async with small(1, num_learners).fault_tolerance(**settings).build_async() as algo:
        await algo.train()
        await kill(algo.learner_group.handles[0])
        with pytest.raises(PeerLostError, match=why):
            await algo.train()


@pytest.mark.parametrize(("num_learners", "what"), [(1, "checkpoint"), (2, "checkpoint"), (2, "copy")])
async def test_the_death_of_all_learners_goes_back_to_the_last_state_that_the_driver_has(
    num_learners: int, what: str, tmp_path: Path
) -> None:
    config = small(1, num_learners)
    if what == "checkpoint":
        config.fault_tolerance(learner_snapshot_every_s=None)
    async with config.build_async() as algo:
        await algo.train()
        if what == "checkpoint":
            await algo.save_to_path(tmp_path / "checkpoint")
        await algo.train()  # within the minute that a copy serves
        for handle in algo.learner_group.handles:
            handle.send_signal(signal.SIGKILL)
        result = await algo.train()
        assert result["learners"]["default_policy"]["weights_seq_no"] == 2
        for _ in range(3):
            result = await algo.train()
    account = result["accounting"]
    assert account["sampled"] == account["trained"] + sum(account["dropped"].values()) + account["pending"]
    assert result["learners"]["default_policy"]["weights_seq_no"] == 5
    assert result["fault_tolerance"]["num_learner_rollbacks"] == 1


async def test_direct_updates_go_on_with_the_survivors() -> None:
    async with small(2, 2).build_async() as algo:
        group = algo.learner_group
        await algo.sync_weights()
        episodes = await algo.env_runner_group.sample(num_timesteps=120)
        assert len(await group.update(episodes=episodes)) == 2
        await kill(group.handles[0])
        assert len(await group.update(episodes=episodes)) == 1
        version = (await group.get_state())["weights_seq_no"]
    assert version == 2


async def test_a_checkpoint_restored_after_a_rank_died_reaches_everybody(tmp_path: Path) -> None:
    async with small(1, 2).build_async() as algo:
        await algo.train()
        path = await algo.save_to_path(tmp_path / "checkpoint")
        saved = (await algo.get_module()).get_state()
        await algo.train()
        await kill(algo.learner_group.handles[0])
        await algo.restore_from_path(path)
        restored = (await algo.get_module()).get_state()
        for name, value in saved.items():
            np.testing.assert_array_equal(restored[name], value)
        result = await algo.train()
        assert result["learners"]["default_policy"]["weights_seq_no"] == 2
