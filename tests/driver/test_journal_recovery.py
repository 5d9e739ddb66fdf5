"""The journal on disk, and a run of which every process was killed with accepted fragments in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rlzmq.algorithms.checkpoints import latest_checkpoint
from rlzmq.core.errors import ConfigurationError
from rlzmq.driver.run_journal import RunJournal
from rlzmq.protocol.events import JournalAppend, JournalRemove
from rlzmq.roles.broker.journal_file import JournalFile
from tests.support.warm_process import WarmPopen, run_warm


class Open:
    """A JournalFile whose thread's words can be waited for."""

    def __init__(self, directory: Path, run_id: str = "run", incarnation: int = 1) -> None:
        self.synced: list[int] = []
        self.failures: list[str] = []
        self._changed = threading.Condition()
        self.file = JournalFile(directory, run_id, incarnation, self._on_synced, self._on_failed)

    def _on_synced(self, number: int) -> None:
        with self._changed:
            self.synced.append(number)
            self._changed.notify_all()

    def _on_failed(self, detail: str) -> None:
        with self._changed:
            self.failures.append(detail)
            self._changed.notify_all()

    def write(self, *payloads: bytes, segment: int = 0, first: int = 0) -> None:
        for number, payload in enumerate(payloads, start=first):
            self.file.do(JournalAppend(number, segment, 1, (payload[:2], payload[2:])))
        with self._changed:
            assert self._changed.wait_for(
                lambda: self.failures or (self.synced and self.synced[-1] >= first + len(payloads) - 1), 10
            )


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Open]]:
    journals: list[Open] = []

    def make(**options: Any) -> Open:
        while journals:
            journals.pop().file.close()
        journals.append(Open(tmp_path / "journal", **options))
        return journals[-1]

    yield make
    for journal in journals:
        journal.file.close()


def left_by_others(journal: Open) -> list[bytes]:
    return [bytes(payload) for _, payload in journal.file.read_others()]


def test_what_was_synced_is_read_by_the_next_run_alone(opened: Callable[..., Open], tmp_path: Path) -> None:
    journal = opened()
    journal.write(b"first", b"second")
    journal.write(b"third", segment=1, first=2)
    assert left_by_others(journal) == []
    assert left_by_others(opened(incarnation=2)) == [], "a later broker of the same run"
    later = opened(run_id="later", incarnation=3)
    assert left_by_others(later) == [b"first", b"second", b"third"]
    assert all(file.stat().st_mode & 0o77 == 0 for file in (tmp_path / "journal").glob("*.journal"))


def test_a_record_cut_short_or_altered_ends_its_segment(opened: Callable[..., Open], tmp_path: Path) -> None:
    opened().write(b"first", b"second")
    opened()  # closes it
    (segment,) = (tmp_path / "journal").glob("*.journal")
    whole = segment.read_bytes()
    seen = set()
    for length in range(len(whole)):
        segment.write_bytes(whole[:length])
        seen.add(tuple(left_by_others(opened(run_id="later"))))
    assert seen == {(), (b"first",)}
    for position in range(whole.index(b"first") - 13, len(whole)):
        altered = bytearray(whole)
        altered[position] ^= 1
        segment.write_bytes(altered)
        assert left_by_others(opened(run_id="later")) in ([], [b"first"])


def test_segments_are_removed_after_what_replaces_them_is_written(opened: Callable[..., Open]) -> None:
    opened(run_id="before").write(b"theirs")
    journal = opened(incarnation=5)
    journal.write(b"a", segment=0)
    journal.write(b"b", segment=1, first=1)
    journal.file.do(JournalRemove(1))
    journal.file.remove_others()
    journal.write(b"c", segment=1, first=2)
    assert left_by_others(opened(run_id="later")) == [b"b", b"c"]


def test_two_runs_do_not_share_a_journal(opened: Callable[..., Open], tmp_path: Path) -> None:
    opened()
    with pytest.raises(ConfigurationError, match="in use by another run"):
        Open(tmp_path / "journal", run_id="other")


def test_a_full_disk_is_said_once(opened: Callable[..., Open], monkeypatch: pytest.MonkeyPatch) -> None:
    journal = opened()
    journal.write(b"first")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    journal.write(b"second", first=1)
    journal.file.do(JournalAppend(2, 0, 1, (b"third",)))
    assert len(journal.failures) == 1
    assert "No space left" in journal.failures[0]
    assert journal.synced == [0]


async def test_data_may_be_as_old_as_an_updates() -> None:
    asked = []

    class Broker:
        async def read_journal(self, next_update: int, max_lag: int) -> list[str]:
            asked.append((next_update, max_lag))
            return ["runner-0"]

    journal = RunJournal(SimpleNamespace(handle=Broker()), max_lag=2)  # type: ignore[arg-type]
    assert await journal.read(7) == ["runner-0"]
    assert asked == [(7, 2)]


# ------------------------------------------------------------------ a whole run

SCRIPT = """
import os, signal, sys
from rlzmq import Algorithm, PPOConfig
from rlzmq.core import faults

run = sys.argv[1]
num_iterations, staleness, dies_after = map(int, sys.argv[2:])
faults.arm("driver")
config = (
    PPOConfig()
    .environment("CartPole-v1")
    .env_runners(num_env_runners=2, num_envs_per_env_runner=2)
    .learners(num_learners=1)
    .training(train_batch_size_per_learner=200, minibatch_size=50, num_epochs=1, staleness=staleness)
    .rl_module(model_config={"fcnet_hiddens": [8]})
    .fault_tolerance(durability="journal", journal_dir=run + "/journal")
    .debugging(seed=1)
)
if __name__ == "__main__":
    with Algorithm.resume(run, config=config) as algo:
        while algo.training_iteration < num_iterations:
            algo.train()
            if algo.training_iteration in (2, num_iterations):
                algo.save_checkpoint()
            if algo.training_iteration == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
"""


