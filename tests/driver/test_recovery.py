"""Processes of a run that die or hang: the broker, learner ranks, env runners, at any time and while they start."""

from __future__ import annotations

import asyncio
import ctypes
import math
import os
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium.spaces import Box, Discrete
from recovery_runs import check_account, kill, small

from rlzmq import RLModuleSpec
from rlzmq.actors import system
from rlzmq.actors.process_state import ActorLostError
from rlzmq.algorithms import checkpoints
from rlzmq.core import patience
from rlzmq.core.errors import DeadlineError, PeerLostError
from rlzmq.envs.registry import register_env
from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule
from tests.support.runs import ShortEnv, assert_accounted, until_async

# ------------------------------------------------------------------ the broker


def broker_of(algo: Any) -> Any:
    return algo.session.pipeline._broker


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


async def test_a_run_ends_although_processes_are_frozen() -> None:
    async with small(2, 2).build_async() as algo:
        await algo.train()
        for handle in (algo.learner_group.handles[0], algo.env_runner_group.handles[0]):
            psutil.Process(handle.pid).suspend()
        start = time.monotonic()
    assert time.monotonic() - start < 20.0, "3 s for their goodbye, 5 s for their end"


# ------------------------------------------------------------------ learner ranks


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
        hashes = await group.foreach_learner(lambda learner: learner.parameter_hash())
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
    ("hang", "most_s"),
    [
        pytest.param(lambda: ctypes.PyDLL(None).pause(), math.inf, id="holds the lock"),
        pytest.param(
            lambda: threading.Event().wait(), 10.0, id="waits", marks=(pytest.mark.slow, pytest.mark.alone)
        ),
    ],
)
async def test_a_rank_that_hangs_in_its_loss_is_killed_and_survived(hang: Any, most_s: float) -> None:
    async with small(1, 2).build_async() as algo:
        group = algo.learner_group.formation
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
    assert took_s < most_s, "5 s on a machine that is not busy"


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


