"""Roles on machines that only have ssh: each process in a shell loop that restarts it, under systemd or setsid.

RUN/jobs/HOST on each host has, for each process, its loop (.sh), the loop's .pid, the .log, and in the end the exit
.code. The loops need nobody: the machine that started them may go away. The join file's text comes by ssh's stdin.
"""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from subprocess import CalledProcessError

from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.launch.engine import LISTEN, Jobs, Role, command, loop

__all__ = ["Ssh"]

_SSH = "ssh -oBatchMode=yes -oStrictHostKeyChecking=yes -oConnectTimeout=10 -oServerAliveInterval=15"
_UNREACHABLE = 255  # ssh's own exit code
_POLL_S = 2.0
_GRACE_S = 60.0  # for a runner's current fragment

_IS_UP = 'shopt -s nullglob; is_up() { grep -qsF "$1.sh" "/proc/$(cat "$1.pid" 2>/dev/null)/cmdline"; }\n'
_START = """\
umask 077; mkdir -p {directory}
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
_LIST = 'for f in {files}; do is_up "${{f%.sh}}" && basename "${{f%.sh}}"; done; true\n'
_LOGS = """\
declare -A read=({read})
for f in {files}; do
    log=${{f%.sh}}.log; name=$(basename "${{f%.sh}}"); k=${{read[$name]:-0}}; n=$(wc -l < "$log")
    tail -n "+$((k + 1))" "$log" | head -n "$((n - k))" | sed "s/^/$name /"