def events(directory: Path, place: str, name: str) -> list[dict[str, Any]]:
    found = []
    for file in sorted(directory.glob(f"{place}*.jsonl")):
        for line in file.read_text().split("\n")[:-1]:
            if (event := json.loads(line))["event"] == name:
                found.append(event)
    return found


def test_fragments_that_were_accepted_when_everything_was_killed_are_trained_after_the_resume(
    tmp_path: Path,
) -> None:
    """The learner hangs in the third update, whose fragments are accepted by then; a checkpoint has the first two."""
    run, before, after = tmp_path / "run", tmp_path / "before", tmp_path / "after"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)}
    faulty = {**environment, "RLZMQ_HISTORY": str(before), "RLZMQ_FAULT": "learner.train:hang:3"}
    train: subprocess.Popen[bytes] = WarmPopen(
        [sys.executable, "-c", SCRIPT, str(run), "9", "0", "0"], env=faulty
    )
    family: list[psutil.Process] = []
    lost: dict[str, int] = {}
    try:
        deadline = time.monotonic() + 60
        while sum(lost.values()) < 200 or latest_checkpoint(run) is None:
            assert train.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)  # facts of other processes, without events
            reported = {name for e in events(before, "driver", "report") for name, _ in e["fragments"]}
            accepted = {e["id"]: e["steps"] for e in events(before, "runner", "accepted")}
            lost = {name: steps for name, steps in accepted.items() if name not in reported}
        family = psutil.Process(train.pid).children(recursive=True)
    finally:
        for process in family:
            process.send_signal(signal.SIGKILL)
        train.kill()
        train.wait()
        psutil.wait_procs(family, timeout=5)
    resumed = run_warm(
        "-c", SCRIPT, str(run), "4", "0", "0", env={**environment, "RLZMQ_HISTORY": str(after)}, timeout=100
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "given_back" in resumed.stderr
    reports = events(after, "driver", "report")
    back = {name: steps for report in reports for name, steps in report["fragments"] if name in lost}
    assert back == lost
    trained = [name for event in events(after, "learner", "trained") for name, _, _ in event["ranges"]]
    assert set(lost) <= set(trained), "their weights are those of the checkpoint"
    account = reports[-1]["accounting"]
    assert account["trained"] == 4 * 200
    assert account["sampled"] == account["trained"] + sum(account["dropped"].values()) + account["pending"]
    left = b"".join(file.read_bytes() for file in (run / "journal").glob("*.journal"))
    assert not any(name.partition("/")[0].encode() in left for name in lost)


@pytest.mark.parametrize("fault", ["", "broker.UpdateDone:kill:4"], ids=["driver", "broker, then driver"])
def test_a_run_that_samples_ahead_dies_and_trains_what_was_accepted_after_its_checkpoint(
    fault: str, tmp_path: Path
) -> None:
    """S = 1: several updates are trained after the checkpoint, and others open, when the driver is killed.

    The runners sample two batches with the checkpoint's weights, which are trained after it, and more with later ones.
    """
    run, before, after = tmp_path / "run", tmp_path / "before", tmp_path / "after"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)}
    faulty = {**environment, "RLZMQ_FAULT": fault, "RLZMQ_FAULT_LOG": str(tmp_path / "faults")}
    # All processes have this one's stdout, so the call returns when the last one has ended.
    died = run_warm(
        "-c", SCRIPT, str(run), "9", "1", "5", env={**faulty, "RLZMQ_HISTORY": str(before)}, timeout=100
    )
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not fault or (tmp_path / "faults").read_text() == "broker.UpdateDone broker kill 4\n"
    resumed = run_warm(
        "-c", SCRIPT, str(run), "6", "1", "0", env={**environment, "RLZMQ_HISTORY": str(after)}, timeout=100
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "given_back" in resumed.stderr
    reports = events(after, "driver", "report")
    begin = reports[0]["update"]  # the checkpoint has the updates below
    assert begin < events(before, "driver", "report")[-1]["update"]
    versions = {event["id"]: event["version"] for event in events(before, "broker", "held")}
    covered = {name for name, _ in steps_trained(before, until=begin)}
    lost = {e["id"]: e["steps"] for e in events(before, "runner", "accepted") if e["id"] not in covered}
    back = {name: num for name, num in lost.items() if versions[name] <= begin}
    assert len(back) < len(lost)
    trained = steps_trained(after)
    everything = [*steps_trained(before, until=begin), *trained]
    assert len(everything) == len(set(everything)), "no step twice in one line of weights"
    account = reports[-1]["accounting"]
    # What no longer fits into the two batches that may use it is as old as it would have been without the death.
    assert sum(back.values()) - sum(name in back for name, _ in trained) <= account["dropped"].get("stale", 0)
    assert {name for name, _ in trained}.isdisjoint(lost.keys() - back.keys())
    assert account["dropped"]["rolled_back"] >= sum(lost.values()) - sum(back.values())
    assert account["sampled"] == account["trained"] + sum(account["dropped"].values()) + account["pending"]
    assert max(report["lag"] for report in reports) == 1


def steps_trained(directory: Path, *, until: int | None = None) -> list[tuple[str, int]]:
    """(fragment, number of the step) of all steps of the updates below `until`; each update's last attempt counts."""
    ranges = {event["update"]: event["ranges"] for event in events(directory, "learner", "trained")}
    return [
        (name, step)
        for update, parts in ranges.items()
        for name, first, num in parts
        for step in range(first, first + num)
        if until is None or update < until
    ]
