"""Engines whose processes have hosts: Slurm, machines that only have ssh, and clusters of Ray and Dask.

The host of a process, on its node, starts the process when its key is there, and ends it in order. Hosts meet in the
directory of the role's key, ``RUN/jobs``: the head writes its join files there, its host the exit code, which is the
end of the run; ``NAME.end`` asks the host of this name to end. A process gets its key by its standard input.

    Slurm      The head is one job, runners are an array, learners one job of several tasks. No job needs a second step
               beside its first, so memory may be consumable. Slurm requeues what loses its node or is preempted; a job
               that nears its time limit gets SIGUSR1 a minute before (``--signal``), and requeues itself.
    ssh        Hosts are under systemd, or in a session of their own. They need nobody: the machine that started them
               may go away. They are found again by their command lines.
    Ray, Dask  A host is in a detached named actor, or in a task, which the engine places, and starts again without end
               when it fails or loses its node.

This module is also the program of a host, and what `Ssh` calls on the other machines.
"""

from __future__ import annotations

import contextlib
import getpass
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ByteSize, TypeAdapter

from rlzmq.config.values import read_toml
from rlzmq.core.errors import ConfigurationError, PeerLostError, RlzmqError
from rlzmq.core.files import write_text
from rlzmq.core.imports import import_optional
from rlzmq.launch.engine import EXIT_CODE, EXIT_RESUMABLE, FORMER, HOST, LISTEN, Engine, Jobs, Role, command
from rlzmq.net.keys import JoinFile

__all__ = ["Slurm", "Ssh", "Tasks"]

# before a command: it ends with the process that starts it
_BOUND = ("setpriv", "--pdeathsig", "KILL", "env")
_END_S = 30.0  # for the end in order of a process whose run is over
_WRONG = (2, 78, 126, 127)  # wrong arguments or configuration, no such program: no restart mends them
_POLL_S = 1.0
_ASK_EVERY = 60  # polls: whether the run is over
_STATES = "pending,running,suspended,configuring,completing"  # a job that is being requeued is pending
_JOB = """\
cd {workdir}
# The address that the other nodes reach; RLZMQ_HEAD names another one.
export RLZMQ_HEAD="${{RLZMQ_HEAD:-$(hostname -I | cut -d' ' -f1)}}"
export RLZMQ_LIMIT='scontrol requeue "$SLURM_JOB_ID"' # SIGUSR1
export RLZMQ_OVER={over}
"""
_HEAD_IS_GONE = """! squeue -h -j "$HEAD" 2>&1 | grep -qv 'Invalid job id'"""
_STEP = """\
trap "$RLZMQ_LIMIT" USR1
srun --immediate=60 --cpus-per-task={cpus} bash -c {host} & step=$!
wait $step || wait $step && exit # the first one may be interrupted
echo "the step of the learners ended with $?: the run is cancelled"; scancel "$HEAD"; exit 1
"""
_SSH = "ssh -oBatchMode=yes -oStrictHostKeyChecking=yes -oConnectTimeout=10 -oServerAliveInterval=15"
_UNREACHABLE = 255  # ssh's own exit code
_UNIT = ("systemd-run", "--user", "--quiet", "--collect", "--same-dir", "--property=Type=exec")
_GOODBYE = '[ "$1" = 0 ]'  # is the run's end: no other news of the head reach the other machines
_OURS = "rlzmq "  # is what the names of tasks begin with
_RAY = {"namespace": "rlzmq"}
_IN_WORKDIR = ("sh", "-c", 'cd "$0"; exec "$@"')  # where there is no such directory, elsewhere


