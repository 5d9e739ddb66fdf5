"""A policy is trained by one script and used by others: here, by its user elsewhere, and by somebody else."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.terminal import Terminal

# Env, wrapper, callback and learner are classes of the script itself, the connector is a lambda.
TRAIN = """
import gymnasium as gym
import numpy as np
from rlzmq import PPOConfig, RLlibCallback
from rlzmq.algorithms.ppo.ppo_learner import PPOLearner
from rlzmq.connectors.env_to_module import MeanStdFilter

class Corridor(gym.Env):
    observation_space = gym.spaces.Box(0, 10, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = 0.0
        return np.array([self.x], np.float32), {}
    def step(self, action):
        self.x = max(0.0, self.x + (1 if action else -1))
        done = self.x >= 3
        return np.array([self.x], np.float32), 1.0 if done else -0.1, done, False, {}

class Halved(gym.RewardWrapper):
    def reward(self, reward):
        return reward / 2

class Quiet(RLlibCallback):
    pass

class OwnLearner(PPOLearner):
    pass

if __name__ == "__main__":
    config = (
        PPOConfig()
        .environment(Corridor, wrappers=[Halved, "TimeLimit(max_episode_steps=20)"])
        .env_runners(num_env_runners=0, env_to_module_connector=lambda env, spaces, device: MeanStdFilter())
        .training(train_batch_size_per_learner=100, minibatch_size=50, num_epochs=1, learner_class=OwnLearner)
        .callbacks(Quiet)
        .debugging(seed=1)
    )
    with config.build() as algo:
        algo.train()
        algo.save_to_path("corridor")
        print("acts", algo.compute_action(np.array([2.0], np.float32)))
"""

ACT = """
import numpy as np
from rlzmq import Policy

policy = Policy.load("corridor")
print("acts", policy.compute_action(np.array([2.0], np.float32)), policy.pipelines()["env_to_module_connector"])
"""

GO_ON = """
from rlzmq import Algorithm, evaluate_checkpoint
from rlzmq.connectors.env_to_module import MeanStdFilter
from train import Corridor, Halved, OwnLearner, Quiet

if __name__ == "__main__":
    print(evaluate_checkpoint(
        "corridor", env=Corridor, wrappers=["TimeLimit(max_episode_steps=20)"], num_episodes=2))
    algo = Algorithm.from_checkpoint(
        "corridor", env=Corridor, wrappers=[Halved, "TimeLimit(max_episode_steps=20)"], callbacks_class=Quiet,
        learner_class=OwnLearner, env_to_module_connector=lambda env, spaces, device: MeanStdFilter(),
    )
    with algo:
        print("iteration", algo.train()["training_iteration"])
"""

# A package of one's own, whose module acts.
PACKAGE = """
import torch
from rlzmq import RLModuleSpec, TorchRLModule, ValueFunctionAPI

class Tiny(TorchRLModule, ValueFunctionAPI):
    def setup(self):
        self.net = torch.nn.Linear(4, 3)
    def _forward(self, batch, **kwargs):
        return {"action_dist_inputs": self.net(batch["obs"])[..., :2]}
    def compute_values(self, batch, embeddings=None):
        return self.net(batch["obs"])[..., 2]
"""

TRAIN_PACKAGE = """
from rlzmq import PPOConfig, RLModuleSpec
from my_package import Tiny

if __name__ == "__main__":
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=Tiny))
        .training(train_batch_size_per_learner=100, minibatch_size=50, num_epochs=1)
    )
    with config.build() as algo:
        algo.train()
        algo.save_to_path("tiny")
"""

# One script that trains, and goes on if there is something to go on from. Everything is its own.
AGAIN = (
    TRAIN.partition("if __name__")[0]
    + PACKAGE
    + """
import os
from rlzmq import Algorithm

def pieces(env, spaces, device):
    return MeanStdFilter()

class Narrow(Tiny):
    def setup(self):
        self.net = torch.nn.Linear(1, 3)

if __name__ == "__main__":
    config = (
        PPOConfig()
        .environment(Corridor, wrappers=[Halved, "TimeLimit(max_episode_steps=20)"])
        .env_runners(num_env_runners=0, env_to_module_connector=pieces)
        .training(train_batch_size_per_learner=100, minibatch_size=50, num_epochs=1, learner_class=OwnLearner)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=Narrow))
        .callbacks(Quiet)
    )
    with Algorithm.from_checkpoint("again") if os.path.exists("again") else config.build() as algo:
        print("iteration", algo.train()["training_iteration"], type(algo.get_module()).__name__)
        algo.save_to_path("again")
"""
)

MODULE = """
from rlzmq import RLModule

