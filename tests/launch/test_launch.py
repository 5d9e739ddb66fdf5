"""What `rlzmq train --on ENGINE --dry-run` prints, and the cluster files and commands that it refuses."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from rlzmq.cli.main import main

_SUBMIT = "train ppo --env CartPole-v1 --run-dir runs/x --on slurm --dry-run --cluster cluster.toml"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_jobs_for_slurm_are_a_shell_script(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = '[head]\nmemory = "4G"\n[learners]\ncount = 2\n[runners]\ncount = 3\n'
    tables += 'arguments = ["--envs-per-env-runner", "8"]\n'
    (here / "cluster.toml").write_text(tables)
    assert main(_SUBMIT.split()) == 0
    said = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=said, text=True, check=True)
    scripts = re.findall(r"END_OF_JOB'\n(.*?)END_OF_JOB\n", said, re.DOTALL)
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
        ("[runner]\ncount = 3", "", "Did you mean 'runners'"),
        ("[runners]\ncount = 0", "", "got 0"),
        ("[head]\ncount = 2", "", "got 2"),
        ("[head]\ncpu = 2", "", "Did you mean 'cpus'"),
        ("runners = 3", "", "runners: .* got 3"),
        ("[runners]\narguments = 3", "", "arguments: .* got 3"),
        ("", "--overwrite", "--overwrite"),
        ("", "--on slrum", "Did you mean 'slurm'"),
        ("", "--on ssh", r"\[head\] needs hosts"),
        ("", "--on local", "--on ENGINE"),
    ],
)
def test_wrong_jobs_are_refused(
    here: Path, cluster: str, more: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "cluster.toml").write_text(cluster)
    assert main([*_SUBMIT.split(), *more.split()]) == 78
    assert re.search(problem, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("command", "code", "problem"),
    [
        ("scale runs/none --env-runners 2", 78, "runs/none does not exist"),
        ("scale . --env-runners 2", 78, "was not started with --on"),
        ("scale runs/none", 78, "expected --env-runners or --learners"),
        ("launch logs runs/none", 78, "runs/none does not exist"),
        ("launch cluster.toml runs/none", 2, "nvalid choice"),
    ],
)
def test_runs_that_no_engine_runs_are_named(
    command: str, code: int, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command.split()) == code
    assert problem in capsys.readouterr().err
