"""Roles as Slurm jobs: the head one job, the runners an array, the learners one job of several tasks.

No job needs a second step beside its first, so memory may be consumable. Slurm requeues what loses its node or is
preempted; a job that nears its time limit gets SIGUSR1 a minute before (``--signal``), and requeues itself.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

from rlzmq.core.errors import ConfigurationError
from rlzmq.launch.engine import LISTEN, WAIT, Jobs, Role, command, log_lines, loop

__all__ = ["Slurm"]

_WARNING_S = 60  # before the time limit: a checkpoint may take as long
_STEP_S = 60  # until a step that Slurm cannot create is an error
_POLL_S = 1.0
_LIVING = "pending,running,suspended,configuring"
_EXIT_RESUMABLE = 75

_HEAD = """\
# On a file system that all nodes share; the join files in it have mode 0600.
mkdir -m 700 -p {directory}; rm -f {directory}/join*.toml
trap 'limit=1; kill -USR1 $role' USR1 # soon the time limit
trap 'kill -TERM $role' TERM # scancel, or preemption, after which Slurm requeues the job
{argv} & role=$!
{wait}
[ -n "$limit" ] && [ $code -eq 75 -o $code -gt 128 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
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


class Slurm:
    """Submits roles with sbatch. The head's handle is its job id, that of the others the name of their jobs."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def _script(self, role: Role, places: str = "") -> str:
        """Return the batch script of a role, or of these of its places. Those of the others read ``HEAD``, a job id."""
        asked = role.resources
        places = places or (f"0-{asked.count - 1}" if role.name == "runners" else "")
        options = [
            f"--output={role.key.parent}/{role.name}{'-%a' if places else ''}.log",
            "--open-mode=append",
            "--requeue",
            f"--signal=B:USR1@{_WARNING_S}",
            f"--cpus-per-task={asked.cpus}",
        ]
        options += [f"--mem={asked.memory}"] if asked.memory else []
        options += [f"--time={asked.time}"] if asked.time else []
        options += [f"--gpus-per-task={asked.gpus}"] if asked.gpus else []
        options += ["--ntasks=1", f"--array={places}"] if places else [f"--ntasks={asked.count}"]
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in (*options, *asked.options))]
        lines += [f"cd {shlex.quote(str(self._jobs.workdir))}", f"export OMP_NUM_THREADS={asked.cpus}"]
        argv, key = shlex.join(role.argv), shlex.quote(str(role.key))
        if role.restart == "with_run":
            lines += ["# The address that the other nodes reach; RLZMQ_HEAD names another one."]
            lines += ["address=${RLZMQ_HEAD:-$(hostname -I | cut -d' ' -f1)}"]
            argv = argv.replace(shlex.quote(LISTEN), '"tcp://$address:0"')
            directory = shlex.quote(str(role.key.parent))
            return "\n".join([*lines, _HEAD.format(argv=argv, directory=directory, wait=WAIT.format("role"))])
        text = loop(argv, before=_BEFORE.format(key=key), after=_AFTER)
        lines.append("trap 'scontrol requeue \"$SLURM_JOB_ID\"' USR1 # soon the time limit")
        if role.name == "learners":
            step = f"srun --immediate={_STEP_S} --cpus-per-task={asked.cpus} bash -c {shlex.quote(text)}"
            return "\n".join([*lines, _STEP.format(step=step, wait=WAIT.format("step"))])
        return "\n".join([*lines, text])

    def _command(self, role: Role, head: str) -> list[str]:
        """Return the command that submits the script of a role, which it reads from its standard input."""
        more = [f"--job-name={self._jobs.name}-{role.name}"]
        if role.name != "head":
            more = [f"{more[0]}-{head}", f"--dependency=after:{head}", f"--export=ALL,HEAD={head}"]
        return ["sbatch", "--parsable", *more]

    def start(self, role: Role, places: str = "") -> str:
        """Submit a role, or these of its places."""
        role.key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        head = self._jobs.handles.get("head", "")
        argv = self._command(role, head)
        job = command(*argv, stdin=self._script(role, places)).strip().partition(";")[0]
        return f"{self._jobs.name}-{role.name}-{head}" if head else job

    def scale(self, handle: str, count: int) -> None:
        """Submit further array tasks, or cancel those with the highest numbers."""
        role = self._jobs.role(handle)
        first = role.resources.count if role.name == "learners" else 0
        if count < first:
            raise ConfigurationError(
                f"the first {first} learners are one job of Slurm's: expected at least {first}, got {count}."
            )
        listed = command("squeue", "-h", "-r", f"--name={handle}", f"--states={_LIVING}", "-o", "%K %F_%K")
        tasks = dict(line.split() for line in listed.splitlines())
        tasks.pop("N/A", "")
        surplus = sorted(tasks, key=int)[count - first :]
        free = [place for place in range(first, count + len(tasks)) if str(place) not in tasks]
        if surplus:
            command("scancel", *(tasks[place] for place in surplus))
        elif missing := free[: count - first - len(tasks)]:
            self.start(role, ",".join(map(str, missing)))

    def logs(self, handle: str, *, follow: bool) -> Iterator[str]:
        """Yield the lines of a role's files; of an array's with the number of the task."""
        return log_lines(self._jobs.role(handle), lambda: not follow or not self._is_there(handle))

    def wait(self, handle: str) -> int:
        """Wait for the head's end."""
        while self._is_there(handle):
            time.sleep(_POLL_S)
        facts = command("scontrol", "-o", "show", "job", handle).split()
        code = next(fact for fact in facts if fact.startswith("ExitCode="))[9:].partition(":")[0]
        return int(code) or (0 if "JobState=COMPLETED" in facts else _EXIT_RESUMABLE)

    def stop(self, handle: str, grace_s: float) -> None:
        """Cancel a role."""
        which = [handle] if handle == self._jobs.handles["head"] else [f"--name={handle}"]
        command("scancel", *which)
        deadline = time.monotonic() + grace_s
        while self._is_there(handle):
            if time.monotonic() > deadline:
                command("scancel", "--full", "--signal=KILL", *which)
                return
            time.sleep(_POLL_S)

    def dry_run(self) -> str:
        """Return a shell script that submits all roles as `start` does."""
        roles = self._jobs.roles.values()
        directory = shlex.quote(str(self._jobs.roles["head"].key.parent))
        lines = ["set -e", f"mkdir -m 700 -p {directory}"]
        for role in roles:
            submit = " ".join(f'"{word}"' for word in self._command(role, "$head"))
            lines += [f"{role.name}=$({submit} <<'END_OF_JOB'", self._script(role) + "END_OF_JOB", ")"]
        return "\n".join([*lines, f"echo {' '.join(f'{role.name} ${role.name}' for role in roles)}"])

    def _is_there(self, handle: str) -> bool:
        """Return whether jobs of the role wait, run or end; a job that is being requeued waits."""
        listed = command("squeue", "-h", "--me", f"--states={_LIVING},completing", "-o", "%A %j")
        return any(handle in line.split(" ", 1) for line in listed.splitlines())
