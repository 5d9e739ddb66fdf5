"""EpisodeRecorder: writes the episodes that an env runner samples into shards."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import make_directories
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.episode_joining import join_chunks
from rlzmq.replay.shards import write_shard

__all__ = ["EpisodeRecorder"]

_log = logging.getLogger("rlzmq.runners")


class EpisodeRecorder:
    """Joins sampled fragments into whole episodes and writes them as shards of a directory.

    Any number of recorders, in any processes, may write into one directory. If a process is killed, its unwritten
    episodes are lost: finished ones of up to `max_env_steps` env steps, and the unfinished ones. After a write error,
    which is logged once, the recorder stops recording.

    Args:
        directory: Directory of the shards.
        max_env_steps: Number of env steps after which a shard is written.
        writes_unfinished: Whether `close` also writes the episodes that have not ended, as chunks that are not done.
        normalize_actions: See `write_shard`.

    Attributes:
        num_episodes: Number of episodes written.
        num_env_steps: Number of env steps written.

    Raises:
        ConfigurationError: `directory` cannot be created, or is a file.
    """

    num_env_steps: int
    num_episodes: int

    def __init__(
        self,
        directory: str | Path,
        *,
        max_env_steps: int,
        writes_unfinished: bool = False,
        normalize_actions: bool | None = None,
    ) -> None:
        self._directory = Path(directory)
        try:
            make_directories(self._directory)
        except OSError as error:
            raise ConfigurationError(
                f"episodes cannot be recorded in {directory}: {error}. Name a directory in offline_data(output=…) that "
                "every env runner can write to."
            ) from None
        self._max_env_steps = max_env_steps
        self._writes_unfinished = writes_unfinished
        self._normalize_actions = normalize_actions
        self._held: list[EpisodeBatch] = []
        self._num_held = 0
        self._unfinished: dict[str, int] = {}  # episode → steps at the last flush
        self._has_failed = False
        self.num_episodes = self.num_env_steps = 0

    def add(self, batch: EpisodeBatch) -> None:
        """Add a sampled batch; write a shard when there are enough env steps."""
        if self._has_failed or not batch.num_env_steps:
            return
        self._held.append(batch)
        self._num_held += batch.num_env_steps
        if self._num_held >= self._max_env_steps:
            self._flush(is_last=False)

    def close(self) -> None:
        """Write the remaining episodes. Idempotent."""
        if self._held:
            self._flush(is_last=True)

    def _flush(self, *, is_last: bool) -> None:
        batch = join_chunks(EpisodeBatch.concat(self._held))
        is_done = batch.terminated | batch.truncated
        writes = np.ones_like(is_done) if is_last and self._writes_unfinished else is_done
        whole, rest = batch.select(np.flatnonzero(writes)), batch.select(np.flatnonzero(~writes))
        # Every vector step continues all episodes of a runner, so an episode that has not grown was abandoned.
        grown = [
            place
            for place, (id_, length) in enumerate(zip(rest.episode_ids, rest.length.tolist(), strict=True))
            if length > self._unfinished.get(id_, 0)
        ]
        rest = rest.select(np.array(grown, np.int64)).compact()
        self._unfinished = dict(zip(rest.episode_ids, rest.length.tolist(), strict=True))
        self._held, self._num_held = [] if is_last or not grown else [rest], 0
        if len(whole):
            self._write(whole)

    def _write(self, whole: EpisodeBatch) -> None:
        try:
            write_shard(self._directory, whole, normalize_actions=self._normalize_actions)
        except (OSError, ValueError) as error:
            self._has_failed = True
            self._held = []
            _log.error(
                "episodes cannot be recorded in %s: %s. Sampling continues, and nothing more is recorded.",
                self._directory,
                error,
            )
            return
        self.num_episodes += len(whole)
        self.num_env_steps += whole.num_env_steps
