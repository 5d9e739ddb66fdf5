"""Small runs and environments, command-line peers that join them, and what every run keeps."""

from __future__ import annotations

import asyncio
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import gymnasium as gym
import numpy as np

from rlzmq import PPOConfig
from rlzmq.envs.examples import MultiAgentCartPole, module_of_agent
from tests.support.warm_process import WarmPopen

T = TypeVar("T")


def small(config_class: Any = PPOConfig, env: Any = "CartPole-v1", **settings: Any) -> Any:
    """Return a config that trains in no time, with any settings by their names.

    Unless `settings` say otherwise: a serial run of 2 envs with seed 1, a hidden layer of 8 units (which stays beside
    another `model_config`), and with PPO batches of 64 env steps as two minibatches, once. Without learners of their
    own, `num_learners` share the batch of `train_batch_size_per_learner`.
    """
    settings = {"num_env_runners": 0, "num_envs_per_env_runner": 2, "seed": 1, **settings}
    settings["model_config"] = {"fcnet_hiddens": [8], **settings.get("model_config", {})}
    if issubclass(config_class, PPOConfig):
        batch = settings.setdefault("train_batch_size_per_learner", 64)
        settings = {"minibatch_size": batch // 2, "num_epochs": 1, **settings}
    return config_class().environment(env).update_from_dict(settings)


def two_agents(**settings: Any) -> Any:
    """`small` with two agents, 0 and 1, whose modules are "p0" and "p1"."""
    agents = {"env_config": {"num_agents": 2}, "policies": {"p0", "p1"}, "policy_mapping_fn": module_of_agent}
    return small(env=MultiAgentCartPole, **agents, **settings)


class ShortEnv(gym.Env[Any, Any]):
    """Episodes of `length` steps of reward 1 and zeros as observations; subclasses override what they are about."""

    observation_space: gym.Space[Any] = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space: gym.Space[Any] = gym.spaces.Discrete(2)
    length: ClassVar[float] = 5
    t = 0  # steps of this episode

    def __init__(self, config: Any = None) -> None:
        self.config = dict(config or {})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return self.observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        reward = self.reward(action)
        return self.observation(), reward, self.t >= self.length, False, {}

    def observation(self) -> Any:
        """Return the observation of step `t`."""
        return np.zeros(2, np.float32)

    def reward(self, action: Any) -> float:
        """Return the reward of the action that led to step `t`."""
        return 1.0


def listening(tmp_path: Path, *, num_env_runners: int = 0, batch: int = 240, **networking: Any) -> Any:
    return small(
        num_env_runners=num_env_runners,
        num_envs_per_env_runner=4,
        rollout_fragment_length=15,
        train_batch_size_per_learner=batch,
        minibatch_size=40,
        lr=1e-3,
    ).networking(**{"listen": "tcp://127.0.0.1:0", "join_file": str(tmp_path / "join.toml"), **networking})


def two_free_ports() -> int:
    """Return a port that is free, as is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return int(port)


class Command:
    """``rlzmq …`` (or another Python program) in a process of its own; its output is read as it comes."""

    def __init__(
        self, cwd: Path, *arguments: str, program: Sequence[str] = ("-m", "rlzmq"), **environment: str
    ) -> None:
        self.process: subprocess.Popen[bytes] = WarmPopen(
            [sys.executable, *program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={
                **os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(cwd),
                "PYTHONPATH": str(Path(__file__).parents[2]), **environment,
            },
        )  # fmt: skip
        self.output = ""

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        """Read until `text` has been printed."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(fd, 1 << 16) if ready else b""
            if not chunk:
                raise AssertionError(f"no {text!r} in:\n{self.output}")
            self.output += chunk.decode()

    def end(self, timeout_s: float = 60.0) -> int:
        """Wait for its end: the exit code."""
        rest, _ = self.process.communicate(timeout=timeout_s)
        self.output += rest.decode()
        return self.process.returncode

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def weights_of(algo: Any, module_id: str = "default_policy") -> dict[str, np.ndarray]:
    """Return a copy of a module's weights; `np.testing.assert_equal` compares two of them."""
    return {name: np.array(value) for name, value in algo.get_module(module_id).get_state().items()}


def assert_accounted(result: dict[str, Any]) -> dict[str, Any]:
    """Check that every sampled step is accounted for; return the account."""
    account: dict[str, Any] = result["accounting"]
    assert account["sampled"] == account["trained"] + sum(account["dropped"].values()) + account["pending"]
    assert account["pending"] >= 0
    assert account["sampled"] == result["num_env_steps_sampled_lifetime"]
    return account


def until(
    look: Callable[[], T | None],
    what: str | Callable[[], str] = "it",
    timeout_s: float = 60.0,
    every_s: float = 0.05,
) -> T:
    """Return the first true answer of `look`; fail with `what` after the time."""
    deadline = time.monotonic() + timeout_s
    while not (answer := look()):
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(every_s)
    return answer


def wait_for_text(
    read: Callable[[], str], pattern: str, after: int, describe: Callable[[], str], timeout_s: float = 120.0
) -> int:
    """Wait for a pattern in a log, after so many characters; return where it ends."""
    found = until(
        lambda: re.search(pattern, read()[after:]), lambda: f"{pattern!r}: {describe()}", timeout_s, 0.1
    )
    return after + found.end()


def ends_of(logs: Iterable[Path]) -> str:
    """Return the last lines of logs, for a failure."""
    return "\n".join(
        f"-- {log}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]) for log in logs
    )


def assert_accounts_in(log: str) -> None:
    """Check that every account in a log adds up; there is one."""
    found = re.findall(
        r"accounting: sampled (\d+) = trained (\d+) \+ dropped (\d+)(?: \(.*?\))? \+ pending (\d+)", log
    )
    assert found, log
    for sampled, *rest in found:
        assert int(sampled) == sum(map(int, rest))


async def until_async(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until something is so, while the loop works."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (facts of other objects, without events)
            await asyncio.sleep(0.005)
