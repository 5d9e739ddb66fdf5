"""Set up a virtualenv, then train CartPole-v1 to 450: broker, 2 runner and 2 learner processes.

Needs only Python 3.11: ``python3 scripts/demo.py``. Prints the curve as it goes.
"""

from __future__ import annotations

import json
import shutil
import sys

from _venv import ROOT, ensure_venv, run

TARGET = 450


def main() -> int:
    """Return 0 if the mean return reached the target within 300,000 env steps."""
    python = ensure_venv(dev=False)
    directory = ROOT / "runs" / "demo"
    shutil.rmtree(directory, ignore_errors=True)
    code = run(
        python, "-m", "rlzmq", "train", "ppo", "--env", "CartPole-v1",
        "--env-runners", "2", "--learners", "2", "--run-dir", directory,
        "--seed", "1", "--stop", f"return={TARGET}", "--stop", "steps=300000",
    )  # fmt: skip
    if code:
        return code
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    best = max(row["env_runners"].get("episode_return_mean") or 0.0 for row in rows)
    print(f"best mean return {best:.1f}, target {TARGET}: {'reached' if best >= TARGET else 'NOT reached'}")
    return 0 if best >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
