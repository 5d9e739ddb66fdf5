"""The core of the benchmarks: contenders, each a process that makes one turn at request, take turns.

A case (a module of this folder without an underscore) says with ``comparisons(options)`` which sides it compares. A
side names a function of the case's module: it is called once, in its own process and maybe with a peer's
interpreter, and returns the function that makes a turn. So a case's module imports neither rlzmq nor torch at its
top. A case that does not alternate has ``report(options)`` instead, which yields lines. ``add_options(parser)``
adds a case's options.

This module runs in the peers' interpreters, too: only the standard library at its top.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psutil

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = (
    "rlzmq",
    "ray",
    "stable-baselines3",
    "sample-factory",
    "pufferlib",
    "torch",
    "gymnasium",
    "numpy",
)

# Works for so many seconds; returns what was measured (mostly a rate).
Turn = Callable[[float], float]


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Args:
        function: A function at the top of a case's module. It prepares everything and returns the turn.
        settings: Its arguments, as JSON can express them.
        peer: In whose virtualenv it runs (see `_peers.PEERS`); empty: this interpreter.
    """

    function: Callable[..., Turn]
    settings: Mapping[str, Any] = field(default_factory=dict)
    peer: str = ""


@dataclass(frozen=True)
class Comparison:
    """Sides that take turns.

    Args:
        title: Its name, unique within the case.
        sides: By name. The first one is compared with each of the others unless `ratios` says otherwise.
        ratios: (dividend, divisor), names of sides.
        unit: Of what a turn returns.
        goal: The ratio wanted, as text.
        turns: How many turns each side has.
        turn_s: How long a turn takes, in seconds, if the side is one that can be asked for that.
        is_rate: Work per second; then ratios by processor time are shown, too.
        is_fresh: Each turn gets a new process.
        measures_memory: Not the turn's result counts but the memory of all its processes (PSS, in MB) after it.
    """

    title: str
    sides: Mapping[str, Side]
    ratios: tuple[tuple[str, str], ...] = ()
    unit: str = "env steps/s"
    goal: str = ""
    turns: int = 5
    turn_s: float = 3.0
    is_rate: bool = True
    is_fresh: bool = False
    measures_memory: bool = False


# -- in the contenders' processes ----------------------------------------------------------------------


def timed(work: Callable[[], float]) -> Turn:
    """Return a turn that repeats `work`, and gives the sum of what it returns per second."""

    def turn(seconds: float) -> float:
        done, start = 0.0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            done += work()
        return done / elapsed

    return turn


def seconds_since_start() -> float:
    """Return how long ago this process began (to 10 ms)."""
    started_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return uptime_s - started_ticks / os.sysconf("SC_CLK_TCK")


def serve() -> None:
    """Make a turn for each line on stdin, as long as it says (``python -c`` calls this in a new process)."""
    module, function, settings = sys.argv[1:]
    turn: Turn = getattr(importlib.import_module(module), function)(**json.loads(settings))
    versions = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    _answer(versions)
    for line in sys.stdin:
        start = time.perf_counter()
        value = turn(float(line))
        _answer([value, time.perf_counter() - start])


def _answer(value: Any) -> None:
    print("answer", json.dumps(value), flush=True)  # a line by itself: peers print, too


# -- in the process that compares ----------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """One turn: its result, and wall and processor time (of all processes of the side) in seconds."""

    value: float
    wall_s: float
    cpu_s: float