class Host:
    """The host of the process ``argv``, which begins when the join file ``key`` is there."""

    def __init__(self, name: str, key: str, *argv: str) -> None:
        self._is_head, self._key = name.startswith("head"), Path(key)
        self._argv = [*_BOUND, *(os.path.expandvars(word) if word == LISTEN else word for word in argv)]
        jobs = self._jobs = self._key.parent
        self._log, self._order, self._exit_code = jobs / f"{name}.log", jobs / f"{name}.end", jobs / EXIT_CODE
        # A command that fails as long as the run goes on; $1: an exit code.
        self._over = os.environ.get("RLZMQ_OVER", "false")
        self._limit = os.environ.get("RLZMQ_LIMIT", "")  # after SIGUSR1: the time of this host's job is over
        self._polls = itertools.count()
        self._signals: list[int] = []
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: self._signals.append(number))
        (jobs / f"{name}.waits").unlink(missing_ok=True)

    def run(self) -> int:
        """Run the process, again and again, until the run is over or a signal comes; return the job's exit code."""
        is_over = False
        while not (is_over or self._is_done()):
            if (key := _text(self._key)) or self._is_head:
                is_over = self._is_over(self._run_once(key))
            time.sleep(_POLL_S)
        exit_code = _text(self._exit_code)
        if signal.SIGUSR1 in self._signals and not exit_code:
            subprocess.call(["sh", "-c", self._limit])
        return int(exit_code or EXIT_RESUMABLE) if self._is_head and self._limit else 0

    def _run_once(self, key: str) -> int:
        """Run the process; return its exit code."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(self._argv, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(b"" if self._is_head else key.encode())
        end_at = 0.0
        while (code := process.poll()) is None:
            if not end_at and self._is_done():
                grace_s = _text(self._order) or (_END_S if self._exit_code.exists() else "inf")
                end_at = time.monotonic() + float(grace_s)
                process.terminate()
            has_moved = not self._is_head and _addresses(_text(self._key) or key) != _addresses(key)
            if has_moved or 0 < end_at < time.monotonic():
                process.kill()  # it waits for a head that is gone, or does not end
            time.sleep(_POLL_S)
        return code

    def _is_over(self, code: int) -> bool:
        """Return whether this exit code is the end; say in the directory what it means for the others."""
        is_done, is_resumable = self._is_done(code), code < 0 or code == EXIT_RESUMABLE
        if not self._is_head:
            if code in _WRONG:
                write_text(self._jobs / "head.end", str(_END_S))
            return is_done or code in _WRONG
        if not is_resumable or (is_done and not self._signals):
            write_text(self._exit_code, str(code if code >= 0 else EXIT_RESUMABLE))
        return is_done or not is_resumable

    def _is_done(self, code: int | None = None) -> bool:
        """Return whether the process is to end; `code`: it has ended with this exit code."""
        if self._signals or self._order.exists() or (self._exit_code.exists() and not self._is_head):
            return True
        is_asked = code is not None or next(self._polls) % _ASK_EVERY == 0
        return is_asked and subprocess.call(["sh", "-c", self._over, "sh", str(code)]) == 0


def _addresses(text: str) -> Mapping[str, str]:
    """Return where the head of a join file is."""
    return JoinFile.from_text(text).addresses


def _text(path: Path) -> str:
    """Return the text of a file; "" if there is none."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
    return ""


class Slurm(Engine):
    """Submits roles with sbatch. The head's handle is its job id, that of the others the name of their jobs."""

    def _script(self, role: str, places: Sequence[int]) -> str:
        """Return the batch script of a role. Those of the others read ``HEAD``, a job id."""
        asked = self.jobs.roles[role]
        is_step = role == "learners" and places == range(asked.count)
        is_array = not (role == "head" or is_step)
        options = [
            f"--output={self.jobs.directory}/{role}{'-%a' if is_array else ''}.log",
            "--open-mode=append",
            "--requeue",
            "--signal=B:USR1@60",  # seconds before the time limit: a checkpoint may take as long
            f"--cpus-per-task={asked.cpus}",
            *([f"--mem={asked.memory}"] if asked.memory else []),
            *([f"--time={asked.time}"] if asked.time else []),
            *([f"--gpus-per-task={asked.gpus}"] if asked.gpus else []),
            f"--array={','.join(map(str, places))}" if is_array else f"--ntasks={asked.count}",
            *asked.options,
        ]
        over = "false" if role == "head" else shlex.quote(_HEAD_IS_GONE)
        job = _JOB.format(workdir=shlex.quote(str(self.jobs.cluster.workdir)), over=over)
        place = '-"${SLURM_ARRAY_TASK_ID:-$SLURM_PROCID}"'
        host = shlex.join(["exec", *self.host(role, "PLACE")]).replace("-PLACE", place, 1) + "\n"
        run = _STEP.format(cpus=asked.cpus, host=shlex.quote(host)) if is_step else host
        return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), job + run])

    def _command(self, role: str, head: str) -> list[str]:
        """Return the command that submits the script of a role, which it reads from its standard input."""
        more = [f"--job-name={self.jobs.run_dir.name}-{role}"]
        if role != "head":
            more = [f"{more[0]}-{head}", f"--dependency=after:{head}", f"--export=ALL,HEAD={head}"]
        return ["sbatch", "--parsable", *more]

    def submit(self, role: str, places: Sequence[int]) -> str:
        """Submit a job or an array."""
        head = self.jobs.handles.get("head", "")
        job = command(*self._command(role, head), stdin=self._script(role, places)).strip()
        return job.partition(";")[0] if role == "head" else f"{self.jobs.run_dir.name}-{role}-{head}"

    def living(self, role: str) -> dict[int, str]:
        """Return the ids of the jobs, or of an array's tasks, by place."""
        found: dict[int, str] = {}
        listed = command("squeue", "-h", "-r", "--me", f"--states={_STATES}", "-o", "%i %K %j")
        for job, place, name in (line.split(" ", 2) for line in listed.splitlines()):
            if self.jobs.handles[role] in (job, name):
                tasks = [int(place)] if place.isdigit() else range(self.jobs.roles[role].count)
                stay = [task for task in tasks if not self.file(role, task, "end").exists()]
                found |= dict.fromkeys(stay or tasks, job)
        return found

    def cancel(self, role: str, places: Collection[int]) -> None:
        """Cancel jobs, or an array's tasks."""
        jobs = self.living(role) if places else {}
        if ids := {jobs[place] for place in places if place in jobs}:
            command("scancel", *ids)

    def dry_run(self) -> str:
        """Return a shell script that submits all roles as `start` does."""
        directory = shlex.quote(str(self.jobs.directory))
        lines = ["set -e", f"mkdir -m 700 -p {directory}; rm -f {directory}/{{*.end,{','.join(FORMER)}}}"]
        for role, asked in self.jobs.roles.items():
            submit = " ".join(f'"{word}"' for word in self._command(role, "$head"))
            script = self._script(role, range(asked.count)) + "END_OF_JOB\n)"
            lines.append(f"{role}=$({submit} <<'END_OF_JOB'\n{script}")
        return "\n".join([*lines, f"echo {' '.join(f'{role} ${role}' for role in self.jobs.roles)}"])


