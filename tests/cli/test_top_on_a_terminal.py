"""``rlzmq top`` on a terminal, against a run that trains: in place, Ctrl-C, small windows, the run's end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

from tests.support.runs import listening


class Terminal:
    """``rlzmq top`` with a terminal of its own."""

    def __init__(self, cwd: Path, *arguments: str, rows: int, columns: int) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rlzmq", "top", *arguments],
            stdin=slave, stdout=slave, stderr=slave, cwd=cwd, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
        os.close(slave)
        self.screen = ""

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> None:
        """Read what it draws until `pattern` was drawn."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.screen):
            assert self._read(max(0.0, deadline - time.monotonic())), self.screen[-3000:]

    def _read(self, timeout_s: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        try:
            chunk = os.read(self._master, 1 << 16) if ready else b""
        except OSError:  # EIO: nobody holds the other end any more
            chunk = b""
        self.screen += chunk.decode(errors="replace")
        return bool(chunk)

    def end(self) -> int:
        """Read to its end: the exit code."""
        while self._read(30.0):
            pass
        return self.process.wait(30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_top_draws_a_live_run_in_place_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    observer = str(tmp_path / "join.observer.toml")
    with listening(tmp_path, num_env_runners=1).build() as algo:
        is_over = threading.Event()

        def train() -> None:
            while not is_over.is_set():
                algo.train()

        training = threading.Thread(target=train)
        training.start()
        terminals = [
            Terminal(tmp_path, observer, "--interval", "0.1", rows=40, columns=120),
            Terminal(tmp_path, observer, "--interval", "0.1", "--timeout", "1", rows=8, columns=60),
        ]
        watching, small = terminals
        try:
            for terminal in terminals:
                terminal.wait_for(r"run \w{8} at tcp://")
                terminal.wait_for(r"\d+ sampled/s")
            watching.wait_for(r"runner-0 .* ok")
            assert "\x1b[" in watching.screen  # drawn in place
            assert "door      " in watching.screen
            watching.process.send_signal(signal.SIGINT)
            assert watching.end() == 130
            assert watching.screen.rstrip().endswith(("\x1b[?25h", "interrupted")), watching.screen[-200:]
            assert "Traceback" not in watching.screen
            is_over.set()
            training.join()
            algo.stop()
            assert small.end() == 69  # the run is over
            assert "no broker at tcp://" in small.screen.replace("\r\n", " ")
            assert "\x1b[?25h" in small.screen  # the cursor is there again
            assert "Traceback" not in small.screen
        finally:
            is_over.set()
            for terminal in terminals:
                terminal.close()
