"""10,000 connections without a key against a run that trains: its throughput, its memory, what it counted.

    python scripts/attack.py --connections 10000

One driver with one local runner listens on loopback TCP with keys. Rounds with and without attackers
alternate, so that what else the machine does hits both alike. The attackers (one process, several threads)
send garbage, HTTP, nothing, a ZMTP greeting without a key, a command that claims 8 GiB, and wrong keys; they
use the CPU of the same machine: the loss printed is an upper bound of what the door itself costs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

THREADS = 32
WRONG_KEYS_EVERY = 50  # a zmq client with a wrong key is made once in so many connections: it is the slowest


def attack(address: str, server_public: str, num: int, seconds: float) -> None:
    """In a process of its own: prints how many connections of each kind were made."""
    from collections import Counter
    from concurrent.futures import ThreadPoolExecutor

    from rlzmq.net.addresses import split_tcp
    from tests.security.strangers import KINDS, knock, wrong_keys

    host, port = split_tcp(address)
    kinds = list(KINDS)
    made: Counter[str] = Counter()
    deadline = time.monotonic() + seconds

    def one(index: int) -> None:
        if time.monotonic() > deadline:
            return
        if index % WRONG_KEYS_EVERY == 0:
            wrong_keys(address, server_public, wait_ms=50)
            made["wrong key"] += 1
            return
        kind = kinds[index % len(kinds)]
        # Silence is held for as long as the door holds it; most of it is cut short to keep up the rate.
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
    parser.add_argument(
        "--round-s", type=float, default=10.0, help="seconds of a round at most (default: 10)"
    )
    parser.add_argument("--attack", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        address, key, num, seconds = options.attack
        attack(address, key, int(num), float(seconds))
        return
    with tempfile.TemporaryDirectory() as directory:
        measure(Path(directory), options)


def measure(directory: Path, options: argparse.Namespace) -> None:
    import psutil

    from rlzmq.net.join_file import JoinFile
    from tests.runtime.outside import listening
    from tests.security.test_strangers import status_of

    with listening(directory, num_env_runners=1, batch=1200).build() as algo:
        join = JoinFile.read(directory / "join.toml")
        observer = JoinFile.read(directory / "join.observer.toml")
        broker = psutil.Process(algo._async.session._pipeline._broker.handle.pid)
        for _ in range(5):
            algo.train()
        steps, seconds = {"peace": 0, "attack": 0}, {"peace": 0.0, "attack": 0.0}
        made: dict[str, int] = {}
        before_rss = peak_rss = broker.memory_info().rss
        for number in range(options.rounds):
            for mode in ("peace", "attack"):
                attackers = None
                if mode == "attack":
                    share = options.connections // options.rounds
                    arguments = [
                        join.addresses["data"],
                        join.server_public_key,
                        str(share),
                        str(10 * options.round_s),
                    ]
                    attackers = subprocess.Popen(
                        [sys.executable, __file__, "--attack", *arguments], stdout=subprocess.PIPE, text=True
                    )
                start, num_before = time.perf_counter(), algo._async.session.accounting.trained
                while (
                    (attackers.poll() is None)
                    if attackers
                    else (time.perf_counter() - start < options.round_s)
                ):
                    algo.train()
                    peak_rss = max(peak_rss, broker.memory_info().rss)
                seconds[mode] += time.perf_counter() - start
                steps[mode] += algo._async.session.accounting.trained - num_before
                if attackers is not None:
                    for kind, count in json.loads(attackers.communicate()[0]).items():
                        made[kind] = made.get(kind, 0) + count
            rates = {mode: steps[mode] / seconds[mode] for mode in steps}
            print(
                f"round {number + 1}: {rates['peace']:.0f} steps/s in peace, {rates['attack']:.0f} under attack",
                flush=True,
            )
        status = status_of(observer)
        account = algo._async.session.accounting
        print(f"connections made   {sum(made.values())} in {seconds['attack']:.1f} s: {made}")
        print(f"at the door        {status['connections']}")
        print(
            f"throughput loss    {100 * (1 - rates['attack'] / rates['peace']):.1f} % (attackers on the same cores)"
        )
        print(
            f"broker RSS         {before_rss / 2**20:.1f} MiB, at most {(peak_rss - before_rss) / 2**20:+.1f} MiB"
        )
        print(f"broker loop lag    at most {status['max_loop_lag_s'] * 1e3:.0f} ms")
        print(f"accounting         {account}")


if __name__ == "__main__":
    main()
