"""Roles as Slurm jobs: the head one job, the runners an array, the learners one job of several tasks.

No job needs a second step beside its first, so memory may be consumable. Slurm requeues what loses its node or is
preempted; a job that nears its time limit gets SIGUSR1 a minute before (``--signal``), and requeues itself.
"""

from __future__ import annotations

import shlex
import subprocess

from rlzmq.core.errors import ConfigurationError
from rlzmq.launch.engine import LISTEN, Role

__all__ = ["Slurm"]

_WARNING_S = 60  # before the time limit: a checkpoint may take as long
_STEP_S = 60  # until a step that Slurm cannot create is an error

_HEAD = """\
# On a file system that all nodes share; the join files in it have mode 0600.
mkdir -m 700 -p {directory}; rm -f {directory}/*.toml
trap 'limit=1; kill -USR1 $role' USR1 # soon the time limit
trap 'kill -TERM $role' TERM # scancel, or preemption, after which Slurm requeues the job
{argv} & role=$!
# A wait that a signal interrupts returns more than 128, and the head still runs.
while :; do wait $role; code=$?; [ $code -gt 128 ] && kill -0 $role 2>/dev/null || break; done
[ -n "$limit" ] && [ $code -eq 75 -o $code -gt 128 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
"""

_PEER = """\
trap 'ends=1; kill -TERM $role 2>/dev/null' TERM
while [ -z "$ends" ]; do
    for _ in {{1..10}}; do [ -f {key} ] && break; sleep 1; done
    case $(squeue -h -o %T -j "$HEAD" 2>&1) in ""|*Invalid*) exit 0;; esac # the run is over
    [ -f {key} ] || continue
    {argv} & role=$!
    while :; do wait $role; code=$?; [ $code -gt 128 ] && kill -0 $role 2>/dev/null || break; done
    case $code in 2|78) scancel "$HEAD"; exit $code;; esac # wrong arguments or configuration
    sleep 2
done
"""

_STEP = """\
trap 'ends=1' TERM
{step} & step=$!
while :; do wait $step; code=$?; [ $code -gt 128 ] && kill -0 $step 2>/dev/null || break; done
[ -n "$ends" -o $code -eq 0 ] && exit
echo "the step of the learners ended with $code: the run is cancelled"; scancel "$HEAD"; exit $code
"""


class Slurm:
    """Submits roles with sbatch."""

    def __init__(self, name: str, workdir: str) -> None:
        self._name = name
        self._workdir = workdir
        self._head = ""

    def script(self, role: Role) -> str:
        """Return the batch script of a role. Those of the others read the head's job id in ``HEAD``."""
        asked = role.resources
        options = [
            f"--job-name={self._name}-{role.name}",
            f"--output={role.key.parent}/{role.name}{'-%a' if role.name == 'runners' else ''}.log",
            "--open-mode=append",
            "--requeue",
            f"--signal=B:USR1@{_WARNING_S}",
            f"--cpus-per-task={asked.cpus}",
        ]
        options += [f"--mem={asked.memory}"] if asked.memory else []
        options += [f"--time={asked.time}"] if asked.time else []
        options += [f"--gpus-per-task={asked.gpus}"] if asked.gpus else []
        is_array = role.name == "runners"
        options += [f"--ntasks={1 if is_array else asked.count}"]
        options += [f"--array=0-{asked.count - 1}"] if is_array else []
        lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in (*options, *asked.options))]
        lines += [f"cd {shlex.quote(self._workdir)}", f"export OMP_NUM_THREADS={asked.cpus}"]
        argv, key = shlex.join(role.argv), shlex.quote(str(role.key))
        if role.restart == "with_run":
            lines += ["# The address that the other nodes reach; RLZMQ_HEAD names another one."]
            lines += ["address=${RLZMQ_HEAD:-$(hostname -I | cut -d' ' -f1)}"]
            argv = argv.replace(shlex.quote(LISTEN), '"tcp://$address:0"')
            return "\n".join([*lines, _HEAD.format(argv=argv, directory=shlex.quote(str(role.key.parent)))])
        loop = _PEER.format(argv=argv, key=key)
        lines.append("trap 'scontrol requeue \"$SLURM_JOB_ID\"' USR1 # soon the time limit")
        if role.name == "learners":
            step = f"srun --immediate={_STEP_S} --cpus-per-task={asked.cpus} bash -c {shlex.quote(loop)}"
            return "\n".join([*lines, _STEP.format(step=step)])
        return "\n".join([*lines, loop])

    def command(self, role: Role, head: str) -> list[str]:
        """Return the command that submits the script of a role, which it reads from its standard input."""
        more = [] if role.name == "head" else [f"--dependency=after:{head}", f"--export=ALL,HEAD={head}"]
        return ["sbatch", "--parsable", *more]

    def start(self, role: Role) -> str:
        """Submit a role, the head first; return the id of its job.

        Raises:
            ConfigurationError: Slurm is not there, or refuses the job.
        """
        role.key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        script, command = self.script(role), self.command(role, self._head)
        try:
            done = subprocess.run(command, input=script, capture_output=True, text=True, check=True)
        except OSError as error:
            raise ConfigurationError(
                f"sbatch cannot be started: {error}. Submit on a machine with Slurm."
            ) from error
        except subprocess.CalledProcessError as error:
            raise ConfigurationError(f"Slurm refuses the {role.name}: {error.stderr.strip()}") from error
        job = done.stdout.strip().partition(";")[0]
        self._head = self._head or job
        return job

    def stop(self, handle: str) -> None:
        """Cancel a job: the head saves a checkpoint, and ends the others."""
        subprocess.run(["scancel", handle], check=False)

    def by_hand(self, roles: list[Role]) -> str:
        """Return a shell script that submits all roles as `start` does."""
        directory = shlex.quote(str(roles[0].key.parent))
        lines = ["set -e", f"mkdir -m 700 -p {directory}"]
        for role in roles:
            command = self.command(role, "$head")
            lines += [
                f"{role.name}=$({' '.join(command)} <<'END_OF_JOB'",
                self.script(role) + "END_OF_JOB",
                ")",
            ]
        return "\n".join([*lines, f"echo {' '.join(f'{role.name} ${role.name}' for role in roles)}"])
