"""RunJournal: the driver's use of the broker's journal, which recovers the data of the previous run."""

from __future__ import annotations

import contextlib
import logging

from rlzmq.core.errors import PeerLostError
from rlzmq.driver.broker_supervision import BrokerKeeper

__all__ = ["RunJournal"]

_log = logging.getLogger("rlzmq.driver")


class RunJournal:
    """The journal of the previous run, read once before the run's first update and restored once.

    Args:
        broker: The BrokerKeeper, whose current broker writes the journal.
        max_lag: Number of versions by which journal data may be older than the checkpoint, as by which the data of an
            update may be older than its weights; below 0: any.

    Attributes:
        is_due: Whether it has not been restored yet.
        num_failures: How often brokers failed to write it.
    """

    def __init__(self, broker: BrokerKeeper, max_lag: int) -> None:
        self._broker = broker
        self._max_lag = max_lag
        self._terms = (-1, max_lag)
        self.is_due: bool = True
        self.num_failures = 0

    async def read(self, next_update: int) -> list[str]:
        """Read the journal of the previous run, before continuing from a checkpoint.

        Args:
            next_update: The checkpoint's weights version; -1: the run starts from scratch.

        Returns:
            Runners whose fragments are recovered. If they continued from the checkpoint, they would sample these again.
        """
        if not self.is_due:
            return []
        self._terms = next_update, self._max_lag
        names: list[str] = await self._broker.handle.read_journal(*self._terms)
        return names

    async def recall(self, generation: int) -> None:
        """Send the result of `read` to the broker, in the lineage that has just begun."""
        counts = await self._broker.handle.recall(generation, *self._terms)
        self.is_due = False
        if counts:
            text = ", ".join(f"{reason} {num_steps}" for reason, num_steps in sorted(counts.items()))
            _log.warning("env steps in the journal of the previous run: %s", text)

    async def note_checkpoint(self, next_update: int) -> None:
        """Record that a checkpoint contains all updates below this one."""
        # If this message is lost, a new broker only keeps more than necessary.
        with contextlib.suppress(PeerLostError):
            await self._broker.handle.checkpoint_covers(next_update)
