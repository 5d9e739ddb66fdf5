"""Set up a virtualenv, then run every check: ruff, mypy, the documentation's build, and the tests.

Needs only Python 3.11: ``python3 scripts/test.py [pytest arguments]``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from _venv import ROOT, ensure_venv, run

_PYTEST = ("-m", "pytest")
_WORKERS = "4"


def main() -> int:
    """Return 0 if every check passed, else the exit code of one that failed."""
    python = ensure_venv(dev=True)
    checks = [
        run(python, "-m", "ruff", "check", "."),
        run(python, "-m", "ruff", "format", "--check", "."),
    ]
    # Types are checked and the documentation is built beside the tests, which mostly wait for processes.
    checkers = [_start(python, "-m", "mypy")]
    if not sys.argv[1:]:
        # One process compiles what all import, and rewrites the tests' asserts, in the workers' stead.
        _start(python, *_PYTEST, "--collect-only").communicate()
        checkers.append(_start(python, "scripts/docs.py"))
    checks += _tests(python, sys.argv[1:])
    for checker in checkers:
        said, _ = checker.communicate()
        print("$ " + " ".join(map(str, checker.args)), said.decode(), sep="\n", end="", flush=True)
        checks.append(checker.returncode)
    return next((code for code in checks if code), 0)


def _start(*command: str | Path) -> subprocess.Popen[bytes]:
    """Start a command whose output is kept for later, in the time that the tests leave."""
    nice = () if os.name == "nt" else ("nice",)
    return subprocess.Popen([*nice, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _tests(python: Path, arguments: list[str]) -> Iterator[int]:
    """Yield the exit codes of pytest: of the requested tests, in one process, or of all tests."""
    if arguments:
        yield run(python, *_PYTEST, *arguments)
        return
    # Half of a test's time is waiting for processes. Tests with time limits run after the others.
    yield run(python, *_PYTEST, "-m", "not slow and not alone", "-n", _WORKERS, "--dist", "worksteal")
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.alone" in path.read_text()]
    yield run(python, *_PYTEST, "-m", "alone and not slow", *files)


if __name__ == "__main__":
    sys.exit(main())
