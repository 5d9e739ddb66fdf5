"""Attacks runs, policy servers and dashboards of its own on loopback; prints what it cost them.

    python scripts/attack.py                       # floods: memory and pauses of the victim, bounded or not
    python scripts/attack.py --only subscriptions  # those whose name contains this
    python scripts/attack.py --connections 10000   # connections without a key, and the run's throughput

Floods: each meets a victim of its own and is bounded in count and time. A flood is bounded if the victim's process
lives, its peak of memory rises by at most 700 MiB, and no update of a run and no answer of a server takes longer than
10 s.

Connections: rounds alternate, so that other load on the machine affects all alike: no attackers ("peace"); attackers
that connect to another port, to measure their own use of the cores ("elsewhere"); attackers at the run's port
("attack"). The attackers (one process, several threads) send garbage, HTTP, nothing, a ZMTP greeting without a key, a
command that claims 8 GiB, and wrong keys, at a given rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from rlzmq.net.keys import JoinFile  # noqa: E402
from tests.security import floods  # noqa: E402

_MIB = 1 << 20

MODES = ("peace", "elsewhere", "attack")
THREADS = 32
WRONG_KEYS_EVERY = 50  # one in so many connections is a zmq client with a wrong key, the slowest kind


def attack(address: str, server_public: str, num: int, rate: float) -> None:
    """Run in a separate process; print the number of connections of each kind."""
    from collections import Counter
    from concurrent.futures import ThreadPoolExecutor

    from rlzmq.core.addresses import split_tcp
    from tests.security.strangers import KINDS, knock, wrong_keys

    host, port = split_tcp(address)
    kinds = list(KINDS)
    made: Counter[str] = Counter()
    print("ready", flush=True)
    sys.stdin.read()
    start = time.monotonic()

    def one(index: int) -> None:
        time.sleep(max(0.0, start + index / rate - time.monotonic()))
        if index % WRONG_KEYS_EVERY == 0:
            wrong_keys(address, server_public, wait_ms=50)
            made["wrong key"] += 1
            return
        kind = kinds[index % len(kinds)]
        # A silent connection could stay until the run closes it; most are closed early to keep up the rate.
        knock(host, port, kind, timeout_s=2.5 if index % 100 == 2 else 0.02)
        made[kind] += 1

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, range(num)))
    print(json.dumps(made), flush=True)


# -- floods ------------------------------------------------------------------------------------------

_MAX_GROWTH_MIB, _MAX_PAUSE_S = 700, 10.0


@dataclass
class Outcome:
    """What a flood did to its victim."""

    before_mib: float
    peak_mib: float
    pause_s: float
    is_alive: bool

    @property
    def is_bounded(self) -> bool:
        return (
            self.is_alive
            and self.peak_mib - self.before_mib <= _MAX_GROWTH_MIB
            and self.pause_s <= _MAX_PAUSE_S
        )


def run_floods() -> dict[str, Callable[[JoinFile], object]]:
    """Floods of a broker, by name; each gets the join file of a runner."""

    def handshakes(num: int, num_bytes: int) -> Callable[[JoinFile], object]:
        def flood(join: JoinFile) -> None:
            for address in join.addresses.values():
                floods.handshake_frames(address, num, num_bytes)

        return flood

    return {
        "no key: 8 handshakes of 256 MiB": handshakes(8, 256 * _MIB),
        "no key: 1,000 handshakes of 250 KiB": handshakes(1000, 250 * 1024),
        "runner's key: 14 frames of 200 MiB": lambda join: floods.many_frames(join, 14, 200 * _MIB),
        "runner's key: 8,000 frames of 250 KiB": lambda join: floods.many_frames(join, 8000, 250 * 1024),
        "runner's key: 3,000,000 empty frames": lambda join: floods.many_frames(join, 3_000_000, 0),
        "runner's key: 1,500,000 empty frames": lambda join: floods.many_frames(join, 1_500_000, 0),
        "runner's key: a message of 2 GiB in parts": lambda join: floods.unfinished_parts(join, 2048 * _MIB),
        "runner's key: 500,000 subscriptions": lambda join: floods.subscriptions(join, 500_000),
        "runner's key: 2,000 claims of env steps": lambda join: floods.claimed_counts(join, 2000),
    }


def http_floods() -> dict[str, Callable[[str, str], object]]:
    """Floods of a policy server, by name; each gets its URL and token."""

    def headers(url: str, token: str) -> None:
        with floods.unfinished_headers(url, 1100):
            time.sleep(3.0)

    bearer = "Authorization: Bearer {}\r\n"
    return {
        "no token: 1,100 unfinished headers": headers,
        "no token: 250 bodies of 4 MiB to /healthz": lambda url, token: floods.unread_bodies(
            url, "/healthz", 250, 4 * _MIB
        ),
        "no token: 250 bodies of 4 MiB to /v1/act": lambda url, token: floods.unread_bodies(
            url, "/v1/act", 250, 4 * _MIB
        ),
        "token: 250 bodies of 4 MiB": lambda url, token: floods.unread_bodies(
            url, "/v1/act", 250, 4 * _MIB, headers=bearer.format(token)
        ),
        "token: 5 bodies of 4 MB of JSON": lambda url, token: floods.large_json(url, token, 4 * _MIB, 5),
    }


def flood_run(flood: str) -> Outcome:
    """Flood the broker of a run."""
    from tests.support.runs import listening

    with (
        tempfile.TemporaryDirectory() as directory,
        listening(Path(directory), num_env_runners=1, batch=1200).build() as algo,
    ):
        keeper = algo._async.session.pipeline._broker
        for _ in range(3):
            algo.train()
        pid = keeper.handle.pid
        before = psutil.Process(pid).memory_info().rss / _MIB
        pause_s = 0.0
        with _attackers(flood, str(Path(directory) / "join.toml")) as attackers:
            is_over = False
            while not is_over:
                is_over = attackers.poll() is not None  # one more update after the end
                start = time.perf_counter()
                algo.train()
                pause_s = max(pause_s, time.perf_counter() - start)
        is_alive = keeper.supervisor.num_restarts == 0
        return Outcome(before, _peak_mib(pid) if is_alive else float("nan"), pause_s, is_alive)


def flood_server(flood: str) -> Outcome:
    """Flood a policy server, or a dashboard."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        _rlzmq(path, "train ppo --env CartPole-v1 --run-dir run --stop iterations=1").wait()
        is_server = flood in http_floods()
        command = f"{'serve' if is_server else 'dashboard'} run --port 0"
        with _rlzmq(path, command, resource.RLIMIT_NOFILE if not is_server else None) as victim:
            assert victim.stdout is not None
            url = next(found[0] for line in victim.stdout if (found := re.search(r"http://[^/\s]+", line)))
            token = next(path.rglob("serve.token")).read_text().strip() if is_server else ""
            before = psutil.Process(victim.pid).memory_info().rss / _MIB

            def ask() -> None:
                try:
                    urllib.request.urlopen(url + ("/healthz" if is_server else "/"), timeout=60).close()
                except urllib.error.HTTPError as error:
                    if error.code != 401:
                        raise

            with floods.Pauses(ask) as pauses, _attackers(flood, url, token) as attackers:
                attackers.wait()
            is_alive = victim.poll() is None
            outcome = Outcome(
                before, _peak_mib(victim.pid) if is_alive else float("nan"), pauses.longest_s, is_alive
            )
            victim.terminate()
            return outcome


