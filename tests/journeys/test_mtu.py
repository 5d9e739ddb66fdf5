"""A path that lets small messages pass and loses large ones: both sides say so."""

from __future__ import annotations

import contextlib
import signal

from tests.journeys.narrow_path import NarrowPath
from tests.journeys.terminal import Terminal
from tests.support.runs import two_free_ports

_HEAD = (
    "rlzmq train ppo --env CartPole-v1 --preset none --env-runners 0 --batch-size-per-learner 60 --minibatch-size 60 "
    "--num-epochs 1 --run-dir runs/a --listen tcp://127.0.0.1:{port} --join-file join.toml"
)


def test_both_sides_name_the_mtu_of_a_path_that_loses_large_packets(terminal: Terminal) -> None:
    port = two_free_ports()
    head = terminal.start(_HEAD.format(port=port))
    head.wait_for("env runners may join")
    text = (terminal.cwd / "join.toml").read_text()
    with contextlib.ExitStack() as paths:
        runners = []
        for packet_bytes in (1400, 16_000):  # the config does not pass; it passes, and weights do not
            path = paths.enter_context(NarrowPath(port, port + 1, packet_bytes=packet_bytes))
            narrowed = text
            for there, here in path.ports.items():
                narrowed = narrowed.replace(f":{there}", f":{here}")
            join_file = terminal.cwd / f"narrow-{packet_bytes}.toml"
            join_file.touch(0o600)
            join_file.write_text(narrowed)
            runners.append(terminal.start(f"rlzmq runner --join {join_file}"))
        for runner in runners:
            runner.wait_for("MTU")
        head.wait_for(r"observer .*MTU")
        head.wait_for(r"runner-.*MTU")
        for command in (*runners, head):
            command.signal(signal.SIGKILL)
            command.end()
