"""Equal shards of episodes or of a train batch, so that every rank trains the same number of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["shard_batch", "shard_episodes"]


def shard_episodes(episodes: Any, num_ranks: int) -> tuple[list[list[Any]], int]:
    """Cut episodes into `num_ranks` lists of equally many env steps, in order.

    An episode that crosses a border is sliced there. Its first part is then not done, and the rest is in the next
    rank's shard.

    Args:
        episodes: Episodes, an EpisodeBatch, or a list of EpisodeBatches.
        num_ranks: ≥ 1.

    Returns:
        (The shards, env steps over all of them: the largest multiple of `num_ranks`.)

    Raises:
        ValueError: There are fewer env steps than ranks.
    """
    items = _flat(episodes)
    total = sum(len(item) for item in items)
    per_rank = total // num_ranks
    if per_rank == 0:
        raise ValueError(
            f"{total} env steps cannot be shared by {num_ranks} learners: pass at least {num_ranks} steps."
        )
    shards: list[list[Any]] = [[] for _ in range(num_ranks)]
    rank, room = 0, per_rank
    for item in items:
        start = 0
        while start < len(item) and rank < num_ranks:
            stop = min(start + room, len(item))
            shards[rank].append(item if (start, stop) == (0, len(item)) else item[start:stop])
            room -= stop - start
            start = stop
            if room == 0:
                rank, room = rank + 1, per_rank
    return shards, per_rank * num_ranks


def shard_batch(batch: Mapping[str, Any], num_ranks: int) -> list[dict[str, Any]]:
    """Cut a train batch into `num_ranks` batches of equally many rows, in order. Surplus rows are left out.

    Args:
        batch: Module id → column → array or tensor ``[rows, ...]`` (or just column → …).
        num_ranks: ≥ 1.

    Raises:
        ValueError: A module has fewer rows than there are ranks.
    """

    def part(value: Any, rank: int) -> Any:
        if isinstance(value, Mapping):
            return {name: part(item, rank) for name, item in value.items()}
        if isinstance(value, tuple):
            return tuple(part(item, rank) for item in value)
        per_rank = len(value) // num_ranks
        if per_rank == 0:
            raise ValueError(
                f"{len(value)} rows cannot be shared by {num_ranks} learners: pass at least {num_ranks} rows."
            )
        return value[rank * per_rank : (rank + 1) * per_rank]

    return [part(batch, rank) for rank in range(num_ranks)]


def _flat(episodes: Any) -> list[Any]:
    flat: list[Any] = []
    for item in episodes:
        if isinstance(item, Sequence) and not hasattr(item, "get_rewards"):
            flat.extend(item)  # an EpisodeBatch
        else:
            flat.append(item)
    return flat
