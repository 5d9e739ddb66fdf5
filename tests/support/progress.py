"""A line every ten seconds in place of dots: how far the tests are, in a log file too (``-p tests.support.progress``).
A failure is named at once: whoever waits for minutes need not wait for the end.

Tests differ a thousandfold, so the share that is done counts seconds of the last whole run, where there was one.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

__all__ = ["Progress"]

_EVERY_S = 10.0


class Progress:
    """What is done and what is left, as the reports of all workers come in."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._known: dict[str, float] = config.cache.get("rlzmq/durations", {}) if config.cache else {}
        self._spent: dict[str, float] = {}
        self._left: set[str] = set()
        self._num_failed = 0
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
        self._spent[report.nodeid] = self._spent.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self._num_failed += 1
            self._write(f"FAILED {report.nodeid}: {report.longreprtext.strip().rpartition(chr(10))[2]}")
        if report.when == "teardown":
            self._left.discard(report.nodeid)
        if time.monotonic() - self._last >= _EVERY_S:
            self._last = time.monotonic()
            self._say()

    def _say(self) -> None:
        usual = sum(self._known.values()) / max(len(self._known), 1) or 1.0
        left = sum(self._known.get(test, usual) for test in self._left)
        done = sum(self._known.get(test, usual) for test in self._spent.keys() - self._left)
        share = done / max(done + left, 1e-9)
        elapsed = time.monotonic() - self._start
        text = f"{share:4.0%}  {len(self._spent.keys() - self._left)} tests, {len(self._left)} left  {elapsed:.0f} s"
        if self._known and share > 0.02:
            text += f", about {elapsed / share - elapsed:.0f} s to go"
        if self._num_failed:
            text += f"  {self._num_failed} FAILED"
        self._write(text)

    def _write(self, text: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        reporter.write_line(text)
        reporter.flush()

    def pytest_sessionfinish(self) -> None:
        if self._config.cache and not self._left and self._spent:
            self._config.cache.set("rlzmq/durations", {**self._known, **self._spent})


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))
