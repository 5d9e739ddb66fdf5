"""The cluster file: which roles run on which hosts."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from rlzmq.core.addresses import check_bind_address, split_tcp
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean

__all__ = ["Cluster", "Place"]

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9a-fA-F:]+")
LOCAL = "local"


@dataclass(frozen=True, slots=True)
class Place:
    """Some processes of one role on one host.

    Attributes:
        host: Name or address for ssh; ``"local"``: this machine, without ssh.
        count: Processes.
        arguments: Further arguments of each, e.g. ``["--envs", "8"]``.
    """

    host: str
    count: int = 1
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cluster:
    """The contents of a cluster file.

    Attributes:
        head: The host of the driver and its broker.
        listen: ``tcp://HOST:PORT`` of the head's interface that the other machines reach.
        train: Arguments of ``rlzmq train``, e.g. ``["ppo", "--env", "CartPole-v1"]``.
        learners, runners: The other roles; without learners the head trains.
        python: Interpreter on every host.
        workdir: Directory on every host in which roles start; the user's modules are found there.
        user, port, key: For ssh; the ssh defaults where not given.
        known_hosts: File with the keys of the hosts; other hosts are refused.
        restarts: How often one process is restarted before the run is given up.
    """

    head: str
    listen: str
    train: tuple[str, ...]
    learners: tuple[Place, ...] = ()
    runners: tuple[Place, ...] = ()
    python: str = "python3"
    workdir: str = "."
    user: str = ""
    port: int = 22
    key: str = ""
    known_hosts: str = "~/.ssh/known_hosts"
    restarts: int = 3
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_learners(self) -> int:
        """The number of learner ranks outside the head."""
        return sum(place.count for place in self.learners)

    @property
    def advertise(self) -> str | None:
        """The value of ``--advertise`` in `train`: the name by which others reach the head."""
        for argument, value in itertools.pairwise((*self.train, "")):
            if argument == "--advertise":
                return value
            if argument.startswith("--advertise="):
                return argument.partition("=")[2]
        return None

    @property
    def hosts(self) -> list[str]:
        """All hosts without duplicates, the head first."""
        return list(dict.fromkeys([self.head, *(place.host for place in (*self.learners, *self.runners))]))

    @classmethod
    def read(cls, path: str | Path) -> Cluster:
        """Read a cluster file in TOML.

        Raises:
            ConfigurationError: The file is missing or not TOML, or a key is unknown, missing or wrong.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read {path}: {error}") from error
        return cls.parse(text, source=str(path))

    @classmethod
    def parse(cls, text: str, *, source: str = "cluster file") -> Cluster:
        """Parse the text of a cluster file; raises as `read` does."""
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{source} is not valid TOML: {error}") from error
        _check_keys(source, data, [f.name for f in fields(cls)], needed=("head", "listen", "train"))
        for name in ("port", "restarts"):
            _check_type(source, data, name, int)
        for name in ("train", "learners", "runners"):
            _check_type(source, data, name, list)
        for name in ("head", "listen", "python", "workdir", "user", "key", "known_hosts"):
            _check_type(source, data, name, str)
        _check_type(source, data, "environment", dict)
        for name in (environment := data.get("environment", {})):
            _check_type(f"{source}: environment", environment, name, str)
            if not (name.isascii() and name.isidentifier()):
                raise ConfigurationError(
                    f"{source}: environment: expected the name of a variable, got {name!r}"
                )
        for role in ("learners", "runners"):
            data[role] = tuple(_place(f"{source}: {role}", item) for item in data.get(role, ()))
        data["train"] = tuple(str(argument) for argument in data["train"])
        cluster = cls(**data)
        check_bind_address(cluster.listen, has_keys=True)
        if not split_tcp(cluster.listen)[1]:
            raise ConfigurationError(
                f"{source}: listen={cluster.listen!r} needs a port that others can be told"
            )
        for host in cluster.hosts:
            if not _HOST.fullmatch(host):
                raise ConfigurationError(f"{source}: {host!r} is not a host name or address")
        return cluster


def _place(where: str, item: Any) -> Place:
    if not isinstance(item, dict):
        raise ConfigurationError(f"{where}: expected [[tables]], got {item!r}")
    _check_keys(where, item, [f.name for f in fields(Place)], needed=("host",))
    count = item.get("count", 1)
    if not isinstance(count, int) or count < 1:
        raise ConfigurationError(f"{where}: count must be 1 or more, got {count!r}")
    _check_type(where, item, "host", str)
    _check_type(where, item, "arguments", list)
    return Place(item["host"], count, tuple(str(argument) for argument in item.get("arguments", ())))


def _check_type(where: str, data: Mapping[str, Any], key: str, kind: type) -> None:
    if key in data and not isinstance(data[key], kind):
        name = {int: "a whole number", str: "a string", list: "a list", dict: "a table"}[kind]
        raise ConfigurationError(f"{where}: {key} must be {name}, got {data[key]!r}")


def _check_keys(where: str, data: Mapping[str, Any], known: list[str], needed: tuple[str, ...]) -> None:
    for key in data:
        if key not in known:
            raise ConfigurationError(f"{where}: unknown key {key!r}.{did_you_mean(key, known)}")
    for key in needed:
        if key not in data:
            raise ConfigurationError(f"{where}: {key} is missing")
