"""SamplingRound: all runners of a group sample by themselves, while the caller may do something else.

    run ──asked──► every runner samples its share ─────────────────────────► what they measured
                   or again and again, until ◄── told ── end

A runner needs nothing of the caller's event loop from when it was asked until it is told that the round is over:
training in the caller's own process, which blocks that loop, does not hold it up.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlzmq.core.errors import first_error

__all__ = ["SamplingRound", "UntilEnd"]

_round_ids = itertools.count(1)


@dataclass(frozen=True)
class UntilEnd:
    """That runners sample until the round's end, at least once each.

    Attributes:
        min_env_steps, max_env_steps: Of one runner's one sample call.
        expected_s: Seconds until the end, as far as is known: sample calls end about then.
    """

    min_env_steps: int
    max_env_steps: int
    expected_s: float | None = None

    def next_env_steps(self, num_env_steps: int, elapsed_s: float) -> int:
        """Env steps of the next sample call.

        Args:
            num_env_steps: Sampled in the round so far.
            elapsed_s: Seconds since it began.
        """
        wanted = 0.0
        if self.expected_s is not None and elapsed_s > 0:
            wanted = num_env_steps / elapsed_s * (self.expected_s - elapsed_s)
        return min(max(int(wanted), self.min_env_steps), self.max_env_steps)


class SamplingRound:
    """One round of a group of runner processes; what they measured comes back, the episodes do not.

    A runner that dies is replaced, and its replacement samples the whole share, as with `AsyncEnvRunnerGroup.sample`.
    When `run` is cancelled, runners that sample until the end stop after the sample call at hand; one that samples
    a share goes on with it, and nobody hears of it.

    Args:
        group: An AsyncEnvRunnerGroup with processes.
        until_end: Sample until `end` is called; None: a share each.
        options: Of `AsyncEnvRunnerGroup.sample`: how much (without `until_end`), ``force_reset``, ….

    Attributes:
        asked: Is set once every runner was asked.
    """

    def __init__(self, group: Any, *, until_end: UntilEnd | None = None, **options: Any) -> None:
        self._supervisor = group.supervisor
        self._until_end = until_end
        self._options = options
        everyone = range(len(group.handles))
        self._shares: list[tuple[int, Mapping[str, Any]]] = (
            group.share_out(**options) if until_end is None else [(index, options) for index in everyone]
        )
        self._id = next(_round_ids)
        self._over = asyncio.Event()
        self._num_asked = 0
        self.asked = asyncio.Event()

    def end(self) -> None:
        """Runners that sample until the end hear that this is it. May be called at any time, and again."""
        self._over.set()

    async def run(self) -> list[dict[str, Any]]:
        """The round.

        Returns:
            The metas of everything that was sampled, each runner's in its order.

        Raises:
            Exception: What a runner's code raised, or why a runner is not replaced.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                asking = [tasks.create_task(self._ask(index, options)) for index, options in self._shares]
                if self._until_end is not None:
                    tasks.create_task(self._tell_the_end())
        except BaseExceptionGroup as group:
            raise first_error(group) from None
        return [meta for task in asking for meta in task.result() or ()]

    async def _ask(self, index: int, options: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        def call(handle: Any) -> Any:
            self._num_asked += 1
            if self._num_asked >= len(self._shares):
                # What is called now is sent before anything else gets a turn.
                asyncio.get_running_loop().call_soon(self.asked.set)
            if self._until_end is None:
                return handle.measure(options)
            # A replacement may come after the end: it samples once.
            rounds = 0 if self._over.is_set() else self._id
            return handle.measure_until_end(rounds, asdict(self._until_end), options)

        return await self._supervisor.call(index, call)  # type: ignore[no-any-return]

    async def _tell_the_end(self) -> None:
        await self._over.wait()
        async with asyncio.TaskGroup() as tasks:
            for index, _ in self._shares:
                tasks.create_task(self._supervisor.call(index, lambda handle: handle.end_round(self._id)))
