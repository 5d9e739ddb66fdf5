"""Updates: the pipeline of a serial run, the result of an update, and the account of all env steps.

    runner.take_fragment ──fragments──► batch ──► learner.update ──weights v+1──► runner

The broker's function also plans these leases, and connector states are merged at the same point. A run with one runner
and one learner process therefore trains on the same numbers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.call_watch import CallWatch
from rlzmq.core.names import ALL_MODULES, BATCH_SOURCE
from rlzmq.core.update_plan import plan_lease
from rlzmq.driver.async_env_runner_group import MergedConnectors
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.runners.episode_metrics import FragmentMeta

__all__ = ["Accounting", "Sampled", "SerialPipeline", "UpdateResult"]


@dataclass
class UpdateResult:
    """Result of one committed update, without what its learners report (see `UpdatePipeline.take_learner_results`).

    Attributes:
        weights_version: Version of the weights after the update.
        fragments: Metadata of the fragments that arrived for it (episode metrics, counts, …).
        num_env_steps_trained: Env steps trained over all ranks. A replayed step counts each time.
        timers: Seconds by the timer's name in results.
        steps_by_lag: Env steps by lag: by how many weights versions they are older than the version that the update
            starts from.
    """

    weights_version: int
    fragments: list[FragmentMeta]
    num_env_steps_trained: int
    timers: dict[str, float] = field(default_factory=dict)
    steps_by_lag: dict[int, int] = field(default_factory=dict)


@dataclass
class Sampled:
    """What was sampled for an update in this process.

    Attributes:
        parts: Its batch, as it was sampled; without empty parts.
        metas: Metadata of all parts.
        num_env_steps: Env steps of the batch.
        seconds: How long it took.
    """

    parts: list[EpisodeBatch]
    metas: list[FragmentMeta]
    num_env_steps: int = 0
    seconds: float = 0.0


class SerialPipeline:
    """Runs updates with a runner and a learner in this process.

    Args:
        config: The run's config.
        runner: An EnvRunner; None if updates need no fresh env steps.
        learner: A built Learner.
        connectors: Merges the runner's connector state.
        accounting: Account of all env steps so far.
        watch: Watches the calls of user code.

    Attributes:
        bottleneck: See `UpdatePipeline`; a serial run has no observers.
    """

    def __init__(
        self,
        config: BaseConfig,
        runner: Any,
        learner: Any,
        connectors: MergedConnectors,
        accounting: Accounting,
        watch: CallWatch,
    ) -> None:
        self._plan = config.update_plan()
        self._runner = runner
        self._learner = learner
        self._connectors = connectors
        self._watch = watch
        self._has_results = False  # of updates since `take_learner_results`
        self.accounting: Accounting = accounting
        self.bottleneck: str = ""

    async def sample(self) -> Sampled:
        """Sample a batch with the runner's weights, in leases as a broker would grant them."""
        await asyncio.sleep(0)  # other tasks of the caller's event loop go on between updates
        plan, runner = self._plan, self._runner
        sampled = Sampled([], [])
        start = time.perf_counter()
        with self._learner.ranks.torch_threads():
            while sampled.num_env_steps < plan.num_env_steps:
                remaining = plan.num_env_steps - sampled.num_env_steps
                length = plan_lease(remaining, 1, runner.num_envs, plan.fragment_length)
                with self._watch.call(self._watch.STEPS):
                    batch = runner.take_fragment(length)
                sampled.metas.append(batch.meta)
                if plan.keeps_episodes:
                    batch, _ = batch.sorted_by_env(runner.num_envs)
                num_steps = batch.num_env_steps
                num_unusable = batch.meta.get("num_env_steps_not_finite", 0)
                self.accounting.add(sampled=num_steps + num_unusable, dropped={"not_finite": num_unusable})
                if num_steps:
                    sampled.parts.append(batch)
                sampled.num_env_steps += num_steps
        sampled.seconds = time.perf_counter() - start
        return sampled

    async def update(self, sampled: Sampled) -> UpdateResult:
        """Train the learner on the batch."""
        learner, accounting, num_steps = self._learner, self.accounting, sampled.num_env_steps
        start = time.perf_counter()
        num_consumed = accounting.num_consumed + num_steps
        with self._watch.call("an update"):
            learner.update(
                episodes=sampled.parts,
                # If nothing is sampled, schedules follow the learner's count of trained steps.
                timesteps={"num_env_steps_sampled_lifetime": num_consumed} if num_consumed else None,
                with_results=False,
            )
        self._has_results = True
        num_kept = num_steps if learner.report.was_trained else 0
        accounting.add(trained=num_kept, dropped={"skipped": num_steps - num_kept})
        return UpdateResult(
            weights_version=learner.weights_seq_no,
            fragments=sampled.metas,
            num_env_steps_trained=learner.report.batch.num_env_steps,
            timers={
                "env_runner_sampling_timer": sampled.seconds,
                "learner_update_timer": time.perf_counter() - start,
            },
            steps_by_lag={0: num_steps} if num_steps else {},
        )

    async def publish(self, update: UpdateResult | None = None) -> None:
        """Give the runner, if there is one, the learner's weights and the connector statistics of all fragments."""
        start = time.perf_counter()
        if (runner := self._runner) is not None:
            learner = self._learner
            with learner.ranks.torch_threads(), self._watch.call("an update"):
                runner.copy_weights(learner.module, learner.weights_seq_no, self.accounting.num_consumed)
                if self._connectors.is_needed:
                    deltas = (meta.get("connector_delta") for meta in (update.fragments if update else ()))
                    runner.set_connector_state(self._connectors.merge(deltas))
        if update is not None:
            update.timers["synch_weights"] = time.perf_counter() - start

    def take_learner_results(self) -> list[list[dict[str, Any]]]:
        """Return the results of all updates since the last call as one, with means of their times."""
        if not self._has_results:
            return []
        self._has_results = False
        of_ranks = [self._learner.results()]
        if self._learner.source.keeps_data:
            self.accounting.note_sources(of_ranks)
        return [of_ranks]

    async def drain(self, *, gives_up: bool = False) -> list[UpdateResult]:
        """Return [], since no update runs ahead, and one that was interrupted has been undone."""
        return []

    def fault_tolerance(self) -> dict[str, int]:
        """Return {}, since no process can die alone."""
        return {}

    async def restart(self) -> None:
        """Continue from the state that was loaded into the learner."""
        await self.publish()
        if self._runner is not None:
            self._runner.set_connector_state(self._connectors.get_state())

    async def stop(self) -> None:
        """Account for steps that were sampled but never trained."""
        self.accounting.drop_pending("stopped")


