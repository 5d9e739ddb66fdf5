"""The checks before a cluster starts: all run at once, and each problem is reported on its own line.

On each host: rlzmq can be imported, with the same version and Python everywhere; the clocks agree. On hosts with
learners: the same torch. On the head: its ports are free. From every other host: these ports, which are opened
briefly, can be reached.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlzmq.core.addresses import split_tcp
from rlzmq.core.errors import ConfigurationError, PeerLostError
from rlzmq.launch.cluster import LOCAL, Cluster
from rlzmq.launch.hosts import Host, Process

__all__ = ["Facts", "preflight"]

_MAX_CLOCK_SKEW_S = 5.0
_PROBE_S = 60.0
_CONNECT_S = 5.0
_PORTS_S = 30.0

_PROBE = """
import importlib.metadata, json, sys, time, rlzmq
torch = importlib.metadata.version("torch")
print(json.dumps(["%s" % rlzmq.__version__, "%d.%d" % sys.version_info[:2], torch, time.time()]))
"""

# Opens the head's ports until it is stopped, and prints the errors.
_LISTEN = """
import json, socket, sys, time
host, seconds, *ports = sys.argv[1:]
servers, problems = [], []
for port in ports:
    try:
        address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        server = socket.socket(*address[:2])
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address[4])
        server.listen(100)
        servers.append(server)
    except OSError as error:
        problems.append([port, error.strerror])
print(json.dumps(problems), flush=True)
if not problems:
    time.sleep(float(seconds))
"""

_CONNECT = """
import json, socket, sys
host, seconds, *ports = sys.argv[1:]
problems = []
for port in ports:
    try:
        socket.create_connection((host, int(port)), float(seconds)).close()
    except OSError as error:
        problems.append([port, error.strerror or str(error)])
print(json.dumps(problems))
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of one host; ``skew_s`` is how far its clock is ahead of this machine's."""

    rlzmq: str
    python: str
    torch: str
    skew_s: float


async def preflight(cluster: Cluster, hosts: Mapping[str, Host], say: Callable[[str], None]) -> None:
    """Check the hosts.

    Args:
        cluster: The roles and their hosts.
        hosts: The connected hosts by name.
        say: Called with each line to show that is not an error.

    Raises:
        ConfigurationError: Versions differ, or a port is taken.
        PeerLostError: rlzmq does not start on a host, or a host cannot reach the head.
    """
    facts = dict(
        zip(hosts, await _gather(*(_facts(cluster.python, host) for host in hosts.values())), strict=True)
    )
    _check_versions(cluster, facts)
    for name, fact in facts.items():
        if abs(fact.skew_s) > _MAX_CLOCK_SKEW_S:
            say(f"[{name}] its clock is {fact.skew_s:+.0f} s off: only log times suffer")
    ports = await _check_ports(cluster, hosts)
    version = next(iter(facts.values()))
    say(
        f"preflight: {len(facts)} hosts, rlzmq {version.rlzmq}, Python {version.python}, torch {version.torch}, "
        f"ports {', '.join(ports)} free and reached"
    )


async def _gather(*jobs: Any) -> list[Any]:
    """Wait for all jobs and return their results; combine their errors into one."""
    results = await asyncio.gather(*jobs, return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    if not errors:
        return results
    if len(errors) == 1 or not all(
        isinstance(error, (PeerLostError, ConfigurationError)) for error in errors
    ):
        raise errors[0]
    raise type(errors[0])("\n".join(str(error) for error in errors))


async def _facts(python: str, host: Host) -> Facts:
    before = time.time()
    try:
        output = await host.run([python, "-c", _PROBE], timeout_s=_PROBE_S)
        version, interpreter, torch, clock = json.loads(output.splitlines()[-1])
    except PeerLostError as error:
        why = str(error).strip().splitlines()[-1]
        raise PeerLostError(
            f"{host.name}: {python} cannot import rlzmq ({why}): install rlzmq there, or name the right interpreter "
            "as `python` in the cluster file"
        ) from error
    except (ValueError, IndexError) as error:
        raise PeerLostError(
            f"{host.name}: {python} printed {output[-200:]!r} in place of versions"
        ) from error
    return Facts(version, interpreter, torch, float(clock) - (before + time.time()) / 2)


def _check_versions(cluster: Cluster, facts: Mapping[str, Facts]) -> None:
    problems = []
    if len({(fact.rlzmq, fact.python) for fact in facts.values()}) > 1:
        told = ", ".join(f"{name}: rlzmq {fact.rlzmq}, Python {fact.python}" for name, fact in facts.items())
        problems.append(f"the hosts have different versions ({told}): install the same everywhere")
    learners = {place.host: facts[place.host].torch for place in cluster.learners}
    if learners and len({*learners.values(), facts[cluster.head].torch}) > 1:
        told = ", ".join(
            f"{name}: torch {torch}"
            for name, torch in {cluster.head: facts[cluster.head].torch, **learners}.items()
        )
        problems.append(f"learners need the same torch ({told})")
    if problems:
        raise ConfigurationError("\n".join(problems))


async def _check_ports(cluster: Cluster, hosts: Mapping[str, Host]) -> list[str]:
    """Open the head's ports briefly and connect to them from every other host; return the ports."""
    address, first = split_tcp(cluster.listen)
    ports = [str(first + offset) for offset in range(4 if cluster.num_learners else 2)]
    head = hosts[cluster.head]
    async with asyncio.timeout(_PORTS_S + 10):
        listener = await head.start([cluster.python, "-c", _LISTEN, address, str(_PORTS_S), *ports])
        try:
            problems = await _problems(listener)
            if problems:
                raise ConfigurationError(
                    "\n".join(_describe_port_error(cluster, head, *problem) for problem in problems)
                )
            others = [host for host in hosts.values() if host is not head]
            await _gather(*(_reach(cluster, host, ports) for host in others))
        finally:
            await listener.signal("TERM")
            await listener.wait()
    return ports


async def _problems(process: Process) -> list[tuple[str, str]]:
    told = ""
    async for line in process.lines():
        told = line
        if line.startswith("["):
            return [(str(port), str(why)) for port, why in json.loads(line)]
    raise PeerLostError(f"the port check ended with {await process.wait()}: {told}")


async def _reach(cluster: Cluster, host: Host, ports: list[str]) -> None:
    target = cluster.advertise or split_tcp(cluster.listen)[0]
    output = await host.run([cluster.python, "-c", _CONNECT, target, str(_CONNECT_S), *ports])
    if problems := json.loads(output.splitlines()[-1]):
        told = ", ".join(f"port {port}: {why}" for port, why in problems)
        raise PeerLostError(
            f"{host.name} cannot reach the head at {target} ({told}): `listen` must name the head's interface that "
            "the other hosts reach, and no firewall may be between"
        )


def _describe_port_error(cluster: Cluster, head: Host, port: str, why: str) -> str:
    address = split_tcp(cluster.listen)[0]
    name = "this machine" if head.name == LOCAL else head.name
    if "assign" in why:
        return f"listen={cluster.listen!r}: {address} is no address of {name} ({why})"
    return (
        f"port {port} of {address} on {name} cannot be listened on ({why}): end what listens there "
        f"(ss -ltnp 'sport = :{port}'), or choose another port as `listen`"
    )
