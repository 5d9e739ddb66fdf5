"""Breaks checkpoints at every place, and resumes from them: always from the former state or the new one.

    python scripts/checkpoint_faults.py

A real run's checkpoint is written after (or over) a former one, and
(a) the writer is killed with SIGKILL at every file boundary,
(b) the disk is full, or broken, at every file boundary; and a tmpfs is so small that the write of each single page
fails (needs root, in a separate mount namespace), (c) every file is truncated, has one byte flipped, or is missing.
After each fault the run is resumed from its directory. Exit code 1: a resume failed, loaded a state that was never
saved, or did not log what it skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_CLONE_NEWNS = 0x20000
_PAGE_BYTES = 4096

Write = Callable[[Path], None]


class Run:
    """An algorithm, and two of its states: the former one (iteration 1) and the new one (iteration 2)."""

    def __init__(self) -> None:
        from rlzmq import PPOConfig
        from rlzmq.algorithms.checkpoints import to_components

        config = (
            PPOConfig()
            .environment("CartPole-v1")
            .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
            .learners(num_learners=0)
            .training(train_batch_size_per_learner=200, minibatch_size=100, num_epochs=1)
            .rl_module(model_config={"fcnet_hiddens": [16]})
            .debugging(seed=1)
        )
        self.algo = config.build()
        self.states: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self.weights: dict[int, dict[str, Any]] = {}
        for iteration in (1, 2):
            self.algo.train()
            components, about = to_components(self.algo, self.algo.config, self.algo.get_state())
            with tempfile.TemporaryDirectory() as scratch:  # a round trip makes copies of everything
                from rlzmq.core.checkpoint import read_checkpoint, write_checkpoint

                self.states[iteration] = (
                    read_checkpoint(write_checkpoint(Path(scratch) / "c", components)),
                    about | {"iteration": iteration},
                )
            weights = self.algo.get_module().get_state()
            self.weights[iteration] = {name: np.array(value) for name, value in weights.items()}

    def write(self, path: Path, iteration: int) -> None:
        """Write one state at exactly this place."""
        from rlzmq.core.checkpoint import write_checkpoint

        components, about = self.states[iteration]
        write_checkpoint(path, components, about=about)

    def resume(self, place: Path) -> int:
        """Restore the run from there, and return which state it has. Raise if it is neither."""
        self.algo.restore_from_path(place)
        iteration = int(self.algo.training_iteration)
        weights = self.algo.get_module().get_state()
        for name, value in self.weights[iteration].items():
            np.testing.assert_array_equal(weights[name], value)
        return iteration


class Tally:
    """Counts resumes by kind and by what they loaded."""

    def __init__(self) -> None:
        self.loaded: dict[str, Counter[str]] = {}
        self.failures: list[str] = []

    def check(self, kind: str, run: Run, place: Path, where: str) -> None:
        """Resume, and record the result."""
        counts = self.loaded.setdefault(kind, Counter())
        try:
            counts["former" if run.resume(place) == 1 else "new"] += 1
        except Exception as error:
            counts["FAILED"] += 1
            self.failures.append(f"{kind}, {where}: {error!r}")

    def report(self) -> int:
        """Print the counts; return the exit code."""
        for kind, counts in self.loaded.items():
            total, failed = sum(counts.values()), counts["FAILED"]
            print(
                f"{kind:<62} {total:5d} faults: {total - failed} resumed "
                f"(the former state {counts['former']}, the new one {counts['new']}), {failed} failed"
            )
        total = sum(sum(counts.values()) for counts in self.loaded.values())
        print(f"{total} faults, {total - len(self.failures)} resumes loaded a valid state")
        print("\n".join(self.failures[:20]))
        return 1 if self.failures or not total else 0


def layouts(run: Run) -> dict[str, tuple[Write, Write, str]]:
    """Return how the former and the new state are written below a run directory, and what is resumed."""
    from rlzmq.core import checkpoint
    from rlzmq.core.run_dir import RunDir

    def series(iteration: int) -> Write:
        def write(place: Path) -> None:
            components, about = run.states[iteration]
            RunDir(place, keep=1).write(iteration, components, about)

        return write

    def over(iteration: int, exchange: Any = checkpoint._exchange) -> Write:
        def write(place: Path) -> None:
            checkpoint._exchange = exchange
            run.write(place / "mine", iteration)

        return write

    def never(a: Path, b: Path) -> bool:
        return False

    return {
        "after it": (series(1), series(2), "."),
        "over it": (over(1), over(2), "mine"),
        "over it, without an atomic exchange": (over(1), over(2, never), "mine"),
    }


def boundary_faults(run: Run, tally: Tally, scratch: Path, action: str) -> None:
    """Make the writer, a child process, fail at the N-th file boundary, for every N."""
    from rlzmq.core import faults

    for layout, (former, new, resumed) in layouts(run).items():
        for number in range(1, 10_000):
            place = scratch / "run"
            shutil.rmtree(place, ignore_errors=True)
            former(place)
            log = scratch / "fired"
            log.unlink(missing_ok=True)
            os.environ |= {
                "RLZMQ_FAULT": f"checkpoint.boundary:{action}:{number}",
                "RLZMQ_FAULT_LOG": str(log),
            }
            if (pid := os.fork()) == 0:
                with contextlib.suppress(BaseException):
                    faults.arm("writer")
                    new(place)
                os._exit(0)
            os.waitpid(pid, 0)
            del os.environ["RLZMQ_FAULT"], os.environ["RLZMQ_FAULT_LOG"]
            if not log.exists():
                break
            tally.check(f"{action} at a file boundary, {layout}", run, place / resumed, f"boundary {number}")


def full_disk(run: Run, tally: Tally, scratch: Path) -> None:
    """Write to a tmpfs with space for the former checkpoint and N pages, until the new one fits."""
    from rlzmq.core.errors import CheckpointError

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        print(f"tmpfs sweep left out: no mount namespace ({os.strerror(ctypes.get_errno())})")
        return
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for layout, (number, name) in {"after it": (2, "000002"), "over it": (2, "000001")}.items():
        num_pages, fits = 0, False
        while not fits:
            with _tmpfs(scratch / "disk") as disk:
                place = disk / "checkpoints"
                run.write(place / "000001", 1)
                stat = os.statvfs(disk)
                used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize
                size = used + num_pages * _PAGE_BYTES
                subprocess.run(["mount", "-o", f"remount,size={size}", str(disk)], check=True)
                try:
                    run.write(place / name, number)
                    fits = True
                except CheckpointError as error:
                    if "No space left" not in str(error):
                        raise
                tally.check(f"tmpfs too small by some pages, {layout}", run, disk, f"{num_pages} pages")
                num_pages += 1


@contextlib.contextmanager
def _tmpfs(path: Path) -> Iterator[Path]:
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def damage(content: bytes) -> Iterator[tuple[str, bytes | None]]:
    """Yield ways in which a file may be damaged."""
    yield "missing", None
    for length in {0, 1, len(content) // 2, len(content) - 1} - {len(content)}:
        yield f"truncated to {length}", content[:length]
    for position in {0, len(content) // 3, len(content) // 2, len(content) - 1}:
        flipped = bytearray(content)
        flipped[position] ^= 1 << (position % 8)
        yield f"bit {position % 8} of byte {position} flipped", bytes(flipped)


def damaged_files(run: Run, tally: Tally, scratch: Path, said: Callable[[], str]) -> None:
    """Damage every file of the newer checkpoint in turn: the former one is loaded, and the reason is logged."""
    place = scratch / "damaged"
    for iteration in (1, 2):
        run.write(place / "checkpoints" / f"{iteration:06d}", iteration)
    newest = place / "checkpoints" / "000002"
    for file in sorted(path for path in newest.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for what, broken in damage(content):
            if broken is None:
                file.unlink()
            else:
                file.write_bytes(broken)
            before = tally.loaded.get("damaged file", Counter())["former"]
            tally.check("damaged file", run, place, f"{file.relative_to(newest)} {what}")
            text = said()
            if tally.loaded["damaged file"]["former"] != before + 1 or "skipped" not in text:
                tally.failures.append(
                    f"{file.relative_to(newest)} {what}: not noticed, or not said: {text!r}"
                )
            file.write_bytes(content)
    tally.check("damaged file, repaired", run, place, "-")


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> str:
        """Return the log since the last call."""
        lines, self.lines = self.lines, []
        return "\n".join(lines)


def main() -> int:
    """Run all cases, print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-tmpfs", action="store_true", help="leave the tmpfs out")
    args = parser.parse_args()
    said = _Said()
    logger = logging.getLogger("rlzmq.checkpoints")
    logger.addHandler(said)
    logger.propagate = False
    start = time.monotonic()
    run, tally = Run(), Tally()
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        for action in ("kill", "enospc", "eio"):
            boundary_faults(run, tally, scratch, action)
        damaged_files(run, tally, scratch, said.take)
        if not args.no_tmpfs:
            full_disk(run, tally, scratch)
    run.algo.stop()
    code = tally.report()
    print(f"{time.monotonic() - start:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
