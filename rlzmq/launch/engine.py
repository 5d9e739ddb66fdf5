"""Engines start the roles of a run, restart, scale and stop them, and give their logs; rlzmq supervises nothing."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import shlex
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlzmq.config.values import read_toml
from rlzmq.core.errors import ConfigurationError, PeerLostError, RlzmqError
from rlzmq.core.files import make_directories, write_private_file
from rlzmq.core.synonyms import did_you_mean

__all__ = [
    "EXIT_CODE",
    "EXIT_RESUMABLE",
    "LISTEN",
    "Engine",
    "Jobs",
    "Resources",
    "Role",
    "command",
    "engine_of",
    "start",
]

EXIT_CODE = "head.code"
"""File in RUN/jobs with the head's exit code, once it has ended."""

EXIT_RESUMABLE = 75
"""The head was interrupted, or killed before it could say how it ended: --resume auto continues it."""
_ROLES = Path("jobs", "roles.json")
_GRACE_S = 60.0  # for processes that are surplus, or whose run cannot start

LISTEN = "{listen}"
"""In the head's `Role.argv`: where the engine puts the address of the head's machine, with port 0."""

_ENGINES = {
    "k8s": "rlzmq.launch.k8s:Kubernetes",
    "slurm": "rlzmq.launch.slurm:Slurm",
    "ssh": "rlzmq.launch.ssh:Ssh",
    "ray": "rlzmq.launch.ray_engine:Ray",
    "dask": "rlzmq.launch.dask_engine:Dask",
}

_POLL_S = 1.0