done
"""
_WAIT = """\
while is_up {head}; do sleep 1; done
cat {head}.code 2>/dev/null || {{ echo "the head left no exit code: was the machine restarted?" >&2; exit 1; }}
"""


class Ssh:
    """Starts roles on the ``hosts`` of their tables; ``options`` are those of ssh."""

    def __init__(self, jobs: Jobs) -> None:
        for role in jobs.roles.values():
            if not role.resources.hosts:
                raise ConfigurationError(f'--on ssh: [{role.name}] needs hosts, e.g. hosts = ["a", "b"].')
        self._jobs = jobs
        self._head = jobs.roles["head"]
        self._head_host = self._head.resources.hosts[0]

    def start(self, role: Role) -> str:
        """Start a role's processes, spread over its hosts; the head's only if all machines can be reached."""
        for each in self._jobs.roles.values() if role is self._head else ():
            self._on_each(each, lambda _: "")
        self._start_at(role, _spread(role))
        return f"{role.name}@{','.join(role.resources.hosts)}"

    def _start_at(self, role: Role, places: Mapping[int, str]) -> None:
        """Start processes by number -> host."""
        text = ""
        if role is not self._head:
            script = _KEY.format(key=shlex.quote(str(role.key)), head=self._file(self._head, self._head_host))
            text = self._on(self._head, self._head_host, script)
        self._on_each(role, lambda host: self._script(role, host, places, text))

    def _script(self, role: Role, host: str, places: Mapping[int, str], key_text: str) -> str:
        """Return the script that starts those of the processes that belong to a host."""
        asked, key = role.resources, shlex.quote(str(role.key))
        argv = shlex.join(role.argv).replace(shlex.quote(LISTEN), '"tcp://$1:0"')
        if role is self._head:  # the keys and ports of one that was killed are kept for it
            stem = shlex.quote(str(role.key.with_suffix("")))
            before = f"is_up {self._file(role, host)} || rm -f {stem}{{,.learner,.observer}}.toml"
            after = "[ $code -eq 69 -o $code -eq 71 -o $code -gt 130 ] || break # it was not killed"
        else:
            before = f"cat > {key}.new <<'END_OF_KEY'\n{key_text}END_OF_KEY\nmv {key}.new {key}"
            after = "case $code in 0|2|78) break;; esac # the run is over, or this is no peer of it"
        script = _START.format(directory=shlex.quote(str(role.key.parent / host)), before=before)
        for place in (place for place in places if places[place] == host):
            script += _PROCESS.format(
                file=self._file(role, host, place),
                workdir=shlex.quote(str(self._jobs.workdir)),
                cpus=asked.cpus,
                rank=f"LOCAL_RANK={place // len(asked.hosts)}" if asked.gpus else "",
                loop=loop(argv, after=after),
            )
        return script

    def scale(self, handle: str, count: int) -> None:
        """Start further processes on the hosts with the fewest, or stop those with the highest numbers."""
        role = self._jobs.role(handle)
        listed = self._on_each(role, lambda host: _LIST.format(files=self._files(role, host)))
        living = {int(name.rpartition("-")[2]): host for host in listed for name in listed[host].split()}
        surplus = [(living[place], place) for place in sorted(living)[count:]]

        def stop(host: str) -> str:
            files = (f"{self._file(role, host, place)}.sh" for at, place in surplus if at == host)
            return _stop(" ".join(files), _GRACE_S)

        self._on_each(role, stop)
        added: dict[int, str] = {}
        for place in itertools.takewhile(lambda _: len(living) < count, itertools.count()):
            if place not in living:
                added[place] = min(role.resources.hosts, key=list(living.values()).count)
                living[place] = added[place]
        if added:
            self._start_at(role, added)

    def logs(self, handle: str, *, follow: bool) -> Iterator[str]:
        """Yield the lines of all hosts, each after the number of its process; a host that is away is asked again."""
        role = self._jobs.role(handle)
        read: dict[tuple[str, str], int] = {}
        is_up = True
        while is_up:
            is_up = False
            for host in role.resources.hosts:
                files = self._files(role, host)
                start = " ".join(f"[{name}]={number}" for (at, name), number in read.items() if at == host)
                try:
                    is_up |= follow and bool(self._on(role, host, _LIST.format(files=files)))
                    text = self._on(role, host, _LOGS.format(read=start, files=files))
                except PeerLostError:
                    if not follow:
                        raise
                    is_up = True
                    continue
                for name, line in (line.split(" ", 1) for line in text.split("\n")[:-1]):
                    read[host, name] = read.get((host, name), 0) + 1
                    yield line if role is self._head else f"{name.rpartition('-')[2]}: {line}"
            time.sleep(_POLL_S if is_up else 0.0)

    def wait(self, handle: str) -> int:
        """Wait for the head's end, also while its host is away."""
        while True:
            try:
                script = _WAIT.format(head=self._file(self._head, self._head_host))
                return int(self._on(self._head, self._head_host, script))
            except PeerLostError:
                time.sleep(_POLL_S)

    def stop(self, handle: str, grace_s: float) -> None:
        """Stop a role on all its hosts."""
        role = self._jobs.role(handle)
        self._on_each(role, lambda host: _stop(self._files(role, host), grace_s))

    def dry_run(self) -> str:
        """Return the commands that `start` runs."""
        key = f"(the text of the join file on {self._head_host})\n"
        return "\n".join(
            f"{shlex.join(self._argv(role, host))} <<'END_OF_HOST'\n{_IS_UP}"
            f"{self._script(role, host, _spread(role), key)}END_OF_HOST"
            for role in self._jobs.roles.values()
            for host in role.resources.hosts
        )

    def _file(self, role: Role, host: str, place: object = "") -> str:
        """Return the path of a process's files, quoted and without suffix."""
        name = "head" if role.name == "head" else f"{role.name}-{place}"
        return f"{shlex.quote(str(role.key.parent / host))}/{name}"

    def _files(self, role: Role, host: str) -> str:
        """Return a pattern of the loops of all processes of a role on a host."""
        return f"{self._file(role, host, '*')}.sh"

    def _argv(self, role: Role, host: str) -> list[str]:
        return [*shlex.split(_SSH), *role.resources.options, "--", host, "bash", "-s"]

    def _on_each(self, role: Role, script: Callable[[str], str]) -> dict[str, str]:
        """Run a script on each host of a role; return what each printed."""
        hosts = role.resources.hosts
        with ThreadPoolExecutor(len(hosts)) as pool:
            printed = pool.map(lambda host: self._on(role, host, script(host)), hosts)
            return dict(zip(hosts, printed, strict=True))

    def _on(self, role: Role, host: str, script: str) -> str:
        """Run a script on a host; return what it prints.

        Raises:
            PeerLostError: The host cannot be reached, or its key is unknown.
            ConfigurationError: The script fails; there is no ssh.
        """
        try:
            return command(*self._argv(role, host), stdin=_IS_UP + script, what=host)
        except ConfigurationError as error:
            failed = error.__cause__
            if isinstance(failed, CalledProcessError) and failed.returncode == _UNREACHABLE:
                raise PeerLostError(str(error)) from None
            raise


def _stop(files: str, grace_s: float) -> str:
    return _STOP.format(files=files, tries=int(grace_s * 5))


def _spread(role: Role) -> dict[int, str]:
    hosts = role.resources.hosts
    return {place: hosts[place % len(hosts)] for place in range(role.resources.count)}
