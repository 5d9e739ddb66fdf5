"""The join file: the addresses and keys with which a process on another machine joins a run."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlzmq.core.addresses import check_connect_address
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import read_private_file, write_private_file
from rlzmq.core.suggest import did_you_mean
from rlzmq.net.keys import CurveClient, KeyPair, check_public_key

__all__ = ["JoinFile"]

_KEYS = ("role", "server_public_key", "client_secret_key", "addresses")
_HEADER = "# Anyone who reads this file can join the run in the role below. Keep it private.\n"


@dataclass(frozen=True, slots=True)
class JoinFile:
    """Addresses and keys of one run for one role, as a TOML file of mode 0600.

    Attributes:
        role: The role that the key allows, e.g. ``"runner"``.
        addresses: Channel name → address, e.g. ``{"control": "tcp://10.0.0.5:5555"}``.
        server_public_key: Proves the other side; empty without keys (ipc, insecure).
        client_secret_key: Proves this side; empty without keys.
    """

    role: str
    addresses: Mapping[str, str]
    server_public_key: str = ""
    client_secret_key: str = field(default="", repr=False)

    def curve(self) -> CurveClient | None:
        """Return the keys for ``DrainSocket(curve=…)``; None if the run has no keys."""
        if not self.server_public_key:
            return None
        return CurveClient(self.server_public_key, KeyPair.from_secret(self.client_secret_key))

    def to_text(self) -> str:
        """Return the file's text, e.g. for a launcher that writes it to a remote shell's stdin."""
        # JSON strings are TOML basic strings as long as nothing beyond ASCII stays unescaped.
        lines = [f"{key} = {json.dumps(getattr(self, key))}" for key in _KEYS if key != "addresses"]
        lines += ["", "[addresses]"]
        lines += [f"{json.dumps(name)} = {json.dumps(address)}" for name, address in self.addresses.items()]
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
            if key not in _KEYS:
                raise ConfigurationError(f"{source}: unknown key {key!r}.{did_you_mean(key, _KEYS)}")
        for key in _KEYS:
            expected = dict if key == "addresses" else str
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
        """
        return cls.from_text(read_private_file(path), source=os.fspath(path))
