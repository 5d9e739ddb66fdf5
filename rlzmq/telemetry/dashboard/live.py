"""LiveRun: the status of a run's broker, requested only while somebody watches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from rlzmq.core.errors import ConfigurationError, RlzmqError
from rlzmq.roles.remote_peer import Observer
from rlzmq.telemetry.brokers import Rates, find_broker

__all__ = ["LiveRun", "runner_grid"]

_TIMEOUT_S = 2.0
_LEAST_INTERVAL_S = 1.0
_RUNNERS_PER_S = 1000  # with many runners, poll less often, so that the broker's load stays bounded
_MAX_GONE = 500


class LiveRun:
    """The newest status of one broker.

    Attributes:
        status: The broker's status (`BrokerCore.status`); None if it did not answer.
        rates: Env steps per second by runner, with ``"sampled"`` and ``"trained"`` for the totals.
        problem: Why there is no status; "" if there is one.
        gone: Runners that have left.
    """

    problem: str

    def __init__(self, where: str) -> None:
        self._where = where
        self._open = AsyncExitStack()
        self._observer: Observer | None = None
        self._rates = Rates()
        self._next_at = 0.0
        self._known: dict[str, None] = {}
        self.status: Mapping[str, Any] | None = None
        self.rates: Mapping[str, float] = {}
        self.problem = "not asked so far"
        self.gone: list[str] = []

    async def poll(self) -> None:
        """Request the broker's status, if it is time to."""
        now = time.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + _LEAST_INTERVAL_S
        try:
            if self._observer is None:
                address, join = await asyncio.to_thread(find_broker, self._where)
                self._observer = await self._open.enter_async_context(Observer(address, join))
            status = await self._observer.status(timeout_s=_TIMEOUT_S)
        except (RlzmqError, OSError) as error:
            self.status, self.rates, self.problem = None, {}, str(error)
            await self.close()
            if not isinstance(error, ConfigurationError):
                self._next_at += _TIMEOUT_S
            return
        self.status, self.problem = status, ""
        self.rates = self._rates.update(status, time.monotonic())
        names = {runner["name"] for runner in status["runners"]}
        self._known |= dict.fromkeys(names)
        self.gone = [name for name in self._known if name not in names][-_MAX_GONE:]
        self._next_at = now + max(_LEAST_INTERVAL_S, len(names) / _RUNNERS_PER_S)

    async def close(self) -> None:
        """Disconnect from the broker; `poll` connects again."""
        self._observer = None
        opened, self._open = self._open, AsyncExitStack()
        await opened.aclose()


def runner_grid(live: LiveRun | None) -> dict[str, Any]:
    """Return the runners' states and numbers in columns, one entry per runner.

    The state is a letter: "s" samples, "i" waits for a lease, "u" suspect (it missed heartbeats), "g" gone.
    """
    status = live.status if live is not None else None
    if live is None or status is None:
        return {
            "problem": "" if live is None else live.problem,
            "names": [],
            "states": "",
            "learners": [],
        }
    runners = status["runners"]
    return {
        "problem": "",
        "names": [runner["name"] for runner in runners] + live.gone,
        "states": "".join(map(_state_of, runners)) + "g" * len(live.gone),
        "rates": [round(live.rates.get(runner["name"], 0.0), 1) for runner in runners],
        "steps": [runner["num_env_steps"] for runner in runners],
        "leases": [runner["num_leases"] for runner in runners],
        "oldest_s": [round(runner["oldest_lease_s"], 1) for runner in runners],
        "bad": [runner["num_bad"] for runner in runners],
        "learners": [
            {"name": learner["name"], "rank": learner["rank"], "update": learner["next_update"]}
            for learner in status["learners"]
        ],
    }


def _state_of(runner: Mapping[str, Any]) -> str:
    if runner["is_suspect"]:
        return "u"
    return "s" if runner["num_leases"] else "i"
