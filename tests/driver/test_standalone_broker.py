"""A broker that was started on its own: the driver's processes and outsiders all meet there, by key."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rlzmq.cli.doctor import DoctorOptions, Finding, check_keys
from rlzmq.cli.main import EXIT_UNREACHABLE, main
from rlzmq.connectors.env_to_module import MeanStdFilter
from rlzmq.core.errors import AuthenticationError, ConfigurationError, PeerLostError
from rlzmq.driver import broker_supervision
from rlzmq.driver.broker_supervision import FoundBroker
from rlzmq.driver.join_files import JoinKeys, at_host, listen_addresses, write_join_files
from rlzmq.net.join_file import JoinFile
from rlzmq.roles.broker.broker_role import BrokerRole
from rlzmq.roles.remote_peer import fetch_config
from tests.driver.outside import Command, assert_accounted, listening


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


def make_filter(env: object, spaces: object, device: object = None) -> MeanStdFilter:
    return MeanStdFilter()


def train_command(*more: str) -> list[str]:
    return [
        "train", "ppo", "--env", "CartPole-v1", "--preset", "none", "--env-runners", "0", "--learners", "1",
        "--envs-per-env-runner", "4", "--batch-size-per-learner", "240", "--minibatch-size", "60", "--num-epochs", "1",
        "--broker", "b.driver.toml", *more,
    ]  # fmt: skip


def broker_command() -> tuple[str, ...]:
    """A broker that waits for drivers longer than a busy machine needs to start one."""
    listen = f"tcp://127.0.0.1:{_two_free_ports()}"
    return ("broker", "--listen", listen, "--join-file", "b.toml", "--driver-timeout", "120")


def test_a_driver_that_was_killed_is_replaced_by_attach_while_broker_and_runner_wait(tmp_path: Path) -> None:
    with Command(tmp_path, *broker_command()) as broker, contextlib.ExitStack() as stack:
        broker.wait_for("runners ")
        runner = stack.enter_context(Command(tmp_path, "runner", "--join", "b.toml"))
        with Command(tmp_path, *train_command("--run-dir", "mine", "--checkpoint-every-s", "0.5")) as driver:
            driver.wait_for("iter ")
            checkpoints = tmp_path / "mine" / "checkpoints"
            while not (checkpoints.is_dir() and list(checkpoints.glob("[0-9]*/manifest.json"))):
                driver.wait_for("iter ")
                driver.output = ""
            with Command(tmp_path, "attach", "mine") as early:
                assert early.end() == 78
                assert "still runs" in early.output
            driver.process.kill()
            driver.process.wait()
        for is_last in (False, True):  # the second one meets a broker that knows two lineages
            with Command(tmp_path, "attach", "mine") as attached:
                attached.wait_for("resumed ")
                attached.wait_for("iter ")
                if not is_last:
                    attached.process.kill()
                    attached.process.wait()
                    continue
                attached.process.send_signal(signal.SIGTERM)
                assert attached.end() == 75, attached.output
                assert "dropped" in attached.output
        broker.process.send_signal(signal.SIGTERM)
        assert broker.end() == 75, broker.output
        assert runner.end() == 0, runner.output
        assert runner.output.count(" joined ") == 1


@pytest.mark.slow
def test_attach_before_the_first_checkpoint_draws_no_other_seed(tmp_path: Path) -> None:
    with Command(tmp_path, *broker_command()) as broker, contextlib.ExitStack() as stack:
        broker.wait_for("runners ")
        runner = stack.enter_context(Command(tmp_path, "runner", "--join", "b.toml"))
        with Command(tmp_path, *train_command("--run-dir", "mine")) as driver:
            driver.wait_for("iter ")
            driver.process.kill()
            driver.process.wait()
        assert not list((tmp_path / "mine" / "checkpoints").glob("*/manifest.json"))
        with Command(tmp_path, "attach", "mine") as attached:
            attached.wait_for("iter ")
            attached.process.send_signal(signal.SIGTERM)
            assert attached.end() == 75, attached.output
        broker.process.send_signal(signal.SIGTERM)
        assert broker.end() == 75, broker.output
        assert runner.end() == 0, runner.output
        assert runner.output.count(" joined ") == 1


def test_a_driver_that_begins_anew_where_another_one_trained_is_served(tmp_path: Path) -> None:
    with Command(tmp_path, *broker_command()) as broker, contextlib.ExitStack() as stack:
        broker.wait_for("runners ")
        here = Path(__file__).parent
        path = f"{here.parents[1]}:{here}"  # where `make_filter` is found
        runner = stack.enter_context(Command(tmp_path, "runner", "--join", "b.toml", PYTHONPATH=path))
        versions = []
        for index in range(2):
            config = listening(tmp_path, listen=None, join_file=None).learners(num_learners=0)
            config.env_runners(env_to_module_connector=make_filter)
            config.networking(broker=str(tmp_path / "b.driver.toml"))
            with config.build() as algo:
                for _ in range(2):
                    result = algo.train()
                if index == 0:
                    runner.wait_for(" joined ")
                assert_accounted(result)
                assert result["accounting"]["trained"] == 2 * 240
                assert result["fault_tolerance"]["num_env_steps_without_report"] == 0
                core = algo._async.session._pipeline._driver.core
                versions.append((core.min_generation, core.connector_version))
                if index == 1:
                    with config.copy().build() as another:
                        another.train()
                        with pytest.raises(
                            ConfigurationError, match="another driver has taken over this run"
                        ):
                            algo.train()
                        assert_accounted(another.train())
        assert versions[0] < versions[1]
        assert versions[0][1] < versions[1][1], "runners would go on with the filter of the driver before"
        broker.process.send_signal(signal.SIGTERM)
        assert broker.end() == 75, broker.output


def test_attach_says_what_it_needs(tmp_path: Path) -> None:
    with Command(tmp_path, "attach") as command:
        assert command.end() == 78
        assert "no run under runs/" in command.output
    (tmp_path / "other").mkdir()
    for text in ('{"command": ["script.py"]}', '{"command": 3, "cwd": "/"}'):
        (tmp_path / "other" / "run.json").write_text(text)
        with Command(tmp_path, "attach", "other") as command:
            assert command.end() == 78
            assert "Algorithm.resume" in command.output
    facts = {"command": ["rlzmq", "train", "ppo"], "train": ["ppo"], "cwd": str(tmp_path / "gone")}
    (tmp_path / "other" / "run.json").write_text(json.dumps(facts))
    with Command(tmp_path, "attach", "other") as command:
        assert command.end() == 78
        assert "gone, which cannot be entered: No such file" in command.output


def top(tmp_path: Path) -> str:
    with Command(tmp_path, "top", "b.observer.toml", "--count", "1") as command:
        assert command.end() == 0, command.output
        return command.output


def test_a_run_through_a_broker_of_its_own_survives_that_brokers_restart(tmp_path: Path) -> None:
    arguments = broker_command()
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


@contextlib.asynccontextmanager
async def waiting_broker(tmp_path: Path) -> AsyncIterator[dict[str, Path]]:
    """A broker with keys that no driver has come to: role → join file."""
    keys = JoinKeys.generate()
    listen = listen_addresses("tcp://127.0.0.1:0")
    broker = BrokerRole("run", listen=listen, curve=keys.curve, roles=keys.roles)
    addresses = await broker.start()
    remote = {name: at_host(addresses[f"remote_{name}"], None) for name in ("data", "weights")}
    try:
        yield write_join_files(keys, tmp_path / "b.toml", "run", remote)
    finally:
        await broker.stop()


async def test_a_broker_without_a_driver_is_told_from_none(tmp_path: Path) -> None:
    def look(file: Path) -> Finding:
        return list(check_keys(DoctorOptions(join=file, timeout=20)))[-1]

    async with waiting_broker(tmp_path) as files:
        finding = await asyncio.to_thread(look, files["runner"])
        assert finding.level == "ok"
        assert "took this key" in finding.detail
        assert "no driver has connected yet" in finding.detail
        with pytest.raises(
            PeerLostError, match=r"accepts this key, but no driver has connected yet \(waited 0.1 s\)"
        ):
            await fetch_config(JoinFile.read(files["runner"]), timeout_s=0.1)
        await FoundBroker(str(files["driver"])).start()


async def test_a_driver_does_not_wait_for_a_broker_that_is_gone_or_has_other_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_supervision, "_WAIT_S", 0.1)
    async with waiting_broker(tmp_path) as files:
        addresses = JoinFile.read(files["driver"]).addresses
    with pytest.raises(PeerLostError, match=rf"no broker at {addresses['data']} within 0.1 s"):
        await FoundBroker(str(files["driver"])).start()
    monkeypatch.undo()
    async with waiting_broker(tmp_path) as files:
        join = JoinFile.read(files["driver"])
        other = write_join_files(JoinKeys.generate(), tmp_path / "other.toml", "run", join.addresses)
        with pytest.raises(AuthenticationError, match="refuses this key"):
            await FoundBroker(str(other["driver"])).start()


def test_train_ends_where_its_broker_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(broker_supervision, "_WAIT_S", 0.1)
    addresses = {name: f"tcp://127.0.0.1:{_two_free_ports()}" for name in ("data", "weights", "control")}
    write_join_files(JoinKeys.generate(), tmp_path / "b.toml", "run", addresses)
    assert main([*train_command(), "--quiet"]) == EXIT_UNREACHABLE
    assert f"no broker at {addresses['data']}" in capsys.readouterr().err
