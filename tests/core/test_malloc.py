"""Large arrays get the memory of those freed before, on any thread."""

from __future__ import annotations

import subprocess
import sys

import pytest

_MEASURE = """
import resource, sys, threading
import numpy as np
from rlzmq.core.process import keep_freed_memory, share_one_arena

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(100_000_000 // 8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def run():
    first = faults()
    print(first, faults())

if sys.argv[1] == "kept":
    share_one_arena()
    keep_freed_memory()
thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
@pytest.mark.parametrize("memory", ["kept", "returned"])
def test_a_second_large_array_of_a_thread_costs_page_faults_only_by_default(memory: str) -> None:
    command = [sys.executable, "-c", _MEASURE, memory]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    first, second = map(int, run.stdout.split())
    assert first > 40  # some systems back large arrays with pages of 2 MB
    if memory == "kept":
        assert second < first / 10
    else:
        assert second > first / 2
