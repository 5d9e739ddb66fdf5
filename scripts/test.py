"""Set up a virtualenv, then run every check: ruff, mypy, and the tests.

Needs only Python 3.11: ``python3 scripts/test.py [pytest arguments]``.
"""

from __future__ import annotations

import subprocess
import sys

from _venv import ROOT, ensure_venv, run


def main() -> int:
    """0 when every check passed; else the exit code of one that did not."""
    python = ensure_venv(dev=True)
    checks = [
        run(python, "-m", "ruff", "check", "."),
        run(python, "-m", "ruff", "format", "--check", "."),
    ]
    # Hundreds of processes import these; where PYTHONDONTWRITEBYTECODE is set none of them would keep what it compiled.
    run(python, "-m", "compileall", "-q", "rlzmq", "tests")
    # The types are checked while the tests run: these wait for processes most of the time.
    types = [str(python), "-m", "mypy"]
    with subprocess.Popen(types, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as checker:
        checks.append(run(python, "-m", "pytest", *sys.argv[1:]))
        said, _ = checker.communicate()
        print("$ " + " ".join(types), said.decode(), sep="\n", end="", flush=True)
        checks.append(checker.returncode)
    return next((code for code in checks if code), 0)


if __name__ == "__main__":
    sys.exit(main())
