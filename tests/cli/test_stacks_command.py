"""rlzmq stacks: what each process of a run is doing, also of one that hangs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlzmq import PPOConfig
from rlzmq.cli.main import main
from rlzmq.core.process import find_stack_channel, read_stacks
from rlzmq.telemetry.run_directory import RunDirectory
from tests.support.warm_process import WarmPopen

# As root it may read every process; others only where the kernel permits it.
PY_SPY = os.geteuid() == 0 and shutil.which("py-spy", path=str(Path(sys.executable).parent))
HANGS = """
import gymnasium as gym, numpy as np, threading

class Hangs(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        print("in step", flush=True)
        self.wait_for_what_never_comes()

    def wait_for_what_never_comes(self):
        threading.Event().wait()
"""


def test_the_place_where_a_runner_hangs_is_shown_and_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_hangs.py").write_text(HANGS)
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    arguments = ["train", "ppo", "--env", "my_hangs:Hangs", "--env-runners", "1", "--run-dir", "run"]
    train: subprocess.Popen[str] = WarmPopen(
        [sys.executable, "-m", "rlzmq", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    try:
        assert train.stdout is not None
        for line in train.stdout:
            if "in step" in line:
                break
        for by_py_spy in (False, False, *([True] if PY_SPY else [])):
            with pytest.MonkeyPatch.context() as patch:
                if not by_py_spy:
                    patch.setattr("shutil.which", lambda *args, **kwargs: None)
                assert main(["stacks", str(tmp_path / "run")]) == 0
            parts = capsys.readouterr().out.split("=== ")[1:]
            by_role = {part.split(" (pid ")[0]: part for part in parts}
            assert parts[0].startswith(f"driver (pid {train.pid})")
            assert "cli/train.py" in by_role["driver"]
            assert by_role["runner-0"].count("wait_for_what_never_comes") == 1, "only those of this call"
            assert ("Python v3." in by_role["runner-0"]) is by_py_spy
            assert any("broker" in role for role in by_role)
        assert train.poll() is None
    finally:
        train.kill()
        train.communicate(timeout=30)
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
