"""Trains for an hour, and measures whether a process grows.

    python scripts/soak.py                          # an hour: 2 runners, 2 ranks, 15 updates/s
    python scripts/soak.py --minutes 20 --trace     # also the lines whose allocations since minute 10 are still held

Every ten seconds the anonymous memory of each process is read, by kind of mapping. Processes are forks of the fork
server and share its pages until either writes to them (reference counts do), so their private memory grows although
nothing is allocated: pages copied since the warm-up are shown separately, and do not count.

The slope is the median of the slopes between all pairs of samples after the warm-up (Theil-Sen), in MiB per hour: it
measures steady growth, and a single step does not change it. Steps of more than half a MiB are listed with their
minute, and growth by kind of mapping, so that the heap of malloc (`[heap]`, anonymous) is distinguished from files
and stacks. With `--trace`, which slows all down, every process counts its Python allocations after the warm-up. Exit
code 1: a process grew faster than `--limit`.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import re
import sys
import time
from array import array
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

SAMPLE_S = 10.0
MIB = 1 << 20
KINDS = ("[heap]", "anonymous", "files", "[stack]")
SHARED = "shared"
MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)$")


def memory_of(pid: int) -> Counter[str]:
    """Return the bytes in anonymous pages by kind of mapping, and those that are `SHARED` with the fork server."""
    found: Counter[str] = Counter()
    kind = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith("Anonymous:"):
            found[kind] += int(line.split()[1]) * 1024
        elif line.startswith("Shared_Dirty:"):
            found[SHARED] += int(line.split()[1]) * 1024
        elif match := MAPPING.match(line):
            name = match[1]
            kind = name if name in ("[heap]", "[stack]") else "files" if name.startswith("/") else "anonymous"
    return found


def held(kinds: Counter[str]) -> float:
    """Return all bytes, shared or not."""
    return sum(kinds[kind] for kind in KINDS)


def begin_trace(_: Any) -> None:
    """Start counting allocations; run in the measured process."""
    import tracemalloc

    tracemalloc.start(8)


def end_trace(_: Any, num: int = 12) -> list[str]:
    """Return allocations since the start that are still held, by line; run in the measured process."""
    import gc
    import tracemalloc

    gc.collect()
    held = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(False, tracemalloc.__file__)])
    return [str(line) for line in held.statistics("lineno")[:num]]


class Soak:
    """One run and the memory of its processes.

    Args:
        algo: The AsyncAlgorithm.
    """

    def __init__(self, algo: Any) -> None:
        self._session = algo.session
        # Objects would add 1 MiB an hour.
        self._rows: dict[str, array[float]] = defaultdict(lambda: array("d"))

    def handles(self) -> dict[str, Any]:
        """Return every process but the driver's, by name."""
        session = self._session
        all_handles = [
            session.pipeline._broker.handle,
            *session.env_runner_group.handles,
            *session.learner_group.handles,
        ]
        return {handle.name: handle for handle in all_handles}

    def sample(self, at: float) -> None:
        """Read the memory of all processes."""
        for name, pid in {"driver": "self", **{name: h.pid for name, h in self.handles().items()}}.items():
            kinds = memory_of(pid)
            self._rows[name].extend([at, *(kinds[kind] for kind in (*KINDS, SHARED))])

    @property
    def samples(self) -> dict[str, list[tuple[float, Counter[str]]]]:
        """(Seconds since the start, bytes by kind of mapping) of each process."""
        found = {}
        for name, rows in self._rows.items():
            table = np.array(rows).reshape(-1, 2 + len(KINDS))
            found[name] = [
                (row[0], Counter(dict(zip((*KINDS, SHARED), row[1:], strict=True)))) for row in table.tolist()
            ]
        return found

    def slopes(self, from_s: float) -> dict[str, float]:
        """Return the MiB per hour of each process, after the warm-up; NaN with fewer than three samples."""
        found = {}
        for name, samples in self.samples.items():
            late = [(at, held(kinds) / MIB) for at, kinds in samples if at >= from_s]
            if len(late) < 3:
                found[name] = float("nan")
                continue
            at, size = np.array(late).T
            first, second = np.triu_indices(len(at), k=1)
            found[name] = float(np.median((size[second] - size[first]) / (at[second] - at[first])) * 3600)
        return found

    def steps(self, name: str, from_s: float) -> str:
        """Return single steps after the warm-up, e.g. of an interpreter table that doubled."""
        totals = [(at, held(kinds) / MIB) for at, kinds in self.samples[name] if at >= from_s]
        found = [
            f"{now - before:+.1f} in minute {at / 60:.0f}"
            for (_, before), (at, now) in itertools.pairwise(totals)
            if abs(now - before) > 0.5
        ]
        return f"; steps: {', '.join(found)}" if found else ""

    def growth(self, name: str, from_s: float) -> str:
        """Return the growth since the warm-up, by kind of mapping."""
        late = [kinds for at, kinds in self.samples[name] if at >= from_s]
        if not late:
            return ""
        added = {kind: late[-1][kind] - late[0][kind] for kind in KINDS}
        added["copied from the fork server"] = late[0][SHARED] - late[-1][SHARED]
        return ", ".join(f"{kind} {num / MIB:+.2f}" for kind, num in added.items() if abs(num) >= 4096)

    def write(self, path: Path) -> None:
        """Write all samples as a table."""
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["process", "s", "kind", "bytes"])
            for name, samples in self.samples.items():
                for at, kinds in samples:
                    table.writerows([name, f"{at:.1f}", kind, num] for kind, num in kinds.items())


