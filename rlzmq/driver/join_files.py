"""How peers from outside get into a run: one server key, one client key per role, and the join files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.addresses import split_tcp
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.space_plain import space_from_plain, space_to_plain
from rlzmq.net.join_file import JoinFile
from rlzmq.net.keys import CurveServer, KeyPair
from rlzmq.roles.compatibility import package_version
from rlzmq.wire.values import pack_blob, unpack_blob

__all__ = [
    "ROLES",
    "JoinKeys",
    "at_host",
    "listen_addresses",
    "pack_config",
    "unpack_config",
    "write_join_files",
]

_SPACES = ("observation_space", "action_space")
ROLES = ("runner", "learner", "driver", "observer")


@dataclass(frozen=True, slots=True)
class JoinKeys:
    """The keys of one run: made when it starts, worthless when it ends.

    Attributes:
        server: Proves the run to whoever joins.
        clients: Role → the key pair that gives this role, and no other.
    """

    server: KeyPair
    clients: Mapping[str, KeyPair] = field(repr=False)

    @classmethod
    def generate(cls) -> JoinKeys:
        """Fresh keys."""
        return cls(KeyPair.generate(), {role: KeyPair.generate() for role in ROLES})

    @property
    def curve(self) -> CurveServer:
        """For sockets that listen."""
        return CurveServer(self.server)

    @property
    def roles(self) -> dict[str, str]:
        """Public key → role, for the authenticator."""
        return {keys.public: role for role, keys in self.clients.items()}

    def join_file(self, role: str, run_id: str, addresses: Mapping[str, str]) -> JoinFile:
        """What a peer of this role needs."""
        return JoinFile(run_id, role, dict(addresses), self.server.public, self.clients[role].secret)


def listen_addresses(listen: str) -> dict[str, str]:
    """``{"data": …, "weights": …}`` of config.listen: the port and the one after it, or any two.

    Raises:
        ConfigurationError: Malformed, or there is no port after it.
    """
    host, port = split_tcp(listen)
    if port == 65535:
        raise ConfigurationError(
            f"listen={listen!r}: weights go by the port after it, so it is at most 65534."
        )
    return {"data": f"tcp://{host}:{port}", "weights": f"tcp://{host}:{port + 1 if port else 0}"}


def at_host(address: str, host: str | None) -> str:
    """The address as peers see it: by another host name, if there is one."""
    if host is None:
        return address
    return f"tcp://{host}:{split_tcp(address)[1]}"


def write_join_files(
    keys: JoinKeys, path: str | os.PathLike[str], run_id: str, addresses: Mapping[str, str]
) -> dict[str, Path]:
    """Write ``FILE`` for runners and ``STEM.ROLE.toml`` for the other roles next to it, mode 0600.

    Returns:
        Role → its file.

    Raises:
        ConfigurationError: The directory is missing or not writable.
    """
    first = Path(path).absolute()
    files = {role: first.with_name(f"{first.stem}.{role}.toml") for role in ROLES}
    files["runner"] = first
    try:
        for role, file in files.items():
            keys.join_file(role, run_id, addresses).write(file)
    except OSError as error:
        raise ConfigurationError(f"cannot write the join file {first}: {error.strerror}") from error
    return files


def pack_config(config: BaseConfig) -> bytes:
    """The run's config for peers that join: plain data; code only by importable names.

    Raises:
        ConfigurationError: A setting holds code without an importable name.
    """
    plain = config.copy(copy_frozen=False)
    spaces = {name: space_to_plain(config.get(name)) for name in _SPACES if config.get(name) is not None}
    spec = config.to_dict()["rl_module_spec"]
    for name in (*spaces, *(("rl_module_spec",) if spec is not None else ())):
        setattr(plain, name, None)
    try:
        settings = plain.get_state()
        spec_plain = None if spec is None else [hasattr(spec, "rl_module_specs"), spec.to_dict()]
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{error} Whoever joins over config.listen={config.listen!r} imports code by its name; "
            "a run without `listen` takes it as it is."
        ) from None
    kind = type(config)
    name = f"{kind.__module__}:{kind.__qualname__}"
    packed = {"class": name, "settings": settings, "spaces": spaces, "rl_module_spec": spec_plain}
    return bytes(pack_blob({"rlzmq": package_version(), **packed}))


def unpack_config(blob: Any) -> tuple[str, dict[str, Any]]:
    """(the config class's name, its settings, with spaces and module specs made) of `pack_config`'s frame.

    Module classes are imported by their names: whoever joins a run trusts it with that.

    Raises:
        ConfigurationError: It is of another version of rlzmq, or is no config, or names a class that is not here.
    """
    from rlzmq.modules.multi_rl_module import MultiRLModuleSpec
    from rlzmq.modules.spec import RLModuleSpec

    data = unpack_blob(blob)
    theirs = data.get("rlzmq") if isinstance(data, dict) else None
    if theirs != package_version():
        raise ConfigurationError(
            f"the run is of rlzmq {theirs}, here is rlzmq {package_version()}: install the same version"
        )
    try:
        name, settings = str(data["class"]), dict(data["settings"])
        spaces, spec = dict(data["spaces"]), data["rl_module_spec"]
    except (KeyError, TypeError, ValueError):
        raise ConfigurationError("the run's configuration is not what this rlzmq understands") from None
    settings |= {key: space_from_plain(space) for key, space in spaces.items() if key in _SPACES}
    if spec is not None:
        is_multi, plain = spec
        settings["rl_module_spec"] = (MultiRLModuleSpec if is_multi else RLModuleSpec).from_dict(plain)
    return name, settings
