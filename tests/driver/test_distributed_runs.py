"""Runs through broker, runner and learner processes: equal to serial, ended without leftovers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest
from recovery_runs import small

from rlzmq import PPOLearner, register_env
from rlzmq.envs.examples import MultiAgentCartPole, module_of_agent
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
