"""A virtualenv beside the project with pinned versions, shared by the set-up scripts."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"


def ensure_venv(*, dev: bool) -> Path:
    """Return the Python of the virtualenv, which is created or updated if necessary.

    Args:
        dev: Also install the development tools and the extras that the tests use.
    """
    if sys.version_info < (3, 11):
        raise SystemExit(f"rlzmq needs Python 3.11 or newer; this is {sys.version.split()[0]}.")
    folder = ROOT / ".venv"
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    wanted = hashlib.sha256(
        CONSTRAINTS.read_bytes() + (ROOT / "pyproject.toml").read_bytes() + str(sys.version).encode()
    ).hexdigest()
    stamp = folder / (".installed-dev" if dev else ".installed")
    if python.exists() and any(
        mark.exists() and mark.read_text() == wanted for mark in {stamp, folder / ".installed-dev"}
    ):
        return python
    if not python.exists():
        print(f"making a virtualenv in {folder}", flush=True)
        venv.create(folder, with_pip=True)
    # torch first and exactly pinned: a looser request would fetch gigabytes of CUDA packages
    pin = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    print("installing rlzmq and what it needs", flush=True)
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        str(CONSTRAINTS),
    ]
    subprocess.run([*pip, pin], check=True)
    extras = "marl,minari,offline,video,plot,tb,tune,onnx,serve,dash"
    subprocess.run([*pip, "--editable", f"{ROOT}[{extras}]" if dev else str(ROOT)], check=True)
    if dev:
        subprocess.run([*pip, *_dev_tools()], check=True)
    stamp.write_text(wanted)
    return python


def _dev_tools() -> list[str]:
    import tomllib

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    return [*groups["dev"], *groups["docs"]]


def run(*command: str | Path, **environment: str) -> int:
    """Run a command in the project's root; return its exit code."""
    print("$ " + " ".join(str(part) for part in command), flush=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([str(part) for part in command], cwd=ROOT, env=env, check=False).returncode
