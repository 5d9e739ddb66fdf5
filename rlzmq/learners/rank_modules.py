"""What torch imports only when the first process group or DistributedDataParallel is made.

That takes seconds, in which the interpreter's lock is held and a rank answers nobody: so it is done before.
"""

from __future__ import annotations

import importlib

__all__ = ["RANK_MODULES", "import_for_ranks"]

RANK_MODULES = ("torch.distributed.nn.functional", "torch._dynamo")


def import_for_ranks() -> None:
    """Import `RANK_MODULES`; to be called before a rank is asked for anything."""
    for name in RANK_MODULES:
        importlib.import_module(name)