class Ssh(Engine):
    """Starts roles on the ``hosts`` of their tables; ``options`` are those of ssh."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        if without := [role for role, asked in jobs.roles.items() if not asked.hosts]:
            raise ConfigurationError(f'--on ssh: [{without[0]}] needs hosts, e.g. hosts = ["a", "b"].')

    def start(self, role: str, places: Sequence[int] = ()) -> str:
        """Start processes that do not live; the head only if all machines can be reached."""
        living = {each: self.living(each) for each in (self.jobs.roles if role == "head" else (role,))}[role]
        missing = [place for place in places or range(self.jobs.roles[role].count) if place not in living]
        key = "" if role == "head" else self._on("head", "read_key", role)[0]
        self._on(role, "begin", role, missing, key)
        return f"{role}@{','.join(self.jobs.roles[role].hosts)}"

    def living(self, role: str) -> set[int]:
        """Return the places of processes on all machines."""
        return set().union(*self._on(role, "living", role))

    def end(self, role: str, places: Collection[int], grace_s: float) -> None:
        """End processes on all machines."""
        self._on(role, "end", role, list(places), grace_s)

    def lines(self, role: str, read: Mapping[str, int]) -> tuple[list[str], dict[str, int]]:
        """Return the further lines of all machines."""
        found = self._on(role, "lines", role, read)
        return [line for lines, _ in found for line in lines], dict(ChainMap(*(now for _, now in found)))

    def exit_code(self) -> int:
        """Return the exit code that the head has left on its machine."""
        return int(self._on("head", "exit_code")[0])

    def _on(self, role: str, *call: Any) -> list[Any]:
        """Call a method of `_Here` on each machine of a role; return the results."""
        cluster, asked = self.jobs.cluster, self.jobs.roles[role]
        there = f"cd {shlex.quote(str(cluster.workdir))} && exec {shlex.join([cluster.python, *HOST])}"

        def on(machine: str) -> Any:
            stdin = json.dumps([self.jobs.model_dump(mode="json"), machine, *call])
            try:
                ssh = [*shlex.split(_SSH), *asked.options, "--", machine, there]
                return json.loads(command(*ssh, stdin=stdin, what=machine))
            except ConfigurationError as error:
                if getattr(error.__cause__, "returncode", 0) == _UNREACHABLE:
                    raise PeerLostError(str(error)) from None  # or the machine's key is unknown
                raise

        with ThreadPoolExecutor(len(asked.hosts)) as pool:
            return list(pool.map(on, asked.hosts))


class _Here(Engine):
    """The processes of this machine."""

    @classmethod
    def answer(cls) -> None:
        """Do what `Ssh` asks this machine on the standard input; print the result."""
        jobs, machine, what, *arguments = json.load(sys.stdin)
        here = cls(Jobs.model_validate(jobs))
        here.mark = f"@{machine}"
        try:
            print(json.dumps(getattr(here, what)(*arguments), default=list))
        except RlzmqError as error:
            sys.exit(str(error))

    def begin(self, role: str, places: Collection[int], key: str) -> None:
        """Start those of these processes that are this machine's: each takes its turn."""
        hosts = self.jobs.roles[role].hosts
        if here := [place for place in places if self.mark == f"@{hosts[place % len(hosts)]}"]:
            self.start(role, here)
        if key and self.jobs.directory.exists():
            write_text(self.jobs.key(role), key, is_private=True)

    def submit(self, role: str, places: Sequence[int]) -> str:
        """Start hosts."""
        address = os.environ["SSH_CONNECTION"].split()[2]  # by which ssh came in: the others reach it, too
        address = f"[{address}]" if ":" in address else address
        asked, null = self.jobs.roles[role], subprocess.DEVNULL
        for place in places:
            rank = [f"LOCAL_RANK={place // len(asked.hosts)}"] if asked.gpus else []
            own = ["env", f"RLZMQ_HEAD={address}", f"RLZMQ_OVER={_GOODBYE}", *rank, *self.host(role, place)]
            lingers = Path("/var/lib/systemd/linger", getpass.getuser()).exists()
            if not (lingers and subprocess.call([*_UNIT, *own]) == 0):
                subprocess.Popen(own, stdin=null, stdout=null, stderr=null, start_new_session=True)
        return ""

    def living(self, role: str) -> set[int]:
        """Return the places of hosts."""
        host = rf" {' '.join(HOST)} (\S+) {re.escape(str(self.jobs.key(role)))} "
        return self.places(role, re.findall(host, command("ps", "-e", "-ww", "-o", "args=")))

    def read_key(self, role: str) -> str:
        """Wait until the head has written the join file of a role; return the text."""
        while not (file := self.jobs.key(role)).exists():
            if not self.living("head"):
                last = "\n".join(self.lines("head", {})[0][-5:])
                raise ConfigurationError(f"the head has ended; the end of its log:\n{last}")
            time.sleep(_POLL_S)
        return file.read_text()


