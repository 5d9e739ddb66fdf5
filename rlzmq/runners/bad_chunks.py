"""Chunks with values that no loss can use: they are left out and counted, and end the run if they are frequent."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from rlzmq.core.errors import EnvError
from rlzmq.episodes.bad_values import BadValue, BadValues, find_bad_values
from rlzmq.runners.env_failures import FailingRunner, Reproduction, describe_runner

__all__ = ["BadChunks"]

_log = logging.getLogger("rlzmq.runners")

# So many are tolerated at once; beyond that, they must be rarer than this share of the recent env steps, and spoil less
# than this share, so that training goes on.
_MAX_NUM, _MAX_SHARE, _MAX_SPOILT = 4, 0.01, 0.5
_REMEMBERED_STEPS = 10_000
_LOG_EVERY_S = 60.0
_MAX_LOOKED_AT = 100


class _Runner(FailingRunner, Protocol):
    def _drop_unfinished_episodes(self) -> None: ...

    def _way_to(self, batch: object, value: BadValue) -> Reproduction | None: ...


class BadChunks:
    """Checks every batch of a runner before anything else reads it."""

    def __init__(self, runner: _Runner) -> None:
        self._runner = runner
        self._num_steps = self._num_bad = self._num_left_out = (
            0.0  # all halved regularly: recent steps count more
        )
        self._num_untold = 0
        self._told_at: float | None = None

    def left_out_of(self, batch: Any) -> tuple[Any, int]:
        """Return the batch without chunks that hold unusable values, and the number of steps left out.

        If an episode goes on after such a chunk, all unfinished episodes are dropped and the next sample resets the
        environments, since every later chunk could hold the value in its lookback or state, too.

        Raises:
            EnvError: Too many values returned by the environments are unusable; has `way_there`.
            ValueError: The module's outputs are unusable for usable observations.
        """
        found = find_bad_values(batch)
        self._num_steps += batch.num_env_steps
        if self._num_steps > _REMEMBERED_STEPS:
            self._num_steps, self._num_bad = self._num_steps / 2, self._num_bad / 2
            self._num_left_out /= 2
        if found is None:
            return batch, 0
        rest = found.left_out_of(batch)
        num_left_out = batch.num_env_steps - rest.num_env_steps
        self._num_bad += found.num
        self._num_left_out += num_left_out
        if self._num_bad > _MAX_NUM and (
            self._num_bad > _MAX_SHARE * self._num_steps or self._num_left_out > _MAX_SPOILT * self._num_steps
        ):
            self._stop(batch, found)
        self._tell(batch, found, num_left_out)
        is_over = batch.terminated | batch.truncated
        if not all(is_over[value.episode] for value in found.values):
            self._runner._drop_unfinished_episodes()
        return rest, num_left_out

    def _stop(self, batch: object, found: BadValues) -> None:
        value, way = self._best_known(batch, found)
        values = f"{self._num_bad:.0f} such values in {self._num_steps:.0f} env steps"
        share = (
            f"{values} are more than {100 * _MAX_SHARE:g} %"
            if self._num_bad > _MAX_SHARE * self._num_steps
            else f"{values} spoil the chunks of {self._num_left_out:.0f} of them"
        )
        if not value.is_of_env:
            raise ValueError(
                f"{self._describe(value)} {share}: correct the module, or look at its weights (a lr too high, "
                "no grad_clip)."
            )
        how = "The steps that led to it are not known." if way is None else str(way)
        failure = EnvError(
            f"{self._describe(value)} {how} {share}: correct the environment, or clean what it returns in a wrapper."
        )
        failure.way_there = way  # type: ignore[attr-defined]
        raise failure

    def _tell(self, batch: object, found: BadValues, num_left_out: int) -> None:
        now = time.perf_counter()
        self._num_untold += num_left_out
        if not self._num_untold or (self._told_at is not None and now - self._told_at < _LOG_EVERY_S):
            return
        value, way = self._best_known(batch, found)
        _log.warning(
            "%s %s %d env steps, the chunks with such values, were left out (in the account: not_finite).",
            self._describe(value),
            "The steps that led to it are not known." if way is None else way,
            self._num_untold,
        )
        self._told_at, self._num_untold = now, 0

    def _best_known(self, batch: object, found: BadValues) -> tuple[BadValue, Reproduction | None]:
        """Return a value that can be reproduced, if there is one, else the first value."""
        of_envs = [value for value in found.values if value.is_of_env][:_MAX_LOOKED_AT]
        for value in of_envs:
            way = self._runner._way_to(batch, value)
            if way is not None:
                return value, way
        return (of_envs or found.values)[0], None

    def _describe(self, value: BadValue) -> str:
        runner = self._runner
        agent = "" if value.agent_id is None else f" of agent {value.agent_id!r}"
        who = (
            f"Environment {value.env_index} of env runner {runner.worker_index} returned"
            if value.is_of_env
            else f"The module of env runner {runner.worker_index} put out, for finite observations,"
        )
        return (
            f"{who} {value.value} in column {value.column}{agent} at step {value.num_env_steps} of an episode "
            f"{describe_runner(runner)}."
        )
