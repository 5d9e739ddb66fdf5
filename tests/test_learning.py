"""Tasks of scripts/learn.py and learn_offline.py are learned within their budgets; docs/learning.md has the figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlzmq import ConfigurationError
from rlzmq.envs.registry import make_env
from scripts import learn, learn_peers

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


def test_the_table_beside_the_peer_has_the_value_at_the_end_of_each_tasks_env_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "CartPole-v1 PPO"
    monkeypatch.setattr(learn_peers, "CURVES", tmp_path / "curves.jsonl")
    monkeypatch.setattr("scripts.bench._peers.python_of", lambda peer: Path(sys.executable))
    for library, last in (("rlzmq", 500.0), ("sb3", 300.0)):
        for seed in (1, 2):
            path = learn_peers.path_of(tmp_path, library, name, seed)
            path.mkdir(parents=True)
            (path / "run.json").write_text(json.dumps({"command": [], "env": "CartPole-v1", "seed": seed}))
            with (path / "metrics.jsonl").open("w") as file:
                for steps, value in [
                    (0, 0.0),
                    (40_000, last + seed),
                    (80_000, 0.0),
                ]:  # what comes later is not used
                    result = {
                        "training_iteration": 1 + steps // 40_000,
                        "num_env_steps_sampled_lifetime": steps,
                    }
                    file.write(json.dumps({**result, "env_runners": {"episode_return_mean": value}}) + "\n")
    learn_peers.train(tmp_path, [name], [1, 2])  # all have finished: only their curves are kept
    learn_peers.train(tmp_path, [name], [1, 2])
    assert len(learn_peers.finished()) == 4
    *_, row = learn_peers.table([name]).splitlines()
    assert row == "| CartPole-v1 PPO | 40k | 502 [501, 502] | 302 [301, 302] |"
    learn_peers.plot([name], tmp_path / "curves.png")
