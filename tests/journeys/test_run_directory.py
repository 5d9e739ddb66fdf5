"""A run directory belongs to one run and one driver: what is typed twice, or into a wrong one, loses nothing."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journeys.terminal import Command, Done, Terminal, until

SMALL = "--env-runners 0 --train-batch-size-per-learner 64 --minibatch-size 64 --num-epochs 1 --preset none"
PPO = f"rlzmq train ppo --env CartPole-v1 {SMALL}"


def files_of(directory: Path) -> dict[str, str]:
    """The content of every file below a directory, by path."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def iterations(directory: Path) -> list[int]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["training_iteration"] for line in lines]


def printed(done: Done, what: str) -> str:
    """The command that a run has printed for `what`."""
    match = re.search(rf"^{what} +(.*)$", done.out, re.M)
    assert match, done
    return match[1]


@pytest.fixture
def live(terminal: Terminal) -> Iterator[Command]:
    """A run in runs/a that has written its first checkpoint, and goes on at the end of the journey."""
    run = terminal.start(f"{PPO} --run-dir runs/a --seed 1")
    checkpoints = terminal.cwd / "runs/a/checkpoints"
    until(lambda: run.process.poll() is not None or [*checkpoints.glob("0*")], "a checkpoint")
    assert run.process.poll() is None, run.end()
    run.signal(signal.SIGSTOP)
    yield run
    run.signal(signal.SIGCONT)
    run.signal(signal.SIGTERM)
    assert run.end().code == 75


def test_a_line_typed_again_touches_nothing_and_its_printed_resume_goes_on_in_place(
    terminal: Terminal,
) -> None:
    run = terminal.cwd / "runs/a"
    line = f"{PPO} --run-dir runs/a --stop iterations=2"
    trained = terminal.type(line)
    assert trained.code == 0, trained
    before = files_of(run)
    again = terminal.type(line)
    assert (again.code, again.out) == (78, ""), again
    assert len(again.err.splitlines()) == 1, again
    for word in (
        "runs/a", "PPO on CartPole-v1", "2 iterations", "--resume auto", "another --run-dir", "--overwrite",
    ):  # fmt: skip
        assert word in again.err
    for other in (
        "rlzmq train dqn --env CartPole-v1 --run-dir runs/a --env-runners 0 --stop iterations=1 --resume auto",
        f"{PPO.replace('CartPole-v1', 'Acrobot-v1')} --run-dir runs/a --stop iterations=3 --resume auto",
    ):
        refused = terminal.type(other)
        assert (refused.code, refused.out) == (78, ""), refused
        assert "holds the run of PPO on CartPole-v1" in refused.err
        assert files_of(run) == before
    # The command of a scheduler that starts it again after the goal.
    done = terminal.type(f"{line} --resume auto")
    assert (done.code, done.err) == (0, ""), done
    assert "training_iteration = 2 ≥ 2, reached before" in done.out
    assert files_of(run) == before
    resumed = terminal.type(f"{printed(trained, 'resume')} --env-runners 0 --stop iterations=3")
    assert resumed.code == 0, resumed
    assert iterations(run) == [1, 2, 3]
    # From another run's checkpoint: not into this run, but into a new directory.
    assert terminal.type(f"{PPO} --run-dir runs/b --stop iterations=1").code == 0
    before = files_of(run)
    foreign = terminal.type(
        "rlzmq train ppo --resume runs/b/checkpoints/000001 --run-dir runs/a --stop iterations=2"
    )
    assert foreign.code == 78, foreign
    assert "3 iterations" in foreign.err
    assert files_of(run) == before
    branch = terminal.type(
        "rlzmq train ppo --resume runs/b/checkpoints/000001 --run-dir runs/c --stop iterations=2"
    )
    assert branch.code == 0, branch
    assert iterations(terminal.cwd / "runs/c") == [2]
    # Overwritten, it lies beside.
    over = terminal.type(f"{line} --overwrite")
    assert over.code == 0, over
    aside = re.search(r"^moved .* to (.*)$", over.out, re.M)
    assert aside, over
    assert files_of(Path(aside[1])) == before
    assert iterations(run) == [1, 2]
    # An overwriting run that cannot be built changes nothing.
    before = files_of(run)
    failed = terminal.type(f"{line} --overwrite --env Nowhere-v0")
    assert failed.code != 0
    assert files_of(run) == before


def test_a_live_driver_is_named_and_nobody_else_gets_in(terminal: Terminal, live: Command) -> None:
    place = terminal.cwd / "runs/a"
    settings = [files_of(place)[name] for name in ("config.toml", "run.json")]
    config = "PPOConfig().environment('CartPole-v1')"
    script = f"from rlzmq import Algorithm, PPOConfig; Algorithm.resume('runs/a', config={config})"
    for line in (
        f"{PPO} --run-dir runs/a",
        f"{PPO} --run-dir runs/a --resume auto",
        f"{PPO} --run-dir runs/a --overwrite",
        f'python -c "{script}"',
    ):
        refused = terminal.type(line)
        assert refused.code == (1 if "python" in line else 78), refused
        assert re.search(rf"runs/a is in use by pid {live.pid} on \S+ since \d{{4}}-", refused.err), refused
    assert "running" in terminal.type("rlzmq runs").out
    removal = terminal.type("rlzmq runs clean runs/a --yes")
    assert "running" in removal.out
    assert settings == [files_of(place)[name] for name in ("config.toml", "run.json")]
    assert live.process.poll() is None
    rows = iterations(place)
    assert rows == [*range(1, len(rows) + 1)]


