"""Runs through broker, runner and learner processes: equal to serial, ended without leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import pytest
from recovery_runs import small

from rlzmq import PPOLearner, register_env
from rlzmq.envs.examples import MultiAgentCartPole, module_of_agent
from tests.support.runs import ShortEnv
from tests.support.warm_process import WarmPopen


def train(config: Any, iterations: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
        return result, dict(algo.get_module().get_state())


@pytest.fixture(scope="module")
def serial_weights() -> dict[str, np.ndarray]:
    return train(small(0, 0), 4)[1]


@pytest.mark.parametrize(("num_env_runners", "num_learners"), [(1, 1), (1, 0), (0, 1)])
def test_one_runner_and_one_learner_equal_the_serial_run_bit_for_bit(
    num_env_runners: int, num_learners: int, serial_weights: dict[str, np.ndarray]
) -> None:
    _, weights = train(small(num_env_runners, num_learners), 4)
    assert weights.keys() == serial_weights.keys()
    for name, value in serial_weights.items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)


def test_two_runners_and_two_learners_train_whole_batches_on_equal_weights() -> None:
    with small(2, 2).build() as algo:
        for _ in range(3):
            result = algo.train()
        hashes = algo.learner_group.foreach_learner(lambda learner: learner.parameter_hash())
        assert len(set(hashes)) == 1
        assert len(hashes) == 2
    account = result["accounting"]
    assert account["trained"] >= 720
    assert account["sampled"] == account["trained"] + sum(account["dropped"].values()) + account["pending"]
    assert result["fault_tolerance"]["num_healthy_workers"] == 2
    assert result["learners"]["default_policy"]["weights_seq_no"] == 3


def test_a_distributed_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    with small(1, 2).build() as algo:
        algo.train()
        path = algo.save_to_path(tmp_path / "c")
        saved = algo.get_module().get_state()
        algo.train()
        algo.restore_from_path(path)
        for name, value in algo.get_module().get_state().items():
            np.testing.assert_array_equal(value, saved[name])
        result = algo.train()
    assert result["learners"]["default_policy"]["weights_seq_no"] == 2
    assert result["training_iteration"] == 2
    account = result["accounting"]
    assert account["trained"] >= 480
    assert account["sampled"] == account["trained"] + sum(account["dropped"].values()) + account["pending"]


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


def test_groups_sample_and_train_for_custom_steps() -> None:
    with small(2, 2).build() as algo:
        episodes = algo.env_runner_group.sample(num_timesteps=100)
        assert sum(len(episode) for episode in episodes) >= 100
        results = algo.learner_group.update(episodes=episodes)
        assert len(results) == 2
        algo.sync_weights()
        kinds = algo.env_runner_group.foreach_env_runner(lambda runner: type(runner).__name__)
        assert kinds == ["SingleAgentEnvRunner"] * 2


class Broken(ShortEnv):
    def reward(self, action: Any) -> float:
        raise ZeroDivisionError("the env's own mistake")


class TenSteps(Broken):
    def step(self, action: Any) -> Any:
        self.t = getattr(self, "t", 0) + 1
        return np.zeros(2, np.float32), 1.0, self.t % 10 == 0, False, {}


def test_names_registered_by_the_user_are_known_in_the_processes() -> None:
    register_env("ten-steps", lambda env_config: TenSteps())
    with small(1, 0).environment("ten-steps").build() as algo:
        assert algo.train()["env_runners"]["episode_return_mean"] == 10.0
    gym.register("TenSteps-v0", entry_point=TenSteps)
    with small(1, 0).environment("TenSteps-v0").build() as algo:
        assert algo.train()["env_runners"]["episode_return_mean"] == 10.0


SCRIPT = """
import sys
from rlzmq import PPOConfig
import gymnasium as gym, numpy as np

class Mine(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(2, np.float32), {}
    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, self.t >= 10, False, {}

config = (
    PPOConfig().environment(Mine)
    .env_runners(num_env_runners=2, num_envs_per_env_runner=2)
    .learners(num_learners=2)
    .training(train_batch_size_per_learner=100, minibatch_size=50, num_epochs=1)
)
algo = config.build()
print("started", flush=True)
while True:
    algo.train()
    print("trained", flush=True)
"""


def start_script(tmp_path: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process: subprocess.Popen[str] = WarmPopen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    for wanted in ("started", "trained", "trained"):
        line = process.stdout.readline().strip()
        assert line == wanted, process.stderr.read() if process.stderr and not line else line
    return process


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_when_the_script_ends(how: signal.Signals, tmp_path: Path) -> None:
    process = start_script(tmp_path)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 6  # fork server, broker, 2 runners, 2 learners
    maps = {area.path for each in family for area in each.memory_maps()}
    shared_memory = [Path(path) for path in maps if path.startswith("/dev/shm/")]
    listening = [c for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert all(c.laddr.ip in ("127.0.0.1", "::1") for c in listening)
    process.send_signal(how)
    process.communicate(timeout=60)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert [path for path in shared_memory if path.exists()] == []
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("rlzmq")] == []
