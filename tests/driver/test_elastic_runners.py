"""Runners that join a run by themselves over TCP with keys: any time, any number, and leave as they like."""

from __future__ import annotations

import signal
import stat
from pathlib import Path

import pytest
from recovery_runs import kill

from rlzmq.core.errors import ConfigurationError
from rlzmq.driver.join_files import JoinKeys, pack_config, unpack_config
from rlzmq.net.keys import JoinFile
from tests.support.runs import Command, assert_accounted, listening


def test_runners_join_leave_and_die_while_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    join = tmp_path / "join.toml"
    with listening(tmp_path).build() as algo:
        assert stat.S_IMODE(join.stat().st_mode) == 0o600
        arguments = ("runner", "--join", str(join))
        with (
            Command(tmp_path, *arguments) as stays,
            Command(tmp_path, *arguments, "--envs-per-env-runner", "3") as leaves,
            Command(tmp_path, *arguments) as dies,
        ):
            for peer in (stays, leaves, dies):
                peer.wait_for(" joined ")
            first = algo.train()
            leaves.process.send_signal(signal.SIGINT)
            dies.process.kill()
            for _ in range(3):
                result = algo.train()
            assert leaves.end() == 130, leaves.output
            assert "left: " in leaves.output
            assert result["num_env_steps_sampled_lifetime"] > first["num_env_steps_sampled_lifetime"]
            assert result["accounting"]["trained"] >= 4 * 240
            assert_accounted(result)
            while f"runner {dies.output.split()[0]} lost" not in caplog.text:
                algo.train()
            assert f"runner {leaves.output.split()[0]} lost" not in caplog.text
            algo.stop()
            assert stays.end() == 0, stays.output
            assert "goodbye: " in stays.output
    assert not list(tmp_path.glob("*.toml"))  # the keys of a run that is over


def test_a_runner_outlives_the_broker_and_ends_with_the_run(tmp_path: Path) -> None:
    with (
        listening(tmp_path, num_env_runners=1).build() as algo,
        Command(tmp_path, "runner", "--join", str(tmp_path / "join.toml")) as peer,
    ):
        peer.wait_for(" joined ")
        algo.train()
        algo._run(kill(algo._async.session.pipeline._broker.handle))
        for _ in range(3):
            result = algo.train()
        assert result["fault_tolerance"]["num_broker_restarts"] == 1
        assert_accounted(result)
        peer.process.send_signal(signal.SIGTERM)
        algo.train()
        assert peer.end() == 75, peer.output


def test_a_key_of_another_run_ends_with_69(tmp_path: Path) -> None:
    with listening(tmp_path, num_env_runners=1).build() as algo:
        mine = JoinFile.read(tmp_path / "join.toml")
        other = JoinKeys.generate().clients["runner"].secret
        JoinFile("runner", mine.addresses, mine.server_public_key, other).write(tmp_path / "wrong.toml")
        with Command(tmp_path, "runner", "--join", "wrong.toml", "--timeout", "10") as peer:
            assert peer.end() == 69
            assert "refuses this key" in peer.output
        algo.train()


@pytest.mark.parametrize("listen", ["tcp://*:5555", "tcp://0.0.0.0:5555", "tcp://127.0.0.1", "127.0.0.1:5"])
def test_wildcards_and_malformed_addresses_are_refused(listen: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        listening(tmp_path, listen=listen).validate()


def test_the_config_travels_as_plain_data(tmp_path: Path) -> None:
    config = listening(tmp_path)
    name, settings = unpack_config(pack_config(config))
    assert name == "rlzmq.algorithms.ppo:PPOConfig"
    assert type(config).from_state(settings).to_dict() == config.to_dict()
    config.env_runners(env_to_module_connector=lambda env, spaces, device: [])
    with pytest.raises(ConfigurationError, match="import code by its name"):
        pack_config(config)