class Resources(BaseModel):
    """What a role needs: a table of the cluster file, ``[head]``, ``[learners]`` or ``[runners]``.

    Attributes:
        count: Processes; the head is one.
        cpus, gpus: Of each process.
        memory, time: As the engine writes them, e.g. ``"4G"`` and ``"1-00:00"``; "": its default.
        image: The container image, for engines that run containers.
        hosts: The machines, for ``--on ssh``.
        options: Further options of the engine, e.g. ``["--partition=long"]``.
        arguments: Further arguments of the role, e.g. ``["--envs-per-env-runner", "8"]``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    count: Annotated[int, Field(ge=1)] = 1
    cpus: Annotated[int, Field(ge=1)] = 1
    gpus: Annotated[int, Field(ge=0)] = 0
    memory: str = ""
    time: str = ""
    image: str = ""
    hosts: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


class Role(Resources):
    """Processes of one kind.

    Attributes:
        name: ``"head"``, ``"learners"`` or ``"runners"``.
        argv: The command of each process.
        key: The join file that must exist before it starts; the head writes it, mode 0600.
    """

    name: str
    argv: tuple[str, ...]
    key: Path


class _Head(Resources):
    count: Literal[1] = 1


class _Tables(BaseModel):
    """The cluster file. ``python`` and ``workdir`` hold on every machine; by default those of the launching process."""

    model_config = ConfigDict(extra="forbid")
    head: _Head = _Head()
    learners: Resources | None = None
    runners: Resources | None = None
    python: str = sys.executable
    workdir: Path = Path()

    @classmethod
    def read(cls, path: Path) -> _Tables:
        """Read a cluster file."""
        try:
            return cls.model_validate(read_toml(path))
        except ValidationError as error:
            problem = error.errors()[0]
            *place, key = map(str, problem["loc"])
            where, wrong = (
                ": ".join([str(path), *place]),
                f"{key}: {problem['msg']}, got {problem['input']!r}",
            )
            if problem["type"] == "extra_forbidden":
                wrong = f"unknown key {key!r}.{did_you_mean(key, (Resources if place else cls).model_fields)}"
            raise ConfigurationError(f"{where}: {wrong}") from None


class Jobs(BaseModel):
    """The roles of a run and where they were started: ``RUN/jobs/roles.json``, by which other processes find them.

    Attributes:
        on: The engine, as in ``--on``, e.g. ``"slurm"`` or ``"ray://10.0.0.5:10001"``.
        name: A name for people: that of the run's directory.
        workdir: The directory in which all roles start.
        roles: By name, the head first.
        handles: Role -> what `Engine.start` returned; roles that were not started are missing.
    """

    on: str
    name: str
    workdir: Path
    roles: dict[str, Role]
    handles: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def of(cls, on: str, train: Sequence[str], cluster: Path | None, run_dir: Path) -> Jobs:
        """Return the roles of a new run.

        Args:
            on: The engine.
            train: The arguments of ``rlzmq train`` without those that choose the engine and the run's directory.
            cluster: The cluster file; None: a head with its own runners.
            run_dir: The run's directory.

        Raises:
            ConfigurationError: The file is missing or not TOML, or a key is unknown or wrong.
        """
        tables = _Tables() if cluster is None else _Tables.read(cluster)
        workdir = tables.workdir.absolute()
        directory = workdir / run_dir
        join = directory / "jobs" / "join.toml"
        base = (tables.python, "-m", "rlzmq")
        head = [*base, "train", *train, "--run-dir", str(directory), "--resume", "auto"]
        head += ["--listen", LISTEN, "--join-file", str(join)]
        if tables.runners is not None:
            head += ["--env-runners", "0"]
        if tables.learners is not None:
            count = str(tables.learners.count)
            head += ["--learners", count, "--num-remote-learners", count]
        roles = {
            "head": Role(name="head", argv=(*head, *tables.head.arguments), key=join, **dict(tables.head))
        }
        for role, asked in (("learner", tables.learners), ("runner", tables.runners)):
            if asked is not None:
                key = join if role == "runner" else join.with_name("join.learner.toml")
                argv = (*base, role, "--join", str(key), *asked.arguments)
                roles[f"{role}s"] = Role(name=f"{role}s", argv=argv, key=key, **dict(asked))
        return cls(on=on, name=directory.name, workdir=workdir, roles=roles)

    @classmethod
    def of_run(cls, run_dir: Path) -> Jobs:
        """Return what was started for a run.

        Raises:
            ConfigurationError: Nothing was, or its file cannot be read.
        """
        path = run_dir / _ROLES
        if not path.exists():
            raise ConfigurationError(
                f"{run_dir} is not a run that `rlzmq train --on ENGINE` started: no {path}."
            )
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"cannot read {path}: {error}") from error


class Engine(ABC):
    """Something that runs roles, e.g. a scheduler. The processes of a role have places: 0, 1, ….

    Every method may be called by another process than the one that started the roles. What cannot be done raises
    ConfigurationError with the reason.

    Attributes:
        mark: What the names of log files end with on this machine.
    """

    mark = ""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs

    @abstractmethod
    def start(self, role: Role, places: Sequence[int] = ()) -> str:
        """Start the processes of a role at these places, the head first; () is all. Return a name for people."""

    @abstractmethod
    def living(self, role: Role) -> Collection[int]:
        """Return the places of the processes that wait, run or end."""

    @abstractmethod
    def end(self, role: Role, places: Collection[int], grace_s: float) -> None:
        """End processes in order (the head saves a checkpoint), kill them after `grace_s`; return when all have."""

    def scale(self, role: Role, count: int) -> None:
        """Change the number of runners or learners of a living run; the highest places end, the lowest begin."""
        living = sorted(self.living(role))
        if surplus := living[count:]:
            self.end(role, surplus, _GRACE_S)
        free = (place for place in itertools.count() if place not in living)
        if missing := list(itertools.islice(free, max(0, count - len(living)))):
            self.start(role, missing)

    def stop(self, role: Role, grace_s: float) -> None:
        """End a role."""
        self.end(role, self.living(role), grace_s)

    def wait(self) -> int:
        """Wait for the head's end, also while its machine is away; return its exit code."""
        head = self.jobs.roles["head"]
        while True:
            with contextlib.suppress(PeerLostError):
                if not self.living(head):
                    return self.exit_code(head)
            time.sleep(_POLL_S)

    def exit_code(self, head: Role) -> int:
        """Return the exit code that the head has left beside its join file."""
        file = head.key.with_name(EXIT_CODE)
        return int(file.read_text()) if file.exists() else EXIT_RESUMABLE

    def logs(self, role: Role, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a role, each after its place; with `follow` as they come, until the role ends."""
        read: dict[str, int] = {}
        is_last = False
        while not is_last:
            try:
                is_last = not follow or not self.living(role)
                lines, read = self.lines(role, read)
                yield from lines
            except PeerLostError:  # what is away is asked again
                if not follow:
                    raise
                is_last = False
            time.sleep(0.0 if is_last else _POLL_S)

    def lines(self, role: Role, read: dict[str, int]) -> tuple[list[str], dict[str, int]]:
        """Return further lines of a role's log files, and how many bytes of each have been read; `read`: until now."""
        lines = []
        for path in sorted(role.key.parent.glob(f"{role.name}*{self.mark}.log")):
            place = path.stem.removesuffix(self.mark).removeprefix(role.name).lstrip("-")
            with path.open("rb") as file:
                file.seek(read.get(path.name, 0))
                text, end, _ = file.read().rpartition(b"\n")
            read[path.name] = read.get(path.name, 0) + len(text + end)
            new = text.decode(errors="replace").split("\n") if end else []
            lines += [f"{place}: {line}" if place else line for line in new]
        return lines, read

    def dry_run(self) -> str:
        """Return what `start` would submit, as text for people who submit by hand."""
        roles = self.jobs.roles.values()
        return "\n".join(f"# {role.name}: {role.count}\n{shlex.join(role.argv)}" for role in roles)


def command(*argv: str, stdin: str = "", what: str = "") -> str:
    """Run one of an engine's commands; return what it prints.

    Raises:
        ConfigurationError: It is not there, or fails, for which its last words are the reason.
    """
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, errors="replace", check=True)
    except OSError as error:
        raise ConfigurationError(f"{argv[0]} cannot be started here: {error}") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip() or f"exit code {error.returncode}"
        raise ConfigurationError(f"{what or shlex.join(argv)}: {reason}") from error
    return done.stdout


def engine_of(jobs: Jobs) -> Engine:
    """Return the engine that runs, or is to run, these roles.

    Raises:
        ConfigurationError: There is no such engine, or its extra is not installed.
    """
    kind = jobs.on.partition("://")[0]
    if kind not in _ENGINES:
        raise ConfigurationError(
            f"--on {jobs.on}: expected local, {', '.join(_ENGINES)}.{did_you_mean(kind, ('local', *_ENGINES))}"
        )
    module, _, name = _ENGINES[kind].partition(":")
    return cast("Engine", getattr(importlib.import_module(module), name)(jobs))


def start(jobs: Jobs, run_dir: Path, say: Callable[[str], None]) -> None:
    """Start all roles of a run, or none; write ``roles.json`` into its directory.

    Raises:
        ConfigurationError: The engine refuses a role, or is not there.
    """
    engine = engine_of(jobs)
    try:
        for role in jobs.roles.values():
            jobs.handles[role.name] = engine.start(role)
            make_directories(run_dir / "jobs", mode=0o700)
            write_private_file(run_dir / _ROLES, jobs.model_dump_json(indent=2) + "\n")
            say(f"{role.name:<11} {jobs.handles[role.name]}")
    except BaseException:
        for name in jobs.handles:
            with contextlib.suppress(RlzmqError):
                engine.stop(jobs.roles[name], _GRACE_S)
        raise
