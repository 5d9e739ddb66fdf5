"""CheckpointKeeper: writes automatic checkpoints, with the state taken between updates and the files on a thread.

    an iteration's end ──due?──► get_state, copied ──► a thread: space? write, fsync, rename, remove old ones
                                                        │ fails
                                                        └──► log, counter; training continues

Only one write runs at a time. A checkpoint that becomes due during a write waits for the end of the next iteration. The
learners' state is also copied to the driver's memory at intervals, to recover from the death of all learners.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlzmq.algorithms.checkpoints import to_components, to_parts
from rlzmq.core import faults
from rlzmq.core.checkpoint_series import CheckpointSeries
from rlzmq.core.errors import CheckpointError, ConfigurationError, RlzmqError
from rlzmq.driver.synchronous import needs_processes

__all__ = ["CheckpointKeeper"]

_log = logging.getLogger("rlzmq.checkpoints")


class CheckpointKeeper:
    """Writer of an AsyncAlgorithm's automatic checkpoints.

    Attributes:
        is_on: Whether iterations have to be told to `after_iteration`, and there are `counters`.
        newest: The newest checkpoint written by this run; None before the first.
        resumed_from: The checkpoint that this run was resumed from; None for a new run.
        num_written, num_failed: Number of checkpoints that were written, and of failed writes.
    """

    def __init__(self, algorithm: Any) -> None:
        self._algorithm = algorithm
        config = algorithm.config
        self._copies = bool(config.learner_snapshot_every_s is not None and config.num_learners)
        self.is_on: bool = self._copies
        self._series: CheckpointSeries | None = None
        self._every_s: float | None = None
        self._begun_at = self._copied_at = -math.inf  # the first one is due after the first iteration
        self._writing: threading.Thread | None = None
        self._error: BaseException | None = None
        self._score: float | None = None
        self.newest: Path | None = None
        self.resumed_from: Path | None = None
        self.num_written = 0
        self.num_failed = 0

    def keep(
        self, directory: str | Path | CheckpointSeries, *, every_s: float | None, num: int | None
    ) -> None:
        """Start writing automatic checkpoints, the first one after the next iteration.

        Args:
            directory: Directory of the numbered checkpoints, or those of a `RunDirectory`.
            every_s: Seconds between the starts of two writes; None: ``config.checkpoint_every_s``. If that is None,
                too, only `write` writes checkpoints.
            num: Number of newest checkpoints to keep besides the one with the best mean return; None:
                ``config.checkpoint_keep``.

        Raises:
            ConfigurationError: Another driver has the directory, or the checkpoints in it are another run's.
        """
        config = self._algorithm.config
        series = directory if isinstance(directory, CheckpointSeries) else CheckpointSeries(directory)
        if self._series is not None:
            self.close()
        series.lock()
        try:
            series.check_continued_from(self.newest or self.resumed_from)
        except ConfigurationError:
            series.release()
            raise
        series.keep = config.checkpoint_keep if num is None else num
        self._series = series
        self.is_on = True
        self._every_s = config.checkpoint_every_s if every_s is None else every_s

    def counters(self) -> dict[str, int]:
        """Return the counters for the result's ``fault_tolerance``; {} without a directory."""
        if self._series is None:
            return {}
        return {"num_checkpoints": self.num_written, "num_failed_checkpoints": self.num_failed}

    async def after_iteration(self, result: Mapping[str, Any], evaluation: Mapping[str, Any]) -> None:
        """Start a checkpoint, or copy the learners' state, if due. Called between two iterations.

        Args:
            result: The iteration's result.
            evaluation: Its evaluation; {} if it has none.
        """
        places = (result["env_runners"], evaluation.get("env_runners", {}))
        scores = [float(place.get("episode_return_mean", math.nan)) for place in places]
        self._score = next(filter(math.isfinite, scores), None)  # an offline run has only the latter
        now = time.monotonic()
        if self._is_due(now):
            await self._begin()
        elif self._copy_is_due(now):
            await self._algorithm.settle()
            await self._algorithm.session.learner_group.get_state()  # keeps a copy
            self._copied_at = now

    async def write(self, *, state_timeout_s: float | None = None) -> Path:
        """Write a checkpoint now, unless there is one of this iteration, and return its path.

        Args:
            state_timeout_s: Time for the processes to send their states; None: unlimited. Writing has no limit.

        Raises:
            CheckpointError: The checkpoint cannot be written. Earlier ones are unchanged.
            TimeoutError: The states did not arrive in time.
        """
        assert self._series is not None
        await self._off_loop(self.wait)
        if self.newest is None or int(self.newest.name) != self._algorithm.iteration:
            waits = state_timeout_s is not None and needs_processes(self._algorithm.config)
            async with asyncio.timeout(state_timeout_s) if waits else contextlib.nullcontext():
                await self._begin()
            await self._off_loop(self.wait)
            if self._error is not None:
                raise self._error
        assert self.newest is not None
        return self.newest

    async def write_if_possible(self, timeout_s: float) -> None:
        """Write a checkpoint if the learners still respond. Called when a run fails or is interrupted."""
        if self._series is None:
            return
        try:
            await self.write(state_timeout_s=timeout_s)
        except (TimeoutError, RlzmqError) as error:
            _log.warning(
                "The last checkpoint could not be written (%r): the previous one remains the newest.", error
            )

    def wait(self) -> None:
        """Wait for the current write to finish."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def close(self) -> None:
        """Wait for the current write, and release the directory. Idempotent."""
        self.wait()
        if self._series is not None:
            self._series.release()
            self._series = None

    # -- private --------------------------------------------------------------------------------

    def _is_due(self, now: float) -> bool:
        if self._series is None or self._every_s in (None, math.inf) or now - self._begun_at < self._every_s:
            return False
        return self._writing is None or not self._writing.is_alive()

    def _copy_is_due(self, now: float) -> bool:
        return self._copies and now - self._copied_at >= self._algorithm.config.learner_snapshot_every_s

    async def _begin(self) -> None:
        """Get the state, and start a thread that writes it."""
        assert self._series is not None
        algorithm, series = self._algorithm, self._series
        self._begun_at = self._copied_at = time.monotonic()
        # Copied because the next update changes the arrays of a learner in this process.
        state = to_parts(copy.deepcopy(await algorithm.get_state()))
        components, about = to_components(algorithm._dispatch.algorithm, algorithm.config, state)
        iteration = int(algorithm.iteration)
        about |= {
            "iteration": iteration,
            "score": self._score,
            "num_env_steps_trained_lifetime": state["algorithm"]["results"]["num_env_steps_trained_lifetime"],
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

        def write() -> None:
            self._error = None
            try:
                self.newest = series.write(iteration, components, about)
            except (CheckpointError, TypeError, OSError) as error:
                self._error = error
                self.num_failed += 1
                faults.record("checkpoint_failed", iteration=iteration, error=str(error))
                _log.warning("%s Training continues; earlier checkpoints are unchanged.", error)
            else:
                self.num_written += 1
                faults.record("checkpoint", iteration=iteration, path=str(self.newest))

        # `wait` joins it. A daemon, so that a hung disk does not keep the process alive.
        self._writing = threading.Thread(target=write, name="rlzmq-checkpoint", daemon=True)
        self._writing.start()

    async def _off_loop(self, function: Callable[[], None]) -> None:
        """Run a blocking function, on a thread if there is an event loop."""
        if needs_processes(self._algorithm.config):
            await asyncio.to_thread(function)
        else:
            function()
