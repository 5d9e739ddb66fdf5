"""Runs that are slow for a known reason, the verdict on each, and what runners of different speed sample."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import DefaultPPOTorchRLModule, PPOConfig, RLModuleSpec
from rlzmq.cli.main import main
from rlzmq.net.keys import JoinFile
from tests.net.chaos_proxy import ChaosProxy
from tests.support.runs import Command, ShortEnv


class MadeEnv(ShortEnv):
    """Observations of `size` numbers; steps take `step_s`, those of the second runner `second_step_s`.

    Each step is a byte more in the file `steps_path`, where there is one.
    """

    length = 30

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (config.get("size", 2),), np.float32)
        own = config.get("second_step_s") if config.worker_index == 2 else None
        self.step_s = own or config.get("step_s", 0.0)

    def observation(self) -> Any:
        return np.zeros(self.observation_space.shape, np.float32)

    def reward(self, action: Any) -> float:
        time.sleep(self.step_s)
        if path := self.config.get("steps_path"):
            with open(path, "ab") as file:
                file.write(b".")
        return 1.0


class Ponderous(DefaultPPOTorchRLModule):
    """Acts as slowly as a large model, also where the machine is busy otherwise."""

    def _forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        time.sleep(0.005)
        return super()._forward_exploration(batch, **kwargs)


def config(num_env_runners: int = 2, batch: int = 200, **env_config: Any) -> PPOConfig:
    return (
        PPOConfig()
        .environment(MadeEnv, env_config=env_config)
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=2, rollout_fragment_length=25)
        .learners(num_learners=1)
        .training(train_batch_size_per_learner=batch, minibatch_size=100, num_epochs=1)
        .rl_module(model_config={"fcnet_hiddens": [8]})
        .debugging(seed=1)
    )


def bottleneck(made: PPOConfig, num_iterations: int = 3) -> dict[str, Any]:
    """The newest result's; the first iterations are not typical."""
    with made.build() as algo:
        for _ in range(num_iterations):
            result = algo.train()
    return result["bottleneck"]  # type: ignore[no-any-return]


def test_an_env_that_takes_its_time() -> None:
    found = bottleneck(config(step_s=0.004))
    assert found["stage"] == "env", found
    assert found["shares"]["env_runners"]["env"] > 0.5


def test_a_large_model_in_the_runners() -> None:
    found = bottleneck(config().rl_module(rl_module_spec=RLModuleSpec(module_class=Ponderous)))
    assert found["stage"] == "inference", found
    assert found["shares"]["env_runners"]["inference"] > 0.5


def test_a_learner_of_many_epochs() -> None:
    found = bottleneck(config().training(num_epochs=15, minibatch_size=25))
    assert found["stage"] == "learner", found
    learner = found["shares"]["learners"]
    assert learner["forward"] + learner["backward"] > 0.5


def count_steps(*, env_runner: Any, metrics_logger: Any, samples: Any, **kwargs: Any) -> None:
    metrics_logger.log_value(
        f"runner-{env_runner.worker_index}", samples.num_env_steps, reduce="lifetime_sum"
    )


def test_one_slow_runner_of_two_is_named_and_samples_its_part_of_a_batch_not_an_equal_one() -> None:
    made = config(batch=400, step_s=0.002, second_step_s=0.04).callbacks(on_sample_end=count_steps)
    with made.build() as algo:
        first = algo.train()["env_runners"]  # their pace is not known before
        for _ in range(3):
            result = algo.train()
            assert result["accounting"]["dropped"].get("surplus", 0) <= 40
    found = result["bottleneck"]
    assert found["stage"] == "one slow runner", found
    assert found["advice"].startswith("Env runner 2 samples ")
    names = ("runner-1", "runner-2")
    fast, slow = (result["env_runners"][name] - first.get(name, 0) for name in names)
    assert 0 < slow <= 0.2 * (fast + slow), "a twenty-first part by its pace"


@pytest.mark.parametrize("num_env_runners", [1, 3])
def test_slow_environments_waste_nothing(num_env_runners: int, tmp_path: Path) -> None:
    """A batch takes three times as long as a runner may be without progress; so does a single lease."""
    batch, steps = 60 * num_env_runners, tmp_path / "steps"
    made = config(num_env_runners, batch, step_s=0.05, steps_path=str(steps)).learners(num_learners=0)
    made.env_runners(num_envs_per_env_runner=1, rollout_fragment_length="auto", sample_timeout_s=1.0)
    with made.training(minibatch_size=batch).build() as algo:
        account = algo.train()["accounting"]
        num_steps = steps.stat().st_size  # runners wait now: there are no leases beyond the batch
    assert account["trained"] >= batch
    assert account["dropped"].get("surplus", 0) <= 2 * (num_env_runners - 1), "the last steps of the batch"
    assert num_steps <= batch + 4 * num_env_runners, "an expired lease's steps are sampled twice"


@contextmanager
def narrow(address: str, bytes_per_s: float) -> Iterator[str]:
    """A link to `address` that carries so much in each direction: the address to connect to."""
    addresses: list[str] = []
    started, ended = threading.Event(), threading.Event()

    async def serve() -> None:
        async with ChaosProxy(address) as proxy:
            proxy.to_server.rate_bytes_per_s = proxy.to_client.rate_bytes_per_s = bytes_per_s
            addresses.append(proxy.address)
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(10)
        yield addresses[0]
    finally:
        ended.set()
        thread.join()


def test_a_narrow_link_to_the_runners(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "join.toml"
    made = config(0, 100, size=5000).networking(listen="tcp://127.0.0.1:0", join_file=str(path))
    with made.build() as algo:
        join = JoinFile.read(str(path))
        with narrow(join.addresses["data"], 1e6) as data, narrow(join.addresses["weights"], 1e6) as weights:
            far = replace(join, addresses={**join.addresses, "data": data, "weights": weights})
            far.write(str(tmp_path / "far.toml"))
            here = os.pathsep.join(sys.path)  # where this module, and so the env, is found
            with Command(tmp_path, "runner", "--join", str(tmp_path / "far.toml"), PYTHONPATH=here) as runner:
                runner.wait_for("joined")
                for _ in range(3):
                    result = algo.train()
                assert main(["top", str(path.with_name("join.observer.toml")), "--count", "1"]) == 0
    found = result["bottleneck"]
    assert found["stage"] == "transport", found
    assert found["shares"]["env_runners"]["deliver"] > 0.5
    assert "bottleneck  transport: Data is on its way for " in capsys.readouterr().out
