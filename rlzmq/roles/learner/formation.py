"""One attempt to bring learner ranks together as a generation: it ends as soon as one of them dies or hangs.

    driver ──rejoin──► every rank ──► they meet in the store ──► connect ──► adopt the newest state ──► done
       └── a rank died, hangs or failed: the others are called off, and tried again without it

| consumes                 | produces           | waits for         | unblocked by                             |
|--------------------------|--------------------|-------------------|------------------------------------------|
| the ranks' `rejoin`      | a new generation   | all of its ranks  | a death, a failure, silence, the deadline |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.errors import PeerLostError

__all__ = ["connecting_timeout_s", "form_group"]

_LOOK_EVERY_S = 1.0


def connecting_timeout_s(config: BaseConfig) -> float:
    """Seconds that ranks have to connect to each other once all of them are there; NCCL's first time is slow."""
    return 30.0 if config.num_gpus_per_learner else 4.0


async def form_group(
    handles: Sequence[Any],
    store: str,
    generation: int,
    *,
    end_if_hanging: Callable[..., Awaitable[bool]],
    deadline_s: float,
) -> None:
    """Bring these ranks together, all with the newest state among them.

    Who hangs meanwhile is killed: its event loop does not answer, or all of it takes longer than `deadline_s`
    (a large state takes its time).

    Args:
        handles: The ranks in rank order.
        store: Where they meet; see `LearnerRole.rejoin`.
        generation: Above all before it.
        end_if_hanging: ``await end_if_hanging(handle, what, is_certain=…)``; see `LearnerSupervisor`.
        deadline_s: Seconds for all of it.

    Raises:
        PeerLostError: One of them died or hung, or could not reach the others; who lives can try again.
        Exception: What the user's code raised in one of them.
    """
    calls = {
        asyncio.ensure_future(handle.call("rejoin", rank, len(handles), store, generation)): handle
        for rank, handle in enumerate(handles)
    }
    deadline = time.monotonic() + deadline_s
    pending = set(calls)
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=_LOOK_EVERY_S, return_when=asyncio.FIRST_EXCEPTION
            )
            failures = [error for call in done if (error := call.exception()) is not None]
            for failure in sorted(failures, key=lambda failure: isinstance(failure, PeerLostError)):
                raise failure  # an error of the user's code before its consequences
            late = [calls[call] for call in pending]
            is_over = time.monotonic() >= deadline
            hanging = await asyncio.gather(
                *(end_if_hanging(handle, "the forming of the group", is_certain=is_over) for handle in late)
            )
            if any(hanging):
                names = ", ".join(handle.name for handle, hangs in zip(late, hanging, strict=True) if hangs)
                raise PeerLostError(f"{names} hung while the learner group was formed")
    finally:
        for call in pending:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
