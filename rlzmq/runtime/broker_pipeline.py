"""Updates through the broker: any number of runner and learner processes.

    driver ──OPEN_UPDATE──► broker ──leases──► runners ──fragments──► broker ──shards──► learners
    driver ◄──REPORT─────── broker ◄──────────────── UPDATE_DONE, weights ──────────────┘

| the driver consumes | produces        | waits for                     | unblocked by              |
|---------------------|-----------------|-------------------------------|---------------------------|
| reports             | OPEN_UPDATE     | the update's commit           | its REPORT                |
| connector deltas    | merged state    | –                             | –                         |
| failures of roles   | restarts, errors | –                            | a role's exit or exception |
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from typing import Any

from rlzmq.protocol.events import Report
from rlzmq.protocol.messages import OpenUpdate
from rlzmq.protocol.values import unpack_blob
from rlzmq.runtime.broker import BrokerRole
from rlzmq.runtime.connector_sync import ConnectorSync
from rlzmq.runtime.driver_link import DriverLink
from rlzmq.runtime.reports import Accounting, UpdateReport

__all__ = ["BrokerPipeline"]


class BrokerPipeline:
    """Runs updates with runners and learners that talk through a broker process.

    Args:
        config: The run's config.
        system: The ActorSystem.
        env_runner_group, learner_group: Started before `start` is called.
        connectors: Merges the runners' connector states.
    """

    def __init__(
        self, config: Any, system: Any, env_runner_group: Any, learner_group: Any, connectors: ConnectorSync
    ) -> None:
        self._config = config
        self._system = system
        self._runners = env_runner_group
        self._learners = learner_group
        self._connectors = connectors
        self._run_id = uuid.uuid4().hex
        self._broker: Any = None
        self._addresses: dict[str, str] = {}
        self._driver: DriverLink | None = None
        self._failures: set[asyncio.Task[Any]] = set()
        self._connector_version = -1
        self._reported_dropped: Counter[str] = Counter()
        self.accounting = Accounting()

    async def start_broker(self) -> None:
        """Start the broker's process."""
        self._broker = await self._system.spawn(BrokerRole, self._run_id, name="broker")
        self._addresses = await self._broker.start()

    async def start(self) -> None:
        """Connect driver, learners and runners to the broker."""
        version = await self._learner_version()
        self._driver = DriverLink(self._run_id, self._addresses["data"], next_update=version)
        await self._driver.start()
        if self._connectors.is_needed:
            self._send_connector_state(self._connectors.get_state())
        num_before = self.accounting.trained
        num_ranks = len(self._learners.handles)
        await asyncio.gather(
            *(
                handle.connect(self._link(f"learner-{rank}", num_env_steps_before=num_before), rank, num_ranks, 0)
                for rank, handle in enumerate(self._learners.handles)
            ),
            *(
                handle.connect(
                    self._link(f"runner-{index}", weights_address=self._addresses["weights"], incarnation=0)
                )
                for index, handle in enumerate(self._runners.handles)
            ),
        )
        for handle in [*self._learners.handles, *self._runners.handles]:
            self._watch(handle)

    def _link(self, name: str, **more: Any) -> dict[str, Any]:
        return {"run_id": self._run_id, "name": name, "data_address": self._addresses["data"], **more}

    async def _learner_version(self) -> int:
        _, version = await self._learners.get_inference_weights()
        return int(version)

    def _watch(self, handle: Any) -> None:
        """Have this role's failure end the update that waits."""
        self._failures.add(asyncio.ensure_future(handle.call("run_until_failure", deadline_s=None)))

    def _send_connector_state(self, state: Any) -> None:
        assert self._driver is not None
        self._connector_version += 1
        self._driver.set_connector_state(self._connector_version, state)

    async def run_update(self, num_env_steps_before: int) -> UpdateReport:
        """One update; returns once it is committed and the new weights are with the broker.

        Raises:
            PeerLostError: A process that the update needs died and is not replaced.
            Exception: What the user's code raised in a runner or learner.
        """
        assert self._driver is not None
        config, driver = self._config, self._driver
        start = time.perf_counter()
        update_id = driver.core.next_update
        future = driver.open_update(
            OpenUpdate(
                update_id=update_id,
                steps_per_rank=config.train_batch_size_per_learner,
                num_ranks=len(self._learners.handles),
                weights_version=update_id,
                connector_version=self._connector_version,
                fragment_length=config.get_rollout_fragment_length(),
                lease_timeout_s=max(config.sample_timeout_s or 60.0, 1.0),
            )
        )
        report = await self._first_of(future)
        metas = [unpack_blob(meta) for _, _, meta in report.fragments]
        state = self._connectors.merge(meta.get("connector_delta") for meta in metas)
        if state is not None:
            self._send_connector_state(state)
        self._account(report)
        results = [unpack_blob(blob) for blob in report.results]
        return UpdateReport(
            update_id=update_id,
            weights_version=update_id + 1,
            learner_results=results,
            fragments=metas,
            num_env_steps_trained=report.report.num_env_steps,
            timers={"update": time.perf_counter() - start},
        )

    async def _first_of(self, future: asyncio.Future[Report]) -> Report:
        assert self._driver is not None
        await asyncio.wait(
            [future, self._driver.ended, *self._failures], return_when=asyncio.FIRST_COMPLETED
        )
        if future.done():
            return future.result()
        future.cancel()
        for failure in self._failures:
            if failure.done():
                failure.result()
        reason, detail = self._driver.ended.result()
        raise RuntimeError(f"the broker ended the driver's connection: {reason} {detail}")

    def _account(self, report: Report) -> None:
        """Bring the run's account up to the broker's."""
        sampled = sum(num_steps for _, num_steps, _ in report.fragments)
        total_dropped = Counter(report.report.dropped)
        dropped = total_dropped - self._reported_dropped
        self._reported_dropped = total_dropped
        self.accounting.add(sampled=sampled, trained=report.report.num_env_steps, dropped=dict(dropped))

    async def pause(self) -> None:
        """No more leases: the learners' state is about to be replaced."""
        assert self._driver is not None
        self._driver.do(self._driver.core.pause())

    async def restart(self) -> None:
        """Go on from the state that the learners were given."""
        assert self._driver is not None
        version = await self._learner_version()
        generation = self._learners.generation = self._learners.generation + 1
        self._driver.reset(generation, version)
        if self._connectors.is_needed:
            self._send_connector_state(self._connectors.get_state())
        num_ranks = len(self._learners.handles)
        await asyncio.gather(
            *(
                handle.form(rank, num_ranks, generation, self.accounting.trained)
                for rank, handle in enumerate(self._learners.handles)
            )
        )
        self._driver.do(self._driver.core.resume())

    async def stop(self) -> None:
        """Disconnect everyone; what is pending then is dropped ("stopped")."""
        for failure in self._failures:
            failure.cancel()
        await asyncio.gather(*self._failures, return_exceptions=True)
        self._failures.clear()
        handles = [*self._runners.handles, *self._learners.handles]
        await asyncio.gather(*(handle.disconnect() for handle in handles), return_exceptions=True)
        if self._driver is not None:
            await self._driver.stop()
        if self._broker is not None:
            await asyncio.gather(self._broker.stop(), return_exceptions=True)
        self.accounting.drop_pending("stopped")
