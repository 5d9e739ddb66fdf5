"""A run, a policy server and a dashboard under floods: they stay small and answer, and say who it was."""

from __future__ import annotations

import json
import re
import resource
import signal
import urllib.request

import pytest

from rlzmq.core.process import find_stack_channel
from rlzmq.net.keys import JoinFile
from tests.journeys.terminal import Terminal, until
from tests.security import floods
from tests.security.floods import Pauses, peak_bytes

_MIB = 1 << 20
_TINY = "--train-batch-size-per-learner 64 --minibatch-size 64 --num-epochs 1 --num-env-runners 1"


class Run:
    """A run that listens."""

    def __init__(self, terminal: Terminal) -> None:
        self.directory = terminal.cwd / "runs/a"
        self.command = terminal.start(
            f"rlzmq train ppo --env CartPole-v1 --run-dir runs/a {_TINY} --listen tcp://127.0.0.1:0 "
            "--join-file join.toml --stop iterations=1000000"
        )
        self.wait_for_updates(1)
        self.join = JoinFile.read(terminal.cwd / "join.toml")
        self.broker = next(
            process.pid
            for process in self.command.family()
            if (found := find_stack_channel(process.pid)) is not None and found[0] == "broker"
        )

    def num_updates(self) -> int:
        """Return the number of results so far."""
        path = self.directory / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for_updates(self, num: int) -> None:
        """Wait for further results."""
        wanted = self.num_updates() + num
        until(lambda: self.num_updates() >= wanted, "updates", lambda: repr(self.command.err))


@pytest.fixture
def run(terminal: Terminal) -> Run:
    """A run that listens, with one runner."""
    return Run(terminal)


def test_a_run_is_flooded_with_a_runners_key_and_without_any(run: Run) -> None:
    """The run goes on, its broker stays small and is not replaced, its account holds, and the log names the key."""
    before = peak_bytes(run.broker)
    for address in run.join.addresses.values():
        taken = floods.handshake_frames(address, 8, 64 * _MIB)
        assert taken < 8 * 16 * _MIB, "what the system's buffers take"
    assert floods.claimed_counts(run.join, 20) == 20
    run.wait_for_updates(2)
    assert floods.many_frames(run.join, 400, 256 * 1024)
    run.command.wait_for(r"has the key of role runner, was cut")
    assert not floods.is_let_in(run.join)
    run.wait_for_updates(2)
    assert peak_bytes(run.broker) - before < 200 * _MIB
    run.command.signal(signal.SIGINT)
    done = run.command.end()
    assert done.code == 130, done
    assert "restart" not in done.err, done
    account = re.search(r"sampled (\d+) = trained (\d+)", done.out)
    assert account is not None, done
    assert int(account[1]) - int(account[2]) < 20 * 4000, "claims are not counted"


def test_a_server_and_a_dashboard_answer_while_others_hold_connections(terminal: Terminal) -> None:
    """Headers and bodies that do not end, idle connections and a large body keep nobody from an answer."""
    assert (
        terminal.type(f"rlzmq train ppo --env CartPole-v1 --run-dir runs/a {_TINY} --stop iterations=1").code
        == 0
    )
    serve = terminal.start("rlzmq serve runs/a --port 0")
    dashboard = terminal.start("rlzmq dashboard runs --port 0 --token-file dash.token", preexec_fn=_few_files)
    server = serve.wait_for(r"http://\S+")[0]
    token = (terminal.cwd / serve.wait_for(r"token +(\S+)")[1]).read_text().strip()
    before = peak_bytes(serve.pid)

    def ask() -> bytes:
        with urllib.request.urlopen(server + "/healthz", timeout=60) as answer:
            body: bytes = answer.read()
            return body

    with floods.unfinished_headers(server, 600):
        assert b"ok" in ask()
    floods.unread_bodies(server, "/healthz", 40, 4 * _MIB)
    floods.unread_bodies(server, "/v1/act", 40, 4 * _MIB)
    with Pauses(ask) as pauses:
        assert floods.large_json(server, token, 4 * _MIB) == 400
    assert pauses.num_answers
    assert peak_bytes(serve.pid) - before < 100 * _MIB + 60 * 4 * _MIB
    link = dashboard.wait_for(r"http://[^/\s]+")[0]
    dash_token = (terminal.cwd / "dash.token").read_text().strip()
    request = urllib.request.Request(link + "/api/runs", headers={"Authorization": f"Bearer {dash_token}"})
    with floods.unfinished_headers(link, 600, b""), urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)
    for command in (serve, dashboard):
        command.signal(signal.SIGINT)
        assert command.end().code in (0, 130)


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
