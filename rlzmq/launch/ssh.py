"""Roles on machines that only have ssh: each process in a shell loop that restarts it, under systemd or setsid.

RUN/jobs/HOST on each host holds, for each process, its loop (.sh), the loop's .pid, the .log, and in the end the exit
.code. The loops need nobody: the machine that started them may go away. The join file's text comes by ssh's stdin.
"""

from __future__ import annotations

import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.launch.engine import LISTEN, Jobs, Role, loop

__all__ = ["Ssh"]

_SSH = [
    "ssh",
    "-oBatchMode=yes",
    "-oStrictHostKeyChecking=yes",
    "-oConnectTimeout=10",
    "-oServerAliveInterval=15",
]
_UNREACHABLE = 255  # ssh's own exit code
_AGAIN_S = 5.0

# The join files of a head that was killed are removed; its keys and ports are kept for the next one.
_START = """\
umask 077
mkdir -p {directory}
{before}
address=${{SSH_CONNECTION% *}}; address=${{address##* }} # by which ssh came in: the others reach it, too
case $address in *:*) address="[$address]";; esac
run() {{
    is_up "$1" && return
    mv "$1.new" "$1.sh"; rm -f "$1.pid" "$1.code"
    if [ -e "/var/lib/systemd/linger/$(id -un)" ] && systemd-run --user --quiet --collect bash "$1.sh" "$address"
    then :; else setsid bash "$1.sh" "$address" & fi </dev/null >/dev/null 2>&1
    for _ in {{1..100}}; do [ -f "$1.pid" -o -f "$1.code" ] && return; sleep 0.1; done
    echo "the loop of $1 did not start" >&2; exit 1
}}
"""
_PROCESS = """\
cat > {file}.new <<'END_OF_PROCESS'
exec >>{file}.log 2>&1 </dev/null
echo $$ > {file}.pid
cd {workdir} && export OMP_NUM_THREADS={cpus} {rank} || exit
{loop}echo $code > {file}.code; rm {file}.pid; exit $code
END_OF_PROCESS
run {file}
"""
_IS_UP = 'shopt -s nullglob; is_up() { grep -qsF "$1.sh" "/proc/$(cat "$1.pid" 2>/dev/null)/cmdline"; }\n'
_KEY = """\
until [ -f {key} ]; do
    is_up {head} || {{ echo "the head has ended; the end of its log:"; tail -n 5 {head}.log; exit 1; }} >&2
    sleep 0.2
done
cat {key}
"""
_STOP = """\
send() {{ n=0; for f in {files}; do is_up "${{f%.sh}}" && kill -"$1" -- "$2$(cat "${{f%.sh}}.pid")" && n=1; done; }}
send TERM
for _ in {{0..{tries}}}; do send 0; [ $n -eq 0 ] && exit; sleep 0.2; done
send KILL - # whole groups
"""
_LOGS = """\
declare -A from=({start})
for file in {files}; do
    file=${{file%.sh}}; name=${{file##*/}}
    follow=; {follow} && is_up "$file" && follow="-F --pid=$(cat "$file.pid")"
    tail -n "+${{from[$name]:-1}}" $follow "$file.log" 2>/dev/null | sed -u "s/^/$name /" &
done
wait
"""
_WAIT = 'while is_up {head}; do sleep 1; done; cat {head}.code || {{ echo "it left no exit code" >&2; exit 1; }}\n'


