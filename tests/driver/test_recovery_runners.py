"""Runner processes that die or hang are replaced, and the run goes on meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from recovery_runs import check_account, kill, small

from rlzmq.actors.process_state import ActorLostError
from tests.support.runs import ShortEnv, until_async

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


@pytest.mark.parametrize(
    "fault",
    ["runner.sampled@runner-0:kill:2", "runner.sent@runner-0:exit:2", "runner.Lease@runner-0:kill:3"],
)
async def test_a_runner_that_dies_at_a_chosen_place(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLZMQ_FAULT", fault)
    monkeypatch.setenv("RLZMQ_FAULT_LOG", str(tmp_path / "fired"))
    async with small(1, 1).build_async() as algo:
        for number in range(1, 4):
            result = await algo.train()
            check_account(result, number)
    assert (tmp_path / "fired").read_text().split() == fault.replace("@", " ").replace(":", " ").split()
    assert result["fault_tolerance"]["num_remote_worker_restarts"] == 1


@pytest.mark.alone
async def test_a_stopped_runner_is_noticed_killed_and_replaced_within_five_seconds() -> None:
    async with small(2, 1).build_async() as algo:
        group = algo.env_runner_group
        await algo.train()
        start = time.monotonic()
        psutil.Process(group.handles[1].pid).suspend()
        result = await algo.train()
        check_account(result, 2)
        await until_async(lambda: group.num_restarts == 1 and group.num_healthy_remote_workers() == 2)
        took_s = time.monotonic() - start
    assert took_s < 8.0, "5 s on a machine that is not busy"


class Spinning(ShortEnv):
    """Hangs in its 30th step of the first incarnation."""

    length, num_steps = 10, 0

    def step(self, action: Any) -> Any:
        self.num_steps += 1
        marker = Path(self.config["marker"])
        if self.num_steps == 30 and not marker.exists():
            marker.touch()
            while True:
                pass
        return super().step(action)


async def test_an_env_that_never_returns_is_killed_after_its_time_with_its_stack_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = (
        small(1, 1)
        .environment(Spinning, env_config={"marker": str(tmp_path / "hung")})
        .env_runners(num_envs_per_env_runner=1)
        .fault_tolerance(env_step_timeout_s=1.0)
    )
    async with config.build_async() as algo:
        result = await algo.train()
    check_account(result, 1)
    assert (tmp_path / "hung").exists()
    assert result["fault_tolerance"]["num_remote_worker_restarts"] == 1
    assert "hangs: a vector step has not returned for 1" in caplog.text
    assert re.search(r"at .*test_recovery_runners.py:\d+ in step\. Restarted", caplog.text)
    assert "test_recovery_runners.py" in caplog.text


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


async def test_without_restarts_the_first_death_ends_the_run_with_its_reason() -> None:
    config = small(2, 1).fault_tolerance(restart_failed_env_runners=False)
    async with config.build_async() as algo:
        await algo.train()
        await kill(algo.env_runner_group.handles[0])
        with pytest.raises(ActorLostError, match=r"runner-0 .*SIGKILL") as caught:  # noqa: PT012
            await algo.train()  # the other runner may still complete this one
            await algo.train()
    assert "restart_failed_env_runners is off" in "".join(caught.value.__notes__)


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


async def test_the_budget_of_restarts_is_kept() -> None:
    config = small(1, 1).fault_tolerance(max_num_env_runner_restarts=1)
    async with config.build_async() as algo:
        await algo.train()
        await kill(algo.env_runner_group.handles[0])
        await algo.train()
        await kill(algo.env_runner_group.handles[0])
        with pytest.raises(ActorLostError) as caught:
            await algo.train()
    assert "max_num_env_runner_restarts=1 is spent" in "".join(caught.value.__notes__)


class HoldsTheLock(ShortEnv):
    """When it is told to, a C function keeps the interpreter's lock for ever: once."""

    length = 10

    def reward(self, action: Any) -> float:
        marker = Path(self.config["marker"])
        if marker.exists():
            marker.unlink()
            ctypes.PyDLL(None).pause()
        return 1.0


@pytest.mark.alone
async def test_an_env_that_holds_the_interpreters_lock_is_noticed_by_its_silence(tmp_path: Path) -> None:
    marker = tmp_path / "hang"
    config = (
        small(2, 1)
        .environment(HoldsTheLock, env_config={"marker": str(marker)})
        .env_runners(num_envs_per_env_runner=1)
    )
    async with config.build_async() as algo:
        group = algo.env_runner_group
        seconds_of_work = time.monotonic() + 1.5
        while time.monotonic() < seconds_of_work:
            await algo.train()
        start = time.monotonic()
        marker.touch()
        while group.num_restarts == 0 or group.num_healthy_remote_workers() < 2:
            result = await algo.train()
        took_s = time.monotonic() - start
    assert not marker.exists()
    assert result["fault_tolerance"]["num_remote_worker_restarts"] == 1
    assert took_s < 10.0, "5 s on a machine that is not busy"


def maps_of(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def semaphores_of(pid: int) -> list[Path]:
    """The named semaphores that a process has mapped, by their inodes: maps tell another name."""
    mapped = {line.split()[4] for line in maps_of(pid).splitlines() if "/dev/shm" in line}
    inodes = {}
    for path in Path("/dev/shm").glob("sem.mp-*"):
        with contextlib.suppress(FileNotFoundError):  # of another program, which has ended
            inodes[path] = str(path.stat().st_ino)
    return [path for path, inode in inodes.items() if inode in mapped]


async def test_a_killed_runner_with_async_environments_leaves_no_semaphores(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async with small(1, 0).env_runners(gym_env_vectorize_mode="async").build_async() as algo:
        await algo.train()
        handle = algo.env_runner_group.handles[0]
        workers = psutil.Process(handle.pid).children(recursive=True)
        assert workers
        assert "/dev/shm/" in maps_of(handle.pid), "it has semaphores"
        assert not semaphores_of(handle.pid), "which have no names any more"
        await kill(handle)
        result = await algo.train()
        check_account(result, 2)
        await until_async(lambda: not any(worker.is_running() for worker in workers))
        assert not semaphores_of(algo.env_runner_group.handles[0].pid)
    assert "leaked" not in capfd.readouterr().err
