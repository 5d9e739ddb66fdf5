"""Roles on machines that only have ssh: each process in a shell loop that restarts it, under systemd or setsid.

RUN/jobs/HOST on each host has, for each process, its loop (.sh), the loop's .pid, the .log, and in the end the exit
.code. The loops need nobody: the machine that started them may go away. The join file's text comes by ssh's stdin.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from subprocess import CalledProcessError

from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.launch.engine import EXIT_RESUMABLE, LISTEN, Engine, Jobs, Role, command, loop

__all__ = ["Ssh"]

_SSH = "ssh -oBatchMode=yes -oStrictHostKeyChecking=yes -oConnectTimeout=10 -oServerAliveInterval=15"
_UNREACHABLE = 255  # ssh's own exit code
_POLL_S = 2.0

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
send() {{ n=0; for f in {files}; do is_up "$f" && kill -"$1" -- "$2$(cat "$f.pid")" && n=1; done; }}
send TERM
for _ in {{0..{tries}}}; do send 0; [ $n -eq 0 ] && exit; sleep 0.2; done
send KILL - # whole groups
"""
_LIST = 'for f in {files}.sh; do is_up "${{f%.sh}}" && basename "${{f%.sh}}"; done; true\n'
_LOGS = """\
declare -A read=({read})
for f in {files}.sh; do
    log=${{f%.sh}}.log; name=$(basename "${{f%.sh}}"); k=${{read[$name]:-0}}; n=$(wc -l < "$log")
    tail -n "+$((k + 1))" "$log" | head -n "$((n - k))" | sed "s/^/$name /"
done
"""


class Ssh(Engine):
    """Starts roles on the ``hosts`` of their tables; ``options`` are those of ssh."""

    def __init__(self, jobs: Jobs) -> None:
        super().__init__(jobs)
        for role in jobs.roles.values():
            if not role.resources.hosts:
                raise ConfigurationError(f'--on ssh: [{role.name}] needs hosts, e.g. hosts = ["a", "b"].')
        self._head = jobs.roles["head"]

    def start(self, role: Role, places: Sequence[int] = ()) -> str:
        """Start processes, each on the host with the fewest; the head only if all machines can be reached."""
        for each in self.jobs.roles.values() if role is self._head else ():
            self._on_each(each, lambda _: "")
        hosts, key = self.living(role), ""
        for place in places or range(role.resources.count):
            if place not in hosts:
                hosts[place] = min(role.resources.hosts, key=list(hosts.values()).count)
        if role is not self._head:
            wait = _KEY.format(key=shlex.quote(str(role.key)), head=self._file(self._head, self._head_host))
            key = self._on(self._head, self._head_host, wait)
        self._on_each(role, lambda host: self._script(role, host, hosts, key))
        return f"{role.name}@{','.join(role.resources.hosts)}"

    @property
    def _head_host(self) -> str:
        return self._head.resources.hosts[0]

    def _script(self, role: Role, host: str, hosts: Mapping[int, str], key_text: str) -> str:
        """Return the script that starts those of the processes that belong to a host and do not run."""
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
        for place in (place for place in hosts if hosts[place] == host):
            script += _PROCESS.format(
                file=self._file(role, host, place),
                workdir=shlex.quote(str(self.jobs.workdir)),
                cpus=asked.cpus,
                rank=f"LOCAL_RANK={place // len(asked.hosts)}" if asked.gpus else "",
                loop=loop(argv, after=after),
            )
        return script

    def living(self, role: Role) -> dict[int, str]:
        """Return the hosts by place."""
        listed = self._on_each(role, lambda host: _LIST.format(files=self._file(role, host, "*")))
        return {
            int(name.rpartition("-")[2]) if "-" in name else 0: host
            for host in listed
            for name in listed[host].split()
        }

    def end(self, role: Role, places: Collection[int], grace_s: float) -> None:
        """Send SIGTERM to the loops, which pass it on."""
        tries = int(grace_s * 5)

        def stop(host: str) -> str:
            return _STOP.format(
                files=" ".join(self._file(role, host, place) for place in places), tries=tries
            )

        self._on_each(role, stop)

    def logs(self, role: Role, *, follow: bool) -> Iterator[str]:
        """Yield the lines of all hosts, each after the place of its process; a host that is away is asked again."""
        read: dict[tuple[str, str], int] = {}
        is_up = True
        while is_up:
            is_up = False
            for host in role.resources.hosts:
                files = self._file(role, host, "*")
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

    def exit_code(self) -> int:
        """Return the exit code that the head has left on its host."""
        file = self._file(self._head, self._head_host)
        return int(
            self._on(self._head, self._head_host, f"cat {file}.code 2>/dev/null || echo {EXIT_RESUMABLE}")
        )

    def _file(self, role: Role, host: str, place: object = "") -> str:
        """Return the path of a process's files, quoted and without suffix; place "*": a pattern of all of the role."""
        name = "head" if role.name == "head" else f"{role.name}-{place}"
        return f"{shlex.quote(str(role.key.parent / host))}/{name}"

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
        argv = [*shlex.split(_SSH), *role.resources.options, "--", host, "bash", "-s"]
        try:
            return command(*argv, stdin=_IS_UP + script, what=host)
        except ConfigurationError as error:
            failed = error.__cause__
            if isinstance(failed, CalledProcessError) and failed.returncode == _UNREACHABLE:
                raise PeerLostError(str(error)) from None
            raise
