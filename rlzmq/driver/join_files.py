"""Keys and join files for external peers: one server key, and one client key per role."""

from __future__ import annotations

import os
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.addresses import split_tcp, tcp_address
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import read_private_file, write_text
from rlzmq.net.keys import CurveServer, JoinFile, KeyPair, writer_of
from rlzmq.roles.peer_link import package_version
from rlzmq.wire.payloads import pack_blob, unpack_blob

__all__ = [
    "ROLES",
    "JoinKeys",
    "at_host",
    "keys_file",
    "listen_addresses",
    "pack_config",
    "unpack_config",
    "write_join_files",
]

ROLES = ("runner", "learner", "observer")


@dataclass(frozen=True, slots=True)
class JoinKeys:
    """The keys of one run, valid until it ends.

    A run with a `join_file` keeps them next to it, with its ports: if the driver is killed and started again, its
    peers reach the new one with the files that they have.

    Attributes:
        server: Key pair that proves the run's identity to external peers.
        clients: Role → the key pair that authorizes only this role.
        ports: Channel → the port of the driver that was killed; {} for a new run.
    """

    server: KeyPair
    clients: Mapping[str, KeyPair] = field(repr=False)
    ports: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def generate(cls) -> JoinKeys:
        """Return newly generated keys."""
        return cls(KeyPair.generate(), {role: KeyPair.generate() for role in ROLES})

    @classmethod
    def kept(cls, path: Path) -> JoinKeys:
        """Return the keys in this file, or new ones if there is none.

        Raises:
            ConfigurationError: The file cannot be read, is readable by others, or holds something else.
        """
        if not path.exists():
            return cls.generate()
        try:
            data = tomllib.loads(read_private_file(path))
            pairs = {role: KeyPair.from_secret(data[role]) for role in ("server", *ROLES)}
            return cls(pairs.pop("server"), pairs, {name: int(port) for name, port in data["ports"].items()})
        except (tomllib.TOMLDecodeError, LookupError, ValueError, AttributeError) as error:
            raise ConfigurationError(f"{path} does not hold a run's keys: {error!r}. Remove it.") from None

    def keep(self, path: Path, addresses: Mapping[str, str]) -> None:
        """Write the keys, and the ports of these addresses."""
        pairs = {"server": self.server, **self.clients}
        lines = [f"{role} = '{pair.secret}'" for role, pair in pairs.items()]
        lines += ["[ports]", *(f"{name} = {split_tcp(address)[1]}" for name, address in addresses.items())]
        write_text(path, "\n".join(lines) + "\n", is_private=True)

    def former(self, name: str, address: str) -> str:
        """Return the address for a channel; one with port 0 gets the port that the killed driver had, if it is free."""
        host, port = split_tcp(address)
        if port or name not in self.ports:
            return address
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            socket.create_server((host, self.ports[name]), family=family).close()
        except OSError:
            return address
        return tcp_address(host, self.ports[name])

    @property
    def curve(self) -> CurveServer:
        """The server keys, for sockets that listen."""
        return CurveServer(self.server)

    @property
    def roles(self) -> dict[str, str]:
        """Public key → role, for the authenticator."""
        return {keys.public: role for role, keys in self.clients.items()}

    def join_file(self, role: str, addresses: Mapping[str, str], run_id: str = "") -> JoinFile:
        """Return the join file for peers of this role."""
        writer = writer_of(run_id)
        return JoinFile(role, dict(addresses), self.server.public, self.clients[role].secret, writer)


def keys_file(join_file: str | os.PathLike[str]) -> Path:
    """Return the path of the keys that a run with this join file keeps: ``STEM.keys.toml`` next to it."""
    path = Path(join_file).absolute()
    return path.with_name(f"{path.stem}.keys.toml")


def listen_addresses(listen: str) -> dict[str, str]:
    """Return ``{"data": …, "weights": …}`` for config.listen: its port and the next one, or any two ports if it is 0.

    Raises:
        ConfigurationError: The address is malformed, or there is no next port.
    """
    host, port = split_tcp(listen)
    if port == 65535:
        raise ConfigurationError(f"listen={listen!r}: weights use the next port, so expected at most 65534.")
    return {"data": tcp_address(host, port), "weights": tcp_address(host, port + 1 if port else 0)}


def at_host(address: str, host: str | None) -> str:
    """Return the address with the advertised host name, if there is one."""
    if host is None:
        return address
    return tcp_address(host.strip("[]"), split_tcp(address)[1])


def write_join_files(
    keys: JoinKeys, path: str | os.PathLike[str], addresses: Mapping[str, str], run_id: str, *, keeps: bool
) -> dict[str, Path]:
    """Write ``FILE`` for runners and ``STEM.ROLE.toml`` for the other roles next to it, mode 0600.

    With `keeps` the keys are written first, for a driver that takes the place of this one.

    Returns:
        Role → its join file.

    Raises:
        ConfigurationError: The directory is missing or not writable.
    """
    first = Path(path).absolute()
    files = {role: first.with_name(f"{first.stem}.{role}.toml") for role in ROLES}
    files["runner"] = first
    try:
        if keeps:
            keys.keep(keys_file(first), addresses)
        for role, file in files.items():
            keys.join_file(role, addresses, run_id).write(file)
    except OSError as error:
        raise ConfigurationError(f"cannot write the join file {first}: {error.strerror}") from error
    return files


def pack_config(config: BaseConfig) -> bytes:
    """Return the run's config for external peers, as plain data, with code only as importable names.

    Raises:
        ConfigurationError: A setting contains code without an importable name.
    """
    try:
        settings = config.get_state()
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error} Peers that join over config.listen={config.listen!r} import code by its name; "
            "a run without `listen` accepts any code."
        ) from None
    kind = type(config)
    name = f"{kind.__module__}:{kind.__qualname__}"
    return bytes(pack_blob({"rlzmq": package_version(), "class": name, "settings": settings}))


def unpack_config(blob: object) -> tuple[str, dict[str, Any]]:
    """Return (name of the config class, settings for its `from_state`) from a frame of `pack_config`.

    Raises:
        ConfigurationError: The frame is invalid or from another version of rlzmq.
    """
    data = unpack_blob(blob)
    theirs = data.get("rlzmq") if isinstance(data, dict) else None
    if theirs != package_version():
        raise ConfigurationError(
            f"the run uses rlzmq {theirs}, this machine has rlzmq {package_version()}: install the same version"
        )
    try:
        return str(data["class"]), dict(data["settings"])
    except (KeyError, TypeError, ValueError):
        raise ConfigurationError("this rlzmq cannot read the run's configuration") from None