class _Actor:
    def __init__(self, name: str, host: Sequence[str]) -> None:
        threading.Thread(target=self._run, args=(name, host), daemon=True).start()

    def _run(self, name: str, host: Sequence[str]) -> None:
        import ray

        if subprocess.call([*_BOUND, f"RLZMQ_HEAD={ray.util.get_node_ip_address()}", *host]):
            os._exit(1)  # Ray starts it again
        ray.kill(ray.get_actor(name, **_RAY))


class _Ray:
    """A Ray cluster; "" is that of this machine."""

    def __init__(self, package: Any, address: str) -> None:
        self._ray, address = package, f"ray://{address}" if address else "auto"
        package.init(address, **_RAY, log_to_driver=False, logging_level="error")

    def submit(self, name: str, host: list[str], asked: Role, memory: int, options: dict[str, Any]) -> None:
        """Start an actor."""
        given: dict[str, Any] = {"name": name, "lifetime": "detached", "max_restarts": -1}
        given |= {"num_cpus": asked.cpus, "num_gpus": asked.gpus, "memory": memory or None}
        self._ray.remote(_Actor).options(**given | options).remote(name, host)

    def names(self) -> Sequence[str]:
        """Return the names of all actors."""
        return list(self._ray.util.list_named_actors())

    def cancel(self, name: str) -> None:
        """Kill an actor."""
        with contextlib.suppress(ValueError):  # it has just ended
            self._ray.kill(self._ray.get_actor(name))

    def seen_by(self, path: str) -> Mapping[str, bool]:
        """Let a task look on each node."""
        look = self._ray.remote(num_cpus=0)(lambda path: os.path.exists(path))
        nodes = [node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]]
        sees = [look.options(resources={f"node:{node}": 0.001}).remote(path) for node in nodes]
        return dict(zip(nodes, self._ray.get(sees), strict=True))


