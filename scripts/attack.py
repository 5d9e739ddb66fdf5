"""Opens 10,000 connections without a key to a training run; prints its throughput, memory and counters.

    python scripts/attack.py --connections 10000

One driver with one local runner listens on loopback TCP with keys. Rounds alternate, so that other load on the
machine affects all alike: no attackers ("peace"); attackers that connect to another port, to measure their own use of
the cores ("elsewhere"); attackers at the run's port ("attack"). The attackers (one process, several threads) send
garbage, HTTP, nothing, a ZMTP greeting without a key, a command that claims 8 GiB, and wrong keys, at a given rate.
"""

from __future__ import annotations

import argparse
import json
import select
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connections", type=int, default=10_000, help="in all rounds (default: 10000)")
    parser.add_argument(
        "--rounds", type=int, default=4, help="of attack, each after one of peace (default: 4)"
    )
    parser.add_argument("--rate", type=float, default=250.0, help="connections per second (default: 250)")
    parser.add_argument("--attack", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        address, key, num, rate = options.attack
        attack(address, key, int(num), float(rate))
        return
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory), options)


def _empty(server: socket.socket) -> bool:
    """Accept the next connection at the other port; False if there is none."""
    ready, _, _ = select.select([server], [], [], 0.0)
    if ready:
        server.accept()[0].close()
    return bool(ready)


def measure(directory: Path, options: argparse.Namespace) -> None:
    import psutil

    from rlzmq.net.join_file import JoinFile
    from tests.driver.outside import listening
    from tests.security.test_strangers import status_of

    with listening(directory, num_env_runners=1, batch=1200).build() as algo:
        join = JoinFile.read(directory / "join.toml")
        observer = JoinFile.read(directory / "join.observer.toml")
        broker = psutil.Process(algo._async.session._pipeline._broker.handle.pid)
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
