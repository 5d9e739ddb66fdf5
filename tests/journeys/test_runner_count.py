"""Many env runners on a host, started by one command."""

from __future__ import annotations

import re
import signal

import psutil

from rlzmq.actors.process_state import FORK_SERVER_NAME
from tests.journeys.terminal import Command, Terminal, until

_HEAD = (
    "rlzmq train ppo --env CartPole-v1 --preset none --env-runners 0 --envs-per-env-runner 2 "
    "--batch-size-per-learner 120 --minibatch-size 60 --num-epochs 1 --run-dir run --checkpoint-every-s none "
    "--listen tcp://127.0.0.1:0 --join-file join.toml"
)
_JOINED = r"(runner-\w+@\S+) joined "


def test_one_command_starts_many_runners_replaces_them_and_ends_as_one(terminal: Terminal) -> None:
    head = terminal.start(_HEAD)
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
