"""A run whose head is killed: its join file names it at once, and the same command starts it again with its peers;
many env runners on a host, started by one command.
"""

from __future__ import annotations

import re
import signal

import psutil

from rlzmq.actors.process_state import FORK_SERVER_NAME
from tests.journeys.terminal import Command, Terminal, until

_HEAD = (
    "rlzmq train ppo --env CartPole-v1 --preset none --env-runners 0 --envs-per-env-runner 2 "
    "--batch-size-per-learner 60 --minibatch-size 60 --num-epochs 1 --checkpoint-every-s 0.1 "
    "--num-learners 1 --num-remote-learners 1 --run-dir runs/a --resume auto "
    "--listen tcp://127.0.0.1:0 --join-file join.toml"
)


def test_a_killed_head_starts_again_and_its_runners_and_learners_rejoin(terminal: Terminal) -> None:
    head = terminal.start(_HEAD)
    head.wait_for("waiting for learners")
    for name in ("", ".learner"):
        copied = terminal.cwd / f"copied{name}.toml"
        copied.write_bytes((terminal.cwd / f"join{name}.toml").read_bytes())
        copied.chmod(0o600)
    learner = terminal.start("rlzmq learner --join copied.learner.toml")
    runner = terminal.start("rlzmq runner --join copied.toml")
    checkpoints = terminal.cwd / "runs/a/checkpoints"
    until(lambda: list(checkpoints.glob("[0-9]*/manifest.json")), "a checkpoint", lambda: head.out + head.err)
    head.signal(signal.SIGKILL)
    head.end()
    assert learner.end().code == 69
    for line in ("rlzmq runner --join join.toml", "rlzmq top join.observer.toml"):
        done = terminal.type(line)
        assert done.code == 69, done
        assert f"pid {head.pid} on " in done.err, done  # whoever waits for a broker names only an address
    head = terminal.start(_HEAD)  # it takes the ports and keys of the one that was killed
    head.wait_for("resumed (.|\\n)*waiting for learners")
    learner = terminal.start("rlzmq learner --join copied.learner.toml")
    runner.wait_for("the run was started again(.|\\n)* joined ")
    learner.wait_for("is rank 0 of 1")
    head.wait_for("iter ")
    head.signal(signal.SIGTERM)
    assert head.end().code == 75
    for peer in (runner, learner):
        done = peer.end()
        assert done.code == 0, done
    assert not list(terminal.cwd.glob("join*.toml")), "the keys are useless now"


_LISTENS = (
    "rlzmq train ppo --env CartPole-v1 --preset none --env-runners 0 --envs-per-env-runner 2 "
    "--batch-size-per-learner 120 --minibatch-size 60 --num-epochs 1 --run-dir run --checkpoint-every-s none "
    "--listen tcp://127.0.0.1:0 --join-file join.toml"
)
_JOINED = r"(runner-\w+@\S+) joined "


def test_one_command_starts_many_runners_replaces_them_and_ends_as_one(terminal: Terminal) -> None:
    head = terminal.start(_LISTENS)
    until(lambda: (terminal.cwd / "join.toml").exists(), "the join file")
    runners = terminal.start("rlzmq runner --join join.toml --env-runners 3")
    names = until(lambda: _joined(runners, 3), "three runners", lambda: runners.err + head.err)
    _wait_for_iteration(terminal)
    for num, number in ((4, signal.SIGKILL), (5, signal.SIGSTOP)):
        _runners(runners)[0].send_signal(number)
        later = until(
            lambda num=num: _joined(runners, num), "its successor", lambda: runners.out + runners.err
        )
        assert later[:3] == names
    _wait_for_iteration(terminal)
    assert len(_runners(runners)) == 3
    runners.signal(signal.SIGTERM)
    assert runners.end().code == 75, runners.end()
    head.signal(signal.SIGTERM)
    assert head.end().code == 75, head.end()


def _joined(runners: Command, num: int) -> list[str]:
    names = re.findall(_JOINED, runners.out)
    return names if len(names) == num else []


def _runners(command: Command) -> list[psutil.Process]:
    """The children of the command's fork server."""
    return [process for process in command.family() if process.parent().name() == FORK_SERVER_NAME]


def _wait_for_iteration(terminal: Terminal) -> None:
    """Wait for two more results: the second one has begun after this call."""
    metrics = terminal.cwd / "run/metrics.jsonl"
    num = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= num + 2, "two iterations")
