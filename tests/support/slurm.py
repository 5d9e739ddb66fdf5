"""A real Slurm on one machine: a controller and nodes, each with a network, host name, /tmp and /dev/shm of its own.

Needs root, iproute2 and Debian's slurm-wlm and munge. /home and everything else is shared, as on NFS.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.support import runs
from tests.support.machines import Machines, why_no_machines

ROOT = Path(__file__).parents[2]
DEADLINE_S = 480.0  # only a fault reaches it
until = functools.partial(runs.until, timeout_s=DEADLINE_S, every_s=0.3)
_CONF = """\
ClusterName=rlzmq
SlurmctldHost=ctl({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket,cred_expire=40
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmctldPidFile={dir}/ctld.pid
SlurmdPidFile={dir}/slurmd.%n.pid
SlurmdSpoolDir={dir}/slurmd.%n
StateSaveLocation={dir}/state
SlurmctldLogFile={dir}/ctld.log
SlurmdLogFile={dir}/slurmd.%n.log
SlurmctldTimeout=30
SlurmdTimeout=20
KillWait=30
MinJobAge=300
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,bf_interval=5,requeue_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
OverTimeLimit=0
SlurmdParameters=config_overrides
NodeName=n[1-{nodes}] CPUs={cpus} Boards=1 SocketsPerBoard=1 CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=8000
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=prio Nodes=n[1-{nodes}] Default=NO MaxTime=INFINITE State=UP PriorityTier=10
"""
_ON = (
    'hostname "$0"; mount --bind "$1/hosts" /etc/hosts; mount --rbind "$1/tmp.$0" /tmp; '
    'mount -t tmpfs -o mode=1777,size=4g tmpfs /dev/shm; shift; exec "$@"'
)


def why_no_slurm() -> str:
    """Return why a Slurm cannot be started here; "" if it can."""
    needed = ("slurmctld", "slurmd", "munged", "nsenter")
    if missing := [name for name in needed if shutil.which(name) is None]:
        return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge iproute2)"
    return why_no_machines()


class Slurm:
    """A controller ``ctl`` and nodes ``n1``, ``n2``, …

    Attributes:
        home: A directory that all nodes share, for the runs of a test.
    """

    def __init__(self, num_nodes: int = 4, cpus: int = 4) -> None:
        # Not in /tmp: each node has its own.
        self._dir = Path(tempfile.mkdtemp(prefix="rlzmq-slurm-", dir="/var/tmp"))
        self._dir.chmod(0o755)
        self.home = self._dir / "home"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._nodes = [f"n{number}" for number in range(1, num_nodes + 1)]
        self._machines = Machines(("ctl", *self._nodes), self._dir)
        self._of = {machine.host_name: machine for machine in self._machines}
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RLZMQ_", "COV_"))},
            "SLURM_CONF": str(self._dir / "slurm.conf"), "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp",
            "PATH": f"{self._dir}/bin:{os.environ['PATH']}",
        }  # fmt: skip
        try:
            self._make(cpus)
        except BaseException:
            self.close()
            raise

    def _make(self, cpus: int) -> None:
        for name in ("home", "state", "bin", *(f"tmp.{node}" for node in ("ctl", *self._nodes))):
            (self._dir / name).mkdir()
        for node in ("ctl", *self._nodes):
            (self._dir / f"tmp.{node}").chmod(0o1777)
        program = self._dir / "bin" / "rlzmq"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m rlzmq "$@"\n')
        program.chmod(0o755)
        (self._dir / "slurm.conf").write_text(
            _CONF.format(dir=self._dir, nodes=len(self._nodes), cpus=cpus, address=self._machines[0].address)
        )
        (self._dir / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nConstrainCores=no\nConstrainRAMSpace=no\n"
        )
        hosts = "127.0.0.1 localhost\n"
        hosts += "".join(f"{machine.address} {machine.host_name}\n" for machine in self._machines)
        (self._dir / "hosts").write_text(hosts)
        key = self._dir / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = [
            f"--{what}={self._dir}/munge.{what.split('-')[0]}"
            for what in ("socket", "pid-file", "log-file", "seed-file")
        ]
        self._start(["munged", "--foreground", "--force", f"--key-file={key}", *files])
        until((self._dir / "munge.socket").exists, lambda: "munged did not start")
        self._start(self.argv("ctl", ["slurmctld", "-D"]))
        for node in self._nodes:
            self.boot(node)
        idle = "sinfo -h -p main -N -t idle -o %N"
        until(lambda: len(self.ctl(idle).split()) == len(self._nodes), self.describe)

    def boot(self, node: str) -> None:
        """Start a node."""
        self._of[node].mend()
        self._start(self.argv(node, ["slurmd", "-D", "-N", node]))

    def lose(self, node: str) -> None:
        """Take a node's power: its cable is dead and its processes are gone."""
        self._machines.lose(self._of[node])

    def argv(self, node: str, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` as on a node."""
        enter = ["nsenter", f"--net=/run/netns/{self._of[node].name}", "unshare", "-u", "-m"]
        return [*enter, "sh", "-c", _ON, node, str(self._dir), *command]

    def ctl(self, command: str, *, cwd: Path | None = None) -> str:
        """Type a command on the controller; return what it prints, both channels."""
        done = subprocess.run(
            self.argv("ctl", ["bash", "-c", command]), cwd=cwd or self.home, env=self._environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        return done.stdout

    def state(self, job: str) -> str:
        """Return the state of a job, e.g. ``RUNNING``."""
        return self.fact(job, "JobState")

    def fact(self, job: str, name: str) -> str:
        """Return a value of ``scontrol show job``."""
        words = self.ctl(f"scontrol -o show job {job}").split()
        return next((word.partition("=")[2] for word in words if word.startswith(f"{name}=")), "")

    def processes(self, node: str, words: str) -> list[psutil.Process]:
        """Return the processes on a node whose command lines contain these words, without the hosts of roles."""
        found = []
        for process in self._of[node].processes():
            with contextlib.suppress(psutil.Error):
                line = process.cmdline()
                if words in " ".join(line) and "rlzmq.launch.hosts" not in line:
                    found.append(process)
        return found

    def describe(self) -> str:
        """Return the state of nodes and jobs, and the ends of all logs, for a failure."""
        logs = [*self._dir.glob("*.log"), *self.home.rglob("*.log")]
        return self.ctl("sinfo -N; squeue -a; scontrol -o show job") + "\n" + runs.ends_of(logs)

    def close(self) -> None:
        """End everything that runs in the namespaces, and remove them."""
        self._machines.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()
        shutil.rmtree(self._dir, ignore_errors=True)

    def _start(self, argv: Sequence[str]) -> None:
        with (self._dir / "daemons.log").open("ab") as log:
            process = subprocess.Popen(
                [*argv], env=self._environment, cwd="/", stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self._processes.append(process)
