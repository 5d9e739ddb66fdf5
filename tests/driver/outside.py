"""Runs that listen, and command-line peers that join them."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlzmq import PPOConfig
from tests.support.warm_process import WarmPopen


def listening(tmp_path: Path, *, num_env_runners: int = 0, batch: int = 240, **networking: Any) -> PPOConfig:
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=4, rollout_fragment_length=15)
        .training(train_batch_size_per_learner=batch, minibatch_size=40, num_epochs=1, lr=1e-3)
        .rl_module(model_config={"fcnet_hiddens": [16]})
        .debugging(seed=1)
        .networking(**{"listen": "tcp://127.0.0.1:0", "join_file": str(tmp_path / "join.toml"), **networking})
    )


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
        is_plain = tuple(program) == ("-m", "rlzmq") and "PYTHONPATH" not in environment
        self.process: subprocess.Popen[bytes] = (WarmPopen if is_plain else subprocess.Popen)(
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


def assert_accounted(result: dict[str, Any]) -> None:
    account = result["accounting"]
    assert account["sampled"] == account["trained"] + sum(account["dropped"].values()) + account["pending"]
