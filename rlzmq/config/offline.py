"""Settings of recorded data: what env runners write, and what offline algorithms read."""

from __future__ import annotations

from typing import Any

from rlzmq.config.settings import PositiveInt, fixed, settings

__all__ = ["OfflineDataSettings"]

_WRITE = "write the data as shards: rlzmq.replay.write_shard(directory, episodes), or `rlzmq record`."


@settings
class OfflineDataSettings:
    """Recorded data: what offline algorithms train on, and recording of sampled episodes.

    Args:
        input_: Directory with shards at any depth, or a list of directories and files; each learner's machine needs
            them. For offline algorithms (BC, MARWIL, CQL, IQL), which need it.
        dataset_num_iters_per_learner: Batches that each learner trains in an update; None: one epoch.
        input_read_method: Only None: data are shards.
        input_read_episodes: Only True: shards hold episodes.
        input_read_sample_batches: Only False.
        materialize_data: Only False: files are mapped into memory.
        materialize_mapped_data: Only False: batches are built for each update, with the current weights.
        output: Directory into which env runners write the episodes that they sample, as shards (`rlzmq inspect`
            shows them); several runs may write into one. None: nothing is recorded.
        output_max_rows_per_file: Env steps after which an env runner writes a shard; unfinished episodes are left for
            the next one.
        output_write_remaining_data: Whether episodes that are unfinished when an env runner ends are written, too.
    """

    input_: str | list[str] | None = None
    dataset_num_iters_per_learner: PositiveInt | None = None
    input_read_method: Any = fixed(default=None, instead=_WRITE)
    input_read_episodes: bool = fixed(default=True, instead=_WRITE)
    input_read_sample_batches: bool = fixed(default=False, instead=_WRITE)
    materialize_data: bool = fixed(
        default=False, instead="the operating system keeps the files' pages in memory."
    )
    materialize_mapped_data: bool = fixed(
        default=False, instead="batches are built with the current weights."
    )
    output: str | None = None
    output_max_rows_per_file: PositiveInt = 10_000
    output_write_remaining_data: bool = False
