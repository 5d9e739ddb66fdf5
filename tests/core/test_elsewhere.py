"""Serial runs and policies use nothing that only Linux has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TRAIN = """
import tests.support.elsewhere
from rlzmq import Algorithm, Policy, PPOConfig

with PPOConfig.preset("CartPole-v1").env_runners(num_env_runners=0).build() as algo:
    assert algo.train()["env_runners"]["episode_return_mean"] > 5
    algo.save_to_path("saved")
with Algorithm.from_checkpoint("saved") as again:
    again.train()
print(Policy.load("saved").compute_action([0.0, 0.0, 0.1, 0.0], explore=False))
"""


def _run(code: str, directory: Path) -> str:
    return subprocess.check_output(
        [sys.executable, "-c", code],
        cwd=directory,
        env={"PYTHONPATH": str(_ROOT), "HOME": str(directory)},
        text=True,
    )


def test_a_serial_run_and_a_policy_work_where_linux_only_modules_are_missing(tmp_path: Path) -> None:
    assert _run(_TRAIN, tmp_path).strip() in ("0", "1")
