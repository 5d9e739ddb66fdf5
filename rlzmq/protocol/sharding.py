"""Division of a batch among learner ranks: the steps of each fragment that each rank trains.

Ranks get equal shares, or, if episodes are kept together, all steps of certain environments: an episode belongs to one
environment, so it stays with one rank.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

from rlzmq.protocol.ledger import Entry, Ledger
from rlzmq.wire.fragment_message import FragmentRange

__all__ = ["rank_of_env", "rank_shares", "shards_by_env", "take_shards", "take_steps"]

_NUMBER = re.compile(r"(\d+)(?:@.*)?$")


def rank_shares(num_env_steps: int, num_ranks: int) -> list[int]:
    """Return each rank's share of a batch, as equal as integers allow. The first ranks get the remainder.

    Shares are equal for the number of ranks that the batch was configured for. After the loss of a rank they may
    differ by one step.
    """
    base, extra = divmod(num_env_steps, num_ranks)
    return [base + (rank < extra) for rank in range(num_ranks)]


def take_shards(ledger: Ledger, entries: Sequence[Entry], shares: Sequence[int]) -> list[list[FragmentRange]]:
    """Take exactly ``shares[rank]`` steps for every rank, from the entries in the given order.

    A fragment that straddles two ranks goes to both, with different ranges. The rest of the last one remains free.

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


def take_steps(ledger: Ledger, entries: Sequence[Entry], num_env_steps: int) -> list[FragmentRange]:
    """Take exactly `num_env_steps` steps, from the entries in the given order."""
    (ranges,) = take_shards(ledger, entries, [num_env_steps])
    return ranges


def rank_of_env(runner_name: str, env_index: int, num_envs: int, num_ranks: int) -> int:
    """Return the rank that gets an environment's steps.

    The result depends only on the arguments, so it survives a restart of the broker. A runner's environments are
    assigned to ranks in blocks, and each runner begins with a different rank, so ranks get similar amounts. With
    fewer environments than ranks, some ranks get nothing.

    Args:
        runner_name: Name such as ``runner-3``; a name without a number is hashed.
        env_index, num_envs: Index of the environment, and the runner's number of environments, >= 1.
        num_ranks: Number of learner ranks.
    """
    number = _NUMBER.search(runner_name)
    runner = int(number[1]) if number is not None else zlib.crc32(runner_name.encode())
    return (runner + env_index * num_ranks // num_envs) % num_ranks


def shards_by_env(
    ledger: Ledger, ranges: Sequence[FragmentRange], num_ranks: int
) -> list[list[FragmentRange]]:
    """Split an update's ranges by the ranks of their environments.

    A fragment without env step counts per environment goes as a whole to the rank of its runner's first environment.

    Returns:
        One list of ranges per rank, in the order of `ranges`; a rank may get none.
    """
    shards: list[list[FragmentRange]] = [[] for _ in range(num_ranks)]
    for fragment, first, num_steps in ranges:
        entry = ledger.entries[fragment]
        env_steps = entry.env_steps or (entry.size,)
        begin, end = 0, 0
        for env_index, count in enumerate(env_steps):
            end += count
            rank = rank_of_env(entry.runner_name, env_index, len(env_steps), num_ranks)
            following = env_index + 1
            if following < len(env_steps) and rank == rank_of_env(
                entry.runner_name, following, len(env_steps), num_ranks
            ):
                continue
            low, high = max(begin, first), min(end, first + num_steps)
            if low < high:
                shards[rank].append(FragmentRange(fragment, low, high - low))
            begin = end
    return shards
