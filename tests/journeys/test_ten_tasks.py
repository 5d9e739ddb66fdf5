"""Ten tasks of a newcomer, as typed from the docs alone; each names the pages that lead there, in order."""

from __future__ import annotations

import ast
import itertools
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.journeys.terminal import Done, Terminal

_ROOT = Path(__file__).parents[2]
TINY = "--env-runners 0 --train-batch-size-per-learner 64 --minibatch-size 32 --num-epochs 1"

ELEVATOR = """
import time

import gymnasium as gym
import numpy as np


class Elevator(gym.Env):
    '''Bring the elevator to the floor where somebody waits.'''

    def __init__(self, config=None):
        self.config = {"price": 1.0, "step_s": 0.0, **(config or {})}
        self.observation_space = gym.spaces.Box(0.0, 1.0, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(3)
        self.calls = [True] * 6

    def observe(self):
        return np.array([self.floor / 6, self.goal / 6], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.floor, self.goal, self.t = 0, int(self.np_random.integers(1, 6)), 0
        return self.observe(), {}

    def step(self, action):
        time.sleep(self.config["step_s"])
        self.t += 1
        self.floor = int(np.clip(self.floor + action - 1, 0, 5))
        is_there = self.floor == self.goal and self.calls[self.floor]
        return self.observe(), 0.0 if is_there else -self.config["price"], is_there, self.t >= 20, {}
"""
WITH_BUG = ELEVATOR.replace("[True] * 6", "[True] * 3")


def typed(terminal: Terminal, line: str) -> Done:
    """A command that must succeed."""
    done = terminal.type(line)
    assert done.code == 0, done
    return done


def script(terminal: Terminal, text: str) -> str:
    """What a script prints."""
    (terminal.cwd / "script.py").write_text(text)
    return typed(terminal, "python script.py").out


