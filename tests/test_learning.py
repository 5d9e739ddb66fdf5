"""Tasks of scripts/learn.py and learn_offline.py are learned within their budgets; docs/learning.md has the figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlzmq import ConfigurationError
from rlzmq.envs.registry import make_env
from scripts import learn

SCRIPT = Path(learn.__file__)
SEED = 1


def test_cartpole_gets_to_150_within_40k_env_steps() -> None:
    outcome = learn.learn("cartpole", "serial", SEED, target=150.0, budget=40_000)
    assert outcome.reached, outcome


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", ["serial", "distributed"])
@pytest.mark.parametrize("task", learn.TASKS)
def test_the_target_is_reached_within_the_budget(task: str, mode: str) -> None:
    try:
        make_env(learn.configure(learn.TASKS[task], "serial", SEED).env_entry()).close()
    except ConfigurationError as error:  # its library is an extra
        pytest.skip(str(error))
    command = [sys.executable, str(SCRIPT), task, "--mode", mode, "--seeds", str(SEED), "--verbose"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1150, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("mode", ["serial", "distributed"])
@pytest.mark.parametrize("tasks", [("bc", "marwil"), ("cql", "iql")], ids="-".join)
def test_the_target_is_reached_from_recorded_data(tasks: tuple[str, ...], mode: str) -> None:
    script = SCRIPT.with_name("learn_offline.py")
    command = [sys.executable, str(script), "--tasks", *tasks, "--mode", mode, "--seeds", str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2350, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
