"""doctor, check-env, inspect, replay, top, stacks: what they print and how they end, top on a terminal too."""

from __future__ import annotations

import fcntl
import math
import os
import pty
import re
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import ConfigurationError, PPOConfig
from rlzmq.cli.doctor import REQUIRED
from rlzmq.cli.looking import format_status
from rlzmq.cli.main import main
from rlzmq.core.process import find_stack_channel, read_stacks
from rlzmq.protocol.broker.core import BrokerCore, BrokerOptions
from rlzmq.roles.runner_role import make_env_runner
from rlzmq.telemetry.dashboard.watched import Rates
from rlzmq.telemetry.run_directory import RunDirectory
from rlzmq.wire.messages import Fragment
from rlzmq.wire.payloads import encode_fragment, fragment_to_bytes
from tests.support.runs import Command, ShortEnv, listening, small
from tests.support.warm_process import WarmPopen


class Broken(ShortEnv):
    """Observations out of their space, an infinite reward, and no regard for seeds."""

    observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
    length = math.inf

    def observation(self) -> Any:
        return np.full(2, 7, np.float32) if self.t else np.random.default_rng().random(2, np.float32)

    def reward(self, action: int) -> float:
        return math.inf


def test_doctor_finds_this_machine_well_and_a_taken_port_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert set(REQUIRED) == {line.partition(">")[0] for line in project["dependencies"]}
    for what in (*REQUIRED, "python", "keys", "open files", "ipc", "loopback", "torch threads"):
        assert what in out
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["doctor", "--listen", f"tcp://127.0.0.1:{port}"]) == 78
    assert f"FAIL  port {port}" in capsys.readouterr().out


def test_check_env_tells_good_from_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-env", "CartPole-v1", "--steps", "100"]) == 0
    assert "CartPole-v1: ok" in capsys.readouterr().out
    assert main(["check-env", f"{__name__}:Broken", "--steps", "5"]) == 78
    problems = capsys.readouterr().err
    assert "same seed" in problems
    assert "outside of" in problems
    assert "reward is not finite" in problems


class Texts(ShortEnv):
    """An observation space that Gymnasium's checker has nothing against."""

    observation_space = gym.spaces.Text(5)

    def observation(self) -> str:
        return "abc"


class TwoRewards(ShortEnv):
    """A reward that is no number."""

    def reward(self, action: int) -> Any:
        return np.array([0.5, 1.0])


def test_check_env_refuses_what_training_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        PPOConfig().environment(f"{__name__}:Texts").env_runners(num_env_runners=0).build()
    assert main(["check-env", f"{__name__}:Texts", "--steps", "5"]) == 78
    said = capsys.readouterr()
    assert f"problem: training refuses it: {caught.value}" in said.err
    assert said.out.endswith("Texts: 1 problem\n")
    assert main(["check-env", f"{__name__}:TwoRewards", "--steps", "5"]) == 78
    said = capsys.readouterr()
    assert "training refuses it: " in said.err
    assert "expected a reward that is one number" in said.err
    assert "\x1b" not in said.out


def test_inspect_shows_spaces_pieces_columns_and_modules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "ppo", "--env", "CartPole-v1"]) == 0
    out = capsys.readouterr().out
    for what in ("observations  Box", "actions       Discrete(2)", "GetActions", "action_logp", "parameters"):
        assert what in out


def _quarantined(tmp_path: Path, *, poisoned: bool) -> Path:
    config = PPOConfig().environment("CartPole-v1").env_runners(num_env_runners=0).debugging(seed=1)
    runner = make_env_runner(config, 0)
    batch = runner.sample_lease(20)
    runner.stop()
    header, arrays = batch.to_wire()
    if poisoned:
        arrays = [array.copy() for array in arrays]
        next(array for array in arrays if array.dtype == np.float32).flat[3] = np.nan
    fragment = Fragment("uuid", 1, 5, 9, batch.num_env_steps, 0, 3, header)
    path = tmp_path / "x.fragment"
    path.write_bytes(fragment_to_bytes(encode_fragment(fragment, arrays)))
    (tmp_path / "x.json").write_text('{"id": "x", "reason": "death_limit"}')
    config.to_toml(tmp_path / "config.toml")
    (tmp_path / "run.json").write_text('{"command": [], "algorithm": "PPO"}')
    (tmp_path / "metrics.jsonl").touch()
    return path