@contextlib.contextmanager
def _attackers(flood: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, __file__, "--flood", flood, *arguments]) as process:
        try:
            yield process
        finally:
            process.kill()


def _rlzmq(path: Path, command: str, few: int | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rlzmq", *command.split()],
        cwd=path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=None if few is None else lambda: resource.setrlimit(few, (1024, 1024)),
    )


def _peak_mib(pid: int) -> float:
    return floods.peak_bytes(pid) / _MIB


def flood_all(only: str) -> int:
    """Run the floods and print a table; return how many are not bounded."""
    outcomes: dict[str, Outcome] = {}
    print(f"{'flood':<46}{'MiB before':>11}{'peak':>8}{'pause s':>9}  bounded")
    for flood in (*run_floods(), *http_floods(), _IDLE):
        if only in flood:
            outcome = outcomes[flood] = (flood_run if flood in run_floods() else flood_server)(flood)
            print(
                f"{flood:<46}{outcome.before_mib:>11.0f}{outcome.peak_mib:>8.0f}{outcome.pause_s:>9.2f}  "
                f"{'yes' if outcome.is_bounded else 'NO' if outcome.is_alive else 'NO: its process ended'}",
                flush=True,
            )
    if not outcomes:
        names = ", ".join((*run_floods(), *http_floods(), _IDLE))
        sys.exit(f"--only {only!r} is part of no flood's name: {names}")
    num = sum(not outcome.is_bounded for outcome in outcomes.values())
    print(f"{num} unbounded")
    return num


