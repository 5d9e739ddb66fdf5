"""Engines start the roles of a run, restart, scale and stop them, and give their logs; rlzmq supervises nothing."""

from __future__ import annotations

import contextlib
import itertools
import pkgutil
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rlzmq.config.values import read_toml
from rlzmq.core.errors import ConfigurationError, PeerLostError, RlzmqError
from rlzmq.core.files import make_directories, write_text
from rlzmq.core.synonyms import did_you_mean

__all__ = ["Engine", "Jobs", "Role", "command", "engine_of", "start"]

EXIT_CODE = "head.code"  # file in RUN/jobs with the head's exit code, once it has ended
EXIT_RESUMABLE = 75  # of a head that was interrupted, or killed before it could say how it ended
FORMER = (EXIT_CODE, "join.toml", "join.learner.toml")  # files that an earlier head may have left
HOST = ("-m", "rlzmq.launch.hosts")  # arguments of the Python interpreter that make it a host
LISTEN = "tcp://$RLZMQ_HEAD:0"  # in the head's command; the engine gives its host the address of the head's machine

_ENGINES = {
    "k8s": "rlzmq.launch.k8s:Kubernetes",
    "slurm": "rlzmq.launch.hosts:Slurm",
    "ssh": "rlzmq.launch.hosts:Ssh",
    "ray": "rlzmq.launch.hosts:Tasks",
    "dask": "rlzmq.launch.hosts:Tasks",
}
_ROLES = Path("jobs", "roles.json")
_POLL_S = 1.0
_END_S = 30.0  # for a process to end in order, and for a host to notice that it is to end


class Role(BaseModel):
    """What a role needs: a table of the cluster file, ``[head]``, ``[learners]`` or ``[runners]``."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)
    count: Annotated[int, Field(ge=1)] = 1  # processes; the head is one
    cpus: Annotated[int, Field(ge=1)] = 1  # of each process
    gpus: Annotated[int, Field(ge=0)] = 0  # of each process
    memory: str = ""  # as the engine writes it, e.g. "4G"; "": its default
    time: str = ""  # as the engine writes it, e.g. "1-00:00"; "": its default
    image: str = ""  # of the container, for engines that run containers
    hosts: tuple[str, ...] = ()  # the machines, for --on ssh
    options: tuple[str, ...] = ()  # further ones of the engine, e.g. "--partition=long"
    arguments: tuple[str, ...] = ()  # further ones of the role, e.g. "--envs-per-env-runner", "8"


class _Head(Role):
    count: Literal[1] = 1


class Cluster(BaseModel):
    """The cluster file. ``python`` and ``workdir`` hold on every machine; by default those of the launching process."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", validate_default=True)
    head: _Head = _Head()
    learners: Role | None = None
    runners: Role | None = None
    python: str = sys.executable
    workdir: Annotated[Path, AfterValidator(Path.absolute)] = Path()


