"""The peers' virtualenvs, made when first needed under ``~/.cache/rlzmq/peers`` (``XDG_CACHE_HOME``)."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

# Exactly this, and before all else: a looser request would fetch gigabytes of CUDA packages.
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Peer:
    """What pip installs.

    Args:
        requirement: The peer.
        also: Packages installed with it.
        before: What its build needs to find; then pip isolates no build, so that it compiles against this torch.
        environment: Variables for its build.
        startup: A line of Python that interpreters of this virtualenv begin with.
    """

    requirement: str
    also: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    startup: str = ""


PEERS = {
    "rllib": Peer("ray[rllib]==2.60.0"),
    "sb3": Peer("stable-baselines3", also=("sb3-contrib", "minigrid", "gymnasium[mujoco]")),
    "sample_factory": Peer("sample-factory==2.1.1"),
    # without its environments in C, whose build downloads from elsewhere, and without any nvcc
    "pufferlib": Peer(
        "pufferlib==3.0.0",
        before=("setuptools<81", "wheel", "Cython", "numpy<2"),
        environment={"NO_OCEAN": "1", "PATH": "/usr/bin:/bin"},
        startup="import builtins; builtins.c_extension_paths = []",  # its setup.py lacks this name with NO_OCEAN
    ),
}


def python_of(peer: str) -> Path | None:
    """Return the interpreter of a peer's virtualenv, which is made when missing.

    None, and a line that says why, if the peer cannot be installed with this Python.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rlzmq" / "peers" / peer
    python, stamp, failure = folder / "bin" / "python", folder / ".installed", folder / ".failed"
    if not stamp.exists() and not failure.exists():
        print(f"installing {PEERS[peer].requirement} in {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        try:
            _install(python, PEERS[peer])
        except subprocess.CalledProcessError as error:
            failure.write_text((error.stderr or str(error)).strip().splitlines()[-1])
        else:
            stamp.touch()
    if failure.exists() and not stamp.exists():
        version = ".".join(map(str, sys.version_info[:2]))
        print(
            f"{peer} is left out: with Python {version} pip says '{failure.read_text()}' (remove {folder} to try again)"
        )
        return None
    return python


def _install(python: Path, peer: Peer) -> None:
    folder = python.parent.parent
    if peer.startup:
        (site_packages,) = folder.glob("lib/python*/site-packages")
        (site_packages / "startup.pth").write_text(peer.startup)
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{TORCH}\n")
    pip = [str(python), *f"-m pip install --quiet --disable-pip-version-check -c {constraints}".split()]
    isolation = ["--no-build-isolation"] if peer.before else []
    for packages in ([TORCH], peer.before, [*isolation, TORCH, peer.requirement, *peer.also]):
        if packages:
            environment = {**os.environ, **peer.environment}
            subprocess.run([*pip, *packages], check=True, stderr=subprocess.PIPE, text=True, env=environment)
