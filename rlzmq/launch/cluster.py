"""The cluster file of `rlzmq launch`: which roles run on which hosts; and how cluster files are read."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlzmq.core.addresses import check_bind_address
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean

__all__ = ["LOCAL", "Cluster", "Place", "Table"]

LOCAL = "local"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|[0-9a-fA-F:]+")


class Table(BaseModel):
    """A table of a TOML file whose keys are the fields of the class."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file.

        Raises:
            ConfigurationError: The file is missing or not TOML, or a key is unknown, missing or wrong.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read {path}: {error}") from error
        return cls.parse(text, source=str(path))

    @classmethod
    def parse(cls, text: str, *, source: str = "cluster file") -> Self:
        """Parse the text of a file; raises as `read` does."""
        try:
            return cls.model_validate(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{source} is not valid TOML: {error}") from error
        except ValidationError as error:
            problem = error.errors()[0]
            *place, key = problem["loc"] or ("",)
            where = ": ".join([source, *map(str, place)])
            if problem["type"] == "extra_forbidden":
                nested = (name for kind in Table.__subclasses__() for name in kind.model_fields)
                known = nested if place else cls.model_fields
                raise ConfigurationError(
                    f"{where}: unknown key {key!r}.{did_you_mean(str(key), known)}"
                ) from None
            if problem["type"] == "missing":
                raise ConfigurationError(f"{where}: {key} is missing") from None
            raise ConfigurationError(f"{where}: {key}: {problem['msg']}, got {problem['input']!r}") from None


class Place(Table):
    """Some processes of one role on one host.

    Attributes:
        host: Name or address for ssh; ``"local"``: this machine, without ssh.
        count: Processes.
        arguments: Further arguments of each, e.g. ``["--envs-per-env-runner", "8"]``.
    """

    host: str
    count: Annotated[int, Field(ge=1)] = 1
    arguments: tuple[str, ...] = ()


class Cluster(Table):
    """The contents of a cluster file.

    Attributes:
        head: The host of the driver and its broker.
        listen: ``tcp://HOST:PORT`` of the head's interface that the other machines reach; port 0: free ones.
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
    environment: Mapping[str, str] = {}

    @property
    def num_learners(self) -> int:
        """The number of learner ranks outside the head."""
        return sum(place.count for place in self.learners)

    @property
    def hosts(self) -> list[str]:
        """All hosts without duplicates, the head first."""
        return list(dict.fromkeys([self.head, *(place.host for place in (*self.learners, *self.runners))]))

    @classmethod
    def parse(cls, text: str, *, source: str = "cluster file") -> Self:
        """Parse the text of a file; raises as `read` does, and for hosts, addresses and variables that are none."""
        cluster = super().parse(text, source=source)
        check_bind_address(cluster.listen, has_keys=True)
        for host in cluster.hosts:
            if not _HOST.fullmatch(host):
                raise ConfigurationError(f"{source}: {host!r} is not a host name or address")
        for name in cluster.environment:
            if not (name.isascii() and name.isidentifier()):
                raise ConfigurationError(
                    f"{source}: environment: expected the name of a variable, got {name!r}"
                )
        return cluster