def last_result(terminal: Terminal, run: str) -> Any:
    return json.loads((terminal.cwd / run / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """The newcomer's directory, with an env and a run of it in runs/elevator."""
    terminal = Terminal(tmp_path_factory.mktemp("newcomer"))
    (terminal.cwd / "my_envs.py").write_text(ELEVATOR)
    typed(
        terminal, f"rlzmq train ppo --env my_envs:Elevator {TINY} --stop iterations=2 --run-dir runs/elevator"
    )
    yield terminal
    assert not terminal.left_processes()
    terminal.close()


def test_an_own_env_with_a_bug(place: Terminal) -> None:
    """README.md, docs/how_to/index.md, docs/how_to/own_environment.md; 3 commands."""
    (place.cwd / "buggy.py").write_text(WITH_BUG)
    checked = place.type("rlzmq check-env buggy:Elevator")
    assert checked.code == 78, checked
    assert re.search(r"IndexError: list index out of range \(\S+buggy\.py:\d+ in step\)", checked.err), (
        checked
    )
    failed = place.type(f"rlzmq train ppo --env buggy:Elevator {TINY} --stop steps=10000")
    assert failed.code == 70, failed
    assert "self.calls[self.floor]" in failed.err, failed
    last = failed.err.splitlines()[-1]
    assert re.search(r"IndexError in step\(\): list index out of range \(\S+buggy\.py:\d+ in step\)", last), (
        last
    )
    assert last.index("correct the environment") < 400, "the remedy comes before what reproduces the error"
    assert "my_envs:Elevator: ok" in typed(place, "rlzmq check-env my_envs:Elevator").out


def test_save_load_act(place: Terminal) -> None:
    """README.md, docs/how_to/index.md, docs/how_to/save_load_act.md; 2 commands."""
    said = script(
        place,
        """
from my_envs import Elevator
from rlzmq import Policy

policy = Policy.load("runs/elevator")
env = Elevator()
observation, _ = env.reset(seed=1)
done = False
while not done:
    action = policy.compute_action(observation)
    observation, reward, terminated, truncated, _ = env.step(action)
    done = terminated or truncated
print("steps", env.t)
""",
    )
    assert 1 <= int(said.split()[1]) <= 20
    assert "length mean" in typed(place, "rlzmq evaluate runs/elevator --episodes 2").out


def test_a_wrong_reward_scale_is_found(place: Terminal) -> None:
    """README.md, docs/how_to/index.md, docs/how_to/not_learning.md; 2 commands."""
    line = f"rlzmq train ppo --env my_envs:Elevator --env-config price=25000 {TINY} --stop iterations=3"
    first, *_, third = re.findall(r"^iter .*", typed(place, f"{line} --run-dir runs/unscaled").out, re.M)
    assert "health" not in first
    assert "health rewards too large" in third
    finding = last_result(place, "runs/unscaled")["health"]["rewards too large"]
    assert "NormalizeReward" in finding["remedy"]
    scaled = typed(place, f"{line} --wrappers NormalizeReward")
    assert "health" not in scaled.out, scaled


def test_seeds_of_two_settings(place: Terminal) -> None:
    """README.md, docs/how_to/index.md, docs/runs.md; 3 commands, the first in a loop."""
    pytest.importorskip("matplotlib")
    runs = [
        place.start(
            f"rlzmq train ppo --env my_envs:Elevator {TINY} --lr {lr} --seed {seed} --stop iterations=1 --quiet "
            f"--run-dir runs/rates/{lr}-{seed}"
        )
        for lr in ("3e-4", "3e-3")
        for seed in (1, 2)
    ]
    assert [run.end().code for run in runs] == [0] * 4
    plotted = typed(place, "rlzmq plot runs/rates -o rates.png").out
    assert sorted(re.findall(r"lr=(\S+) \(2 runs\): ", plotted)) == ["0.0003", "0.003"], plotted
    assert (place.cwd / "rates.png").exists()
    assert "lr      seed" in typed(place, "rlzmq runs compare runs/rates").out


def test_lstm(place: Terminal) -> None:
    """README.md, docs/how_to/index.md, docs/how_to/own_model.md; 3 commands, of which one is a guess."""
    line = f"rlzmq train ppo --env my_envs:Elevator {TINY} --stop iterations=1 --run-dir runs/lstm"
    guessed = place.type(f"{line} --use-lstm true")
    assert "--model-config use_lstm=true" in guessed.err.splitlines()[-1], guessed
    typed(place, f"{line} --model-config use_lstm=true")
    said = script(
        place,
        """
from rlzmq import Policy

policy = Policy.load("runs/lstm")
policy.reset()
print(policy.compute_action([0.0, 0.5]), policy.get_state().keys() if hasattr(policy, "get_state") else "")
""",
    )
    assert said.split()[0] in "012"


def test_two_agents(place: Terminal) -> None:
    """README.md, docs/how_to/index.md, docs/how_to/several_agents.md; 3 commands."""
    page = (_ROOT / "docs/how_to/several_agents.md").read_text()
    env = page.partition("```python\n")[2].partition("config = (")[0]
    (place.cwd / "tug.py").write_text(env)
    line = f"rlzmq train ppo --env tug:TugOfWar {TINY} --stop iterations=2 --run-dir runs/tug"
    refused = place.type(line)
    assert refused.code == 78, refused
    flags = re.search(r"--policies \S+ --policy-mapping-fn \S+:\w+", refused.err.splitlines()[-1])
    assert flags, refused
    typed(place, f"{line} --overwrite {flags[0]}")
    result = last_result(place, "runs/tug")
    assert result["env_runners"]["agent_episode_return_mean"].keys() == {"left", "right"}
    assert {"left", "right"} <= result["learners"].keys()
    said = script(
        place,
        """
from rlzmq import Policy

print(Policy.load("runs/tug").compute_action({"left": [0.5], "right": [-0.5]}))
""",
    )
    assert "left" in said
    assert "right" in said


def test_tune(place: Terminal) -> None:
    """README.md, docs/how_to/index.md, docs/tune.md; 3 commands."""
    pytest.importorskip("optuna")
    line = "rlzmq tune ppo --env my_envs:Elevator"
    asked = place.type(line)
    assert asked.code == 78, asked
    assert "--lr 1e-4..1e-2:log" in asked.err.splitlines()[-1]
    done = typed(
        place, f"{line} {TINY} --lr 1e-4..1e-2:log --num-epochs 1,2 --trials 1 --stop steps=64 --name mine"
    )
    assert "2 trials ended, 0 failed" in done.out
    rate = re.search(r"^ +lr = (\S+)$", done.out, re.M)
    assert rate, done
    assert 1e-4 <= float(rate[1]) <= 1e-2
    assert re.search(r"^ +num_epochs = [12]$", done.out, re.M), done
    train = re.search(r"^train +(rlzmq train ppo --config .*)$", done.out, re.M)
    assert train, done
    typed(place, f"{train[1]} --stop iterations=1")


def test_record_and_bc(place: Terminal) -> None:
    """README.md, docs/how_to/index.md, docs/offline_data.md; 3 commands."""
    recorded = typed(place, "rlzmq record runs/elevator --output data/elevator --episodes 20")
    assert "20 episodes, return mean" in recorded.out
    cloned = typed(
        place,
        "rlzmq train bc --env my_envs:Elevator --input data/elevator --train-batch-size-per-learner 64 "
        "--evaluation-interval 2 --evaluation-duration 2 --stop iterations=2 --run-dir runs/bc",
    )
    assert re.search(r"^iter 2  steps \d+  .*loss \S+  evaluation -", cloned.out, re.M), cloned
    assert "return mean" in typed(place, "rlzmq evaluate runs/bc --episodes 1").out


def test_serve(place: Terminal) -> None:
    """README.md, docs/tour.md; 2 commands."""
    serving = place.start("rlzmq serve runs/elevator --port 0")
    url = serving.wait_for(r"http +(http://\S+)\n(?s:.*)token +(\S+)")
    said = script(
        place,
        f"""
import json
import urllib.request
from pathlib import Path

from rlzmq import Policy

headers = {{"Authorization": "Bearer " + Path("{url[2]}").read_text()}}
policy = Policy.load("runs/elevator")
for observation in ([0.0, 0.5], [1.0, 0.2], [0.5, 0.6]):
    body = json.dumps({{"obs": observation}}).encode()
    with urllib.request.urlopen(urllib.request.Request("{url[1]}/v1/act", body, headers)) as answer:
        print(json.load(answer)["action"], policy.compute_action(observation))
""",
    )
    serving.signal(signal.SIGTERM)
    assert serving.end().code == 0, serving.end()
    pairs = [line.split() for line in said.splitlines()]
    assert len(pairs) == 3
    assert all(served == own for served, own in pairs)


def test_a_slow_env(place: Terminal) -> None:
    """README.md, docs/how_to/index.md, docs/how_to/slow_env.md; 2 commands."""
    env = "my_envs:Elevator --env-config step_s=0.005"
    speed = re.search(r"^(\d+) steps/s", typed(place, f"rlzmq check-env {env} --steps 50").out, re.M)
    assert speed
    assert int(speed[1]) < 200
    trained = typed(
        place,
        f"rlzmq train appo --env {env} --env-runners 2 --envs-per-env-runner 2 --train-batch-size-per-learner 64 "
        "--min-time-s-per-iteration 1 --stop iterations=1 --run-dir runs/slow",
    )
    assert "bottleneck env" in trained.out, trained
    assert "num_env_runners" in last_result(place, "runs/slow")["bottleneck"]["advice"]


def test_the_pages_of_each_task_exist_and_lead_to_each_other() -> None:
    tree = ast.parse(Path(__file__).read_text())
    tasks = [
        ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and "command" in (ast.get_docstring(node) or "")
    ]
    assert len(tasks) == 10
    for task in tasks:
        pages = re.findall(r"\S+\.md", task)
        assert pages[0] == "README.md"
        assert 2 <= len(pages) <= 3
        for page, after in itertools.pairwise(pages):
            linked = {
                (_ROOT / page).parent / link
                for link in re.findall(r"\]\(([^)#]+\.md)\)", (_ROOT / page).read_text())
            }
            assert (_ROOT / after).resolve() in {path.resolve() for path in linked}, (
                f"{page} has no link to {after}"
            )
