"""Real CURVE keys: who is let in, as what; files with secrets; the join file."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import read_private_file, write_text
from rlzmq.net.context import Context
from rlzmq.net.events import SocketEvent
from rlzmq.net.keys import Authenticator, CurveClient, CurveServer, JoinFile, KeyPair
from rlzmq.net.socket import DrainSocket

DEADLINE_S = 20
SERVER = KeyPair.generate()
RUNNER = KeyPair.generate()


class Server:
    """A ROUTER on loopback TCP with keys; ``received`` holds (role, body)."""

    def __init__(self, context: Context, host: str) -> None:
        self.received: asyncio.Queue[tuple[str | None, bytes]] = asyncio.Queue()
        self.refused = asyncio.Event()
        self.socket = DrainSocket(
            context, "ROUTER", self._on_message, curve=CurveServer(SERVER), on_event=self._on_event
        )
        self.address = self.socket.bind(f"tcp://{host}:0")

    def _on_message(self, frames: list[Any]) -> None:
        self.received.put_nowait((self.socket.sender_role, bytes(frames[1])))

    def _on_event(self, event: SocketEvent) -> None:
        if event.kind == "handshake_failed":
            self.refused.set()


def client(context: Context, keys: KeyPair, server_public: str = SERVER.public) -> DrainSocket:
    return DrainSocket(context, "DEALER", None, curve=CurveClient(server_public, keys))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_in_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    write_text(path, "something", is_private=True)
    assert read_private_file(path) == "something"
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigurationError, match="user 12345"):
        read_private_file(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
async def test_the_authenticator_answers_while_the_loop_is_busy(context: Context, host: str) -> None:
    with Authenticator(context, {RUNNER.public: "runner"}) as authenticator:
        server = Server(context, host)
        dealer = client(context, RUNNER)
        dealer.connect(server.address)
        loop = asyncio.get_running_loop()
        end = loop.time() + DEADLINE_S
        while authenticator.num_accepted == 0 and loop.time() < end:
            pass  # never yields
        assert authenticator.num_accepted == 1


def test_a_key_pair_hides_its_secret() -> None:
    assert SERVER.secret not in repr(SERVER)
    assert KeyPair.from_secret(SERVER.secret) == SERVER
    for wrong in ("", "x" * 39, "é" * 40, '"' * 40):
        with pytest.raises(ConfigurationError, match="not a secret key"):
            KeyPair.from_secret(wrong)


def test_private_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        write_text(tmp_path / "key", "secret", is_private=True)
    finally:
        os.umask(old_umask)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert read_private_file(tmp_path / "key") == "secret"
    with pytest.raises(ConfigurationError, match="Is a directory"):
        read_private_file(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        read_private_file(tmp_path / "key")


def secret_volume(directory: Path, mode: int) -> Path:
    """A file as kubelet lays it out: key → ..data/key, ..data → a directory with a time in its name."""
    directory.mkdir()
    (directory / "..2026_11_21").mkdir()
    (directory / "..2026_11_21" / "key").write_text("secret")
    (directory / "..2026_11_21" / "key").chmod(mode)
    (directory / "..data").symlink_to("..2026_11_21")
    (directory / "key").symlink_to("..data/key")
    return directory / "key"


def test_a_file_of_a_kubernetes_secret_may_be_its_pods_groups(tmp_path: Path) -> None:
    assert read_private_file(secret_volume(tmp_path / "volume", 0o440)) == "secret"  # with an fsGroup


JOIN = JoinFile(
    role="runner",
    addresses={"control": "tcp://10.0.0.5:5555", "weights": "tcp://10.0.0.5:5556"},
    server_public_key=SERVER.public,
    client_secret_key=RUNNER.secret,
)


def test_a_join_file_comes_back_as_written(tmp_path: Path) -> None:
    JOIN.write(tmp_path / "join.toml")
    assert (tmp_path / "join.toml").stat().st_mode & 0o777 == 0o600
    read = JoinFile.read(tmp_path / "join.toml")
    assert read == JOIN
    assert read.curve() == CurveClient(SERVER.public, RUNNER)
    assert RUNNER.secret not in repr(read)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("role =", "rol =", "unknown key 'rol'. Did you mean 'role'"),
        ("tcp://10.0.0.5:5555", "tcp://10.0.0.5", "malformed address"),
        pytest.param(SERVER.public, "short", "not a public key", id="short"),  # keys differ in each process
        ("[addresses]", "[addresses", "not valid TOML"),
    ],
)
def test_a_wrong_join_file_says_what_is_wrong(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        JoinFile.from_text(JOIN.to_text().replace(old, new), source="join.toml")
    assert message in str(caught.value)
