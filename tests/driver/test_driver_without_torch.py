"""A driver whose env runners and learners are other processes does not import torch, which takes 134 MB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Reports where the driver imports torch.
_BEGIN = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name != "torch", "the driver imports torch"
refuse = Refuse()
sys.meta_path.insert(0, refuse)
"""

_PROGRAM = """
from rlzmq.cli.main import main
assert 0 == main([
    "train", "ppo", "--env", "CartPole-v1", "--num-env-runners", "2", "--num-learners", "1", "--run-dir", sys.argv[1],
    "--batch-size-per-learner", "400", "--stop", "iterations=2",
])
assert "torch" not in sys.modules

from rlzmq import Algorithm, DQNConfig, PPOConfig
from rlzmq.envs.examples import MultiAgentCartPole, module_of_agent

def remote(config):
    return config.env_runners(num_env_runners=1).learners(num_learners=1).debugging(seed=1)

# A default module that is the algorithm's own, with checkpoints and remote evaluation.
config = remote(DQNConfig()).environment("CartPole-v1").training(
    train_batch_size_per_learner=8, num_steps_sampled_before_learning_starts=8
).reporting(min_sample_timesteps_per_iteration=40).evaluation(
    evaluation_num_env_runners=1, evaluation_interval=1, evaluation_duration=1
)
with config.build() as algorithm:
    algorithm.train()
    path = algorithm.save_to_path(sys.argv[2])
with Algorithm.from_checkpoint(path) as algorithm:
    algorithm.train()

# Several modules, and a connector with state.
config = remote(PPOConfig()).environment(MultiAgentCartPole, env_config={"num_agents": 2}).multi_agent(
    policies={"p0", "p1"}, policy_mapping_fn=module_of_agent
).training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1)
with config.build() as algorithm:
    algorithm.train()
    algorithm.save_to_path(sys.argv[2])
    assert "torch" not in sys.modules

    # It is imported when the caller asks for a module.
    sys.meta_path.remove(refuse)
    assert algorithm.get_module("p1").get_state()
    assert "torch" in sys.modules
"""


def test_a_driver_of_remote_runners_and_learners_imports_no_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BEGIN + _PROGRAM, str(tmp_path / "run"), str(tmp_path / "saved")],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
