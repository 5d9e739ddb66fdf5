"""Checkpoints that a run writes by itself: the state between two updates, the files on a thread.

    an iteration's end ──due?──► get_state, copied ──► a thread: space? write, fsync, rename, remove old ones
                                                        │ fails
                                                        └──► log, counter; training goes on

One write at a time: what falls due meanwhile waits for the next iteration's end. Without a directory the
learners' state alone is copied into the driver's memory now and then, for the day when all learners die.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlzmq.algorithms.checkpoints import to_components
from rlzmq.algorithms.state_tree import to_parts
from rlzmq.core import faults
from rlzmq.core.checkpoint_series import CheckpointSeries
from rlzmq.core.errors import CheckpointError, RlzmqError
from rlzmq.driver.run_coroutine import needs_processes

__all__ = ["CheckpointKeeper"]

_log = logging.getLogger("rlzmq.checkpoints")


class CheckpointKeeper:
    """Keeps an AsyncAlgorithm's checkpoints.

    Args:
        algorithm: The AsyncAlgorithm.

    Attributes:
        newest: The newest checkpoint that this run wrote; None before.
        num_written, num_failed: Checkpoints, by how they ended.
    """

    def __init__(self, algorithm: Any) -> None:
        self._algorithm = algorithm
        self._series: CheckpointSeries | None = None
        self._every_s: float | None = None
        self._begun_at = time.monotonic()
        self._copied_at = -math.inf
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None
        self._score: float | None = None
        self._written_state: dict[str, Any] | None = None
        self.newest: Path | None = None
        self.num_written = 0
        self.num_failed = 0

    def keep(self, directory: str | Path, *, every_s: float | None, num: int | None) -> None:
        """Write checkpoints there from now on.

        Args:
            directory: Of the numbered checkpoints.
            every_s: Seconds from the beginning of one write to the next; None: ``config.checkpoint_every_s``,
                and if that is None, only by `write`.
            num: How many of the newest stay, the best by mean return beside them; None: ``config.checkpoint_keep``.
        """
        config = self._algorithm.config
        self._series = CheckpointSeries(directory, keep=config.checkpoint_keep if num is None else num)
        self._every_s = config.checkpoint_every_s if every_s is None else every_s
        self._begun_at = time.monotonic()

    def counters(self) -> dict[str, int]:
        """For the result's ``fault_tolerance``; {} where nothing is kept."""
        if self._series is None:
            return {}
        return {"num_checkpoints": self.num_written, "num_failed_checkpoints": self.num_failed}

    async def after_iteration(self, result: Mapping[str, Any]) -> None:
        """Between two iterations: begin a checkpoint, or copy the learners' state, if it is time."""
        score = result["env_runners"].get("episode_return_mean")
        self._score = float(score) if score is not None and math.isfinite(score) else None
        await self._note_written()
        now = time.monotonic()
        if self._is_due(now):
            await self._begin()
        elif self._copy_is_due(now):
            await self._algorithm.settle()
            await self._algorithm.session.learner_group.get_state()  # which remembers it
            self._copied_at = now

    async def write(self) -> Path:
        """Write a checkpoint now and wait for it; where one of this iteration is there, that one.

        Raises:
            CheckpointError: It cannot be written. Former ones are as they were.
        """
        assert self._series is not None
        await self._off_loop(self.wait)
        if self.newest is None or int(self.newest.name) != self._algorithm.iteration:
            await self._begin()
            await self._off_loop(self.wait)
            if self._error is not None:
                raise self._error
            await self._note_written()
        assert self.newest is not None
        return self.newest

    async def write_if_possible(self, timeout_s: float) -> None:
        """Write one where the learners still answer; a run that ends has its former ones otherwise."""
        if self._series is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self.write()
        except (TimeoutError, RlzmqError) as error:
            _log.warning(
                "No last checkpoint could be written (%r): the newest one stays the one before.", error
            )

    def wait(self) -> None:
        """Until the write at hand has ended."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    # -- private --------------------------------------------------------------------------------

    def _is_due(self, now: float) -> bool:
        if self._series is None or self._every_s is None or now - self._begun_at < self._every_s:
            return False
        return self._writing is None or not self._writing.is_alive()

    def _copy_is_due(self, now: float) -> bool:
        every_s = self._algorithm.config.learner_snapshot_every_s
        if every_s is None or not self._algorithm.config.num_learners:
            return False
        return bool(now - self._copied_at >= every_s)

    async def _begin(self) -> None:
        """Take the state, and leave the writing to a thread."""
        assert self._series is not None
        algorithm, series = self._algorithm, self._series
        self._begun_at = self._copied_at = time.monotonic()
        # A copy: the arrays of a learner in this process change with its next update.
        state = to_parts(copy.deepcopy(await algorithm.get_state()))
        components, about = to_components(algorithm._face.algorithm, algorithm.config, state)
        iteration = int(algorithm.iteration)
        about |= {
            "iteration": iteration,
            "score": self._score,
            "num_env_steps_trained_lifetime": state["algorithm"]["results"]["num_env_steps_trained_lifetime"],
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

        version = state["learner_group/learner"]["weights_seq_no"]

        def write() -> None:
            self._error = None
            try:
                self.newest = series.write(iteration, components, about)
            except (CheckpointError, TypeError, OSError) as error:
                self._error = error
                self.num_failed += 1
                faults.record("checkpoint_failed", iteration=iteration, error=str(error))
                _log.warning("%s Training goes on; former checkpoints are as they were.", error)
            else:
                self.num_written += 1
                self._written_state = {"learner_group/learner": {"weights_seq_no": version}}
                faults.record("checkpoint", iteration=iteration, path=str(self.newest))

        # Its end is waited for by `wait`; a disk that never answers shall not keep the process.
        self._writing = threading.Thread(target=write, name="rlzmq-checkpoint", daemon=True)
        self._writing.start()

    async def _note_written(self) -> None:
        """Tell the run of a checkpoint that has got onto the disk since the last call."""
        state, self._written_state = self._written_state, None
        if state is not None:
            await self._algorithm.session.note_checkpoint(state)

    async def _off_loop(self, function: Callable[[], None]) -> None:
        """A blocking call, away from the event loop where there is one."""
        if needs_processes(self._algorithm.config):
            await asyncio.to_thread(function)
        else:
            function()
