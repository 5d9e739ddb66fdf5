"""Peers of another version, config or env: each is turned away, with both values in the text."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlzmq.cli.joining import make_config
from rlzmq.core.errors import ConfigurationError
from rlzmq.driver.join_files import pack_config
from rlzmq.net.keys import JoinFile
from rlzmq.roles.remote_peer import fetch_config
from rlzmq.roles.runner_role import RemoteRunner
from tests.support.runs import Command, listening

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