_IDLE = "no session: 1,000 idle connections to a dashboard"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="floods whose name contains this (default: all)")
    parser.add_argument("--connections", type=int, help="connections without a key, in all rounds")
    parser.add_argument(
        "--rounds", type=int, default=4, help="of attack, each after one of peace (default: 4)"
    )
    parser.add_argument("--rate", type=float, default=250.0, help="connections per second (default: 250)")
    parser.add_argument("--attack", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--flood", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood:
        name, *arguments = options.flood
        if name in run_floods():
            run_floods()[name](JoinFile.read(Path(arguments[0])))
        elif name in http_floods():
            http_floods()[name](*arguments)
        else:
            with floods.idle_connections(arguments[0], 1000):
                time.sleep(3.0)
        return
    if options.attack:
        address, key, num, rate = options.attack
        attack(address, key, int(num), float(rate))
        return
    if options.connections is None:
        sys.exit(1 if flood_all(options.only) else 0)
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory), options)


def _empty(server: socket.socket) -> bool:
    """Accept the next connection at the other port; False if there is none."""
    ready, _, _ = select.select([server], [], [], 0.0)
    if ready:
        server.accept()[0].close()
    return bool(ready)


def measure(directory: Path, options: argparse.Namespace) -> None:
    from tests.security.test_strangers import status_of
    from tests.support.runs import listening

    with listening(directory, num_env_runners=1, batch=1200).build() as algo:
        join = JoinFile.read(directory / "join.toml")
        observer = JoinFile.read(directory / "join.observer.toml")
        broker = psutil.Process(algo._async.session.pipeline._broker.handle.pid)
        for _ in range(5):
            algo.train()
        steps, seconds, cpu = dict.fromkeys(MODES, 0), dict.fromkeys(MODES, 0.0), dict.fromkeys(MODES, 0.0)
        made: dict[str, int] = {}
        before_rss = peak_rss = broker.memory_info().rss
        share = options.connections // options.rounds
        with socket.create_server(("127.0.0.1", 0), backlog=share + 1) as nobody:
            elsewhere = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
            for number in range(options.rounds):
                for mode in MODES:
                    attackers = None
                    if mode != "peace":
                        address = elsewhere if mode == "elsewhere" else join.addresses["data"]
                        arguments = [address, join.server_public_key, str(share), str(options.rate)]
                        attackers = subprocess.Popen(
                            [sys.executable, __file__, "--attack", *arguments],
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            text=True,
                        )
                        assert attackers.stdin is not None
                        assert attackers.stdout is not None
                        assert attackers.stdout.readline() == "ready\n"
                        attackers.stdin.close()
                    start, num_before = time.perf_counter(), algo._async.session.accounting.trained
                    cpu_before = sum(broker.cpu_times()[:2])
                    while (
                        attackers.poll() is None
                        if attackers is not None
                        else time.perf_counter() - start < share / options.rate
                    ):
                        algo.train()
                        peak_rss = max(peak_rss, broker.memory_info().rss)
                    seconds[mode] += time.perf_counter() - start
                    cpu[mode] += sum(broker.cpu_times()[:2]) - cpu_before
                    steps[mode] += algo._async.session.accounting.trained - num_before
                    if attackers is not None and attackers.stdout is not None:
                        counts = json.loads(attackers.stdout.read())
                        for kind, count in counts.items() if mode == "attack" else ():
                            made[kind] = made.get(kind, 0) + count
                    while _empty(nobody):
                        pass
                rates = {mode: steps[mode] / seconds[mode] for mode in MODES}
                print(
                    f"round {number + 1}: steps/s so far: "
                    + ", ".join(f"{rate:.0f} ({mode})" for mode, rate in rates.items()),
                    flush=True,
                )
        status = status_of(observer)
        account = algo._async.session.accounting
        print(f"connections made   {sum(made.values())} in {seconds['attack']:.1f} s: {made}")
        print(f"at the door        {status['connections']}")
        print(
            f"throughput loss    {100 * (1 - rates['attack'] / rates['elsewhere']):.1f} % against attackers elsewhere, "
            f"{100 * (1 - rates['attack'] / rates['peace']):.1f} % against peace (attackers on the same cores)"
        )
        busy = {mode: 100 * cpu[mode] / seconds[mode] for mode in MODES}
        print(f"broker CPU         {busy['elsewhere']:.1f} % of a core, {busy['attack']:.1f} % under attack")
        print(
            f"broker RSS         {before_rss / 2**20:.1f} MiB, at most {(peak_rss - before_rss) / 2**20:+.1f} MiB"
        )
        print(f"broker loop lag    at most {status['max_loop_lag_s'] * 1e3:.0f} ms")
        print(f"accounting         {account}")


if __name__ == "__main__":
    main()
