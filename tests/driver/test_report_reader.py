"""The driver's reading of reports: fragments once, env steps once, lies without harm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlzmq.driver.driver_link import ReportReader
from rlzmq.driver.updates import Accounting
from rlzmq.protocol.events import Report
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.values import pack_blob

KEY = ("runner", 1)


class _Metas:
    """Takes numbers for metas."""

    def open(self, blob: Any, *, is_trusted: bool) -> dict[str, Any]:
        if blob == b"bad":
            raise ValueError("no meta")
        return {"meta": blob, "is_trusted": is_trusted}


def _reader(blamed: list[tuple[int, str]] | None = None) -> ReportReader:
    blame = [] if blamed is None else blamed
    metas: Any = _Metas()
    return ReportReader(metas, {"runner": 3}.get, lambda place, why: blame.append((place, why)))


def _report(
    *seqs: int,
    num_kept_steps: int = 0,
    dropped: dict[str, int] | None = None,
    **more: Any,
) -> Report:
    message: Any = SimpleNamespace(num_kept_steps=num_kept_steps, dropped=dropped or {})
    return Report(
        message, [(FragmentId(*KEY, seq), 10, b"") for seq in seqs], [], **{"watermarks": {}, **more}
    )


def test_a_fragment_that_two_brokers_report_is_new_once() -> None:
    reader = _reader()
    assert [item[0].seq for item in reader.take_new(_report(0, 1))] == [0, 1]
    assert [item[0].seq for item in reader.take_new(_report(1, 2))] == [2]


def test_what_was_refused_at_the_door_is_not_waited_for() -> None:
    reader = _reader()
    for seq in range(1, 400, 2):  # every other one was refused: no report names it
        report = _report(seq, watermarks={KEY: seq + 1})
        assert len(reader.take_new(report)) == 1
        assert reader.take_new(report) == [], "once"
    assert reader._reported[KEY].beyond == set()
    assert reader.num_runners == 1
    reader.take_new(_report(forgotten=[KEY]))
    assert reader.num_runners == 0


def test_own_runners_are_trusted_and_blamed_and_others_are_not() -> None:
    blamed: list[tuple[int, str]] = []
    reader = _reader(blamed)
    assert reader.open_meta(FragmentId("runner", 1, 0), 7) == {"meta": 7, "is_trusted": True}
    assert reader.open_meta(FragmentId("from outside", 1, 0), 7)["is_trusted"] is False
    assert reader.open_meta(FragmentId("from outside", 1, 1), b"bad") == {}
    assert blamed == []
    assert reader.open_meta(FragmentId("runner", 1, 1), b"bad") == {}
    assert blamed == [(3, "an unusable meta: no meta")]


def test_the_account_follows_the_brokers() -> None:
    reader, accounting = _reader(), Accounting()
    reader.account(_report(num_kept_steps=40, dropped={"surplus": 5}), 50, accounting)
    assert accounting.to_dict() == {"sampled": 50, "trained": 40, "dropped": {"surplus": 5}, "pending": 5}
    reader.account(_report(num_kept_steps=40, dropped={"stale": 1, "surplus": 5}), 36, accounting)
    assert accounting.to_dict()["dropped"] == {"surplus": 5, "stale": 1}
    assert (accounting.pending, reader.num_env_steps_without_report) == (0, 0)


def test_steps_of_fragments_that_no_report_names_are_counted_as_such() -> None:
    reader, accounting = _reader(), Accounting()
    reader.account(_report(num_kept_steps=40), 25, accounting)
    assert (accounting.sampled, accounting.trained, accounting.pending) == (40, 40, 0)
    assert reader.num_env_steps_without_report == 15


def test_a_batch_that_all_ranks_skipped_is_dropped_and_not_trained() -> None:
    reader, accounting = _reader(), Accounting()
    reader.account(_report(dropped={"skipped": 40}), 40, accounting)
    assert accounting.to_dict() == {"sampled": 40, "trained": 0, "dropped": {"skipped": 40}, "pending": 0}
    assert reader.num_env_steps_without_report == 0


def test_what_was_trained_is_taken_back_where_a_buffer_held_what_no_loss_can_use() -> None:
    reader, accounting = _reader(), Accounting()
    reader.account(_report(num_kept_steps=40), 40, accounting)
    reader.account(_report(num_kept_steps=-10, dropped={"skipped": 50}), 40, accounting)
    assert accounting.to_dict() == {"sampled": 80, "trained": 30, "dropped": {"skipped": 50}, "pending": 0}
    assert reader.num_env_steps_without_report == 0


def test_the_results_of_a_rank_that_cannot_be_read_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    reader = _reader()
    good = {"default_policy": {"total_loss": 1.0}}
    assert reader.open_results([pack_blob(good), b"junk", pack_blob(3)]) == [good, {}, {}]
    assert "the results of rank 1 are unusable: not a packed value: 4 bytes" in caplog.text
