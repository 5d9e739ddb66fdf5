"""What every test may rely on: the same environment, the same draws, one warm fork server."""

from __future__ import annotations

import atexit
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Generator, Iterator

import psutil
import pytest
import zmq
from hypothesis import HealthCheck, settings

from rlzmq.actors import forkserver
from tests.support.warm_process import WarmPopen, with_popen

# How the terminal is that the tests are started from, or which rank of a job, is nothing to them.
_OF_THE_CALLER = (
    "COLUMNS",
    "LINES",
    "NO_COLOR",
    "FORCE_COLOR",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "PYTHONWARNINGS",
)
_OF_A_JOB = ("RLZMQ_", "SLURM_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "JOB_COMPLETION_INDEX")
for _name in [name for name in os.environ if name in _OF_THE_CALLER or name.startswith(_OF_A_JOB)]:
    del os.environ[_name]

# A shell starts what it puts in the background with SIGINT ignored, nohup with SIGHUP, and processes hand that on: the
# tests send both.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# This user's secret, which signs checkpoints, is one of the tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="rlzmq-tests-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# `--hypothesis-profile=other` draws other examples each time, and many more. A loaded machine is slow, not wrong.
_patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", _patient, derandomize=True, max_examples=20)
settings.register_profile("other", _patient, max_examples=300)
settings.load_profile("repeatable")


forkserver.subprocess = with_popen(WarmPopen)  # type: ignore[attr-defined]


# What is imported stays: no collection looks at it, neither while more of it comes nor while tests run.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect, from here on, what tests leave."""
    gc.freeze()
    gc.enable()


_failed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note tests that fail."""
    report = yield
    if report.failed:
        _failed.add(item.nodeid)
    return report


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Collect what a failed test left open, without the warnings that would make a later test fail, too."""
    if nodeid not in _failed:
        return
    _failed.discard(nodeid)
    hook = sys.unraisablehook
    end_context = zmq.Context.__del__
    sys.unraisablehook = lambda unraisable: None
    zmq.Context.__del__ = lambda self: None  # it would wait for sockets that are collected after it
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # pytest's: they hold its frames
            for name in ("last_exc", "last_type", "last_value", "last_traceback"):
                if hasattr(sys, name):
                    delattr(sys, name)
            gc.collect()
    finally:
        sys.unraisablehook, zmq.Context.__del__ = hook, end_context


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """The generators that a test did not seed itself begin at the same place, whatever ran before it."""
    random.seed(1)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(1)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.manual_seed(1)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    """One warm server for all tests that start processes, ended with them: its process must be gone."""
    forkserver.get_fork_server()
    yield
    server = psutil.Process(forkserver.get_fork_server().pid)
    forkserver.shutdown()
    assert not server.is_running()


@pytest.fixture(autouse=True)
def warm_fork_server(request: pytest.FixtureRequest) -> None:
    """For the folders whose tests start processes from this one."""
    if request.path.parent.name in ("actors", "algorithms", "cli", "driver", "security"):
        request.getfixturevalue("fork_server")
