"""What `rlzmq train --on ENGINE --dry-run` prints, and the cluster files and commands that it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SUBMIT = ["train", "ppo", "--env", "CartPole-v1", "--run-dir", "runs/x", "--on", "slurm", "--dry-run"]


def submitted(directory: Path, cluster: str, *more: str) -> subprocess.CompletedProcess[str]:
    (directory / "cluster.toml").write_text(cluster)
    return rlzmq(directory, *_SUBMIT, "--cluster", "cluster.toml", *more)


def rlzmq(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command, environment = (
        [sys.executable, "-m", "rlzmq", *arguments],
        {**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


def test_jobs_for_slurm_are_a_shell_script(tmp_path: Path) -> None:
    tables = '[head]\nmemory = "4G"\n[learners]\ncount = 2\n[runners]\ncount = 3\n'
    tables += 'arguments = ["--envs-per-env-runner", "8"]\n'
    done = submitted(tmp_path, tables)
    assert done.returncode == 0, done.stderr
    subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=True)
    scripts = re.findall(r"END_OF_JOB'\n(.*?)END_OF_JOB\n", done.stdout, re.DOTALL)
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert "--signal=B:USR1@60" in script
    head, learners, runners = scripts
    assert "--mem=4G" in head
    assert "--dry-run" not in head
    assert "--ntasks=2" in learners
    assert "--array=0,1,2" in runners
    assert "--envs-per-env-runner 8" in runners


@pytest.mark.parametrize(
    ("cluster", "more", "problem"),
    [
        ("[runner]\ncount = 3", (), "Did you mean 'runners'"),
        ("[runners]\ncount = 0", (), "got 0"),
        ("[head]\ncount = 2", (), "got 2"),
        ("[head]\ncpu = 2", (), "Did you mean 'cpus'"),
        ("runners = 3", (), "runners: .* got 3"),
        ("[runners]\narguments = 3", (), "arguments: .* got 3"),
        ("", ("--overwrite",), "--overwrite"),
        ("", ("--on", "slrum"), "Did you mean 'slurm'"),
        ("", ("--on", "ssh"), r"\[head\] needs hosts"),
        ("", ("--on", "local"), "--on ENGINE"),
    ],
)
def test_wrong_jobs_are_refused(tmp_path: Path, cluster: str, more: tuple[str, ...], problem: str) -> None:
    done = submitted(tmp_path, cluster, *more)
    assert done.returncode == 78
    assert re.search(problem, done.stderr)


@pytest.mark.parametrize(
    ("command", "code", "problem"),
    [
        ("scale runs/none --env-runners 2", 78, "was not started with --on"),
        ("scale runs/none", 78, "expected --env-runners or --learners"),
        ("launch logs runs/none", 78, "is not a run"),
        ("launch cluster.toml", 2, "expected logs or stop"),
    ],
)
def test_runs_that_no_engine_runs_are_named(tmp_path: Path, command: str, code: int, problem: str) -> None:
    done = rlzmq(tmp_path, *command.split())
    assert done.returncode == code
    assert problem in done.stderr
