"""Sampling by all runners of a group in the background, e.g. for evaluation during training.

    run ──request──► every runner samples its share, or repeatedly until `end` ──► metas

Between the request and the end of the round runners do not depend on the caller's event loop, so training in the
caller's process, which blocks that loop, does not delay them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlzmq.actors.handle import ActorHandle
from rlzmq.core.errors import first_error

__all__ = ["SamplingRound", "UntilEnd"]

_round_ids = itertools.count(1)


@dataclass(frozen=True)
class UntilEnd:
    """Limits for runners that sample until the round's end, at least once each.

    Attributes:
        min_env_steps, max_env_steps: Bounds of one sample call of one runner.
        expected_s: Expected seconds until the end, if known; sample calls aim to end then.
    """

    min_env_steps: int
    max_env_steps: int
    expected_s: float | None = None

    def next_env_steps(self, num_env_steps: int, elapsed_s: float) -> int:
        """Return the env steps of the next sample call.

        Args:
            num_env_steps: Env steps sampled in the round so far.
            elapsed_s: Seconds since the round began.
        """
        wanted = 0.0
        if self.expected_s is not None and elapsed_s > 0:
            wanted = num_env_steps / elapsed_s * (self.expected_s - elapsed_s)
        return min(max(int(wanted), self.min_env_steps), self.max_env_steps)


class SamplingRound:
    """One round of a group of runner processes, which returns metas but no episodes.

    A runner that dies is replaced, and its replacement samples the whole share, as with `AsyncEnvRunnerGroup.sample`.
    When `run` is cancelled, runners that sample until the end stop after the current sample call; those that sample
    a share complete it, and the result is discarded.

    Args:
        group: An AsyncEnvRunnerGroup with processes.
        until_end: Sample until `end` is called; None: a share each.
        options: Arguments of `AsyncEnvRunnerGroup.sample`: the amount (without `until_end`), ``force_reset``, ….

    Attributes:
        asked: Set once every runner has been called.
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
        self.asked: asyncio.Event = asyncio.Event()

    def end(self) -> None:
        """End the round for runners that sample until the end. Idempotent; may be called at any time."""
        self._over.set()

    async def run(self) -> list[dict[str, Any]]:
        """Run the round.

        Returns:
            The metas of all samples, in order for each runner.

        Raises:
            Exception: A runner's code failed, or a runner could not be replaced.
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
        def call(handle: ActorHandle) -> Any:
            self._num_asked += 1
            if self._num_asked >= len(self._shares):
                # The call below is sent before the callback runs.
                asyncio.get_running_loop().call_soon(self.asked.set)
            if self._until_end is None:
                return handle.measure(options)
            # A replacement may start after the end; it samples once.
            rounds = 0 if self._over.is_set() else self._id
            return handle.measure_until_end(rounds, asdict(self._until_end), options)

        return await self._supervisor.call(index, call)  # type: ignore[no-any-return]

    async def _tell_the_end(self) -> None:
        await self._over.wait()
        async with asyncio.TaskGroup() as tasks:
            for index, _ in self._shares:
                tasks.create_task(self._supervisor.call(index, lambda handle: handle.end_round(self._id)))
