"""Runs that others join: a head that is killed names and repeats itself; a path that loses large packets is named."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
from typing import Self

import psutil

from rlzmq.actors.process_state import FORK_SERVER_NAME
from tests.journeys.terminal import Command, Terminal, until
from tests.support.runs import two_free_ports

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


class NarrowPath:
    """Forwards TCP connections, on a path whose MTU is smaller than its ends believe.

    Each direction of a connection is silent from its first full packet on, which is one of more than `packet_bytes`.
    `ports`, set in the block, has the port to connect to in place of each port that is forwarded to.
    """

    def __init__(self, *ports: int, packet_bytes: int) -> None:
        self._packet_bytes = packet_bytes
        self._servers = {port: socket.create_server(("127.0.0.1", 0)) for port in ports}
        self._open: list[socket.socket] = []
        self.ports = {port: server.getsockname()[1] for port, server in self._servers.items()}

    def __enter__(self) -> Self:
        for port, server in self._servers.items():
            threading.Thread(target=self._accept, args=(server, port), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        for each in (*self._servers.values(), *self._open):
            with contextlib.suppress(OSError):  # its end has gone
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self, server: socket.socket, port: int) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                ends = server.accept()[0], socket.create_connection(("127.0.0.1", port))
                self._open += ends
                for one, other in (ends, ends[::-1]):
                    threading.Thread(target=self._carry, args=(one, other), daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        is_silent = False
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                is_silent |= len(data) > self._packet_bytes  # what follows waits for it at the other end
                if not is_silent:
                    other.sendall(data)
            other.shutdown(socket.SHUT_RDWR)


_NARROW_HEAD = (
    "rlzmq train ppo --env CartPole-v1 --preset none --env-runners 0 --batch-size-per-learner 60 --minibatch-size 60 "
    "--num-epochs 1 --run-dir runs/a --listen tcp://127.0.0.1:{port} --join-file join.toml"
)


def test_both_sides_name_the_mtu_of_a_path_that_loses_large_packets(terminal: Terminal) -> None:
    port = two_free_ports()
    head = terminal.start(_NARROW_HEAD.format(port=port))
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