class Ssh:
    """Starts roles on the ``hosts`` of their tables; ``options`` are those of ssh."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def start(self, role: Role) -> str:
        """Start a role's processes, spread over its hosts."""
        hosts = role.resources.hosts
        if not hosts:
            raise ConfigurationError(f'--on ssh: [{role.name}] needs hosts, e.g. hosts = ["node1", "node2"].')
        self._place(role, {place: hosts[place % len(hosts)] for place in range(role.resources.count)})
        return f"{role.name}@{','.join(hosts)}"

    def _place(self, role: Role, places: Mapping[int, str]) -> None:
        text = "" if role.name == "head" else self._on(self._head, self._head_host, self._key(role))
        self._on_each(role, lambda host: self._script(role, host, places, text))

    def _key(self, role: Role) -> str:
        return _KEY.format(key=shlex.quote(str(role.key)), head=self._file(self._head, self._head_host))

    def _script(self, role: Role, host: str, places: Mapping[int, str], key_text: str) -> str:
        """Return the script that starts a role's places of a host."""
        key = shlex.quote(str(role.key))
        argv = shlex.join(role.argv).replace(shlex.quote(LISTEN), '"tcp://$1:0"')
        if role.name == "head":
            stems = (role.key.stem, f"{role.key.stem}.learner", f"{role.key.stem}.observer")
            files = shlex.join(str(role.key.with_name(f"{stem}.toml")) for stem in stems)
            before = f"is_up {self._file(role, host)} || rm -f {files}"
            text = loop(
                argv, after="[ $code -eq 69 -o $code -eq 71 -o $code -gt 130 ] || break # it was not killed"
            )
        else:
            before = f"cat > {key}.new <<'END_OF_KEY'\n{key_text}END_OF_KEY\nmv {key}.new {key}"
            text = loop(
                argv, after="case $code in 0|2|78) break;; esac # the run is over, or this is no runner of it"
            )
        script = _START.format(directory=shlex.quote(str(role.key.parent / host)), before=before)
        for place in (place for place, its_host in places.items() if its_host == host):
            rank = f"LOCAL_RANK={place // len(role.resources.hosts)}" if role.resources.gpus else ""
            workdir = shlex.quote(str(self._jobs.workdir))
            script += _PROCESS.format(
                file=self._file(role, host, place),
                workdir=workdir,
                cpus=role.resources.cpus,
                rank=rank,
                loop=text,
            )
        return script

    def scale(self, handle: str, count: int) -> None:
        """Start further processes on the hosts with the fewest, or stop those with the highest numbers."""
        role = self._role(handle)
        listed = self._on_each(
            role,
            lambda host: (
                f'for f in {self._files(role, host)}; do f=${{f%.sh}}; is_up "$f" && echo "${{f##*-}}"; done; true'
            ),
        )
        living = {int(place): host for host, text in listed.items() for place in text.split()}
        surplus = sorted(living)[count:]
        self._stop(role, {place: living[place] for place in surplus}, 60.0)
        added: dict[int, str] = {}
        for place in range(count + len(living)):
            if len(living) - len(surplus) + len(added) < count and place not in living:
                taken = [*living.values(), *added.values()]
                added[place] = min(role.resources.hosts, key=taken.count)
        if added:
            self._place(role, added)

    def logs(self, handle: str, *, follow: bool) -> Iterator[str]:
        """Yield the lines of all hosts, each after the number of its process; a host that is away is asked again."""
        role = self._role(handle)
        lines: queue.Queue[str | None] = queue.Queue()

        def read(host: str) -> None:
            read: dict[str, int] = {}
            while True:
                start = " ".join(f"[{name}]={number + 1}" for name, number in read.items())
                script = _LOGS.format(
                    start=start, files=self._files(role, host), follow="true" if follow else "false"
                )
                with subprocess.Popen(
                    self._argv(role, host), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                ) as process:
                    assert process.stdin is not None
                    assert process.stdout is not None
                    process.stdin.write(_IS_UP + script)
                    process.stdin.close()
                    for line in process.stdout:
                        name, _, text = line.rstrip("\n").partition(" ")
                        read[name] = read.get(name, 0) + 1
                        place = name.removeprefix(role.name).lstrip("-")
                        lines.put(f"{place}: {text}" if place else text)
                if not follow or process.returncode != _UNREACHABLE:
                    break
                time.sleep(_AGAIN_S)
            lines.put(None)

        for host in role.resources.hosts:
            threading.Thread(target=read, args=(host,), daemon=True).start()
        num_open = len(role.resources.hosts)
        while num_open:
            line = lines.get()
            if line is None:
                num_open -= 1
            else:
                yield line

    def wait(self, handle: str) -> int:
        """Wait for the head's end, also while its host is away."""
        role = self._role(handle)
        while True:
            try:
                return int(
                    self._on(role, self._head_host, _WAIT.format(head=self._file(role, self._head_host)))
                )
            except PeerLostError:
                time.sleep(_AGAIN_S)

    def stop(self, handle: str, grace_s: float) -> None:
        """Stop a role on all its hosts."""
        self._stop(self._role(handle), None, grace_s)

    def _stop(self, role: Role, places: Mapping[int, str] | None, grace_s: float) -> None:
        """Stop these places of a role; None: all."""

        def script(host: str) -> str:
            here = ["*"] if places is None else [place for place in places if places[place] == host]
            files = " ".join(self._files(role, host, place) for place in here)
            return _STOP.format(files=files, tries=int(grace_s * 5))

        self._on_each(role, script)

    def dry_run(self) -> str:
        """Return the commands that `start` runs."""
        lines = []
        for role in self._jobs.roles.values():
            hosts = role.resources.hosts
            places = {place: hosts[place % len(hosts)] for place in range(role.resources.count)}
            for host in hosts:
                script = self._script(role, host, places, f"(the text of {role.key} on {self._head_host})\n")
                lines.append(
                    f"{shlex.join(self._argv(role, host))} <<'END_OF_HOST'\n{_IS_UP}{script}END_OF_HOST"
                )
        return "\n".join(lines)

    @property
    def _head(self) -> Role:
        return self._jobs.roles["head"]

    @property
    def _head_host(self) -> str:
        return self._head.resources.hosts[0]

    def _role(self, handle: str) -> Role:
        return self._jobs.roles[handle.partition("@")[0]]

    def _file(self, role: Role, host: str, place: object = "") -> str:
        """Return the path of a process's files, quoted and without suffix."""
        directory = shlex.quote(str(role.key.parent / host))
        return f"{directory}/{role.name}" + ("" if role.name == "head" else f"-{place}")

    def _files(self, role: Role, host: str, place: object = "*") -> str:
        """Return a pattern of the loops of a role's processes on a host."""
        return f"{self._file(role, host, place)}.sh"

    def _argv(self, role: Role, host: str) -> list[str]:
        return [*_SSH, *role.resources.options, "--", host, "bash", "-s"]

    def _on_each(self, role: Role, script: Callable[[str], str]) -> dict[str, str]:
        """Run a script on each host of a role; return what each printed."""
        hosts = role.resources.hosts
        with ThreadPoolExecutor(len(hosts)) as pool:
            return dict(
                zip(hosts, pool.map(lambda host: self._on(role, host, script(host)), hosts), strict=True)
            )

    def _on(self, role: Role, host: str, script: str) -> str:
        """Run a script on a host; return what it prints.

        Raises:
            PeerLostError: The host cannot be reached, or its key is unknown.
            ConfigurationError: The script fails; there is no ssh.
        """
        try:
            done = subprocess.run(
                self._argv(role, host), input=_IS_UP + script, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise ConfigurationError(f"ssh cannot be started: {error}. Install OpenSSH's client.") from error
        if done.returncode == _UNREACHABLE:
            raise PeerLostError(f"{host}: {done.stderr.strip()}")
        if done.returncode:
            raise ConfigurationError(f"{host}: {done.stderr.strip()}")
        return done.stdout
