"""Steps that no loss can use: they are removed and counted, and end the run if they are frequent."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

from rlzmq.core.errors import EnvError
from rlzmq.episodes.bad_values import BadValue, BadValues, find_bad_values
from rlzmq.runners.env_failures import FailingRunner, Reproduction, describe_runner

__all__ = ["BadSteps"]

_log = logging.getLogger("rlzmq.runners")

# So many are tolerated at once; beyond that, they must be rarer than this share of the recent env steps.
_MAX_NUM, _MAX_SHARE = 4, 0.01
_REMEMBERED_STEPS = 10_000
_LOG_EVERY_S = 60.0
_MAX_LOOKED_AT = 100


class _Runner(FailingRunner, Protocol):
    def _drop_unfinished_episodes(self) -> None: ...

    def _way_to(self, batch: Any, value: BadValue) -> Reproduction | None: ...


class BadSteps:
    """Checks every batch of a runner before anything else reads it."""

    def __init__(self, runner: _Runner) -> None:
        self._runner = runner
        self._num_steps = self._num_bad = 0.0  # both halved regularly: recent steps count more
        self._num_untold = 0
        self._told_at: float | None = None

    def cut_out_of(self, batch: Any) -> tuple[Any, int]:
        """Return the batch without its unusable steps, and the number of steps removed.

        If an episode continues from an unusable step, all unfinished episodes are dropped and the next sample resets
        the environments, since every later step could be unusable, too.

        Raises:
            EnvError: Too many values returned by the environments are unusable; has `way_there`.
            ValueError: The module's outputs are unusable for usable observations.
        """
        num_steps = batch.num_env_steps
        found = find_bad_values(batch)
        self._num_steps += num_steps
        if self._num_steps > _REMEMBERED_STEPS:
            self._num_steps, self._num_bad = self._num_steps / 2, self._num_bad / 2
        if found is None:
            return batch, 0
        num_unusable = num_steps - int(found.usable.sum())
        is_modules = found.values and not found.values[0].is_of_env
        self._num_bad += max(found.num_of_envs, num_unusable if is_modules else 0)
        if self._num_bad > _MAX_NUM and self._num_bad > _MAX_SHARE * self._num_steps:
            self._stop(batch, found)
        self._tell(batch, found, num_unusable)
        if found.ends_badly:
            self._runner._drop_unfinished_episodes()
        return found.cut_out_of(batch), num_unusable

    def _stop(self, batch: Any, found: BadValues) -> None:
        value, way = self._best_known(batch, found)
        share = (
            f"{self._num_bad:.0f} such values in {self._num_steps:.0f} env steps are more than "
            f"{100 * _MAX_SHARE:g} %"
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

    def _tell(self, batch: Any, found: BadValues, num_unusable: int) -> None:
        now = time.perf_counter()
        self._num_untold += num_unusable
        if not self._num_untold or (self._told_at is not None and now - self._told_at < _LOG_EVERY_S):
            return
        value, way = self._best_known(batch, found)
        _log.warning(
            "%s %s %d env steps around such values were left out (in the account: not_finite).",
            self._describe(value),
            "The steps that led to it are not known." if way is None else way,
            self._num_untold,
        )
        self._told_at, self._num_untold = now, 0

    def _best_known(self, batch: Any, found: BadValues) -> tuple[BadValue, Reproduction | None]:
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
