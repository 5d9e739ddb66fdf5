"""A virtualenv beside the project with pinned versions, shared by the set-up scripts."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "scripts" / "constraints.txt"
# Python compiles what is imported, and keeps it: pip would compile five times as much.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
_INSTALL = ("install", "--quiet", "--disable-pip-version-check", "--no-compile", "-c", str(CONSTRAINTS))
_PIP = "pip==26.3"  # the one that Python 3.11 brings takes twice as long to find packages
_EXTRAS = "marl,minari,offline,video,plot,tb,tune,onnx,serve,dash"


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
        has_pip = importlib.util.find_spec("pip") is not None
        venv.create(folder, with_pip=not has_pip)
        bare = [sys.executable, "-m", "pip", "--python", python] if has_pip else [python, "-m", "pip"]
        subprocess.run([*bare, *_INSTALL, _PIP], check=True)
    print("installing rlzmq and what it needs", flush=True)
    pip = [str(python), "-m", "pip", *_INSTALL]
    _side_by_side([*pip, "--no-deps", *pins] for pins in _pins(dev))
    if dev:  # what is not pinned, and rlzmq, which the pinned hatchling builds
        pip += ["--no-build-isolation", "--editable", f"{ROOT}[{_EXTRAS}]", *_dev_tools()]
    else:
        pip.append(str(ROOT))
    subprocess.run(pip, check=True)
    stamp.write_text(wanted)
    return python


def _pins(dev: bool) -> list[list[str]]:
    """Return pinned packages in lists that take about as long to install; torch, exactly pinned, is the first.

    A looser request for torch would fetch gigabytes of CUDA packages.
    """
    pins = CONSTRAINTS.read_text().partition("\n\n#")[0].splitlines()  # up to those of other virtualenvs
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    pins.remove(torch)
    return [[torch], pins[::2], pins[1::2]] if dev else [[torch]]


def _side_by_side(commands: Iterable[list[str]]) -> None:
    processes = [subprocess.Popen(command) for command in commands]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("pip failed")


def _dev_tools() -> list[str]:
    import tomllib

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    has_helm = shutil.which("helm") is not None  # without it, tests skip what needs these 17,000 files
    schemas = [tool for tool in groups["engines"] if has_helm and tool.startswith("kubernetes-validate")]
    return [*groups["dev"], *groups["docs"], *schemas]


def run(*command: str | Path, **environment: str) -> int:
    """Run a command in the project's root; return its exit code."""
    print("$ " + " ".join(str(part) for part in command), flush=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([str(part) for part in command], cwd=ROOT, env=env, check=False).returncode