class Accounting:
    """Account of all env steps of a run: each one is trained, dropped for a counted reason, or pending.

    ``sampled == trained + sum(dropped.values()) + pending`` holds after every call.

    A step counts as *trained*, once, when the update that received it is committed. If learners keep data (a replay
    buffer), a trained step is in a rank's buffer, may be drawn any number of times, and may be evicted. When a rank
    dies, the content of its buffer changes from trained to dropped: ``buffer_lost``.
    """

    def __init__(self) -> None:
        self.sampled: int = 0
        self.trained: int = 0
        self.dropped: Counter[str] = Counter()
        self._in_sources: dict[str, int] = {}
        self._added: dict[str, int] = {}  # steps added per source
        self._nowhere: int | None = 0  # steps received but not added to any source; None: not known yet

    @property
    def num_consumed(self) -> int:
        """Number of env steps that updates received, including those lost with a buffer; never decreases."""
        return self.trained + self.dropped.get("buffer_lost", 0)

    @property
    def num_in_sources(self) -> int:
        """Number of env steps in the ranks' batch sources."""
        return sum(self._in_sources.values())

    @property
    def pending(self) -> int:
        """Number of env steps sampled and neither trained nor dropped so far."""
        return self.sampled - self.trained - sum(self.dropped.values())

    def add(self, *, sampled: int = 0, trained: int = 0, dropped: dict[str, int] | None = None) -> None:
        """Count additional steps.

        Raises:
            AssertionError: More steps were trained and dropped than sampled, which is a bug.
        """
        self.sampled += sampled
        self.trained += trained
        for reason, num_steps in (dropped or {}).items():
            self.dropped[reason] += num_steps
        assert self.pending >= 0, f"more env steps were trained and dropped than sampled: {self.to_dict()}"

    def note_sources(self, learner_results: Sequence[Mapping[str, Any]]) -> None:
        """Update the contents of the ranks' batch sources. The content of missing sources is lost.

        Args:
            learner_results: Results of each rank; none for a rank that died with its results.
        """
        sources = [
            source
            for one in learner_results
            if (source := one.get(ALL_MODULES, {}).get(BATCH_SOURCE)) is not None
        ]
        if not sources:
            return
        held = {str(source["source_id"]): int(source["num_env_steps"]) for source in sources}
        self._added |= {str(source["source_id"]): int(source["num_added"]) for source in sources}
        self._in_sources |= held
        if len(held) < max([int(source["num_ranks"]) for source in sources]):
            return  # another rank died with its results, but perhaps not with its source
        self.lose_sources([source_id for source_id in self._in_sources if source_id not in held])
        # Steps that a rank received after its last report and lost when it died.
        nowhere = self.num_consumed - sum(self._added.values())
        if self._nowhere is not None and nowhere > self._nowhere:
            self._lose(nowhere - self._nowhere)
        self._nowhere = nowhere

    def lose_sources(self, source_ids: Iterable[str]) -> None:
        """Count the content of these sources as lost."""
        for source_id in source_ids:
            self._lose(self._in_sources.pop(source_id, 0))

    def _lose(self, num_steps: int) -> None:
        lost = min(num_steps, self.trained)
        self.trained -= lost
        self.dropped["buffer_lost"] += lost

    def drop_pending(self, reason: str) -> None:
        """Count all pending steps as dropped, e.g. at the end of a run."""
        if self.pending:
            self.dropped[reason] += self.pending

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"sampled", "trained", "dropped": {reason: steps}, "pending"}``."""
        return {
            "sampled": self.sampled,
            "trained": self.trained,
            "dropped": dict(+self.dropped),  # without zeros
            "pending": self.pending,
        }

    def get_state(self) -> dict[str, Any]:
        """Return `to_dict` and the contents of the batch sources."""
        return {**self.to_dict(), "in_sources": self.num_in_sources}

    def set_state(self, state: dict[str, Any], *, with_sources: bool = False) -> int:
        """Load a state from `get_state`. Its pending steps are dropped ("restored").

        Args:
            state: State from `get_state`.
            with_sources: Whether the content of the sources is restored, too; otherwise it is lost.

        Returns:
            Number of env steps lost with the sources.
        """
        self.sampled = int(state["sampled"])
        self.trained = int(state["trained"])
        self.dropped = Counter({str(k): int(v) for k, v in state["dropped"].items()})
        self.drop_pending("restored")
        self._nowhere = None
        if with_sources or self._in_sources:  # this run's own sources still exist
            return 0
        self._in_sources = {"restored": int(state.get("in_sources", 0))}
        num_lost = self.num_in_sources
        self.lose_sources(["restored"])
        return num_lost

    def __str__(self) -> str:
        dropped = ", ".join(f"{reason} {steps}" for reason, steps in sorted(self.dropped.items()) if steps)
        return (
            f"sampled {self.sampled} = trained {self.trained} + dropped {sum(self.dropped.values())}"
            + (f" ({dropped})" if dropped else "")
            + f" + pending {self.pending}"
        )
