"""Run the tests of packages that the test command leaves out: trackers, environments, Jupyter; and of other libraries.

These are W&B, MLflow and trackio; Atari, MiniGrid, dm_control and EnvPool; the notebooks with Jupyter's client;
clusters of Ray and Dask.

Installs them into the checkout's virtualenv, beside what `scripts/test.py` installs (about 1 GB), so that later test
runs there include these tests, too. ``--peers`` instead runs the code of RLlib and Stable-Baselines3 on the migration
pages (blocks marked ``py``), in the virtualenvs that `scripts/bench` makes for them.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import tomllib
from pathlib import Path

from _venv import CONSTRAINTS, ROOT, ensure_venv, run
from bench._peers import python_of

TESTS = (
    "tests/telemetry/test_writers.py",
    "tests/envs/test_wrappers.py",
    "tests/docs/test_code_blocks.py::test_a_notebook_runs_in_jupyter",
    "tests/launch/test_task_engines.py",
)

# Before the code of a peer: Ray without a dashboard, and with CPUs for all of the page's actors.
PEERS = {
    "rllib": "import ray\n\nray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)\n",
    "sb3": "",
}


def main() -> int:
    """Return pytest's exit code, or the first of a peer's that is not 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--peers", action="store_true", help="run the other libraries' code in docs/migrating_*.md"
    )
    if parser.parse_args().peers:
        return max([run_peers_code(peer) for peer in PEERS])
    python = ensure_venv(dev=True)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["optional-tests"]
    extras = f"{ROOT}[atari,minigrid,mujoco,dm-control,ray,dask]"
    # Not all of them accept the versions of scripts/constraints.txt; torch must stay the pinned CPU build.
    pin = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", pin)
    return run(*pip, "--editable", extras, *packages) or run(
        python, "-m", "pytest", "-q", "-rs", "-m", "", *TESTS
    )


def run_peers_code(peer: str) -> int:
    """Run a migration page's blocks of the peer's code as one script, in its virtualenv; return the exit code."""
    page = ROOT / "docs" / f"migrating_from_{peer}.md"
    blocks = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    python = python_of(peer)
    if python is None:
        return 1
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / f"{page.stem}.py"
        script.write_text(
            "\n".join(["import os\n\nos.chdir(os.path.dirname(__file__))", PEERS[peer], *blocks])
        )
        code = run(python, script)
    print(f"{peer}: {len(blocks)} blocks {'failed' if code else 'ran'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