print(type(RLModule.from_checkpoint("tiny")).__name__)
"""


@pytest.fixture(scope="module")
def at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """The terminal of the person who trained, with "corridor" and "tiny" in its directory."""
    terminal = Terminal(tmp_path_factory.mktemp("home"))
    for name, text in {"train": TRAIN, "my_package": PACKAGE, "train_package": TRAIN_PACKAGE}.items():
        (terminal.cwd / f"{name}.py").write_text(text)
    trained = terminal.start("python train.py"), terminal.start("python train_package.py")
    for done in (command.end() for command in trained):
        assert done.code == 0, done
    (terminal.cwd / "said").write_text(trained[0].out)
    yield terminal
    terminal.close()


def test_a_script_goes_on_with_its_own_code_and_no_other_script_finds_it(terminal: Terminal) -> None:
    (terminal.cwd / "again.py").write_text(AGAIN)
    for iteration in (1, 2):
        went_on = terminal.type("python again.py")
        assert f"iteration {iteration} Narrow" in went_on.out, went_on
    (terminal.cwd / "other.py").write_text("from rlzmq import Algorithm\nAlgorithm.from_checkpoint('again')")
    asked = terminal.type("python other.py")
    assert asked.code != 0, asked
    assert "learner_class (trains): OwnLearner, of another script" in asked.err, asked
    assert "--trust" not in asked.err, asked


def test_another_script_acts_evaluates_and_goes_on(at_home: Terminal) -> None:
    for name, text in {"act": ACT, "go_on": GO_ON, "module": MODULE}.items():
        (at_home.cwd / f"{name}.py").write_text(text)
    acted = at_home.type("python act.py")
    assert acted.code == 0, acted
    assert acted.out.startswith((at_home.cwd / "said").read_text().strip()), acted
    assert "MeanStdFilter" in acted.out

    asked = at_home.type("rlzmq evaluate corridor --episodes 2")
    assert asked.code != 0, asked
    assert "env (makes the environments): Corridor" in asked.err, asked
    assert "--env" in asked.err, asked
    assert "learner_class" not in asked.err, asked
    went_on = at_home.type("python go_on.py")
    assert went_on.code == 0, went_on
    assert "return mean" in went_on.out, went_on
    assert "iteration 2" in went_on.out, went_on

    (at_home.cwd / "elsewhere").mkdir()
    shutil.copytree(at_home.cwd / "tiny", at_home.cwd / "elsewhere" / "tiny")  # a copy is the user's, too
    module = at_home.type("python ../module.py", cwd=at_home.cwd / "elsewhere")
    assert (module.code, module.out) == (0, "Tiny\n"), module


def test_a_policy_of_a_script_is_served_and_exported(at_home: Terminal) -> None:
    serving = at_home.start("rlzmq serve corridor --port 0")
    serving.wait_for("http  ")
    serving.signal(signal.SIGTERM)
    assert serving.end().code == 0, serving.end()
    exported = at_home.type("rlzmq export corridor --format pt2 --observations 10")
    assert exported.code == 0, exported
    place = re.search(r"exported\s+(\S+\.pt2)", exported.out)
    assert place, exported
    assert (at_home.cwd / place[1]).exists(), exported


def test_somebody_elses_checkpoint_names_what_it_wants_and_how_to_allow_it(
    at_home: Terminal, terminal: Terminal
) -> None:
    for name in ("corridor", "tiny"):
        shutil.copytree(at_home.cwd / name, terminal.cwd / name)
    shutil.copy(at_home.cwd / "my_package.py", terminal.cwd)
    (terminal.cwd / "act.py").write_text(ACT)
    acted = terminal.type("python act.py")  # nothing that acts is of another package
    assert acted.code == 0, acted

    (terminal.cwd / "module.py").write_text(MODULE)
    refused = terminal.type("python module.py"), terminal.type("rlzmq evaluate tiny --episodes 1")
    for done in refused:
        assert done.code != 0, done
        assert "my_package:Tiny" in done.err, done
        assert "module_class=" in done.err, done
        assert "trust=['" in done.err, done
    assert "--trust my_package" in refused[1].err, refused[1]
    trusted = terminal.type("rlzmq evaluate tiny --episodes 1 --trust my_package")
    assert trusted.code == 0, trusted


def test_a_secret_that_others_could_read_signs_nothing(at_home: Terminal, terminal: Terminal) -> None:
    secret = Path(".local/state/rlzmq/signing.key")
    assert (at_home.home / secret).stat().st_mode & 0o777 == 0o600
    shutil.copytree(at_home.home / ".local", terminal.home / ".local")
    shutil.copytree(at_home.cwd / "tiny", terminal.cwd / "tiny")
    shutil.copy(at_home.cwd / "my_package.py", terminal.cwd)
    (terminal.cwd / "module.py").write_text(MODULE)
    assert terminal.type("python module.py").code == 0
    (terminal.home / secret).chmod(0o644)
    refused = terminal.type("python module.py")
    assert refused.code == 1, refused
    assert "signing.key" in refused.err, refused
