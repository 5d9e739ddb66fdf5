"""A broker that was started on its own: the driver's processes and outsiders all meet there, by key."""

from __future__ import annotations

import contextlib
import signal
import socket
from pathlib import Path

from tests.runtime.outside import Command, assert_accounted, listening


def _two_free_ports() -> int:
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return int(port)


def train_command(*more: str) -> list[str]:
    return [
        "train", "ppo", "--env", "CartPole-v1", "--preset", "none", "--env-runners", "0", "--learners", "1",
        "--envs-per-env-runner", "4", "--batch-size-per-learner", "240", "--minibatch-size", "60", "--num-epochs", "1",
        "--broker", "b.driver.toml", "--checkpoint-every-s", "0.5", *more,
    ]  # fmt: skip


def test_a_driver_that_was_killed_is_replaced_by_attach_while_broker_and_runner_wait(tmp_path: Path) -> None:
    arguments = ("broker", "--listen", f"tcp://127.0.0.1:{_two_free_ports()}", "--join-file", "b.toml")
    with Command(tmp_path, *arguments) as broker, contextlib.ExitStack() as stack:
        broker.wait_for("runners ")
        runner = stack.enter_context(Command(tmp_path, "runner", "--join", "b.toml"))
        with Command(tmp_path, *train_command("--run-dir", "mine", "--stop", "iterations=100000")) as driver:
            driver.wait_for("iter ")
            checkpoints = tmp_path / "mine" / "checkpoints"
            while not (checkpoints.is_dir() and list(checkpoints.glob("[0-9]*/manifest.json"))):
                driver.wait_for("iter ")
                driver.output = ""
            with Command(tmp_path, "attach", "mine") as early:
                assert early.end() == 78
                assert "runs still" in early.output
            driver.process.kill()
            driver.process.wait()
        with Command(tmp_path, "attach", "mine") as attached:
            attached.wait_for("resumed ")
            attached.wait_for("iter ")
            attached.process.send_signal(signal.SIGTERM)
            assert attached.end() == 75, attached.output
            assert "dropped" in attached.output
        broker.process.send_signal(signal.SIGTERM)
        assert broker.end() == 75, broker.output
        assert runner.end() == 0, runner.output
        assert runner.output.count(" joined ") == 1


def test_attach_says_what_it_needs(tmp_path: Path) -> None:
    with Command(tmp_path, "attach") as command:
        assert command.end() == 78
        assert "no run under runs/" in command.output
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"command": ["script.py"]}')
    with Command(tmp_path, "attach", "other") as command:
        assert command.end() == 78
        assert "Algorithm.resume" in command.output


def top(tmp_path: Path) -> str:
    with Command(tmp_path, "top", "b.observer.toml", "--count", "1") as command:
        assert command.end() == 0, command.output
        return command.output


def test_a_run_through_a_broker_of_its_own_survives_that_brokers_restart(tmp_path: Path) -> None:
    arguments = ("broker", "--listen", f"tcp://127.0.0.1:{_two_free_ports()}", "--join-file", "b.toml")
    with Command(tmp_path, *arguments) as broker:
        broker.wait_for("runners ")
        config = listening(tmp_path, num_env_runners=1, listen=None, join_file=None)
        config.networking(broker=str(tmp_path / "b.driver.toml")).learners(num_learners=1)
        with config.build() as algo, Command(tmp_path, "runner", "--join", "b.toml") as runner:
            runner.wait_for(" joined ")
            algo.train()
            broker.process.kill()
            with Command(tmp_path, *arguments) as restarted:  # the same keys: peers come back by themselves
                for _ in range(2):
                    result = algo.train()
                assert_accounted(result)
                assert result["accounting"]["trained"] == 3 * 240
                while runner.output.split()[0] not in top(tmp_path):
                    pass  # it says HELLO again when its next sign of life goes unanswered
                algo.stop()
                restarted.process.send_signal(signal.SIGTERM)
                assert restarted.end() == 75, restarted.output
                assert runner.end() == 0, runner.output