def test_ckpt_diff_shows_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def saved(name: str, width: int, num_iterations: int) -> str:
        with small(
            num_envs_per_env_runner=1, minibatch_size=64, model_config={"fcnet_hiddens": [width]}, seed=0
        ).build() as algo:
            for _ in range(num_iterations):
                algo.train()
            return algo.save_to_path(tmp_path / name)

    new, trained, wide = saved("new", 4, 0), saved("trained", 4, 1), saved("wide", 5, 0)
    module = "learner_group/learner/rl_module/default_policy"
    assert main(["ckpt", "diff", new, str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.splitlines() == [f"A  {new}", f"B  {new}", "nothing differs"]

    assert main(["ckpt", "diff", new, trained]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "accounting  trained  0 → 64" in lines
    assert "learner_group/learner/counters  num_gradient_updates_lifetime  0 → 1" in lines
    (weights,) = [line for line in lines if line.startswith(module)]
    assert re.fullmatch(
        rf"{module}  8 of 8 values differ, the largest difference is [45][.0-9]*e-05 in \S+", weights
    )  # 5e-5 is the lr, and the length of Adam's first step
    assert not [line for line in lines if line.startswith("config")]

    assert main(["ckpt", "diff", new, wide]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "config  model_config/fcnet_hiddens  [4] → [5]" in lines
    assert f"{module}  encoder.layers.0.weight  (4, 4) float32 → (5, 4) float32" in lines


def test_replay_shows_the_poison_and_trains_a_healthy_fragment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(_quarantined(tmp_path, poisoned=True))]) == 0
    out = capsys.readouterr().out
    assert "quarantined: death_limit" in out
    assert "NOT FINITE at 1 places" in out
    assert main(["replay", str(_quarantined(tmp_path, poisoned=False)), "--run-dir", str(tmp_path)]) == 0
    assert "trained: " in capsys.readouterr().out
    torn = tmp_path / "torn.fragment"
    torn.write_bytes((tmp_path / "x.fragment").read_bytes()[:-3])
    assert main(["replay", str(torn)]) == 78
    for text in ('{"id": "x", "rea', "[]"):
        (tmp_path / "x.json").write_text(text)
        assert main(["replay", str(tmp_path / "x.fragment")]) == 78
        assert "x.json does not say why" in capsys.readouterr().err


def test_top_says_what_a_broker_does() -> None:
    status = {
        **BrokerCore(BrokerOptions("run-of-ours", 1)).status(),
        "loop_lag_s": 0.001, "max_loop_lag_s": 0.01, "num_messages": 3, "num_unsent": 0,
        "connections": {"opened": 3, "let_in": 1, "refused_keys": {"unknown key": 2}, "failed_handshakes": {}},
    }  # fmt: skip
    rates = Rates()
    assert rates.update(status, 1.0) == {}
    status["accounting"]["sampled"] += 50
    text = "\n".join(format_status(status, rates.update(status, 2.0), "ipc:///x"))
    assert "50 sampled/s" in text
    assert "1 let in  2 turned away: unknown key 2" in text
    assert "STANDS STILL" not in text
    judged = {**status, "bottleneck": "env: add\x1b runners"}
    assert "bottleneck  env: add\\x1b runners" in format_status(judged, {}, "ipc:///x")
    text = "\n".join(format_status({**status, "still_s": 12.0}, {}, "ipc:///x"))
    assert "nothing has moved for 12 s; what each peer waits for:\n  broker: waits for a driver" in text


@pytest.mark.parametrize("arguments", [["presets"], ["train"]])
def test_a_reader_that_has_ended_is_no_error(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "rlzmq", *arguments]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=120, check=False)
    finally:
        os.close(writing)
    assert "BrokenPipe" not in done.stderr.decode()
    assert done.returncode in (141, 2), "2: usage, on stderr"


def test_an_output_that_is_closed_from_the_start_is_no_error() -> None:
    command = f"exec {shlex.quote(sys.executable)} -m rlzmq presets >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()


# -- stacks --------------------------------------------------------------------------------------------


class Hangs(ShortEnv):
    def reward(self, action: Any) -> float:
        print("in step", flush=True)
        return self.wait_for_what_never_comes()

    def wait_for_what_never_comes(self) -> float:
        threading.Event().wait()
        return 0.0


def test_the_place_where_a_runner_hangs_is_shown_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = "tests.cli.test_looking_commands:Hangs"
    arguments = ["train", "ppo", "--env", env, "--env-runners", "1", "--run-dir", "run"]
    with Command(tmp_path, *arguments) as train:
        train.wait_for("in step")
        for _ in range(2):
            assert main(["stacks", str(tmp_path / "run")]) == 0
            parts = capsys.readouterr().out.split("=== ")[1:]
            by_role = {part.split(" (pid ")[0]: part for part in parts}
            assert parts[0].startswith(f"driver (pid {train.process.pid})")
            assert "cli/train.py" in by_role["driver"]
            assert by_role["runner-0"].count("wait_for_what_never_comes") == 1, "only those of this call"
            assert any("broker" in role for role in by_role)
        assert train.process.poll() is None
    assert main(["stacks", str(tmp_path / "run")]) == 78
    assert "its driver has ended" in capsys.readouterr().err


HOLDS_THE_GIL = """
import ctypes
from rlzmq.core.process import open_stack_channel

open_stack_channel("holds")
ctypes.PyDLL(None).system(b"echo ready; cat")
"""


def test_stacks_are_written_by_a_process_that_holds_the_gil() -> None:
    with WarmPopen(
        [sys.executable, "-c", HOLDS_THE_GIL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            found = find_stack_channel(process.pid)
            assert found is not None
            assert '"<string>", line' in read_stacks(process.pid, found[1])
            assert process.poll() is None
        finally:
            process.kill()


def test_a_process_without_a_channel_is_never_signalled_and_wrong_runs_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert find_stack_channel(process.pid) is None
        process.communicate(b"\n")
    assert find_stack_channel(process.pid) is None
    assert main(["stacks", str(tmp_path)]) == 78
    assert "is not a run directory" in capsys.readouterr().err
    directory = RunDirectory.create(tmp_path / "far", PPOConfig().environment("CartPole-v1"))
    text = (directory.path / "run.json").read_text()
    (directory.path / "run.json").write_text(text.replace('"host": "', '"host": "far-'))
    assert main(["stacks", str(directory.path)]) == 78
    assert "run rlzmq stacks there" in capsys.readouterr().err
    directory.close()


# -- top on a terminal ---------------------------------------------------------------------------------


class Terminal:
    """``rlzmq top`` with a terminal of its own."""

    def __init__(self, cwd: Path, *arguments: str, rows: int, columns: int) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlzmq", "top", *arguments],
            stdin=slave, stdout=slave, stderr=slave, cwd=cwd, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        os.close(slave)
        self.screen = ""

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> None:
        """Read what it draws until `pattern` was drawn."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.screen):
            assert self._read(max(0.0, deadline - time.monotonic())), self.screen[-3000:]

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        try:
            chunk = os.read(self._master, 1 << 16) if ready else b""
        except OSError:  # EIO: nobody holds the other end any more
            chunk = b""
        self.screen += chunk.decode(errors="replace")
        return bool(chunk)

    def end(self) -> int:
        """Read to its end: the exit code."""
        while self._read(30.0):
            pass
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_top_draws_a_live_run_in_place_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    observer = str(tmp_path / "join.observer.toml")
    with listening(tmp_path, num_env_runners=1).build() as algo:
        is_over = threading.Event()

        def train() -> None:
            while not is_over.is_set():
                algo.train()

        training = threading.Thread(target=train)
        training.start()
        terminals = [
            Terminal(tmp_path, observer, "--interval", "0.1", rows=40, columns=120),
            Terminal(tmp_path, observer, "--interval", "0.1", "--timeout", "1", rows=8, columns=60),
        ]
        watching, small = terminals
        try:
            for terminal in terminals:
                terminal.wait_for(r"run \w{8} at tcp://")
                terminal.wait_for(r"\d+ sampled/s")
            watching.wait_for(r"runner-0 .* ok")
            assert "\x1b[" in watching.screen  # drawn in place
            assert "door      " in watching.screen
            watching.process.send_signal(signal.SIGINT)
            assert watching.end() == 130
            assert watching.screen.rstrip().endswith(("\x1b[?25h", "interrupted")), watching.screen[-200:]
            assert "Traceback" not in watching.screen
            is_over.set()
            training.join()
            algo.stop()
            assert small.end() == 69  # the run is over
            assert "no broker at tcp://" in small.screen.replace("\r\n", " ")
            assert "\x1b[?25h" in small.screen  # the cursor is there again
            assert "Traceback" not in small.screen
        finally:
            is_over.set()
            for terminal in terminals:
                terminal.close()