def _dask_names(dask_scheduler: Any) -> list[str]:
    """Return the names of all tasks of rlzmq; let them lose any number of workers."""
    tasks = {str(key): task for key, task in dask_scheduler.tasks.items() if str(key).startswith(_OURS)}
    for task in tasks.values():
        task.suspicious = 0
    return list(tasks)


def _dask_task(host: Sequence[str]) -> None:
    from distributed import get_worker

    address = urlsplit(get_worker().address).hostname
    subprocess.run([*_BOUND, f"RLZMQ_HEAD={address}", *host], check=True)  # if it fails, Dask starts it again


class _Dask:
    """A Dask cluster, by its scheduler's address."""

    def __init__(self, package: Any, address: str) -> None:
        self._dask = package
        self._client = package.Client(f"tcp://{address}", timeout=20, set_as_default=False)

    def submit(self, name: str, host: list[str], asked: Role, memory: int, options: dict[str, Any]) -> None:
        """Submit a task."""
        sizes = {"CPU": asked.cpus * (asked.cpus > 1), "GPU": asked.gpus, "MEMORY": memory}
        needs = {what: size for what, size in sizes.items() if size}
        workers = self._client.scheduler_info(n_workers=-1)["workers"].values()
        if workers and (missing := set(needs).difference(*(worker["resources"] for worker in workers))):
            raise ConfigurationError(
                f"{name}: no worker offers {', '.join(sorted(missing))}: dask worker --resources 'GPU=1 …'"
            )
        given = {"key": name, "retries": 1_000_000, "pure": False, "resources": needs, **options}
        self._dask.fire_and_forget(self._client.submit(_dask_task, host, **given))
        while name not in self.names():  # until the scheduler has it
            time.sleep(0.05)

    def names(self) -> Sequence[str]:
        """Return the names of all tasks."""
        return list(self._client.run_on_scheduler(_dask_names))

    def cancel(self, name: str) -> None:
        """Cancel a task."""
        self._client.cancel([self._dask.Future(name, self._client)], force=True)

    def seen_by(self, path: str) -> Mapping[str, bool]:
        """Let all workers look."""
        return dict(self._client.run(os.path.exists, path))


_CLUSTERS: dict[str, tuple[str, type[_Ray | _Dask]]] = {"ray": ("ray", _Ray), "dask": ("distributed", _Dask)}


class Tasks(Engine):
    """The cluster of ``--on ray``, ``--on ray://HOST:PORT`` or ``--on dask://HOST:PORT``."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        kind, _, address = jobs.on.partition("://")
        name, cluster = _CLUSTERS[kind]
        package = import_optional(name, f"--on {kind}", f"rlzmq[{kind}]")
        try:
            self._cluster = cluster(package, address)
        except (OSError, ValueError) as error:
            raise ConfigurationError(f"--on {jobs.on}: no such cluster: {error}") from error

    def submit(self, role: str, places: Sequence[int]) -> str:
        """Submit tasks."""
        asked, directory = self.jobs.roles[role], self.jobs.directory
        if unknown := [key for key in ("time", "image", "hosts") if getattr(asked, key)]:
            raise ConfigurationError(f"[{role}] {unknown[0]}: --on {self.jobs.on} has no such thing.")
        memory = int(TypeAdapter(ByteSize).validate_python(asked.memory or 0))
        options = read_toml("\n".join(asked.options) + "\n")
        with tempfile.NamedTemporaryFile(dir=directory) as mark:
            if unseen := [node for node, sees in self._cluster.seen_by(mark.name).items() if not sees]:
                raise ConfigurationError(
                    f"{directory} is another directory on {', '.join(unseen)}, or none: name a --run-dir that this "
                    "machine and all nodes share."
                )
        for place in places:
            host = [*_IN_WORKDIR, str(self.jobs.cluster.workdir), *self.host(role, place)]
            self._cluster.submit(self._task(role, place), host, asked, memory, options)
        return self._task(role, "*")

    def living(self, role: str) -> set[int]:
        """Return the places of tasks."""
        directory = f"{_OURS}{self.jobs.directory}/"
        return self.places(role, (name.removeprefix(directory) for name in self._cluster.names()))

    def cancel(self, role: str, places: Collection[int]) -> None:
        """Cancel tasks."""
        for place in places:
            self._cluster.cancel(self._task(role, place))

    def _task(self, role: str, place: object) -> str:
        """Return the name of a task: it has the directory and the name of its host."""
        return f"{_OURS}{self.jobs.directory}/{self.name(role, place)}"


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(Host(*sys.argv[1:]).run())
    _Here.answer()
