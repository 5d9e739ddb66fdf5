"""The join file: the addresses and keys with which a process on another machine joins a run."""

from __future__ import annotations

import json
import os
import socket
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlzmq.core.addresses import check_connect_address, split_tcp
from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.core.files import read_private_file, write_private_file
from rlzmq.core.process import process_space, start_mark
from rlzmq.core.suggest import did_you_mean
from rlzmq.net.keys import CurveClient, KeyPair, check_public_key

__all__ = ["JoinFile", "writer_of"]

_KEYS = ("role", "server_public_key", "client_secret_key", "addresses")
_HEADER = "# Anyone who reads this file can join the run in the role below. Keep it private.\n"


def writer_of(run_id: str) -> dict[str, str]:
    """Return what a join file says of its run and of the process that writes it: this one."""
    pid = os.getpid()
    return {
        "run": run_id,
        "host": socket.gethostname(),
        "pid": str(pid),
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "space": process_space(),
        "mark": start_mark(pid) or "",
    }


@dataclass(frozen=True, slots=True)
class JoinFile:
    """Addresses and keys of one run for one role, as a TOML file of mode 0600.

    Attributes:
        role: The role that the key allows, e.g. ``"runner"``.
        addresses: Channel name → address, e.g. ``{"control": "tcp://10.0.0.5:5555"}``.
        server_public_key: Proves the other side; empty without keys (ipc, insecure).
        client_secret_key: Proves this side; empty without keys.
        writer: What `writer_of` returned to the run's head; {} if the file is written by hand.
    """

    role: str
    addresses: Mapping[str, str]
    server_public_key: str = ""
    client_secret_key: str = field(default="", repr=False)
    writer: Mapping[str, str] = field(default_factory=dict)

    def curve(self) -> CurveClient | None:
        """Return the keys for ``DrainSocket(curve=…)``; None if the run has no keys."""
        if not self.server_public_key:
            return None
        return CurveClient(self.server_public_key, KeyPair.from_secret(self.client_secret_key))

    def absence(self, channel: str) -> str:
        """Return what a peer is told at once if nothing listens at an address of the file."""
        by = f", written by {self.writer['host']} at {self.writer['written']}," if self.writer else ""
        return (
            f"nothing listens at {self.addresses[channel]}: the run of this join file{by} has ended, or its head is "
            "being started again"
        )

    def to_text(self) -> str:
        """Return the file's text, e.g. for the standard input of a process elsewhere."""
        # JSON strings are TOML basic strings as long as nothing beyond ASCII stays unescaped.
        lines = [f"{key} = {json.dumps(getattr(self, key))}" for key in _KEYS if key != "addresses"]
        for table in ("addresses", "writer"):
            lines += ["", f"[{table}]"]
            lines += [
                f"{json.dumps(name)} = {json.dumps(value)}" for name, value in getattr(self, table).items()
            ]
        return _HEADER + "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str, *, source: str = "join file") -> JoinFile:
        """Parse and check the file's text.

        Raises:
            ConfigurationError: The text is not TOML; a key is unknown, missing or of the wrong type; an
                address or a CURVE key is malformed.
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{source} is not valid TOML: {error}") from error
        for key in data:
            if key not in (*_KEYS, "writer"):
                raise ConfigurationError(f"{source}: unknown key {key!r}.{did_you_mean(key, _KEYS)}")
        data.setdefault("writer", {})
        for key in (*_KEYS, "writer"):
            expected = dict if key in ("addresses", "writer") else str
            if not isinstance(data.get(key), expected):
                found = "nothing" if key not in data else repr(data[key])[:40]
                kind = "a table" if expected is dict else "a string"
                raise ConfigurationError(f"{source}: {key} must be {kind}, got {found}")
        has_keys = bool(data["server_public_key"])
        if has_keys:
            check_public_key(data["server_public_key"])
            KeyPair.from_secret(data["client_secret_key"])
        for name, address in data["addresses"].items():
            if not isinstance(address, str):
                raise ConfigurationError(f"{source}: addresses.{name} must be a string, got {address!r}")
            check_connect_address(address, has_keys=has_keys, insecure=True)
        return cls(**data)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically, with mode 0600."""
        write_private_file(path, self.to_text())

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> JoinFile:
        """Read a join file.

        Raises:
            ConfigurationError: As in :meth:`from_text`; or the file is missing, or readable by others.
            PeerLostError: The process that wrote it, on this machine, has ended, and no other has taken its place.
        """
        join = cls.from_text(read_private_file(path), source=os.fspath(path))
        writer = join.writer
        has_ended = (
            writer.get("space") == process_space() and start_mark(int(writer["pid"])) != writer["mark"]
        )
        if has_ended and not _is_listening(join.addresses["data"]):
            raise PeerLostError(
                f"{path} is of a run that is gone: {writer['run']}, whose head (pid {writer['pid']} on "
                f"{writer['host']}) wrote it at {writer['written']} and has ended. Start the head again first."
            )
        return join


def _is_listening(address: str) -> bool:
    """Return whether somebody listens at an address of this machine, e.g. the head that was started again."""
    try:
        with socket.create_connection(split_tcp(address), timeout=1.0):
            return True
    except OSError:
        return False
