"""Prepare a release: set the version, date the CHANGELOG, build and check the wheel and the sdist in ``dist``.

Usage: ``python3 scripts/release.py 0.2.0``; without a version it builds and checks what is there, as CI does.
"""

from __future__ import annotations

import datetime
import re
import shutil
import sys

from _venv import ROOT, ensure_venv, run

_VERSION = ROOT / "rlzmq" / "core" / "version.py"
_CHANGELOG = ROOT / "CHANGELOG.md"
_TITLE = "## Unreleased\n"


def main() -> int:
    """Return 0 if the distributions are built and pass their check."""
    if version := next(iter(sys.argv[1:]), None):
        _set_version(version)
    python = ensure_venv(dev=True)
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    if code := run(python, "-m", "build", "--outdir", "dist"):
        return code
    if code := run(python, "-m", "twine", "check", "--strict", *sorted((ROOT / "dist").iterdir())):
        return code
    if version:
        print(
            f"next: git commit -am 'Release {version}' && git tag v{version} && git push --tags origin HEAD"
        )
    return 0


def _set_version(version: str) -> None:
    """Write the version, and give what is unreleased its name and date."""
    if not re.fullmatch(r"\d+\.\d+\.\d+(?:rc\d+)?", version):
        raise SystemExit(f"{version!r}: expected a version such as 0.2.0 or 0.2.0rc1")
    changes = _CHANGELOG.read_text(encoding="utf-8")
    if _TITLE not in changes:
        raise SystemExit(f"CHANGELOG.md has no {_TITLE.strip()!r}: add it above the changes of this release")
    dated = f"## {version} ({datetime.date.today().isoformat()})\n"
    _CHANGELOG.write_text(changes.replace(_TITLE, dated, 1), encoding="utf-8")
    text = _VERSION.read_text(encoding="utf-8")
    _VERSION.write_text(re.sub(r'(__version__ = )".*"', rf'\1"{version}"', text), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
