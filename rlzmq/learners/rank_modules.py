"""Modules that torch imports when the first process group or DistributedDataParallel is created.

The import takes seconds, in which the rank holds the GIL and does not respond. Therefore it is done in advance.
"""

from __future__ import annotations

import importlib

__all__ = ["RANK_MODULES", "import_for_ranks"]

RANK_MODULES = ("torch.distributed.nn.functional", "torch._dynamo")


def import_for_ranks() -> None:
    """Import `RANK_MODULES`. Call it before a rank has work to do."""
    for name in RANK_MODULES:
        importlib.import_module(name)
