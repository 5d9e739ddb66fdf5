"""One attempt to form a generation of learner ranks, which fails as soon as one of them dies or hangs.

    driver ──rejoin──► every rank ──► rendezvous in the store ──► connect ──► adopt the newest state ──► done
       └── a rank died, hangs or failed: the attempt is cancelled, and repeated without it

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
    """Return the seconds that ranks have to connect once all are present; NCCL's first connection is slow."""
    return 30.0 if config.num_gpus_per_learner else 4.0


async def form_group(
    handles: Sequence[Any],
    store: str,
    generation: int,
    *,
    end_if_hanging: Callable[..., Awaitable[bool]],
    deadline_s: float,
    registers: bool = True,
) -> None:
    """Form a group of these ranks, all with the newest state among them.

    A rank that hangs is killed: its event loop does not answer, or the attempt takes longer than `deadline_s`
    (transferring a large state takes time).

    Args:
        handles: The ranks in rank order.
        store: The rendezvous store; see `LearnerRole.rejoin`.
        generation: Higher than all earlier ones.
        end_if_hanging: ``await end_if_hanging(handle, what, is_certain=…)``; see `LearnerSupervisor`.
        deadline_s: Seconds for the whole attempt.
        registers: See `LearnerRole.rejoin`.

    Raises:
        PeerLostError: A rank died, hung, or could not reach the others; the live ranks can try again.
        Exception: The user's code failed in a rank.
    """
    calls = {
        asyncio.ensure_future(handle.call("rejoin", rank, len(handles), store, generation, registers)): handle
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
