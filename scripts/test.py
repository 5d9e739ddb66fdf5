"""Set up a virtualenv, then run every check: ruff, mypy, and the tests.

Needs only Python 3.11: ``python3 scripts/test.py [pytest arguments]``.
"""

from __future__ import annotations

import sys

from _venv import ensure_venv, run


def main() -> int:
    """0 when every check passed; else the exit code of the first that did not."""
    python = ensure_venv(dev=True)
    steps = [
        (python, "-m", "ruff", "check", "."),
        (python, "-m", "ruff", "format", "--check", "."),
        (python, "-m", "mypy"),
        (python, "-m", "pytest", *sys.argv[1:]),
    ]
    failed = 0
    for step in steps:
        failed = run(*step) or failed
    return failed


if __name__ == "__main__":
    sys.exit(main())
