"""Function calls of a group without processes: which runners are called, and what comes back when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlzmq import EnvRunnerGroup, MetricsLogger, PPOConfig, SingleAgentEnvRunner
from rlzmq.core.metrics import ReducedMetrics
from rlzmq.driver.async_env_runner_group import AsyncEnvRunnerGroup
from rlzmq.wire.payloads import pack_blob, unpack_blob


class Runner:
    def __init__(self, number: int) -> None:
        self.number = number
        self.config = PPOConfig()

    def times(self, factor: int) -> int:
        return factor * self.number


class Handle:
    """An actor handle whose calls wait until they are let go."""

    def __init__(self, number: int) -> None:
        self.env_runner = Runner(number)
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def apply(self, function: Any) -> Any:
        await self.may_answer.wait()
        return function(self)


class Supervisor:
    num_healthy = 3

    def __init__(self, handles: list[Handle]) -> None:
        self.handles = handles
        self.given_up: set[int] = set()

    async def call(self, index: int, call: Any) -> Any:
        return None if index in self.given_up else await call(self.handles[index])


def remote_calls(num: int = 3) -> Any:
    calls: Any = AsyncEnvRunnerGroup(PPOConfig())
    calls.supervisor = Supervisor([Handle(number) for number in range(1, num + 1)])
    return calls


async def test_functions_methods_arguments_and_chosen_runners() -> None:
    calls = remote_calls()
    assert await calls.foreach_env_runner(lambda runner: runner.number) == [1, 2, 3]
    assert await calls.foreach_env_runner("times", kwargs={"factor": 10}) == [10, 20, 30]
    assert await calls.foreach_env_runner(lambda runner: runner.number, remote_worker_ids=[3, 1]) == [1, 3]
    assert await calls.foreach_env_runner(lambda runner: (number for number in range(runner.number))) == [
        [0], [0, 1], [0, 1, 2]
    ]  # fmt: skip
    functions = [lambda runner: "first", "times", lambda runner: "third"]
    with pytest.raises(TypeError):
        await calls.foreach_env_runner(functions)  # times() needs its argument
    with pytest.raises(ValueError, match="expected 3 functions"):
        await calls.foreach_env_runner(functions[:2])
    with pytest.raises(ValueError, match="numbers from 1 to 3, got 4"):
        await calls.foreach_env_runner(len, remote_worker_ids=[4])
    assert calls.num_remote_workers() == calls.num_healthy_remote_workers() == 3


async def test_a_late_runner_is_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    calls = remote_calls()
    calls.handles[1].may_answer.clear()
    results = await calls.foreach_env_runner(lambda runner: runner.number, timeout_seconds=0.01)
    assert results == [1, 3]
    assert "no result of runner(s) [2] within 0.01 s" in caplog.text
    await calls.cancel_calls()


async def test_a_runner_that_the_run_goes_on_without_is_left_out() -> None:
    calls = remote_calls()
    calls.supervisor.given_up.add(1)
    assert await calls.foreach_env_runner("times", kwargs={"factor": 1}) == [1, 3]
    assert await calls.foreach_env_runner("times", kwargs={"factor": 1}, timeout_seconds=9.0) == [1, 3]
    await calls.foreach_env_runner_async("times", kwargs={"factor": 1})
    await asyncio.sleep(0)
    ready = [result for _ in range(3) for result in await calls.fetch_ready_async_reqs(timeout_seconds=None)]
    assert sorted(ready) == [(1, 1), (3, 3)]


async def test_calls_in_the_background_are_fetched_when_they_are_ready() -> None:
    calls = remote_calls()
    calls.handles[1].may_answer.clear()
    begin = calls.foreach_env_runner_async
    assert await begin(lambda runner: runner.number, tag="a") == 3
    assert await begin(lambda runner: runner.number, tag="a") == 0, "one of a tag at a time"
    assert await begin(lambda runner: -runner.number, tag="b", remote_worker_ids=[1]) == 1
    ready = await calls.fetch_ready_async_reqs(tags="a", timeout_seconds=None)
    while len(ready) < 2:
        ready += await calls.fetch_ready_async_reqs(tags="a", timeout_seconds=None)
    assert sorted(ready) == [(1, 1), (3, 3)]
    assert await calls.fetch_ready_async_reqs(timeout_seconds=None) == [(1, -1)]
    assert await calls.fetch_ready_async_reqs() == [], "runner 2 is still busy"
    calls.handles[1].may_answer.set()
    assert await calls.fetch_ready_async_reqs(timeout_seconds=None) == [(2, 2)]
    assert await calls.fetch_ready_async_reqs() == []


async def test_a_functions_error_is_raised_where_its_result_is_asked_for() -> None:
    def fail(runner: Runner) -> int:
        if runner.number == 2:
            return 2
        raise LookupError(f"runner {runner.number}")

    calls = remote_calls(2)
    with pytest.raises(LookupError, match="runner 1"):
        await calls.foreach_env_runner(fail)
    assert await calls.foreach_env_runner_async(fail) == 2
    await asyncio.wait(calls._in_background.values())
    with pytest.raises(LookupError, match="runner 1"):
        await calls.fetch_ready_async_reqs(timeout_seconds=None)
    assert await calls.fetch_ready_async_reqs() == [(2, 2)]


def test_a_group_of_its_own_gets_weights_from_learners() -> None:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).debugging(seed=1)
    runners = EnvRunnerGroup(config=config)
    learners = config.copy().debugging(seed=2).build_learner_group()
    with pytest.raises(ValueError, match="belongs to no run"):
        runners.sync_weights()
    with pytest.raises(KeyError, match="Did you mean 'default_policy'"):
        runners.sync_weights(policies=["default"], from_worker_or_learner_group=learners)
    runners.sync_weights(from_worker_or_learner_group=learners, inference_only=True)
    weights = learners.get_weights()["default_policy"]
    (own,) = runners.foreach_env_runner(lambda runner: runner.module.get_state())
    assert own
    assert all((array == weights[name]).all() for name, array in own.items())
    assert runners.foreach_env_runner(lambda runner: 1, local_env_runner=False) == []
    assert runners.num_remote_workers() == 0


def test_a_runners_metrics_are_merged_into_another_logger_also_after_a_journey() -> None:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0)
    runners = [SingleAgentEnvRunner(config=config, worker_index=index) for index in (1, 2)]
    logger = MetricsLogger()
    returns: list[float] = []
    num_steps = 0
    for _ in range(2):
        episodes = [episode for runner in runners for episode in runner.sample(num_episodes=3)]
        returns += [episode.get_return() for episode in episodes]
        num_steps += sum(map(len, episodes))
        results = [unpack_blob(pack_blob(runner.get_metrics())) for runner in runners]
        assert all(type(result) is ReducedMetrics for result in results)
        logger.aggregate(results, key="env_runners")
    merged = logger.reduce()["env_runners"]
    assert merged["num_env_steps_sampled"] == merged["num_env_steps_sampled_lifetime"] == num_steps
    assert merged["num_episodes_lifetime"] == 12
    assert merged["episode_return_mean"] == pytest.approx(sum(returns) / 12)
    assert (merged["episode_return_min"], merged["episode_return_max"]) == (min(returns), max(returns))
    assert merged["num_module_steps_sampled_lifetime"] == {"default_policy": num_steps}
