"""A join file outlives its run when the head is killed: whoever uses it is told at once."""

from __future__ import annotations

import signal

from tests.journeys.terminal import Terminal

_HEAD = (
    "rlzmq train ppo --env CartPole-v1 --preset none --env-runners 0 --run-dir runs/a "
    "--listen tcp://127.0.0.1:0 --join-file join.toml"
)


def test_the_file_of_a_killed_run_names_it_at_once(terminal: Terminal) -> None:
    head = terminal.start(_HEAD)
    head.wait_for("env runners may join")
    head.signal(signal.SIGKILL)
    head.end()
    for line in ("rlzmq runner --join join.toml", "rlzmq top join.observer.toml"):
        done = terminal.type(line)
        assert done.code == 69, done
        assert f"pid {head.pid} on " in done.err, done  # whoever waits for a broker names only an address
