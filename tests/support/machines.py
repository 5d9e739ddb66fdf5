"""Network namespaces as machines: an address, a host name and an sshd each, joined by a switch whose cables can be cut.

    with Machines(3, directory) as machines:      # 10.77.0.1 … 10.77.0.3
        machines[0].popen(["rlzmq", …])
        machines[1].cut(); …; machines[1].mend()

The namespaces are called ``rlz<pid>x<n>``; nothing is added to the machine's own network. On leaving, every process in
them is killed and they are deleted. Needs root; `why_no_machines` says what is missing.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

SSH_PORT = 2222
ROOT = Path(__file__).parents[2]
_SUBNET = "10.77.0"


@functools.cache
def why_no_machines() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"rlz{os.getpid()}probe"
    try:
        for arguments in (("netns", "add", name), ("-n", name, "link", "add", "x0", "type", "veth"),
                          ("-n", name, "link", "add", "br0", "type", "bridge")):  # fmt: skip
            _ip(*arguments)
        subprocess.run(["unshare", "--uts", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {getattr(error, 'stderr', b'') or error}"
    finally:
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Machine:
    """One namespace.

    Attributes:
        name: Of the namespace; ``host_name`` is what its processes see.
        address: Its IP.
    """

    def __init__(self, name: str, host_name: str, number: int, switch: str, directory: Path) -> None:
        self.name, self.switch = name, switch
        self.host_name = host_name
        self.address = f"{_SUBNET}.{number + 1}"
        self.directory = directory / self.host_name
        self.directory.mkdir(mode=0o700, parents=True)
        self._port = f"port{number}"
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        # Behind `cut_towards`.
        _ip("-n", name, "rule", "add", "pref", "10", "lookup", "local")
        _ip("-n", name, "rule", "del", "pref", "0")
        _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", self._port, "netns", switch)
        _ip("-n", name, "address", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        _ip("-n", switch, "link", "set", self._port, "master", "br0", "up")

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The command that runs `arguments` here; the process keeps its pid."""
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", *arguments]

    def environment(self, **more: str) -> dict[str, str]:
        """For processes here: a private place for run directories, rlzmq importable."""
        return {
            **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
            "XDG_RUNTIME_DIR": str(self.directory), "TMPDIR": str(self.directory), **more,
        }  # fmt: skip

    def popen(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process here."""
        options.setdefault("env", self.environment())
        return subprocess.Popen(self.command(arguments), **options)

    def processes(self, begin: str = "") -> list[psutil.Process]:
        """The processes here; only those whose command line begins so, if given."""
        return [process for process in _processes_in(self.name) if _command_line(process).startswith(begin)]

    def listening(self) -> list[str]:
        """ADDRESS:PORT of every TCP listener here."""
        output = subprocess.run(
            ["ip", "netns", "exec", self.name, "ss", "-ltnH"], check=True, capture_output=True, text=True
        ).stdout
        return [line.split()[3] for line in output.splitlines()]

    def kill_all(self) -> None:
        """Kill all processes here."""
        for _ in range(3):  # one may have started another
            for process in self.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def cut(self) -> None:
        """Pull its cable, at the switch."""
        _ip("-n", self.switch, "link", "set", self._port, "down")

    def mend(self) -> None:
        """Put the cable back."""
        _ip("-n", self.switch, "link", "set", self._port, "up")

    def cut_towards(self, other: Machine) -> None:
        """What it sends to another machine vanishes; what that one sends still arrives.

        It vanishes at the other one: a route that drops would tell the sender's TCP, as no network does.
        """
        _ip("-n", other.name, "rule", "add", "pref", "5", "from", self.address, "blackhole")

    def mend_towards(self, other: Machine) -> None:
        """Undo `cut_towards`."""
        _ip("-n", other.name, "rule", "del", "pref", "5")

    def slow_down(self, *options: str) -> subprocess.Popen[str]:
        """Replace its cable by a slow one (`tests.support.slow_path`); return the process, which is to be killed."""
        _ip("-n", self.switch, "link", "set", self._port, "nomaster")
        _ip("-n", self.switch, "link", "add", "slow0", "type", "veth", "peer", "name", "slow1")
        _ip("-n", self.switch, "link", "set", "slow0", "master", "br0", "up")
        _ip("-n", self.switch, "link", "set", "slow1", "up")
        program = str(Path(__file__).with_name("slow_path.py"))
        names = _ip("netns", "list").split()
        for name in (
            name for name in names if name.startswith(self.switch.removesuffix("sw")) and name != self.switch
        ):
            subprocess.run(
                ["ip", "netns", "exec", name, sys.executable, program, "eth0", "-", "--whole-packets"],
                check=True,
            )
        router = subprocess.Popen(
            ["ip", "netns", "exec", self.switch, sys.executable, program, self._port, "slow1", *options],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert router.stdout is not None
        if router.stdout.readline() != "ready\n":
            raise RuntimeError(f"the slow path ended with {router.wait()}")
        return router


class Machines(Sequence[Machine]):
    """Several machines at one switch.

    Args:
        num: How many, which are called m0, m1, …; or their host names.
        directory: Gets a directory per machine, and the ssh client's key and known_hosts.
    """

    def __init__(self, num: int | Sequence[str], directory: Path) -> None:
        prefix = f"rlz{os.getpid()}x"
        self.directory = directory
        self._switch = f"{prefix}sw"
        self._machines: list[Machine] = []
        self._sshds: list[subprocess.Popen[bytes]] = []
        try:
            _ip("netns", "add", self._switch)
            # No spanning tree: a port forwards as soon as its cable is in.
            bridge = ["br0", "type", "bridge", "forward_delay", "0", "stp_state", "0"]
            _ip("-n", self._switch, "link", "add", *bridge)
            _ip("-n", self._switch, "link", "set", "br0", "up")
            names = [f"m{number}" for number in range(num)] if isinstance(num, int) else num
            for number, name in enumerate(names):
                self._machines.append(Machine(f"{prefix}{number}", name, number, self._switch, directory))
        except BaseException:
            self.close()
            raise

    def start_sshds(self) -> None:
        """Start OpenSSH's sshd on every machine; ``bin/ssh`` (in `directory`) reaches them as m0, m1, …

        Each has its own /mnt, so that machines share no files there.
        """
        key, known = self.directory / "client_key", self.directory / "known_hosts"
        _keygen(key)
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        lines = [
            "Host *",
            f"Port {SSH_PORT}",
            "User root",
            f"IdentityFile {key}",
            f"UserKnownHostsFile {known}",
        ]
        known_keys = ""
        for machine in self._machines:
            lines += [f"Host {machine.host_name}", f"HostName {machine.address}"]
            known_keys += f"[{machine.address}]:{SSH_PORT} {_keygen(machine.directory / 'host_key')}\n"
        config, ssh = self.directory / "ssh_config", self.directory / "bin" / "ssh"
        config.write_text("\n".join(lines) + "\n")
        ssh.parent.mkdir()
        ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {config} "$@"\n')  # in place of ~/.ssh/config
        ssh.chmod(0o755)
        known.write_text(known_keys)
        for machine in self._machines:
            self.boot(machine)

    def boot(self, machine: Machine) -> None:
        """Start a machine's sshd, e.g. after `lose`."""
        work = machine.directory / "work"
        work.mkdir(exist_ok=True)
        places = {name: machine.environment()[name] for name in ("PYTHONPATH", "XDG_RUNTIME_DIR", "TMPDIR")}
        config = machine.directory / "sshd_config"
        config.write_text(
            f"Port {SSH_PORT}\nListenAddress {machine.address}\nHostKey {machine.directory / 'host_key'}\n"
            f"AuthorizedKeysFile {self.directory / 'client_key.pub'}\nStrictModes no\nPidFile none\nUsePAM no\n"
            f"SetEnv {' '.join(f'{name}={value}' for name, value in places.items())}\n"
        )
        enter = 'hostname "$0"; mount --bind "$1" /mnt; exec /usr/sbin/sshd -D -e -f "$2"'
        machine.mend()
        self._sshds.append(
            subprocess.Popen(
                ["ip", "netns", "exec", machine.name, "unshare", "--uts", "--mount", "sh", "-c", enter,
                 machine.host_name, str(work), str(config)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
                start_new_session=True,
            )
        )  # fmt: skip
        while f"{machine.address}:{SSH_PORT}" not in machine.listening():
            if self._sshds[-1].poll() is not None:
                raise RuntimeError(f"the sshd of {machine.host_name} ended")
            time.sleep(0.05)

    def lose(self, machine: Machine) -> None:
        """Take a machine's power: its cable is dead and its processes are gone."""
        machine.cut()
        machine.kill_all()

    def close(self) -> None:
        """Kill what runs in the namespaces, and delete them. Idempotent."""
        names = [*(machine.name for machine in self._machines), self._switch]
        for machine in self._machines:
            with contextlib.suppress(subprocess.CalledProcessError):
                machine.kill_all()
        with contextlib.suppress(subprocess.CalledProcessError):
            for process in _processes_in(self._switch):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for sshd in self._sshds:
            sshd.communicate()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        self._machines, self._sshds = [], []

    def __getitem__(self, index: Any) -> Any:
        return self._machines[index]

    def __len__(self) -> int:
        return len(self._machines)

    def __iter__(self) -> Iterator[Machine]:
        return iter(self._machines)

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _keygen(path: Path) -> str:
    """Make a key pair; return the public key."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True)
    return path.with_name(f"{path.name}.pub").read_text().strip()


def _processes_in(name: str) -> list[psutil.Process]:
    """The processes in a namespace."""
    found = []
    for pid in _pids_in(name):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    pids = _pids_in(name)  # again: a number may have become that of a process elsewhere
    return [process for process in found if process.pid in pids]


def _pids_in(name: str) -> set[int]:
    return set(map(int, _ip("netns", "pids", name).split()))


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
