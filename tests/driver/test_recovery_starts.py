"""Processes that die, are stopped or hang while they start for the first time."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from gymnasium.spaces import Box, Discrete
from recovery_runs import check_account, kill, small

from rlzmq import RLModuleSpec
from rlzmq.actors import system
from rlzmq.actors.process_state import ActorLostError
from rlzmq.core.errors import DeadlineError
from rlzmq.envs.registry import register_env
from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule
from tests.support.runs import until_async

ROLES = {
    "runner-1": "runner",
    "learner-0": "learner",
    "learner-1": "learner",
    "broker": "broker",
    "eval-runner-0": "runner",
}


def everywhere(point: str, action: str, *, roles: dict[str, str] = ROLES) -> str:
    return ",".join(f"{role}.{point}@{place}:{action}:1" for place, role in roles.items())


def fired_by_role(log: Path) -> Counter[str]:
    places = (line.split()[1] for line in log.read_text().splitlines())
    return Counter(place.rpartition("-")[0] or place for place in places)


CONNECTING = {"runner-0": "runner", "learner-1": "learner"}


@pytest.mark.parametrize(
    "faults",
    [
        everywhere("start", "kill"),
        everywhere("start", "stop"),
        everywhere("started", "exit"),
        pytest.param(everywhere("started", "stop"), marks=pytest.mark.slow),
        everywhere("connect", "kill", roles=CONNECTING),
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
        fired = fired_by_role(tmp_path / "fired")
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
    monkeypatch.setattr(system, "_LOOK_S", 0.01)
    async with small(1, 1).build_async() as algo:
        check_account(await algo.train(), 1)
        await kill(algo.session.pipeline._broker.handle)
        await kill(algo.env_runner_group.handles[0])
        check_account(await algo.train(), 2)
        counts = algo.session.fault_tolerance()
    assert counts["num_broker_restarts"] == counts["num_remote_worker_restarts"] == 1


def kills_itself(context: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


async def test_who_always_dies_while_starting_ends_the_run_after_a_few_attempts() -> None:
    register_env("kills-itself", kills_itself)
    config = small(1, 1).environment("kills-itself").fault_tolerance(delay_between_env_runner_restarts_s=0.01)
    config.environment(observation_space=Box(-1, 1, (2,)), action_space=Discrete(2))
    with pytest.raises(ActorLostError, match=r"'runner-0' .*SIGKILL.* during its constructor") as caught:
        async with config.build_async():
            pass
    assert "env runner 0 was started 6 times" in "".join(caught.value.__notes__)


class NeverMade(DefaultActorCriticModule):
    def setup(self) -> None:
        threading.Event().wait()


async def test_a_module_that_is_never_made_ends_the_run_with_its_stack_and_the_setting() -> None:
    config = (
        small(0, 1)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=NeverMade))
        .fault_tolerance(process_start_timeout_s=10.0)
    )
    with pytest.raises(DeadlineError, match=r"'learner-0' .*within 10 s.*") as caught:
        async with config.build_async():
            pass
    assert "process_start_timeout_s" in str(caught.value)
    assert "in setup" in str(caught.value)
