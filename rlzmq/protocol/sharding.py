"""Exact batches: which steps of which fragments every learner rank trains."""

from __future__ import annotations

from collections.abc import Sequence

from rlzmq.protocol.ledger import Entry, Ledger
from rlzmq.wire.ranges import FragmentRange

__all__ = ["rank_shares", "take_shards"]


def rank_shares(num_env_steps: int, num_ranks: int) -> list[int]:
    """A batch as equally as integers allow; the first ranks get the remainder.

    With the number of ranks that the batch was planned for, all shares are equal; a group that has
    shrunk keeps the batch and so has shares that may differ by one step.
    """
    base, extra = divmod(num_env_steps, num_ranks)
    return [base + (rank < extra) for rank in range(num_ranks)]


def take_shards(ledger: Ledger, entries: Sequence[Entry], shares: Sequence[int]) -> list[list[FragmentRange]]:
    """Takes exactly ``shares[rank]`` steps for every rank, from the entries in the given order.

    A fragment that straddles two ranks goes to both, with different ranges; what is left of the
    last one stays free.

    Returns:
        One list of ranges per rank; together they are contiguous in the order of `entries`.
    """
    assert sum(entry.free for entry in entries) >= sum(shares), "fewer free steps than the batch needs"
    shards: list[list[FragmentRange]] = []
    remaining = iter(entries)
    entry = next(remaining, None)
    for share in shares:
        shard: list[FragmentRange] = []
        while share:
            while entry is not None and not entry.free:
                entry = next(remaining, None)
            assert entry is not None
            taken = ledger.take(entry, min(share, entry.free))
            shard.append(taken)
            share -= taken.num_steps
        shards.append(shard)
    return shards
