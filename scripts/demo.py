"""Set up a virtualenv, then run ``rlzmq demo`` in it. Needs only Python 3.11: ``python3 scripts/demo.py``."""

from __future__ import annotations

import sys

from _venv import ensure_venv, run

if __name__ == "__main__":
    sys.exit(run(ensure_venv(dev=False), "-m", "rlzmq", "demo"))
