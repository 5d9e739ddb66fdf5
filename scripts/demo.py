"""Set up a virtualenv, then train CartPole-v1 to 450: broker, 2 runner and 2 learner processes.

Needs only Python 3.11: ``python3 scripts/demo.py``.
"""

from __future__ import annotations

import sys

from _venv import ROOT, ensure_venv, run


def main() -> int:
    """0 when the mean return reached 450."""
    python = ensure_venv(dev=False)
    return run(
        python, "-m", "rlzmq", "train", "ppo", "--env", "CartPole-v1",
        "--env-runners", "2", "--envs-per-env-runner", "8", "--learners", "2",
        "--config", ROOT / "scripts" / "cartpole.toml",
        "--seed", "1", "--stop", "return=450", "--stop", "steps=300000",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
