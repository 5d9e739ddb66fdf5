"""Roles as Slurm jobs: the head one job, the runners an array, the learners one job of several tasks.

No job needs a second step beside its first, so memory may be consumable. Slurm requeues what loses its node or is
preempted; a job that nears its time limit gets SIGUSR1 a minute before (``--signal``), and requeues itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

from rlzmq.launch.engine import Role, command
from rlzmq.launch.host import OWN, Hosted

__all__ = ["Slurm"]

_WARNING_S = 60  # before the time limit: a checkpoint may take as long
_STATES = "pending,running,suspended,configuring,completing"  # a job that is being requeued is pending
_NAMES = {
    "head": "head",
    "runners": 'runners-"$SLURM_ARRAY_TASK_ID"',
    "learners": 'learners-"${SLURM_ARRAY_TASK_ID:-$SLURM_PROCID}"',
}
_JOB = """\
cd {workdir}
# The address that the other nodes reach; RLZMQ_HEAD names another one.
export address="${{RLZMQ_HEAD:-$(hostname -I | cut -d' ' -f1)}}"
export limit='scontrol requeue "$SLURM_JOB_ID"' # SIGUSR1
export over={over}
"""
_HEAD_IS_GONE = """! squeue -h -j "$HEAD" 2>&1 | grep -qv 'Invalid job id'"""
_STEP = """\
trap "$limit" USR1
srun --immediate=60 --cpus-per-task={cpus} bash -c {host} & step=$!
wait $step || wait $step && exit # the first one may be interrupted
echo "the step of the learners ended with $?: the run is cancelled"; scancel "$HEAD"; exit 1
"""


class Slurm(Hosted):
    """Submits roles with sbatch. The head's handle is its job id, that of the others the name of their jobs."""

    def _script(self, role: Role, places: Sequence[int] = ()) -> str:
        """Return the batch script of a role. Those of the others read ``HEAD``, a job id."""
        is_step = role.name == "learners" and places in ((), range(role.count))
        places = places or range(role.count)
        is_array = not (role.name == "head" or is_step)
        options = [
            f"--output={role.key.parent}/{role.name}{'-%a' if is_array else ''}.log",
            "--open-mode=append",
            "--requeue",
            f"--signal=B:USR1@{_WARNING_S}",
            f"--cpus-per-task={role.cpus}",
            *([f"--mem={role.memory}"] if role.memory else []),
            *([f"--time={role.time}"] if role.time else []),
            *([f"--gpus-per-task={role.gpus}"] if role.gpus else []),
            f"--array={','.join(map(str, places))}" if is_array else f"--ntasks={role.count}",
            *role.options,
        ]
        over = "false" if role.name == "head" else shlex.quote(_HEAD_IS_GONE)
        job = _JOB.format(workdir=shlex.quote(str(self.jobs.workdir)), over=over)
        own = (
            f"{shlex.join((role.argv[0], *OWN))} {_NAMES[role.name]} {shlex.quote(str(role.key))} {role.cpus}"
        )
        host = f'exec {own} "$address" "$over" "$limit" {shlex.join(role.argv)}\n'
        run = _STEP.format(cpus=role.cpus, host=shlex.quote(host)) if is_step else host
        return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), job + run])

    def _command(self, role: Role, head: str) -> list[str]:
        """Return the command that submits the script of a role, which it reads from its standard input."""
        more = [f"--job-name={self.jobs.name}-{role.name}"]
        if role.name != "head":
            more = [f"{more[0]}-{head}", f"--dependency=after:{head}", f"--export=ALL,HEAD={head}"]
        return ["sbatch", "--parsable", *more]

    def submit(self, role: Role, places: Sequence[int]) -> str:
        """Submit a job or an array."""
        head = self.jobs.handles.get("head", "")
        job = command(*self._command(role, head), stdin=self._script(role, places)).strip()
        return job.partition(";")[0] if role.name == "head" else f"{self.jobs.name}-{role.name}-{head}"

    def living(self, role: Role) -> dict[int, str]:
        """Return the ids of the jobs, or of an array's tasks, by place."""
        return self._jobs(role, _STATES)

    def withdraw(self, role: Role, places: Collection[int]) -> None:
        """Cancel jobs that wait."""
        if ids := {job for place, job in self._jobs(role, "pending").items() if place in places}:
            command("scancel", *ids)

    def _jobs(self, role: Role, states: str) -> dict[int, str]:
        found: dict[int, str] = {}
        listed = command("squeue", "-h", "-r", "--me", f"--states={states}", "-o", "%i %K %j")
        for job, place, name in (line.split(" ", 2) for line in listed.splitlines()):
            if self.jobs.handles[role.name] in (job, name):
                tasks = [int(place)] if place.isdigit() else range(role.count)
                ends = (role.key.with_name(f"{self.name(role, task)}.end") for task in tasks)
                stay = [task for task, end in zip(tasks, ends, strict=True) if not end.exists()]
                found |= dict.fromkeys(stay or tasks, job)
        return found

    def dry_run(self) -> str:
        """Return a shell script that submits all roles as `start` does."""
        roles = self.jobs.roles.values()
        directory = shlex.quote(str(self.jobs.roles["head"].key.parent))
        lines = ["set -e", f"mkdir -m 700 -p {directory}; rm -f {directory}/*.end"]
        for role in roles:
            submit = " ".join(f'"{word}"' for word in self._command(role, "$head"))
            lines += [f"{role.name}=$({submit} <<'END_OF_JOB'", self._script(role) + "END_OF_JOB", ")"]
        return "\n".join([*lines, f"echo {' '.join(f'{role.name} ${role.name}' for role in roles)}"])
