"""``rlzmq serve`` as a process: its token, its signals, and requests in flight when it ends."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from rlzmq import PPOConfig, RLModuleSpec
from rlzmq.cli.main import EXIT_CONFIG, EXIT_INTERRUPTED, main
from tests.deploy.serving import GatedModule, Http, cartpole, write_checkpoint
from tests.support.runs import Command


class Served(Command):
    """A process of the command."""

    def __init__(self, *arguments: str, directory: Path) -> None:
        super().__init__(directory, "serve", *arguments, "--port", "0")
        self.wait_for("serve.token\n")
        self.said = {
            line.partition(" ")[0]: line.partition(" ")[2].strip() for line in self.output.splitlines()
        }
        self.token = (directory / self.said["token"]).read_text().strip()

    def client(self) -> Http:
        return Http(self.said["http"], self.token)

    def end_by(self, number: int) -> int:
        self.process.send_signal(number)
        return self.end()


def test_a_process_serves_reloads_and_ends(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_checkpoint(cartpole(), run / "checkpoints" / "000001", seed=1)
    with Served("run", "--reload-interval", "0", directory=tmp_path) as server, server.client() as client:
        assert server.said["serving"] == str(run / "checkpoints" / "000001")
        token_file = run / "serve.token"
        assert token_file.stat().st_mode & 0o777 == 0o600
        assert len(server.token) >= 40
        assert client.act(obs=[0.0] * 4)[1]["checkpoint"] == "000001"
        write_checkpoint(cartpole(), run / "checkpoints" / "000002", seed=2)
        assert client.act(obs=[0.0] * 4)[1]["checkpoint"] == "000001"
        server.process.send_signal(signal.SIGHUP)
        while client.act(obs=[0.0] * 4)[1]["checkpoint"] != "000002":
            pass
        assert server.end_by(signal.SIGTERM) == 0
        assert server.output.splitlines()[-1] == "ending"
        assert "serving the checkpoint" in server.output
        # The next server has the same token.
    with Served("run/checkpoints/000001", directory=tmp_path) as server:
        assert token_file.read_text().strip() == server.token
        with server.client() as client:
            assert client.act(obs=[0.0] * 4)[1]["checkpoint"] == "000001"
        assert server.end_by(signal.SIGINT) == EXIT_INTERRUPTED


def gated(directory: Path) -> PPOConfig:
    spaces = gym.spaces.Box(-10, 10, (4,), np.float32), gym.spaces.Discrete(2)
    config = PPOConfig().environment("CartPole-v1", observation_space=spaces[0], action_space=spaces[1])
    return config.rl_module(
        rl_module_spec=RLModuleSpec(module_class=GatedModule, model_config={"directory": str(directory)})
    )


def refuses_connections(server: Served) -> bool:
    try:
        with server.client() as late:
            late.ask("GET", "/healthz")
    except OSError:
        return True
    return False


def test_sigterm_answers_what_has_arrived_also_beside_a_request_that_makes_the_module_fail(
    tmp_path: Path,
) -> None:
    write_checkpoint(gated(tmp_path), tmp_path / "000001")
    with Served("000001", directory=tmp_path) as server:
        answers: dict[float, Any] = {}

        def ask(first: float) -> None:
            with server.client() as client:
                answers[first] = client.act(obs=[first, 0, 0, 0])

        threads = [threading.Thread(target=ask, args=(first,)) for first in (1.0, 2.0, 3.0, 4.0)]
        threads[0].start()
        while not (tmp_path / "begun").exists():
            threads[0].join(0.01)
        for thread in threads[1:]:
            thread.start()
        with server.client() as client:
            while "rlzmq" not in client.ask("GET", "/metrics")[1]["text"]:
                pass
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("ending\n")
        while not refuses_connections(server):
            pass
        assert answers == {}
        (tmp_path / "go").touch()
        for thread in threads:
            thread.join()
        codes = {first: code for first, (code, _) in answers.items()}
        assert codes == {1.0: 200, 2.0: 500, 3.0: 200, 4.0: 200}
        assert "the policy raised RuntimeError" in answers[2.0][1]["error"]
        assert server.end() == 0
        assert "this observation makes the module fail" in server.output


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a checkpoint."""
    directory = tmp_path_factory.mktemp("place")
    write_checkpoint(cartpole(), directory / "000001")
    return directory


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["000001", "--host", "0.0.0.0", "--port", "80"], "refusing to serve HTTP on 0.0.0.0:80"),
        (["000001", "--max-batch-size", "0"], "--max-batch-size: expected 1 or more"),
        (["000001", "--module", "p0"], "no module 'p0'"),
    ],
)
def test_wrong_arguments_are_configuration_errors(
    arguments: list[str],
    message: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(place)
    assert main(["serve", *arguments]) == EXIT_CONFIG
    assert message in capsys.readouterr().err


def test_a_token_file_must_hold_a_token(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    file = Path("000001/serve.token")
    for text in ("", "short", "a token with spaces in it", "ä" * 40):
        file.write_text(text)
        file.chmod(0o600)
        assert main(["serve", "000001"]) == EXIT_CONFIG
        assert "serve.token holds no token" in capsys.readouterr().err
    file.chmod(0o644)
    assert main(["serve", "000001"]) == EXIT_CONFIG
    assert "others may read it" in capsys.readouterr().err
    file.unlink()
