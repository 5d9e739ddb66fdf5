"""What every test may rely on: the same environment, the same draws, one warm fork server."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import HealthCheck, settings

from rlzmq.actors import forkserver
from tests.support.warm import WARM
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

# A shell starts what it puts in the background with SIGINT ignored, and processes hand that on: the tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `--hypothesis-profile=default` draws other examples each time. A loaded machine is slow, not wrong.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


forkserver.subprocess = with_popen(WarmPopen)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """The generators that a test did not seed itself begin at the same place, whatever ran before it."""
    random.seed(1)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(1)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(1)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[None]:
    """One warm server for all tests that start processes, ended with them: its process must be gone."""
    forkserver.prestart(WARM)
    yield
    server = psutil.Process(forkserver.get_fork_server().pid)
    forkserver.shutdown()
    assert not server.is_running()


@pytest.fixture(autouse=True)
def warm_fork_server(request: pytest.FixtureRequest) -> None:
    """For the folders whose tests start processes from this one."""
    if request.path.parent.name in ("actors", "algorithms", "cli", "driver", "security"):
        request.getfixturevalue("fork_server")