class Jobs(BaseModel):
    """What is started for a run, and where: ``RUN/jobs/roles.json``, by which other processes find it."""

    on: str  # the engine, as in --on, e.g. "slurm" or "ray://10.0.0.5:10001"
    # Arguments of rlzmq train without those that choose the engine and the run's directory.
    train: tuple[str, ...]
    run_dir: Path  # below the cluster's workdir
    cluster: Cluster
    # Role -> what Engine.start returned, if it was started.
    handles: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def of(cls, on: str, train: Sequence[str], cluster: Path | None, run_dir: Path) -> Jobs:
        """Return those of a new run, by its cluster file; None: a head with its own runners."""
        try:
            tables = Cluster.model_validate({} if cluster is None else read_toml(cluster))
        except ValidationError as error:
            problem = error.errors()[0]
            *place, key = map(str, problem["loc"])
            hint = did_you_mean(key, (Role if place else Cluster).model_fields)
            wrong = f"{problem['msg']}, got {problem['input']!r}.{hint}"
            raise ConfigurationError(f"{cluster}: {': '.join((*place, key))}: {wrong}") from None
        return cls(on=on, train=tuple(train), run_dir=run_dir, cluster=tables)

    @classmethod
    def of_run(cls, run_dir: Path) -> Jobs:
        """Return what was started for a run."""
        path = run_dir / _ROLES
        try:
            return cls.model_validate_json(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if not run_dir.is_dir():
                raise ConfigurationError(f"{run_dir} does not exist: expected a run's directory.") from None
            raise ConfigurationError(
                f"{run_dir} was not started with --on. To add runners to a run that listens: rlzmq runner --join FILE "
                "--env-runners N. Otherwise end it with Ctrl-C (it saves a checkpoint), and continue with "
                f"rlzmq train ALGORITHM --resume {run_dir} --env-runners N."
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from None

    @property
    def roles(self) -> dict[str, Role]:
        """The roles by name, the head first."""
        tables = {name: getattr(self.cluster, name) for name in ("head", "learners", "runners")}
        return {name: role for name, role in tables.items() if role is not None}

    @property
    def directory(self) -> Path:
        """``RUN/jobs`` on the machines."""
        return self.cluster.workdir / self.run_dir / "jobs"

    def key(self, role: str) -> Path:
        """Return the join file that must exist before a role starts; the head writes it, mode 0600."""
        return self.directory / ("join.learner.toml" if role == "learners" else "join.toml")

    def argv(self, role: str) -> list[str]:
        """Return the command of each process of a role, which reads the join file from its standard input."""
        words = ["env", f"OMP_NUM_THREADS={self.roles[role].cpus}", self.cluster.python, "-m", "rlzmq"]
        if role != "head":
            words += [role.removesuffix("s"), "--join", "-"]
        else:
            words += ["train", *self.train, "--run-dir", str(self.directory.parent), "--resume", "auto"]
            words += ["--listen", LISTEN, "--join-file", str(self.key(role))]
            words += ["--env-runners", "0"] if self.cluster.runners else []
            if learners := self.cluster.learners:
                words += ["--learners", str(learners.count), "--num-remote-learners", str(learners.count)]
        return [*words, *self.roles[role].arguments]


class Engine:
    """Something that runs roles, e.g. a scheduler. The processes of a role have places: 0, 1, ….

    On its node each process has a host (`rlzmq.launch.hosts`); hosts meet in the directory ``RUN/jobs``. Every method
    may be called by another process than the one that started the roles. What cannot be done raises ConfigurationError.
    """

    mark = ""  # what the names of hosts end with on this machine

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs

    def living(self, role: str) -> Collection[int]:
        """Return the places of the processes that wait, run or end."""
        raise NotImplementedError

    def submit(self, role: str, places: Sequence[int]) -> str:
        """Start hosts at these places. Return a name for people."""
        raise NotImplementedError

    def cancel(self, role: str, places: Collection[int]) -> None:
        """Take back hosts that have not begun, or do not end, if there is a way."""

    def start(self, role: str, places: Sequence[int] = ()) -> str:
        """Start the processes of a role at these places, the head first; () is all. Return a name for people."""
        places = places or range(self.jobs.roles[role].count)
        make_directories(self.jobs.directory, mode=0o700)
        if role == "head":
            for name in FORMER:
                (self.jobs.directory / name).unlink(missing_ok=True)
        for place in places:
            self.file(role, place, "end").unlink(missing_ok=True)
            self.file(role, place, "waits").touch()
        return self.submit(role, places)

    def end(self, role: str, places: Collection[int], grace_s: float) -> None:
        """End processes in order (the head saves a checkpoint), kill them after `grace_s`; return when all have."""
        for place in places:
            write_text(self.file(role, place, "end"), str(grace_s))
        deadline = time.monotonic() + grace_s + _END_S
        while left := set(places).intersection(self.living(role)):
            is_late = time.monotonic() > deadline
            self.cancel(role, [each for each in left if is_late or self.file(role, each, "waits").exists()])
            time.sleep(_POLL_S)

    def scale(self, role: str, count: int) -> None:
        """Change the number of runners or learners of a living run; the highest places end, the lowest begin."""
        living = sorted(self.living(role))
        if surplus := living[count:]:
            self.end(role, surplus, _END_S)
        free = (place for place in itertools.count() if place not in living)
        if missing := list(itertools.islice(free, max(0, count - len(living)))):
            self.start(role, missing)

    def wait(self) -> int:
        """Wait for the head's end, also while its machine is away; return its exit code."""
        while True:
            with contextlib.suppress(PeerLostError):
                if not self.living("head"):
                    return self.exit_code()
            time.sleep(_POLL_S)

    def exit_code(self) -> int:
        """Return the exit code that the head has left."""
        file = self.jobs.directory / EXIT_CODE
        return int(file.read_text()) if file.exists() else EXIT_RESUMABLE

    def logs(self, role: str, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a role, each after its place; with `follow` as they come, until the role ends."""
        read: dict[str, int] = {}
        is_last = False
        while not is_last:
            try:
                is_last = not follow or not self.living(role)
                lines, now = self.lines(role, read)
                read |= now
                yield from lines
            except PeerLostError:  # what is away is asked again
                if not follow:
                    raise
                is_last = False
            time.sleep(0.0 if is_last else _POLL_S)

    def lines(self, role: str, read: Mapping[str, int]) -> tuple[list[str], dict[str, int]]:
        """Return further lines of a role's log files, and how many bytes of each have been read; `read`: until now."""
        lines, now = [], dict[str, int]()
        for path in sorted(self.jobs.directory.glob(f"{role}*{self.mark}.log")):
            place = path.stem.removesuffix(self.mark).partition("-")[2]
            with path.open("rb") as file:
                file.seek(read.get(path.name, 0))
                text, end, _ = file.read().rpartition(b"\n")
            now[path.name] = read.get(path.name, 0) + len(text + end)
            new = text.decode(errors="replace").split("\n") if end else []
            lines += [f"{place}: {line}" if place else line for line in new]
        return lines, now

    def dry_run(self) -> str:
        """Return what `start` would submit, as text for people who submit by hand."""
        lines = []
        for role, asked in self.jobs.roles.items():
            key = "" if role == "head" else f" < {self.jobs.key(role)}"
            lines.append(f"# {role}: {asked.count}\n{shlex.join(self.jobs.argv(role))}{key}")
        return "\n".join(lines)

    def host(self, role: str, place: object) -> list[str]:
        """Return the command that is the host at a place; see `rlzmq.launch.hosts.Host`."""
        words = [self.name(role, place), str(self.jobs.key(role)), *self.jobs.argv(role)]
        return [self.jobs.cluster.python, *HOST, *words]

    def name(self, role: str, place: object) -> str:
        """Return the name of a host."""
        return ("head" if role == "head" else f"{role}-{place}") + self.mark

    def places(self, role: str, names: Iterable[str]) -> set[int]:
        """Return the places of those of the named hosts that are of a role."""
        own = re.compile(rf"{role}-?(\d*){re.escape(self.mark)}")
        return {int(found[1] or 0) for found in map(own.fullmatch, names) if found}

    def file(self, role: str, place: int, what: str) -> Path:
        """Return a file of a host: ``end`` asks it to end, ``waits`` is there until it begins."""
        return self.jobs.directory / f"{self.name(role, place)}.{what}"


def command(*argv: str, stdin: str = "", what: str = "") -> str:
    """Run one of an engine's commands; return what it prints. If it fails, its last words are the error."""
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, errors="replace", check=True)
    except OSError as error:
        raise ConfigurationError(f"{argv[0]} cannot be started here, is it installed? {error}") from error
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip() or f"exit code {error.returncode}"
        raise ConfigurationError(f"{what or shlex.join(argv)}: {reason}") from error
    return done.stdout


def engine_of(jobs: Jobs) -> Engine:
    """Return the engine that runs, or is to run, these roles."""
    kind = jobs.on.partition("://")[0]
    if kind not in _ENGINES:
        hint = did_you_mean(kind, ("local", *_ENGINES))
        raise ConfigurationError(f"--on {jobs.on}: expected local, {', '.join(_ENGINES)}.{hint}")
    return cast("Engine", pkgutil.resolve_name(_ENGINES[kind])(jobs))


def start(jobs: Jobs, run_dir: Path, say: Callable[[str], None]) -> None:
    """Start all roles of a run, or none; write ``roles.json`` into its directory."""
    engine = engine_of(jobs)
    try:
        for role in jobs.roles:
            jobs.handles[role] = engine.start(role)
            make_directories(run_dir / "jobs", mode=0o700)
            write_text(run_dir / _ROLES, jobs.model_dump_json(indent=2) + "\n", is_private=True)
            say(f"{role:<11} {jobs.handles[role]}")
    except BaseException:
        for role in jobs.handles:
            with contextlib.suppress(RlzmqError):
                engine.end(role, engine.living(role), _END_S)
        raise
