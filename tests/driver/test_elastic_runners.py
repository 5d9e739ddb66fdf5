"""Runners and learner ranks that join over TCP with keys, at any time, and leave as they like; who is turned away."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from recovery_runs import kill

from rlzmq.cli.joining import make_config, ranks_here
from rlzmq.core.errors import ConfigurationError
from rlzmq.driver.join_files import JoinKeys, pack_config, unpack_config
from rlzmq.net.keys import JoinFile
from rlzmq.roles.remote_peer import fetch_config
from rlzmq.roles.runner_role import RemoteRunner
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


def test_the_config_travels_as_plain_data(tmp_path: Path) -> None:
    config = listening(tmp_path)
    name, settings = unpack_config(pack_config(config))
    assert name == "rlzmq.algorithms.ppo:PPOConfig"
    assert type(config).from_state(settings).to_dict() == config.to_dict()
    config.env_runners(env_to_module_connector=lambda env, spaces, device: [])
    with pytest.raises(ConfigurationError, match="import code by its name"):
        pack_config(config)


def test_learners_and_runners_all_come_from_outside_and_a_spare_replaces_a_dead_rank(tmp_path: Path) -> None:
    config = listening(tmp_path, batch=120, num_remote_learners=2).learners(num_learners=2)
    built: list[object] = []
    builder = threading.Thread(target=lambda: built.append(config.build()))
    builder.start()
    join, learner_join = tmp_path / "join.toml", tmp_path / "join.learner.toml"
    while not learner_join.exists():
        builder.join(0.05)
        assert builder.is_alive(), "the driver ended before it listened"
    learner = ("learner", "--join", str(learner_join))
    with (
        Command(tmp_path, *learner, RANK="0", WORLD_SIZE="2") as first,
        Command(tmp_path, *learner, RANK="1", WORLD_SIZE="2") as second,
        Command(tmp_path, "runner", "--join", str(join), "--timeout", "100") as runner,
    ):
        builder.join(100)
        assert built
        with built[0] as algo:  # type: ignore[attr-defined]
            runner.wait_for(" joined ")
            result = algo.train()
            assert result["accounting"]["trained"] >= 240
            second.process.kill()
            with Command(tmp_path, *learner) as spare:
                result = algo.train()  # the survivor goes on with the same batch
                assert result["accounting"]["trained"] >= 480
                spare.wait_for(" is rank ")
                while algo.learner_group.num_learners < 2:
                    result = algo.train()  # the spare joins between two updates
                assert_accounted(result)
                algo.stop()
                assert first.end() == 0, first.output
                assert spare.end() == 0, spare.output


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 1)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"}, (2, 0)),
        ({"JOB_COMPLETION_INDEX": "5"}, (5, -1)),
        ({}, (-1, -1)),
    ],
)
def test_schedulers_variables_are_recognised(environment: dict[str, str], ranks: tuple[int, int]) -> None:
    assert ranks_here(environment) == ranks


def test_what_is_no_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="RANK='x'"):
        ranks_here({"RANK": "x"})
    with pytest.raises(ConfigurationError, match="all remote"):
        listening(tmp_path, num_remote_learners=1).learners(num_learners=2).validate()


_OTHER_PACKAGE = "import rlzmq.core.version as v; v.__version__ = '9.9.9'"
_OTHER_WIRE = "import rlzmq.wire.codec as codec; codec.WIRE_VERSION = 99"
_MAIN = "import sys; from rlzmq.cli.main import main; sys.exit(main(sys.argv[1:]))"


@pytest.mark.slow
def test_peers_of_other_versions_are_told_both_and_the_run_goes_on(tmp_path: Path) -> None:
    with listening(tmp_path, num_env_runners=1).build() as algo:
        runner = ("runner", "--join", str(tmp_path / "join.toml"))
        with (
            Command(tmp_path, *runner, program=("-c", f"{_OTHER_PACKAGE}; {_MAIN}")) as package,
            Command(tmp_path, *runner, program=("-c", f"{_OTHER_WIRE}; {_MAIN}")) as wire,
        ):
            assert package.end() == 78, package.output
            assert "the run uses rlzmq 0.1.0, this machine has rlzmq 9.9.9" in package.output
            assert wire.end() == 69, wire.output
            assert " is not spoken here, this side speaks version 99" in wire.output
        algo.train()


async def test_a_runner_of_another_env_is_refused_with_both_digests(tmp_path: Path) -> None:
    async with listening(tmp_path, num_env_runners=1).build_async() as algo:
        join = JoinFile.read(tmp_path / "join.toml")
        run_id, packed = await fetch_config(join, timeout_s=10)
        config = make_config(packed).environment("Acrobot-v1")
        runner = RemoteRunner(join, run_id, config, patience_s=10)
        try:
            await runner.start()
            why, detail = await runner.wait()
        finally:
            await runner.stop()
        assert why == "spaces_digest"
        assert "the run has" in detail
        assert "the peer has" in detail
        await algo.train()


def test_a_config_of_another_version_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_config(listening(tmp_path))
    monkeypatch.setattr("rlzmq.core.version.__version__", "9.9.9")
    with pytest.raises(ConfigurationError, match=r"this machine has rlzmq 9\.9\.9"):
        make_config(packed)


@pytest.mark.slow
def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with Command(
            tmp_path, "train", "ppo", "--env", "CartPole-v1", "--env-runners", "1", "--join-file", "y.toml",
            "--listen", f"tcp://127.0.0.1:{port}",
        ) as train:  # fmt: skip
            assert train.end() == 78, train.output
            assert f"cannot listen on tcp://127.0.0.1:{port}: another process listens there" in train.output
            assert "Traceback" not in train.output


@pytest.mark.slow
def test_too_few_open_files_are_named_before_and_while_running(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    train = "train ppo --env CartPole-v1 --env-runners 1 --listen tcp://127.0.0.1:0"
    for num_files, command, says in (
        (64, "doctor", "FAIL  open files       soft 64, hard 64: a broker serves about 12 peers"),
        (40, train, "only 40 files may be open in this process"),
    ):
        line = f"ulimit -n {num_files}; exec {sys.executable} -m rlzmq {command} 2>&1"
        done = subprocess.run(
            ["sh", "-c", line], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
        )
        assert done.returncode == 78, done
        assert says in done.stdout
