"""Checks that processes are gone, for processes that are nobody's children here."""

from __future__ import annotations

import time

import psutil


def is_gone(process: psutil.Process, within_s: float = 10.0) -> bool:
    """Whether it ends within this time; a zombie has ended, its new parent is only slow to notice."""
    end = time.monotonic() + within_s
    while True:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