def test_killed_in_its_first_minute_a_run_goes_on_though_its_children_live(terminal: Terminal) -> None:
    """The lock ends with the driver, not with the processes that its environment has forked."""
    (terminal.cwd / "forking.py").write_text(
        "import os, pathlib, time\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Forking(CartPoleEnv):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        if not os.path.exists('forked') and not (pid := os.fork()):\n"
        "            pathlib.Path('forked').write_text(str(os.getpid()))\n"
        "            time.sleep(1000)\n"
    )
    line = f"rlzmq train ppo --env forking:Forking {SMALL} --run-dir runs/a --resume auto"
    run = terminal.start(line)
    place = terminal.cwd / "runs/a"
    until(lambda: run.process.poll() is not None or [*place.glob("checkpoints/0*")], "a checkpoint")
    assert run.process.poll() is None, run.end()
    child = int((terminal.cwd / "forked").read_text())
    run.signal(signal.SIGKILL)
    run.end()
    assert "ended" in terminal.type("rlzmq runs").out
    done = terminal.type(f"{line} --stop time=0")
    assert done.code == 0, done
    assert "resumed " in done.out
    subprocess.run(["kill", "-9", str(child)], check=True)


def test_two_who_type_the_same_at_the_same_time_are_one_run(terminal: Terminal) -> None:
    line = f"{PPO} --run-dir runs/a --resume auto --stop iterations=3"
    both = [terminal.start(line) for _ in range(2)]
    ends = [command.end() for command in both]
    codes = sorted(done.code for done in ends)
    assert codes in ([0, 78], [0, 0]), ends  # the second may begin when the first has ended
    assert iterations(terminal.cwd / "runs/a")[:3] == [1, 2, 3]
    unnamed = [terminal.start(f"{PPO} --stop iterations=1") for _ in range(2)]
    assert [command.end().code for command in unnamed] == [0, 0]
    assert len([*(terminal.cwd / "runs").glob("ppo-*/metrics.jsonl")]) == 2


def test_scripts_share_the_rule(terminal: Terminal) -> None:
    (terminal.cwd / "mine.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "from rlzmq import PPOConfig\n"
        "from rlzmq.telemetry.run_directory import RunDirectory\n"
        "config = PPOConfig().environment('CartPole-v1').env_runners(num_env_runners=0)\n"
        "config.training(train_batch_size_per_learner=64, minibatch_size=64, num_epochs=1)\n"
        "resumes = 'resume' in sys.argv\n"
        "with RunDirectory.create(Path('runs/a'), config, resumes=resumes) as run, config.build() as algo:\n"
        "    if resumes:\n"
        "        algo.restore_from_path('runs/a')\n"
        "    algo.keep_checkpoints(run)\n"
        "    run.log(algo.train())\n"
    )
    assert terminal.type("python -m mine").code == 0
    before = files_of(terminal.cwd / "runs/a")
    again = terminal.type("python -m mine")
    assert again.code == 1
    assert "PPO on CartPole-v1, 1 iteration," in again.err.splitlines()[-1]
    assert files_of(terminal.cwd / "runs/a") == before
    resumed = terminal.type("python -m mine resume")
    assert resumed.code == 0, resumed
    assert iterations(terminal.cwd / "runs/a") == [1, 2]
    foreign = (
        "from rlzmq import PPOConfig; config = PPOConfig().environment('CartPole-v1').env_runners(num_env_runners=0); "
        "config.build().keep_checkpoints('runs/a/checkpoints')"
    )
    before = files_of(terminal.cwd / "runs/a")
    refused = terminal.type(f'python -c "{foreign}"')
    assert refused.code == 1
    assert "checkpoints of another run, up to 000002" in refused.err.splitlines()[-1]
    assert files_of(terminal.cwd / "runs/a") == before


_SPACE = """
trainable = "PPO"

[environment]
env = "CartPole-v1"

[env_runners]
num_env_runners = 0

[training]
lr = { grid_search = [0.001] }
train_batch_size_per_learner = 64
minibatch_size = 64
num_epochs = 1

[stop]
training_iteration = 1000000
"""


def test_a_search_and_a_recording_that_are_typed_twice(terminal: Terminal) -> None:
    (terminal.cwd / "space.toml").write_text(_SPACE)
    line = "rlzmq tune space.toml --dir runs --name mine --preset none"
    search = terminal.start(line)
    trial = terminal.cwd / "runs/mine/PPO_00000"
    until(lambda: search.process.poll() is not None or trial.exists(), "a trial", lambda: search.err)
    trained = terminal.type(f"{PPO} --run-dir runs/a --stop iterations=1")
    assert trained.code == 0, trained

    again = terminal.type(line)
    assert again.code == 78, again
    assert f"in use by pid {search.pid} " in again.err, again

    line = "rlzmq record runs/a --output data --episodes 2"
    recorded = terminal.type(line)
    assert recorded.code == 0, recorded
    before = files_of(terminal.cwd / "data")
    again = terminal.type(line)
    assert again.code == 78, again
    assert "--overwrite" in again.err, again
    assert files_of(terminal.cwd / "data") == before
    assert terminal.type(f"{line} --overwrite").code == 0

    search.signal(signal.SIGTERM)
    assert search.end().code == 75
    again = terminal.type("rlzmq tune space.toml --dir runs --name mine --preset none")
    assert again.code == 78, again
    assert "--resume" in again.err, again
