"""The driver's reading of reports: fragments once, env steps once, lies without harm."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlzmq.driver.driver_link import ReportReader
from rlzmq.driver.updates import Accounting
from rlzmq.protocol.core import Report
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.payloads import pack_blob

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


def test_own_runners_are_trusted_and_blamed_and_others_are_not() -> None:
    blamed: list[tuple[int, str]] = []
    reader = _reader(blamed)
    assert reader.open_meta(FragmentId("runner", 1, 0), 7) == {"meta": 7, "is_trusted": True}
    assert reader.open_meta(FragmentId("from outside", 1, 0), 7)["is_trusted"] is False
    assert reader.open_meta(FragmentId("from outside", 1, 1), b"bad") == {}
    assert blamed == []
    assert reader.open_meta(FragmentId("runner", 1, 1), b"bad") == {}
    assert blamed == [(3, "an unusable meta: no meta")]


def test_steps_of_fragments_that_no_report_names_are_counted_as_such() -> None:
    reader, accounting = _reader(), Accounting()
    reader.account(_report(num_kept_steps=40), 25, accounting)
    assert (accounting.sampled, accounting.trained, accounting.pending) == (40, 40, 0)
    assert reader.num_env_steps_without_report == 15


def test_the_results_of_a_rank_that_cannot_be_read_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    reader = _reader()
    good = {"default_policy": {"total_loss": 1.0}}
    assert reader.open_results([pack_blob(good), b"junk", pack_blob(3)]) == [good, {}, {}]
    assert "the results of rank 1 are unusable: not a packed value: 4 bytes" in caplog.text
