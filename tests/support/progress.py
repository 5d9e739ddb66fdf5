"""A line every ten seconds in place of dots: how far the tests are, in a log file too (``-p tests.support.progress``).
A failure is named at once: whoever waits for minutes need not wait for the end.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

_EVERY_S = 10.0


class Progress:
    """What is done and what is left, as the reports of all workers come in."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._left: set[str] = set()
        self._num_done = self._num_failed = 0
        self._start = self._last = time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._left = {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._left = set(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        if report.passed:
            return (report.outcome if report.when == "call" else "", "", "")
        word = ("failed", "", "FAILED") if report.when == "call" else ("error", "", "ERROR")
        return word if report.failed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._num_failed += 1
            self._write(f"FAILED {report.nodeid}: {report.longreprtext.strip().rpartition(chr(10))[2]}")
        if report.when == "teardown":
            self._left.discard(report.nodeid)
            self._num_done += 1
        if time.monotonic() - self._last >= _EVERY_S:
            self._last = time.monotonic()
            self._say()

    def _say(self) -> None:
        share = self._num_done / max(1, self._num_done + len(self._left))
        elapsed = time.monotonic() - self._start
        text = f"{share:4.0%}  {self._num_done} tests, {len(self._left)} left  {elapsed:.0f} s"
        self._write(text + (f"  {self._num_failed} FAILED" if self._num_failed else ""))

    def _write(self, text: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.write_line(text)
        reporter.flush()


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))
