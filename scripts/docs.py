"""Build the documentation site into build/docs; a warning is an error: ``python3 scripts/docs.py``."""

from __future__ import annotations

import shutil
import sys

from _venv import ROOT, ensure_venv, run

_DOCTREES = ROOT / "build" / "doctrees"  # a build reads only pages that changed since the last one


def main() -> int:
    """Build the site; return 0 if there was no warning."""
    python = ensure_venv(dev=True)
    source, site = ROOT / "docs", ROOT / "build" / "docs"
    code = run(python, "-m", "sphinx", "-q", "-W", "--keep-going", "-d", _DOCTREES, source, site)
    if code:
        shutil.rmtree(_DOCTREES, ignore_errors=True)  # otherwise the next build would not repeat the warnings
    else:
        print(f"built {site / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
