"""Keeps the test files as pytest rewrites them (its asserts), before several processes each do so: ``python -m``.

Half of what it costs to collect the tests. pytest keeps them itself unless PYTHONDONTWRITEBYTECODE is set, but then
each of its first processes has rewritten them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from _pytest.assertion.rewrite import PYC_TAIL, _read_pyc, _rewrite_test, _write_pyc_fp, get_cache_dir

_TESTS = Path(__file__).resolve().parents[1]


def _keep(path: Path) -> None:
    kept = get_cache_dir(path) / f"{path.stem}{PYC_TAIL}"
    if _read_pyc(path, kept) is None:
        digest, code = _rewrite_test(path, None)  # type: ignore[arg-type]
        kept.parent.mkdir(exist_ok=True)
        with (part := kept.with_suffix(f".{os.getpid()}")).open("wb") as file:
            _write_pyc_fp(file, digest, code)
        part.replace(kept)


def main() -> None:
    """Rewrite all test files, and through pytest itself its plugins."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(_TESTS / "test_wall_clock.py")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL), ProcessPoolExecutor() as pool:
        list(pool.map(_keep, [*_TESTS.rglob("test_*.py"), *_TESTS.rglob("conftest.py")], chunksize=10))


if __name__ == "__main__":
    main()
