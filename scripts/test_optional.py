"""Run the tests of packages that the test command leaves out: trackers and environments.

These are W&B, MLflow and trackio; Atari, MiniGrid, dm_control and EnvPool.

Installs them into the checkout's virtualenv, beside what `scripts/test.py` installs (about 1 GB), so that later test
runs there include these tests, too.
"""

from __future__ import annotations

import sys
import tomllib

from _venv import CONSTRAINTS, ROOT, ensure_venv, run

TESTS = ("tests/telemetry/test_writers.py", "tests/envs/test_wrappers.py")


def main() -> int:
    """Return pytest's exit code."""
    python = ensure_venv(dev=True)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["optional-tests"]
    extras = f"{ROOT}[atari,minigrid,mujoco,dm-control]"
    # Not all of them accept the versions of scripts/constraints.txt; torch must stay the pinned CPU build.
    pin = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", pin)
    return run(*pip, "--editable", extras, *packages) or run(python, "-m", "pytest", "-q", "-rs", *TESTS)


if __name__ == "__main__":
    sys.exit(main())
