"""Runs that are slow for a known reason, and the verdict on each."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlzmq import DefaultPPOTorchRLModule, PPOConfig, RLModuleSpec
from rlzmq.cli.main import main
from rlzmq.net.keys import JoinFile
from tests.driver.made_env import MadeEnv
from tests.net.chaos_proxy import ChaosProxy
from tests.support.runs import Command


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
    found = bottleneck(config().training(num_epochs=40, minibatch_size=25))
    assert found["stage"] == "learner", found
    learner = found["shares"]["learners"]
    assert learner["forward"] + learner["backward"] > 0.5


def test_one_slow_runner_of_two() -> None:
    found = bottleneck(config(step_s=0.002, second_step_s=0.04))
    assert found["stage"] == "one slow runner", found
    assert found["advice"].startswith("Env runner 2 samples ")


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
            with Command(tmp_path, "runner", "--join", str(tmp_path / "far.toml")) as runner:
                runner.wait_for("joined")
                for _ in range(3):
                    result = algo.train()
                assert main(["top", str(path.with_name("join.observer.toml")), "--count", "1"]) == 0
    found = result["bottleneck"]
    assert found["stage"] == "transport", found
    assert found["shares"]["env_runners"]["deliver"] > 0.5
    assert "bottleneck  transport: Data is on its way for " in capsys.readouterr().out
