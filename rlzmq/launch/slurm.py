"""Roles as Slurm jobs: the head one job, the runners an array, the learners one job of several tasks.

No job needs a second step beside its first, so memory may be consumable. Slurm requeues what loses its node or is
preempted; a job that nears its time limit gets SIGUSR1 a minute before (``--signal``), and requeues itself.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Sequence

from rlzmq.core.errors import ConfigurationError
from rlzmq.launch.engine import EXIT_CODE, LISTEN, WAIT, Engine, Role, command, loop

__all__ = ["Slurm"]

_WARNING_S = 60  # before the time limit: a checkpoint may take as long
_STEP_S = 60  # until a step that Slurm cannot create is an error
_POLL_S = 1.0
_STATES = "pending,running,suspended,configuring,completing"  # a job that is being requeued is pending

_HEAD = """\
# The address that the other nodes reach; RLZMQ_HEAD names another one.
address=${{RLZMQ_HEAD:-$(hostname -I | cut -d' ' -f1)}}
# On a file system that all nodes share; the join files in it have mode 0600.
mkdir -m 700 -p {directory}; rm -f {directory}/join*.toml {directory}/{code}
trap 'limit=1; kill -USR1 $role' USR1 # soon the time limit
trap 'kill -TERM $role' TERM # scancel, or preemption, after which Slurm requeues the job
{argv} & role=$!
{wait}
[ -n "$limit" ] && [ $code -eq 75 -o $code -gt 128 ] && scontrol requeue "$SLURM_JOB_ID"
echo $code > {directory}/{code}; exit $code
"""

_BEFORE = """\
for _ in {{1..10}}; do [ -f {key} ] && break; sleep 1; done
case $(squeue -h -o %T -j "$HEAD" 2>&1) in ""|*Invalid*) exit 0;; esac # the run is over
[ -f {key} ] || continue
"""
_AFTER = 'case $code in 2|78) scancel "$HEAD"; exit $code;; esac # wrong arguments or configuration'

_STEP = """\
trap 'ends=1' TERM
{step} & step=$!
{wait}
[ -n "$ends" -o $code -eq 0 ] && exit
echo "the step of the learners ended with $code: the run is cancelled"; scancel "$HEAD"; exit $code
"""


class Slurm(Engine):
    """Submits roles with sbatch. The head's handle is its job id, that of the others the name of their jobs."""

    def _script(self, role: Role, places: Sequence[int] = ()) -> str:
        """Return the batch script of a role. Those of the others read ``HEAD``, a job id."""
        asked, jobs = role.resources, shlex.quote(str(role.key.parent))
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
        lines += [f"cd {shlex.quote(str(self.jobs.workdir))}", f"export OMP_NUM_THREADS={asked.cpus}"]
        argv, key = shlex.join(role.argv), shlex.quote(str(role.key))
        if role.name == "head":
            argv = argv.replace(shlex.quote(LISTEN), '"tcp://$address:0"')
            lines.append(_HEAD.format(argv=argv, directory=jobs, code=EXIT_CODE, wait=WAIT.format("role")))
            return "\n".join(lines)
        text = loop(argv, before=_BEFORE.format(key=key), after=_AFTER)
        lines.append("trap 'scontrol requeue \"$SLURM_JOB_ID\"' USR1 # soon the time limit")
        if role.name == "learners":
            step = f"srun --immediate={_STEP_S} --cpus-per-task={asked.cpus} bash -c {shlex.quote(text)}"
            text = _STEP.format(step=step, wait=WAIT.format("step"))
        return "\n".join([*lines, text])

    def _command(self, role: Role, head: str) -> list[str]:
        """Return the command that submits the script of a role, which it reads from its standard input."""
        more = [f"--job-name={self.jobs.name}-{role.name}"]
        if role.name != "head":
            more = [f"{more[0]}-{head}", f"--dependency=after:{head}", f"--export=ALL,HEAD={head}"]
        return ["sbatch", "--parsable", *more]

    def start(self, role: Role, places: Sequence[int] = ()) -> str:
        """Submit a job or an array."""
        role.key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
