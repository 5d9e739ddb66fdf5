"""What the tests' fork servers import before they fork."""

from __future__ import annotations

from rlzmq.actors import forkserver
from rlzmq.core.imports import RANK_MODULES

__all__ = ["WARM"]

WARM = (*forkserver.PRELOAD, *RANK_MODULES)
"""What a run's own server imports before its first rank is made takes seconds: once for all tests, not in each run."""
