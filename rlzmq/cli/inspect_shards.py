"""Recorded episodes, each shard checked byte by byte: what ``rlzmq inspect DIRECTORY`` shows."""

from __future__ import annotations

from pathlib import Path

__all__ = ["show_shards"]


def show_shards(place: Path) -> int:
    """Check and print the shards of a directory; return 0, or 78 if none is usable (raised as ConfigurationError)."""
    import numpy as np

    from rlzmq.connectors.explain import describe_batch
    from rlzmq.core.printable import printable
    from rlzmq.replay.shards import open_shards

    opened = open_shards(place)
    returns, lengths, is_done = [], [], []
    for shard, path in zip(opened.shards, opened.paths, strict=True):
        returns.append(shard.get_returns())
        lengths.append(shard.length)
        is_done.append(shard.terminated | shard.truncated)
        print(
            f"{path.name:<40} whole       {len(shard)} episodes  {shard.num_env_steps} steps  "
            f"return {returns[-1].mean():.2f}"
        )
    for skipped in opened.skipped:
        print(f"{skipped.path.name:<40} NOT USABLE  {printable(skipped.reason)}")
    all_returns, all_lengths = np.concatenate(returns), np.concatenate(lengths)
    first = opened.shards[0]
    print(f"\nobservations  {first.observation_space}\nactions       {first.action_space}")
    print("\n".join(describe_batch(dict(first.columns))))
    num_ended, num_steps = int(np.concatenate(is_done).sum()), int(all_lengths.sum())
    print(f"\n{len(all_returns)} episodes ({num_ended} ended), {num_steps} env steps in", end=" ")
    print(f"{len(opened.shards)} shards; {len(opened.skipped)} files skipped")
    for name, values in (("return", all_returns), ("length", all_lengths)):
        print(f"{name}  mean {values.mean():.2f}  min {values.min():.2f}  max {values.max():.2f}")
    return 0
