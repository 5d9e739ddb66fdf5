"""What an engine is asked to run: the roles of one run, with their resources; engines start, place, restart and log."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field

from rlzmq.launch.cluster import Table

__all__ = ["LISTEN", "Engine", "Resources", "Role", "roles_of"]

LISTEN = "{listen}"
"""In the head's `Role.argv`: where the engine puts the address of the head's machine, with port 0."""


class Resources(Table):
    """A table of the cluster file: ``[head]``, ``[learners]`` or ``[runners]``.

    Attributes:
        count: Processes; the head is one.
        cpus, gpus: Of each process.
        memory, time: As the engine writes them, e.g. ``"4G"`` and ``"1-00:00"``; "": its default.
        options: Further options of the engine, e.g. ``["--partition=long"]``.
        arguments: Further arguments of the role, e.g. ``["--envs-per-env-runner", "8"]``.
    """

    count: Annotated[int, Field(ge=1)] = 1
    cpus: Annotated[int, Field(ge=1)] = 1
    gpus: Annotated[int, Field(ge=0)] = 0
    memory: str = ""
    time: str = ""
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


class _Head(Resources):
    count: Literal[1] = 1


class _Tables(Table):
    head: _Head = _Head()
    learners: Resources | None = None
    runners: Resources | None = None


@dataclass(frozen=True, slots=True)
class Role:
    """Processes of one kind.

    Attributes:
        name: ``"head"``, ``"learners"`` or ``"runners"``.
        argv: The command of each process.
        key: The join file that must exist before it starts; the head writes it, mode 0600.
        resources: Of each process, and how many.
        restart: ``"always"``: each process by itself, as long as the head's job exists; ``"with_run"``: when it was
            interrupted to be resumed.
    """

    name: str
    argv: tuple[str, ...]
    key: Path
    resources: Resources
    restart: Literal["always", "with_run"]


class Engine(Protocol):
    """Something that runs roles: a scheduler."""

    def start(self, role: Role) -> str:
        """Start a role, the head first; return the engine's name of it."""

    def stop(self, handle: str) -> None:
        """Stop a role in order; the end of the head ends the others."""


def roles_of(train: Sequence[str], cluster: Path | None, run_dir: Path) -> list[Role]:
    """Return the roles of a run, the head first.

    Args:
        train: The arguments of ``rlzmq train`` without those that choose the engine and the run's directory.
        cluster: The cluster file; None: a head with its own runners.
        run_dir: The run's directory, on a file system that all machines share.

    Raises:
        ConfigurationError: The file is missing or not TOML, or a key is unknown or wrong.
    """
    tables = _Tables() if cluster is None else _Tables.read(cluster)
    directory = run_dir.absolute()
    join = directory / "jobs" / "join.toml"
    base = (sys.executable, "-m", "rlzmq")
    head = [*base, "train", *train, "--run-dir", str(directory), "--resume", "auto"]
    head += ["--listen", LISTEN, "--join-file", str(join)]
    if tables.runners is not None:
        head += ["--env-runners", "0"]
    if tables.learners is not None:
        count = str(tables.learners.count)
        head += ["--learners", count, "--num-remote-learners", count]
    roles = [Role("head", (*head, *tables.head.arguments), join, tables.head, "with_run")]
    for name, key, asked in (
        ("learners", join.with_name("join.learner.toml"), tables.learners),
        ("runners", join, tables.runners),
    ):
        if asked is not None:
            argv = (*base, name.removesuffix("s"), "--join", str(key), *asked.arguments)
            roles.append(Role(name, argv, key, asked, "always"))
    return roles
