"""The driver's side of the journal: what of the run before is given back, and when checkpoints make it needless."""

from __future__ import annotations

import contextlib
import logging

from rlzmq.core.errors import PeerLostError
from rlzmq.driver.broker_supervision import BrokerKeeper

__all__ = ["RunJournal"]

_log = logging.getLogger("rlzmq.driver")

# Versions by which data of a journal may be older than the checkpoint: updates train data of their own version.
_MAX_LAG = 0


class RunJournal:
    """The journal is looked at once, before the run's first update, and given back once.

    Args:
        broker: Its keeper: whichever broker it has now writes the journal.

    Attributes:
        is_due: It was not given back yet.
        num_failures: How often a broker could not write it.
    """

    def __init__(self, broker: BrokerKeeper) -> None:
        self._broker = broker
        self._terms = (-1, 0)
        self.is_due = True
        self.num_failures = 0

    async def read(self, next_update: int) -> list[str]:
        """Look at what the journal of a run before this one holds, before going on from a checkpoint.

        Args:
            next_update: The checkpoint's weights version; -1: the run begins anew.

        Returns:
            Runners whose fragments come back: to go on from the checkpoint they would sample those again.
        """
        if not self.is_due:
            return []
        self._terms = next_update, _MAX_LAG
        names: list[str] = await self._broker.handle.read_journal(*self._terms)
        return names

    async def recall(self, generation: int) -> None:
        """Give the broker what `read` found, in the lineage that has just begun."""
        counts = await self._broker.handle.recall(generation, *self._terms)
        self.is_due = False
        if counts:
            text = ", ".join(f"{reason} {num_steps}" for reason, num_steps in sorted(counts.items()))
            _log.warning("env steps in the journal of the run before: %s", text)

    async def note_checkpoint(self, next_update: int) -> None:
        """A checkpoint that a run would go on from holds all updates below this one."""
        # Untold, a new broker keeps a little more than it must.
        with contextlib.suppress(PeerLostError):
            await self._broker.handle.checkpoint_covers(next_update)
