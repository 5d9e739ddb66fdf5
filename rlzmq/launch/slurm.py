"""Roles as Slurm jobs: the head one job, the runners an array, the learners one job of several tasks.

No job needs a second step beside its first, so memory may be consumable. Slurm requeues what loses its node or is
preempted; a job that nears its time limit gets SIGUSR1 a minute before (``--signal``), and requeues itself. This module
is also the program that jobs run; ``HEAD`` is the id of the head's job there.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import make_directories
from rlzmq.launch.engine import EXIT_CODE, Engine, Resources, Role, command
from rlzmq.launch.host import forget, stay

__all__ = ["Slurm"]

_WARNING_S = 60  # before the time limit: a checkpoint may take as long
_STEP_S = 60  # until a step that Slurm cannot create is an error
_POLL_S = 1.0
_ASK_S, _ASK_WITHOUT_KEY_S = 120.0, 10.0  # between questions whether the head's job is there
_OWN = ("-m", "rlzmq.launch.slurm")
_STATES = "pending,running,suspended,configuring,completing"  # a job that is being requeued is pending
_PLACES = {
    "head": "\"${RLZMQ_HEAD:-$(hostname -I | cut -d' ' -f1)}\"",  # its address: the other nodes reach it there
    "runners": '"$SLURM_ARRAY_TASK_ID"',
    "learners": '"${SLURM_ARRAY_TASK_ID:-step}"',
}


class Slurm(Engine):
    """Submits roles with sbatch. The head's handle is its job id, that of the others the name of their jobs."""

    def _script(self, role: Role, places: Sequence[int] = ()) -> str:
        """Return the batch script of a role. Those of the others read ``HEAD``, a job id."""
        asked = role.resources
        if role.name == "runners" and not places:
            places = range(asked.count)
        options = [
            f"--output={role.key.parent}/{role.name}{'-%a' if places else ''}.log",
            "--open-mode=append",
            "--requeue",
            f"--signal=B:USR1@{_WARNING_S}",
            f"--cpus-per-task={asked.cpus}",
            *([f"--mem={asked.memory}"] if asked.memory else []),
            *([f"--time={asked.time}"] if asked.time else []),
            *([f"--gpus-per-task={asked.gpus}"] if asked.gpus else []),
            *([f"--array={','.join(map(str, places))}"] if places else [f"--ntasks={asked.count}"]),
        ]
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in (*options, *asked.options))]
        own = [role.argv[0], *_OWN, role.name, str(role.key), str(asked.cpus)]
        run = f"exec {shlex.join(own)} {_PLACES[role.name]} {shlex.join(role.argv)}"
        return "\n".join([*lines, f"cd {shlex.quote(str(self.jobs.workdir))}", run, ""])

    def _command(self, role: Role, head: str) -> list[str]:
        """Return the command that submits the script of a role, which it reads from its standard input."""
        more = [f"--job-name={self.jobs.name}-{role.name}"]
        if role.name != "head":
            more = [f"{more[0]}-{head}", f"--dependency=after:{head}", f"--export=ALL,HEAD={head}"]
        return ["sbatch", "--parsable", *more]

    def start(self, role: Role, places: Sequence[int] = ()) -> str:
        """Submit a job or an array."""
        make_directories(role.key.parent, mode=0o700)
        if role.name == "head":
            forget(role.key.parent)
        head = self.jobs.handles.get("head", "")
        job = command(*self._command(role, head), stdin=self._script(role, places))
        return (
            job.strip().partition(";")[0] if role.name == "head" else f"{self.jobs.name}-{role.name}-{head}"
        )

    def living(self, role: Role) -> dict[int, str]:
        """Return the ids of the jobs, or of an array's tasks, by place."""
        found: dict[int, str] = {}
        listed = command("squeue", "-h", "-r", "--me", f"--states={_STATES}", "-o", "%i %K %j")
        for job, place, name in (line.split(" ", 2) for line in listed.splitlines()):
            if self.jobs.handles[role.name] in (job, name):
                places = [int(place)] if place.isdigit() else range(role.resources.count)
                found |= dict.fromkeys(places, job)
        return found

    def end(self, role: Role, places: Collection[int], grace_s: float) -> None:
        """Cancel jobs. The learners that the run was started with are one."""
        count = role.resources.count if role.name == "learners" else 0
        if 0 < sum(place < count for place in places) < count:
            raise ConfigurationError(
                f"the first {count} learners are one job of Slurm's: expected at least {count}."
            )
        deadline, is_killed = time.monotonic() + grace_s, False
        ids = {job for place, job in self.living(role).items() if place in places}
        if ids:
            command("scancel", *ids)
        while ids.intersection(self.living(role).values()):
            if time.monotonic() > deadline and not is_killed:
                is_killed = True
                command("scancel", "--full", "--signal=KILL", *ids)
            time.sleep(_POLL_S)

    def dry_run(self) -> str:
        """Return a shell script that submits all roles as `start` does."""
        roles = self.jobs.roles.values()
        lines = ["set -e", f"mkdir -m 700 -p {shlex.quote(str(self.jobs.roles['head'].key.parent))}"]
        for role in roles:
            submit = " ".join(f'"{word}"' for word in self._command(role, "$head"))
            lines += [f"{role.name}=$({submit} <<'END_OF_JOB'", self._script(role) + "END_OF_JOB", ")"]
        return "\n".join([*lines, f"echo {' '.join(f'{role.name} ${role.name}' for role in roles)}"])


def _is_there(job: str) -> bool:
    """Return whether a job waits or runs, or Slurm cannot tell."""
    asked = subprocess.run(["squeue", "-h", "-j", job], capture_output=True, text=True, check=False)
    return bool(asked.stdout) or (asked.returncode != 0 and "Invalid job id" not in asked.stderr)


def _main(name: str, key: str, cpus: str, place: str, *argv: str) -> int:
    """Run the process of a job or, with place "step", the processes of all its tasks."""
    job, head = os.environ["SLURM_JOB_ID"], os.environ.get("HEAD", "")
    if place == "step":
        return _step(
            job,
            head,
            [
                "srun",
                f"--immediate={_STEP_S}",
                f"--cpus-per-task={cpus}",
                sys.executable,
                *_OWN,
                name,
                key,
                cpus,
                "task",
                *argv,
            ],
        )
    role = Role(name, argv, Path(key), Resources(cpus=int(cpus)))
    asked_at = -math.inf

    def is_over(code: int | None) -> bool:
        nonlocal asked_at
        now, every_s = time.monotonic(), _ASK_S if role.key.exists() else _ASK_WITHOUT_KEY_S
        if not head or now < asked_at + every_s:
            return False
        asked_at = now
        return not _is_there(head)

    number = os.environ["SLURM_PROCID"] if place == "task" else place
    if stay(role, name if name == "head" else f"{name}-{number}", place, is_over):
        command("scontrol", "requeue", job)
    code = role.key.with_name(EXIT_CODE)
    return int(code.read_text()) if name == "head" and code.exists() else 0


def _step(job: str, head: str, argv: Sequence[str]) -> int:
    """Run a step; cancel the run if it cannot be created or fails."""
    signals: list[int] = []

    def note(number: int, frame: object) -> None:
        signals.append(number)
        if number == signal.SIGUSR1:  # soon the time limit
            command("scontrol", "requeue", job)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, note)
    if (code := subprocess.call(argv)) and not signals:
        print(f"the step of the learners ended with {code}: the run is cancelled", flush=True)
        command("scancel", head)
    return code


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
