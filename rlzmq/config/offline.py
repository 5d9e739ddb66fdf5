"""Settings of recorded data: what env runners write."""

from __future__ import annotations

from rlzmq.config.settings import PositiveInt, settings

__all__ = ["OfflineDataSettings"]


@settings
class OfflineDataSettings:
    """Recording of sampled episodes.

    Args:
        output: Directory into which env runners write the episodes that they sample, as shards (`rlzmq inspect`
            shows them); several runs may write into one. None: nothing is recorded.
        output_max_rows_per_file: Env steps after which an env runner writes a shard; unfinished episodes are left for
            the next one.
        output_write_remaining_data: Whether episodes that are unfinished when an env runner ends are written, too.
    """

    output: str | None = None
    output_max_rows_per_file: PositiveInt = 10_000
    output_write_remaining_data: bool = False