class Contender:
    """A process that makes a side's turns, with all its descendants.

    Args:
        name: For errors.
        side: What it runs.
        python: The interpreter.
        autogroup: Nice value for the scheduler's groups of its processes (Linux).
    """

    def __init__(self, name: str, side: Side, python: Path, autogroup: int | None = None) -> None:
        import psutil

        self._name = name
        self._autogroup = autogroup
        self._folder = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        arguments = [side.function.__module__, side.function.__name__, json.dumps(dict(side.settings))]
        self._process = subprocess.Popen(
            [str(python), "-c", "from scripts.bench._core import serve; serve()", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=self._folder.name,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        self._root = psutil.Process(self._process.pid)

    def wait_until_ready(self) -> dict[str, str]:
        """Return versions of what it has installed."""
        versions: dict[str, str] = self._read()
        self.prioritize()
        return versions

    def prioritize(self) -> None:
        """Give all its processes the nice value for the scheduler's groups."""
        prioritize(self._tree(), self._autogroup)

    def turn(self, seconds: float, *, starts_processes: bool = False) -> Measurement:
        """Have it make a turn; with `starts_processes` the nice value is given to those, too."""
        before = self._cpu_s()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # reading tells why
            print(seconds, file=self._process.stdin, flush=True)
        while starts_processes and not select.select([self._process.stdout], [], [], 0.2)[0]:
            self.prioritize()
        value, wall_s = self._read()
        return Measurement(value, wall_s, self._cpu_s() - before)

    def memory_mb(self) -> float:
        """Return the proportional set size of all its processes: pages that n processes share count as 1/n of each."""
        total = 0
        for process in self._tree():
            with contextlib.suppress(OSError):
                rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
                total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        return total * 1024 / 1e6

    def close(self) -> None:
        """End it, and what it leaves behind."""
        import psutil

        tree = self._tree()
        shared = {path for process in tree for path in _shared_files(process.pid)}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        _, alive = psutil.wait_procs(tree, timeout=3)
        for process in alive:
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()
        for path in shared:  # semaphores and tensors of peers, whose own cleaners may have been killed
            path.unlink(missing_ok=True)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._folder.cleanup()
        self._errors.close()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        self._errors.seek(0)
        lines = self._errors.read().splitlines()[-20:]
        raise SystemExit("\n".join([*lines, f"{self._name} ended with exit status {self._process.wait()}."]))

    def _tree(self) -> list[psutil.Process]:
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._root, *self._root.children(recursive=True)]
        return []

    def _cpu_s(self) -> float:
        import psutil

        total = 0.0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                total += sum(process.cpu_times()[:4])  # of children that ended, too
        return total


def prioritize(processes: Iterable[psutil.Process], autogroup: int | None) -> None:
    """Give the scheduler's groups of these processes a nice value (Linux); None: leave them as they are."""
    if autogroup is not None:
        for process in processes:
            with contextlib.suppress(OSError):
                Path(f"/proc/{process.pid}/autogroup").write_text(str(autogroup))


def _shared_files(pid: int) -> set[Path]:
    """Return the named files of /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    names = {line.partition("/dev/shm/")[2] for line in lines}
    return {Path("/dev/shm", name) for name in names if name and not name.endswith(" (deleted)")}


def wait_until_quiet(busy: float, patience_s: float) -> float:
    """Wait until other work takes less than the share `busy` of all cores; return the share it takes.

    After `patience_s` it prints a message, and waits no longer.
    """
    import psutil

    end = time.monotonic() + patience_s
    while (share := psutil.cpu_percent(1.0) / 100) > busy:
        if time.monotonic() > end:
            print(f"  measured beside other work, which takes {share:.0%} of the cores", flush=True)
            break
    return share


@dataclass(frozen=True)
class Conditions:
    """How a comparison is carried out; None leaves the choice to the comparison."""

    turns: int | None = None
    turn_s: float | None = None
    busy: float = 0.25
    patience_s: float = 30.0
    autogroup: int | None = None


def compare(
    comparison: Comparison, pythons: Mapping[str, Path], conditions: Conditions
) -> dict[str, list[Measurement]]:
    """Measure all sides, turn about, every second time in the opposite order.

    Args:
        comparison: What is compared.
        pythons: The interpreters of the peers it names.
        conditions: Turns, and how quiet the machine should be.
    """
    turns = conditions.turns or comparison.turns
    seconds = conditions.turn_s or comparison.turn_s
    found: dict[str, list[Measurement]] = {name: [] for name in comparison.sides}

    def start(name: str, stack: contextlib.ExitStack) -> Contender:
        side = comparison.sides[name]
        python = pythons[side.peer] if side.peer else Path(sys.executable)
        return stack.enter_context(contextlib.closing(Contender(name, side, python, conditions.autogroup)))

    with contextlib.ExitStack() as stack:
        contenders = {} if comparison.is_fresh else {name: start(name, stack) for name in comparison.sides}
        for contender in contenders.values():
            contender.wait_until_ready()
        if conditions.busy < 1.0:
            wait_until_quiet(conditions.busy, conditions.patience_s)
        if not comparison.is_fresh:
            for contender in contenders.values():  # warms up
                contender.turn(min(seconds, 1.0))
        for turn in range(turns):
            for name in list(comparison.sides)[:: -1 if turn % 2 else 1]:
                with contextlib.ExitStack() as once:
                    contender = contenders.get(name) or start(name, once)
                    if comparison.is_fresh:
                        contender.wait_until_ready()
                    measurement = contender.turn(seconds, starts_processes=comparison.is_fresh)
                    if comparison.measures_memory:
                        measurement = Measurement(
                            contender.memory_mb(), measurement.wall_s, measurement.cpu_s
                        )
                found[name].append(measurement)
    return found


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return median, least and greatest."""
    return statistics.median(values), min(values), max(values)


def ratios(comparison: Comparison, found: Mapping[str, list[Measurement]]) -> Iterator[dict[str, Any]]:
    """Yield the ratios of a comparison, each of both sides' turns in pairs: median, least, greatest."""
    first, *others = comparison.sides
    for dividend, divisor in comparison.ratios or [(first, other) for other in others]:
        pairs = list(zip(found[dividend], found[divisor], strict=True))
        ratio: dict[str, Any] = {"of": dividend, "to": divisor, "goal": comparison.goal}
        ratio["ratio"] = spread([a.value / b.value for a, b in pairs])
        if comparison.is_rate and all(one.cpu_s > 0 for pair in pairs for one in pair):
            used = [(a.cpu_s / a.wall_s) / (b.cpu_s / b.wall_s) for a, b in pairs]
            ratio["by_cpu"] = spread(
                [value.value / other.value / more for (value, other), more in zip(pairs, used, strict=True)]
            )
        yield ratio


def lines_of(comparison: Comparison, found: Mapping[str, list[Measurement]]) -> Iterator[str]:
    """Yield a comparison's results as text."""
    width = max(len(name) for name in found)
    yield f"{comparison.title} ({len(next(iter(found.values())))} turns)"
    for name, measurements in found.items():
        middle, least, greatest = (
            f"{value:,.{0 if value >= 100 else 3}f}" for value in spread([one.value for one in measurements])
        )
        cores = statistics.median(one.cpu_s / one.wall_s for one in measurements)
        yield f"  {name:{width}} {middle:>10} {comparison.unit} ({least} to {greatest}), {cores:.2f} cores"
    for ratio in ratios(comparison, found):
        text = "{:.2f} ({:.2f} to {:.2f})".format(*ratio["ratio"])
        if "by_cpu" in ratio:
            text += ", by processor time {:.2f} ({:.2f} to {:.2f})".format(*ratio["by_cpu"])
        yield f"  {ratio['of']} ÷ {ratio['to']}: {text}" + (
            f", goal {ratio['goal']}" if ratio["goal"] else ""
        )
