"""Runs of several processes: equal to serial, no torch in the driver, random kills, nothing is left."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from recovery_runs import large, small

from rlzmq import PPOConfig, PPOLearner, register_env
from rlzmq.core import faults
from rlzmq.envs.examples import MultiAgentCartPole, module_of_agent
from scripts.nemesis import ROLES, Nemesis
from tests.support.fault_history import check_history, read_history
from tests.support.runs import Command, ShortEnv


class NotesAgentSteps(PPOLearner):
    """Writes each agent step that this rank trains, and the number of slots that its batches hold."""

    def update(self, *, episodes: Any = None, **kwargs: Any) -> Any:
        lines = [f"slots {sum(group.num_slots for batch in episodes for group in batch.agent_batches)}"]
        for episode in (episode for batch in episodes for episode in batch):
            for agent_id, own in episode.agent_episodes.items():
                columns = own.get_observations(), own.get_actions(), own.get_rewards()
                for t, (observation, action, reward) in enumerate(zip(*columns, strict=False), own.t_started):
                    lines.append(f"{agent_id} {t} {observation.tobytes().hex()} {action} {reward}")
        folder = Path(os.environ["NOTED_STEPS"])
        index = len(list(folder.glob(f"{os.getpid()}-*")))
        (folder / f"{os.getpid()}-{index}").write_text("\n".join(lines))
        return super().update(episodes=episodes, **kwargs)


def test_two_ranks_get_the_agents_steps_of_the_serial_run_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[list[list[str]]] = []
    for num_env_runners, num_learners in ((0, 0), (1, 2)):
        folder = tmp_path / f"{num_learners}"
        folder.mkdir()
        monkeypatch.setenv("NOTED_STEPS", str(folder))
        config = (
            small(num_env_runners, num_learners)
            .environment(MultiAgentCartPole, env_config={"num_agents": 2})
            .multi_agent(policies={"p0", "p1"}, policy_mapping_fn=module_of_agent)
            .learners(learner_class=NotesAgentSteps)
            .training(lr=0.0)
        )
        with config.build() as algo:
            for _ in range(3):
                algo.train()
        noted.append([[path.read_text() for path in sorted(folder.glob(f"*-{index}"))] for index in range(3)])
    for (whole,), parts in zip(*noted, strict=True):
        assert len(parts) == 2
        slots, *expected = whole.splitlines()
        found = [part.splitlines() for part in parts]
        assert sorted(line for part in found for line in part[1:]) == sorted(expected)
        # Only the episodes on the border have slots in both.
        assert max(int(part[0].split()[1]) for part in found) < 0.75 * int(slots.split()[1])


class TenSteps(ShortEnv):
    length = 10


def test_names_registered_by_the_user_are_known_in_the_processes() -> None:
    register_env("ten-steps", lambda env_config: TenSteps())
    gym.register("TenSteps-v0", entry_point=TenSteps)
    for name in ("ten-steps", "TenSteps-v0"):
        with small(1, 0).environment(name).build() as algo:
            assert algo.train()["env_runners"]["episode_return_mean"] == 10.0


SCRIPT = """
from tests.driver.recovery_runs import small
from tests.support.runs import Command, ShortEnv

class Mine(ShortEnv):
    length = 10

algo = small(2, 2).environment(Mine).build()
for _ in range(3):
    algo.train()
print("trained", flush=True)
while True:
    algo.train()
"""


def test_nothing_is_left_when_the_script_is_killed(tmp_path: Path) -> None:
    with Command(tmp_path, SCRIPT, program=("-c",)) as script:
        script.wait_for("trained")
        family = psutil.Process(script.process.pid).children(recursive=True)
        assert len(family) >= 6  # fork server, broker, 2 runners, 2 learners
        maps = {area.path for each in family for area in each.memory_maps()}
        shared_memory = [Path(path) for path in maps if path.startswith("/dev/shm/")]
        script.process.kill()
        script.end()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert [path for path in shared_memory if path.exists()] == []
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("rlzmq")] == []


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
    "train", "ppo", "--env", "CartPole-v1", "--num-env-runners", "1", "--num-learners", "1", "--run-dir", sys.argv[1],
    "--batch-size-per-learner", "400", "--stop", "iterations=1",
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


def segments_in(pid: int) -> set[int]:
    """Inodes of the segments that a process has opened."""
    inodes = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "rlzmq_segment" in os.readlink(path):
                inodes.add(path.stat().st_ino)
        except FileNotFoundError:
            continue
    return inodes


def train(config: PPOConfig, check: Callable[[], None] | None = None) -> dict[str, np.ndarray]:
    with config.build() as algo:
        for _ in range(3):
            algo.train()
        if check is not None:
            check()
        return dict(algo.get_module().get_state())


@pytest.fixture(scope="module")
def serial_weights() -> dict[str, np.ndarray]:
    return train(large(0, 0))


@pytest.mark.parametrize(
    ("num_env_runners", "num_learners"), [(1, 1), pytest.param(1, 0, marks=pytest.mark.slow), (0, 1)]
)
def test_fragments_in_shared_memory_are_trained_bit_for_bit_as_in_a_serial_run(
    num_env_runners: int, num_learners: int, serial_weights: dict[str, np.ndarray]
) -> None:
    def check() -> None:
        runners = psutil.Process().children(recursive=True) if num_env_runners else [psutil.Process()]
        assert any(segments_in(process.pid) for process in runners), "else this test shows nothing"

    np.testing.assert_equal(train(large(num_env_runners, num_learners), check), serial_weights)
    gc.collect()
    assert segments_in(os.getpid()) == set()


def test_without_shared_memory_the_run_is_the_same(
    monkeypatch: pytest.MonkeyPatch, serial_weights: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "memfd_create", refuse)  # the runner is in this process
    np.testing.assert_equal(train(large(0, 1)), serial_weights)
    assert len([text for text in caplog.messages if "No space left on device" in text]) == 1


@pytest.fixture
def history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where every process of the test's run, this one too, says what it did."""
    with monkeypatch.context() as patch:
        patch.setenv("RLZMQ_HISTORY", str(tmp_path))
        faults.arm("driver")
        yield tmp_path
    faults.arm("driver")  # as the variables say: nothing any more


@pytest.mark.timeout(300)
async def test_kills_of_all_roles_lose_nothing_and_leave_nothing(history: Path) -> None:
    async with large(2, 2).training(staleness=1).build_async() as algo:
        nemesis = Nemesis(algo, num_kills=4, roles=list(ROLES), seed=5, how="kill", is_impatient=True)
        await nemesis.run()
        children = psutil.Process().children(recursive=True)
        assert any(segments_in(child.pid) for child in children), "else this test shows nothing"
    assert "0 lost, 0 trained twice" in str(check_history(read_history(history)))
    gc.collect()
    assert segments_in(os.getpid()) == set()
    assert not any(child.is_running() and segments_in(child.pid) for child in children)
    assert not [name for name in os.listdir("/dev/shm") if "rlzmq" in name]


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [8, 15])
async def test_kills_each_long_before_everybody_is_back(history: Path, num_kills: int) -> None:
    async with small(2, 2).build_async() as algo:
        roles = list(ROLES)
        nemesis = Nemesis(algo, num_kills=num_kills, roles=roles, seed=3, how="kill", is_impatient=True)
        await nemesis.run()
    verdict = check_history(read_history(history))
    assert verdict.num_killed == num_kills, "each of them seen in the exit status"
    assert set(nemesis.gaps_s) == set(ROLES), "runners, learner ranks and the broker were all hit"
    assert "0 lost, 0 trained twice" in str(verdict)