@pytest.mark.parametrize(
    ("num_learners", "what"),
    [pytest.param(1, "copy", marks=pytest.mark.slow), (2, "checkpoint"), (2, "copy, one after the other")],
)
async def test_the_death_of_all_learners_goes_back_to_the_last_state_that_the_driver_has(
    num_learners: int, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(1, num_learners)
    monkeypatch.setattr(checkpoints, "_COPIES_SHARE", math.inf)  # a copy costs nothing:
    monkeypatch.setattr(checkpoints, "_MIN_COPY_EVERY_S", 0.0)  # one after each iteration
    if what == "checkpoint":
        config.fault_tolerance(learner_snapshot_every_s=None)
    async with config.build_async() as algo:
        await algo.train()
        if what == "checkpoint":
            await algo.save_to_path(tmp_path / "checkpoint")
        await algo.train()
        # All are dead before an update is open that they could still train.
        group = algo.learner_group
        if "after" in what:
            await kill(group.handles[0])
            # its replacement joins with an update
            await until_async(lambda: group.supervisor.num_healthy == 2)
        kept = group.formation.last_resort["weights_seq_no"]
        assert kept == (1 if what == "checkpoint" else 2)
        await asyncio.gather(*map(kill, group.handles))
        result = await algo.train()
        assert result["learners"]["default_policy"]["weights_seq_no"] == kept + 1
        for _ in range(3):
            result = await algo.train()
    assert_accounted(result)
    assert result["learners"]["default_policy"]["weights_seq_no"] == kept + 4
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
        module = await algo.get_module()
        saved = module.get_state()
        await algo.train()
        assert await algo.get_module() is module
        await kill(algo.learner_group.handles[0])
        await algo.restore_from_path(path)
        np.testing.assert_equal(module.get_state(), saved)
        result = await algo.train()
        assert result["learners"]["default_policy"]["weights_seq_no"] == 2


# ------------------------------------------------------------------ env runners


RECREATED: list[tuple[list[int], bool]] = []


def note_recreated(*, env_runner_indices: list[int], is_evaluation: bool, **kwargs: Any) -> None:
    RECREATED.append((env_runner_indices, is_evaluation))


async def test_a_killed_runner_is_replaced_while_the_others_sample() -> None:
    RECREATED.clear()
    config = small(2, 1).callbacks(on_env_runners_recreated=note_recreated)
    async with config.build_async() as algo:
        group = algo.env_runner_group
        await algo.train()
        old = group.handles[0]
        await kill(old)
        result = await algo.train()
        check_account(result, 2)
        await until_async(lambda: group.num_healthy_remote_workers() == 2)
        assert group.handles[0].pid != old.pid
        # The replacement has the weights of now, and its samples are trained.
        sampled_by_it = []
        for number in range(3, 30):
            result = await algo.train()
            check_account(result, number)
            sampled_by_it = await group.foreach_env_runner(lambda runner: runner.num_env_steps_sampled)
            if sampled_by_it[0]:
                break
        assert sampled_by_it[0] > 0
    assert result["fault_tolerance"]["num_remote_worker_restarts"] == 1
    assert result["fault_tolerance"]["num_healthy_workers"] == 2
    assert RECREATED == [([1], False)]


async def test_a_replacement_makes_its_envs_with_the_env_config_that_was_set_last() -> None:
    def harder(runner: Any) -> None:
        runner.config.environment(env_config={"sutton_barto_reward": True})
        runner.make_env()

    def is_harder(runner: Any) -> list[bool]:
        return [env.unwrapped._sutton_barto_reward for env in runner.env.unwrapped.envs]

    async with small(1, 0).build_async() as algo:
        group = algo.env_runner_group
        assert not any((await group.foreach_env_runner(is_harder))[0])
        await group.foreach_env_runner(harder)
        await kill(group.handles[0])
        assert all((await group.foreach_env_runner(is_harder))[0])
        await algo.train()
        assert (await group.foreach_env_runner(lambda runner: runner.incarnation)) == [1]


class Leaking(ShortEnv):
    """Keeps 64 MiB more with every episode, for as long as a file is there; it never touches them."""

    length = 10

    def reward(self, action: Any) -> float:
        if self.t == 10 and Path(self.config["marker"]).exists():
            self.kept = [*getattr(self, "kept", []), np.empty(1 << 26, np.uint8)]
        return 1.0


async def test_a_runner_that_outgrows_its_memory_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leaks = tmp_path / "leaks"
    leaks.touch()
    config = (
        small(1, 1)
        .environment(Leaking, env_config={"marker": str(leaks)})
        .env_runners(num_envs_per_env_runner=1)
        .fault_tolerance(env_runner_memory_limit_bytes=2 << 30)
    )
    async with config.build_async() as algo:
        group = algo.env_runner_group
        number = 0
        while not group.num_restarts:
            number += 1
            check_account(await algo.train(), number)
        leaks.unlink()
        check_account(await algo.train(), number + 1)
    assert "exited with code 71" in caplog.text
    assert "OOM: env runner 1 has outgrown its limit" in caplog.text


@pytest.mark.parametrize(
    ("setting", "dies"),
    [("restart_failed_env_runners", "runner-0"), ("restart_failed_broker", "broker")],
)
async def test_without_restarts_the_first_death_ends_the_run_with_its_reason(setting: str, dies: str) -> None:
    async with small(2, 1).fault_tolerance(**{setting: False}).build_async() as algo:
        await algo.train()
        await kill(broker_of(algo).handle if dies == "broker" else algo.env_runner_group.handles[0])
        with pytest.raises(ActorLostError, match=rf"{dies} .*SIGKILL") as caught:  # noqa: PT012
            for _ in range(1000):  # until it is noticed, the other runner completes these
                await algo.train()
    assert f"{setting} is off" in "".join(caught.value.__notes__)


async def test_a_dead_runner_can_be_ignored() -> None:
    config = small(2, 1).fault_tolerance(restart_failed_env_runners=False, ignore_env_runner_failures=True)
    async with config.build_async() as algo:
        await algo.train()
        await kill(algo.env_runner_group.handles[0])
        for number in range(2, 4):
            result = await algo.train()
            check_account(result, number)
        episodes = await algo.env_runner_group.sample(num_timesteps=50)
        assert episodes
    assert result["fault_tolerance"]["num_healthy_workers"] == 1
    assert result["fault_tolerance"]["num_remote_worker_restarts"] == 0


# ------------------------------------------------------------------ while they start for the first time


ROLES = {
    "runner-1": "runner",
    "learner-0": "learner",
    "learner-1": "learner",
    "broker": "broker",
    "eval-runner-0": "runner",
}


def everywhere(point: str, action: str, *, roles: dict[str, str] = ROLES) -> str:
    return ",".join(f"{role}.{point}@{place}:{action}:1" for place, role in roles.items())


CONNECTING = {"runner-0": "runner", "learner-1": "learner"}


@pytest.mark.parametrize(
    "faults",
    [
        everywhere("start", "kill"),
        pytest.param(everywhere("start", "stop"), marks=pytest.mark.slow),
        everywhere("started", "exit"),
        pytest.param(everywhere("started", "stop"), marks=pytest.mark.slow),
        pytest.param(everywhere("connect", "kill", roles=CONNECTING), marks=pytest.mark.slow),
        everywhere("connect", "stop", roles=CONNECTING),
        pytest.param("learner.connect:stop:1", marks=pytest.mark.slow),  # of every rank
        pytest.param("runner.start:kill:1,runner.connect:kill:1", marks=pytest.mark.slow),
        pytest.param("broker.Hello:kill:1,runner.Welcome@runner-0:stop:1", marks=pytest.mark.slow),
        pytest.param(
            "learner.Welcome@learner-1:kill:1,runner.Welcome@runner-1:kill:1", marks=pytest.mark.slow
        ),
        pytest.param("learner.start:kill:1,learner.join@learner-1:kill:1", marks=pytest.mark.slow),
    ],
)
async def test_who_dies_or_is_stopped_while_starting_is_replaced(
    faults: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLZMQ_FAULT", faults)
    monkeypatch.setenv("RLZMQ_FAULT_LOG", str(tmp_path / "fired"))
    config = small(2, 2).evaluation(evaluation_num_env_runners=1, evaluation_duration=2)
    async with config.build_async() as algo:
        number, group = 0, algo.env_runner_group
        while number < 3 or len(algo.learner_group.handles) < 2:
            number += 1
            result = await algo.train()
            check_account(result, number)
        result["evaluation"] = await algo.evaluate()
        places = (line.split()[1] for line in (tmp_path / "fired").read_text().splitlines())
        fired = Counter(place.rpartition("-")[0] or place for place in places)
        await until_async(
            lambda: group.num_restarts == fired["runner"] and group.num_healthy_remote_workers() == 2
        )
        counts = algo.session.fault_tolerance()
        num_eval = algo.eval_env_runner_group.num_restarts
    assert fired
    assert result["evaluation"]["env_runners"]["num_episodes"] == 2
    assert counts["num_broker_restarts"] == fired["broker"]
    assert num_eval == fired["eval-runner"]
    assert counts["num_healthy_learners"] == 2
    assert counts["num_learner_rollbacks"] == 0


async def test_processes_that_are_slow_to_start_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver asks them at once, and again and again, whether their loop runs; the broker, too."""
    monkeypatch.setattr(system, "HEARTBEAT_S", 0.01)
    async with small(1, 1).build_async() as algo:
        check_account(await algo.train(), 1)
        await kill(algo.session.pipeline._broker.handle)
        await kill(algo.env_runner_group.handles[0])
        check_account(await algo.train(), 2)
        counts = algo.session.fault_tolerance()
    assert counts["num_broker_restarts"] == counts["num_remote_worker_restarts"] == 1


def kills_itself(context: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


async def test_who_always_dies_while_starting_ends_the_run_after_a_few_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "MAX_RESTARTS", 2)
    register_env("kills-itself", kills_itself)
    config = small(1, 1).environment("kills-itself")
    config.environment(observation_space=Box(-1, 1, (2,)), action_space=Discrete(2))
    with pytest.raises(ActorLostError, match=r"'runner-0' .*SIGKILL.* during its constructor") as caught:
        async with config.build_async():
            pass
    assert "3 failures in a row" in "".join(caught.value.__notes__)


class EndsItsProcess(ShortEnv):
    def step(self, action: Any) -> Any:
        if self.config["how"] == "exit":
            os._exit(3)
        ctypes.string_at(0)


@pytest.mark.parametrize(
    ("how", "told"),
    [("exit", r"os\._exit\(3\) was called at .*test_recovery\.py:\d+ in step"), ("fault", "SIGSEGV")],
)
async def test_an_env_that_ends_its_process_ends_the_run_soon_with_its_line(
    how: str, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patience, "MAX_RESTARTS", 3)
    config = small(1, 1).environment(EndsItsProcess, env_config={"how": how})
    async with config.env_runners(num_envs_per_env_runner=2).build_async() as algo:
        with pytest.raises(ActorLostError, match=told) as caught:
            await algo.train()
    assert re.search(r"test_recovery\.py.*in step", str(caught.value))
    assert re.search("4 failures in a row.*num_env_runners=0", "".join(caught.value.__notes__))
    restarts = [record.getMessage() for record in caplog.records if "Restarted in" in record.getMessage()]
    assert len(restarts) == 3
    assert all("Restarted in 0.1 s" in text for text in restarts), "waiting would not help"


class NeverMade(DefaultActorCriticModule):
    can_go_on = threading.Event()

    def setup(self) -> None:
        self.can_go_on.wait()
        super().setup()


async def test_a_module_that_is_never_made_ends_the_run_with_its_stack_and_the_setting() -> None:
    config = (
        small(0, 1)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=NeverMade))
        .fault_tolerance(process_start_timeout_s=10.0)
    )
    try:
        with pytest.raises(DeadlineError, match=r"'learner-0' .*within 10 s.*") as caught:
            async with config.build_async():
                pass
    finally:
        NeverMade.can_go_on.set()  # for the local runner's thread
    assert "process_start_timeout_s" in str(caught.value)
    assert "in setup" in str(caught.value)