async def train(algo: Any, rate: float, until: float) -> int:
    """Train at a steady pace, one update per iteration; return the number of iterations."""
    start, num = time.monotonic(), 0
    while time.monotonic() < until:
        await algo.train()
        num += 1
        ahead_s = start + num / rate - time.monotonic()
        if ahead_s > 0:
            await asyncio.sleep(ahead_s)
        else:
            start = time.monotonic() - num / rate  # on a slow machine, do not catch up afterwards
    return num


async def soak(options: argparse.Namespace) -> int:
    from rlzmq import PPOConfig

    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=2, num_envs_per_env_runner=4)
        .learners(num_learners=2)
        .training(train_batch_size_per_learner=120, minibatch_size=60, num_epochs=1)
        .debugging(seed=1)
    )
    warm_s = 60.0 * options.warm_up
    async with config.build_async() as algo:
        watched = Soak(algo)
        start = time.monotonic()
        training = asyncio.create_task(train(algo, options.rate, start + 60.0 * options.minutes))
        traced = False
        while not training.done():
            at = time.monotonic() - start
            if options.trace and not traced and at >= warm_s:
                traced = True
                for handle in watched.handles().values():
                    await handle.apply(begin_trace)
            watched.sample(at)
            await asyncio.wait([training], timeout=SAMPLE_S)
        num = training.result()
        print(f"{num} updates in {options.minutes:g} minutes ({num / options.minutes / 60:.1f}/s)")
        broken = 0
        for name, slope in watched.slopes(warm_s).items():
            _, last = watched.samples[name][-1]
            first = next((kinds for at, kinds in watched.samples[name] if at >= warm_s), last)
            broken += slope > options.limit
            print(
                f"{name:<10} {held(first) / MIB:7.1f} → {held(last) / MIB:7.1f} MiB, {slope:+7.2f} MiB/h"
                f"   ({watched.growth(name, warm_s)}{watched.steps(name, warm_s)})"
            )
        if traced:
            for name, handle in watched.handles().items():
                print(f"\n{name}: held, of what was allocated after the warm-up")
                print("\n".join(f"  {line}" for line in await handle.apply(end_trace)))
        if options.csv is not None:
            watched.write(options.csv)
    return int(broken > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=10.0, help="minutes that do not count (default: 10)")
    parser.add_argument("--rate", type=float, default=15.0, help="updates per second (default: 15)")
    parser.add_argument("--limit", type=float, default=1.0, help="MiB per hour (default: 1)")
    parser.add_argument("--trace", action="store_true", help="count Python's allocations in every process")
    parser.add_argument("--csv", type=Path, help="write all samples there")
    return asyncio.run(soak(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
