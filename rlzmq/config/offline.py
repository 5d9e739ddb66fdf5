"""Settings of recorded data, which env runners write and offline algorithms read."""

from __future__ import annotations

from typing import Any

from rlzmq.config.settings import PositiveInt, fixed, settings

__all__ = ["OfflineDataSettings"]

_WRITE = "write the data as shards: rlzmq.replay.write_shard(directory, episodes), or `rlzmq record`."


@settings
class OfflineDataSettings:
    """Recorded data for offline algorithms, and recording of sampled episodes.

    Args:
        input_: Directory with shards at any depth, or a list of directories and files, on each learner's machine.
            Required by offline algorithms (BC, MARWIL, CQL, IQL), and only for these.
        dataset_num_iters_per_learner: Batches that each learner trains in an update; None: one epoch.
        input_read_method: Must be None: data are shards.
        input_read_episodes: Must be True: shards hold episodes.
        input_read_sample_batches: Must be False.
        materialize_data: Has no effect; accepted for compatibility with RLlib. Files are mapped into memory.
        materialize_mapped_data: Has no effect; accepted for compatibility with RLlib. Batches are built for each
            update, with the current weights.
        output: Directory into which env runners write their sampled episodes as shards (`rlzmq inspect` shows them).
            Several runs may write into one. None: nothing is recorded.
        output_max_rows_per_file: Number of env steps after which an env runner writes a shard. Unfinished episodes
            are left for the next one.
        output_write_remaining_data: Whether to write episodes that are unfinished when an env runner ends, too.
    """

    input_: str | list[str] | None = None
    dataset_num_iters_per_learner: PositiveInt | None = None
    input_read_method: Any = fixed(default=None, instead=_WRITE)
    input_read_episodes: bool = fixed(default=True, instead=_WRITE)
    input_read_sample_batches: bool = fixed(default=False, instead=_WRITE)
    materialize_data: bool = fixed(default=False, others=(True,))
    materialize_mapped_data: bool = fixed(default=False, others=(True,))
    output: str | None = None
    output_max_rows_per_file: PositiveInt = 10_000
    output_write_remaining_data: bool = False
