"""BrokerPipeline: updates through a broker, with any number of runner and learner processes.

    driver ──OPEN_UPDATE──► broker ──leases──► runners ──fragments──► broker ──shards──► learners
    driver ◄──REPORT─────── broker ◄──────────────── UPDATE_DONE, weights ──────────────┘

| the driver consumes | produces        | waits for                     | unblocked by              |
|---------------------|-----------------|-------------------------------|---------------------------|
| reports             | OPEN_UPDATE     | the update's commit           | its REPORT                |
| connector deltas    | merged state    | –                             | –                         |
| failures of roles   | restarts, errors | –                            | a role's exit or exception |

| the watchdog consumes     | produces                                  | waits for | unblocked by |
|---------------------------|-------------------------------------------|-----------|--------------|
| the broker's PROGRESS     | a report, stacks, one re-forming of all; then an error | time | –       |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import time
import traceback
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from rlzmq.actors.handle import ActorHandle
from rlzmq.actors.process_state import ActorLostError
from rlzmq.actors.system import ActorSystem
from rlzmq.config.base_config import BaseConfig
from rlzmq.core import faults
from rlzmq.core.errors import PeerLostError, StandstillError
from rlzmq.core.patience import ANSWER_S, HEARTBEAT_S, STEP_S, FairClock, Patience
from rlzmq.core.process import STACKS_TO_STDERR
from rlzmq.driver.async_env_runner_group import MergedConnectors
from rlzmq.driver.driver_link import DriverLink, MetaCheck, ReportReader, num_left_out
from rlzmq.driver.join_files import (
    JoinKeys,
    at_host,
    keys_file,
    listen_addresses,
    pack_config,
    write_join_files,
)
from rlzmq.driver.supervision import Place, RunTasks, Supervisor
from rlzmq.driver.updates import Accounting, Sampled, UpdateResult
from rlzmq.protocol.driver_core import Report
from rlzmq.roles.broker_role import BrokerRole
from rlzmq.roles.peer_link import new_peer_id, spaces_digest
from rlzmq.wire.messages import OpenUpdate, Progress

__all__ = ["BrokerPipeline", "Watchdog"]


_log = logging.getLogger("rlzmq.driver")


class Watchdog:
    """Watches the updates of one pipeline for progress.

    Args:
        pipeline: The pipeline.

    Attributes:
        has_tried: Whether broker and learner group were re-formed since the last committed update.
    """

    def __init__(self, pipeline: BrokerPipeline) -> None:
        self._pipeline = pipeline
        self._clock = FairClock(HEARTBEAT_S)
        self._patience = Patience(2 * STEP_S)
        self._num_moves = -1
        self.has_tried: bool = False

    @contextlib.asynccontextmanager
    async def update(self) -> Any:
        """Watch for progress in the block, in which an update is awaited."""
        self._patience.begin(self._clock.now())
        task = asyncio.create_task(self._run(), name="watchdog")
        try:
            yield
        finally:
            task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            progress, now = self._pipeline.progress, self._clock.now()
            num_moves = progress.num_moves if progress is not None else 0
            if num_moves != self._num_moves:
                self._num_moves = num_moves
                self._patience.moved(now)
            # Processes at work are replaced first.
            others_s = max(self._pipeline.patience_s, progress.patience_s if progress is not None else 0.0)
            silent_s = self._patience.silent_s(now)
            if self._patience.is_over(now) and silent_s >= 2 * others_s:
                self._patience.begin(now)
                await self._act(silent_s)

    async def _act(self, still_s: float) -> None:
        report = await self._report()
        _log.error("No training progress for %.0f s.\n%s", still_s, report)
        for handle in self._pipeline.handles:
            if not handle.exited.done():
                with contextlib.suppress(NotImplementedError):  # local actors have no stacks
                    handle.send_signal(STACKS_TO_STDERR)
        if not self.has_tried:
            self.has_tried = True
            _log.error("Re-forming broker and learner group, once.")
            self._pipeline.form_again()
            return
        self._pipeline.fail(
            StandstillError(
                f"Training stands still: nothing has moved for {still_s:.0f} s, for the second time in one update, "
                f"although broker and learner group were re-formed. Waiting:\n{report}\n"
                "The stacks of all processes are on stderr. The run can be resumed from its newest checkpoint."
            )
        )

    async def _report(self) -> str:
        try:
            async with asyncio.timeout(ANSWER_S):
                status = await self._pipeline.status()
        except Exception as error:
            return f"  the broker did not answer: {error!r}"
        return "\n".join(f"  {line}" for line in status["waits"])


class BrokerProcess:
    """The broker's process, with its addresses and join files.

    Args:
        system: The ActorSystem; the sockets are in its private directory.
        run_id: Id of the run.
        config: Source of the fault-tolerance settings.
        keys: Keys for external peers; None: no such peers.
        control_address: Address for external learners; None: no such learners.

    Attributes:
        supervisor: Starts it, and starts it again if it ends.
        addresses: ``{"data": …, "weights": …}``, the same for every incarnation.
        remote_addresses: Addresses for external peers, once the broker listens for them; {} before.
        join_files: Role → the join file; {} if no peer may join.
    """

    def __init__(
        self,
        system: ActorSystem,
        run_id: str,
        config: BaseConfig,
        keys: JoinKeys | None = None,
        control_address: str | None = None,
    ) -> None:
        self._system = system
        self._run_id = run_id
        self._config = config
        self.supervisor: Supervisor = Supervisor(
            self._spawn, setting="restart_failed_broker", is_on=config.restart_failed_broker
        )
        self._incarnation = 0
        directory = system.run_directory
        self.addresses: dict[str, Any] = {name: directory.address(name) for name in ("data", "weights")}
        self._keys = keys
        self._control_address = control_address
        self._listen: dict[str, str] | None = None
        if keys is not None and config.listen is not None:
            wanted = listen_addresses(config.listen)
            self._listen = {name: keys.former(name, address) for name, address in wanted.items()}
        self.remote_addresses: dict[str, str] = {}
        self.join_files: dict[str, Path] = {}

    @property
    def handle(self) -> Any:
        """The broker's actor handle; None before it was started."""
        return next(iter(self.supervisor.handles), None)

    async def start(self) -> None:
        """Start the broker and its supervision.

        Raises:
            ConfigurationError: `config.listen` is not available, or the join file cannot be written.
        """
        await self.supervisor.start(1)
        if self._keys is not None:
            self._write_join_files(self._keys)

    async def stop(self) -> None:
        """Stop the supervision, then the broker."""
        await self.supervisor.end()
        if self.supervisor.places and self._config.join_file is not None:
            keys_file(self._config.join_file).unlink(missing_ok=True)
        for file in self.join_files.values():
            file.unlink(missing_ok=True)  # the keys in it are now useless

    def _write_join_files(self, keys: JoinKeys) -> None:
        config = self._config
        path = config.join_file or self._system.run_directory.path / "join.toml"
        addresses = {
            name: at_host(address, config.advertise) for name, address in self.remote_addresses.items()
        }
        if self._control_address is not None:
            addresses["control"] = self._control_address
        self.join_files = write_join_files(
            keys, path, addresses, self._run_id, keeps=config.join_file is not None
        )
        print(f"env runners may join:  rlzmq runner --join {self.join_files['runner']}", file=sys.stderr)
        if self._control_address is not None:
            print(
                f"waiting for learners:  rlzmq learner --join {self.join_files['learner']}", file=sys.stderr
            )

    async def _spawn(self, place: Place) -> ActorHandle:
        # Peers order brokers by this number, so it must rise even if the wall clock is set back.
        self._incarnation = max(self._incarnation + 1, int(time.time() * 1000))
        handle = await self._system.spawn(
            BrokerRole,
            self._run_id,
            {},
            addresses=self.addresses,
            incarnation=self._incarnation,
            quarantine_dir=self._config.quarantine_dir,
            listen=self._listen,
            curve=self._keys.curve if self._keys is not None else None,
            roles=self._keys.roles if self._keys is not None else None,
            trace_path=self._config.trace,
            memory_limit_bytes=self._config.broker_memory_limit_bytes,
            name="broker",
            deadline_s=self._config.process_start_timeout_s,
            patience=place.patience,
        )
        try:
            addresses = await handle.start()
            if self._listen is not None:  # later brokers use the ports of this one
                self._listen = {name: addresses[f"remote_{name}"] for name in ("data", "weights")}
                self.remote_addresses = self._listen
        except BaseException:
            handle.kill()
            await handle.exited  # until then its name and its addresses are taken
            raise
        return handle


class BrokerPipeline(RunTasks):
    """Runs updates with runners and learners that communicate through a broker process.

    Args:
        config: The run's config.
        system: The ActorSystem.
        env_runner_group, learner_group: The groups, started before `start` is called.
        connectors: Merges the runners' connector states.
        accounting: Account of all env steps so far.
        join_keys: Keys for external peers; None: no such peers.
        control_address: Address for external learners; None: no such learners.
    """

    def __init__(
        self,
        config: BaseConfig,
        system: ActorSystem,
        env_runner_group: Any,
        learner_group: Any,
        connectors: MergedConnectors,
        accounting: Accounting,
        join_keys: JoinKeys | None = None,
        control_address: str | None = None,
    ) -> None:
        super().__init__()
        self._config = config
        self._runners = env_runner_group
        self._learners = learner_group
        self._connectors = connectors
        self._run_id = uuid.uuid4().hex
        self._broker = BrokerProcess(system, self._run_id, config, join_keys, control_address)
        self._driver: DriverLink | None = None
        self._place_of: dict[str, int] = {}
        self._peer_of: dict[int, str] = {}
        self._watchdog = Watchdog(self)
        self._reader = ReportReader(MetaCheck(config, connectors.spaces), self._place_of)
        self._learner_results: list[list[dict[str, Any]]] = []
        self.accounting: Accounting = accounting
        self.bottleneck: str = ""

    async def start_broker(self) -> None:
        """Start the broker's process."""
        await self._broker.start()
        await self._broker.supervisor.prepare_all(self._watch_broker)

    async def start(self) -> None:
        """Connect driver, learners and runners to the broker."""
        _, version = await self._learners.get_inference_weights()
        is_open = self._config.listen is not None
        self._driver = DriverLink(
            self._run_id,
            self._broker.addresses["data"],
            next_update=version,
            packed_config=pack_config(self._config) if is_open else b"",
            spaces_digest=spaces_digest(self._connectors.spaces["__env_single__"]) if is_open else "",
        )
        await self._driver.start()
        await self.publish()
        await asyncio.gather(
            self._learners.supervisor.prepare_all(self._connect_learner),
            self._runners.supervisor.prepare_all(self._connect_runner),
        )
        await self._register_learners()
        self._learners.formation.begin_lineage = partial(self._register_ranks, begins_lineage=True)

    async def _connect_runner(self, place: Place) -> None:
        index, peer_id, name = place.index, new_peer_id(), f"runner-{place.index}"
        await place.handle.connect(
            self._link(
                name,
                weights_address=self._broker.addresses["weights"],
                incarnation=place.incarnation + 1,  # 0 lets the broker choose, and it would choose 1
                peer_id=peer_id,
                replaces=self._peer_of.get(index, ""),
            )
        )
        self._place_of[peer_id] = index
        self._peer_of[index] = peer_id
        self._start(self._watch(place.handle), f"watch {name}")

    async def _connect_learner(self, place: Place) -> None:
        await place.handle.connect(
            self._link(
                place.handle.name,
                num_env_steps_before=self.accounting.num_consumed,
                observation_space=self._connectors.stored_observation_space(),
                stores_module_outputs=self._connectors.stores_module_outputs,
            )
        )
        self._start(self._watch(place.handle), f"watch {place.handle.name}")

    async def _register_learners(self, *, begins_lineage: bool = False) -> None:
        """Connect and register the ranks. Repeat it if one dies in the meantime."""
        is_done = False
        while not is_done:
            async with self._learners.formation.steady() as handles:
                is_done = await self._register_ranks(handles, begins_lineage=begins_lineage)

    def _link(self, name: str, **more: object) -> dict[str, Any]:
        return {"run_id": self._run_id, "name": name, "data_address": self._broker.addresses["data"], **more}

    async def _watch(self, handle: ActorHandle) -> None:
        """Watch a runner or a learner until its process ends, and end it if it can no longer work with the broker.

        An error of the user's code in it ends the run. A lost collective lets the group be formed again.
        """
        formation = self._learners.formation
        try:
            while True:
                try:
                    reason, detail = await handle.call("run_until_failure")
                except ActorLostError:
                    return
                except PeerLostError as error:
                    if handle not in self._learners.supervisor.handles:
                        raise
                    _log.info("%s: %s", handle.name, error)
                    formation.notice()
                    await formation.wait_formed()
                else:
                    handle.kill(f"left the broker ({reason}: {detail})")
                    return
        except Exception as error:
            self.fail(error)

    async def _watch_broker(self, place: Place) -> None:
        self._start(self._end_failed(place.handle), "watch the broker")

    async def _end_failed(self, broker: ActorHandle) -> None:
        """End the broker's process after an internal error: a new one rebuilds its state from its peers."""
        try:
            await broker.call("run_until_failure")
        except ActorLostError:
            pass
        except Exception as error:
            # Its last lines on stderr say where.
            broker.kill(f"failed: {traceback.format_exception_only(error)[0].strip()}")

    # -- for the watchdog -----------------------------------------------------------------------

    @property
    def progress(self) -> Progress | None:
        """The broker's newest PROGRESS; None before the first."""
        return self._driver.progress if self._driver is not None else None

    @property
    def handles(self) -> list[Any]:
        """All processes of the run."""
        return [*self._runners.handles, *self._learners.handles, self._broker.handle]

    async def status(self) -> dict[str, Any]:
        """Return what the broker and the driver are waiting for, as far as known."""
        waits = [f"driver: {line}" for line in self._learners.formation.waits()]
        status = await self._broker.handle.status()
        return {**status, "waits": [*waits, *status["waits"]]}

    @property
    def patience_s(self) -> float:
        """Time limits of processes that are currently starting."""
        runners = self._runners.supervisor
        is_starting = not runners.num_healthy and not runners.failed.done()
        start_s, reset_s = self._config.process_start_timeout_s, self._config.env_reset_timeout_s
        limit_s = start_s + reset_s if start_s and reset_s else math.inf
        return limit_s if is_starting else 0.0

    def form_again(self) -> None:
        """Re-form broker and learner group."""
        self._learners.formation.notice()
        if self._config.restart_failed_broker:
            self._broker.handle.kill()

    # -- updates --------------------------------------------------------------------------------

    async def sample(self) -> Sampled:
        """Open updates, for which the broker lets runners sample until `staleness` + 1 batches are on their way.

        Returns:
            Nothing: runners send their fragments to the broker, which gives them to the learners.
        """
        assert self._driver is not None
        async with self._watchdog.update():
            await self.unless_failed(self._learners.formation.admit())
        plan, driver = self._config.update_plan(), self._driver
        driver.core.bottleneck = self.bottleneck  # which its heartbeats carry
        while len(driver.open_reports) < plan.open_updates:
            driver.open_update(
                OpenUpdate(
                    update_id=driver.core.next_update,
                    steps_per_rank=plan.env_steps_per_rank,
                    num_ranks=plan.num_ranks,
                    weights_version=driver.core.next_update,
                    staleness=plan.staleness,
                    max_policy_lag=plan.max_policy_lag,
                    fragment_length=plan.fragment_length,
                    lease_timeout_s=max(self._config.sample_timeout_s or 60.0, 1.0),
                    keeps_episodes=plan.keeps_episodes,
                )
            )
        return Sampled([], [])

    async def update(self, sampled: Sampled) -> UpdateResult:
        """Return the result of the next update, once the learners have trained it and rank 0 has sent the weights.

        Raises:
            PeerLostError: A process that the update needs died and will not be replaced.
            Exception: An error raised by the user's code in a runner or learner.
        """
        while (update := await self._next_result()) is None:
            await self.sample()  # again: all learners died and were rolled back
        return update

    async def publish(self, update: UpdateResult | None = None) -> None:
        """Send runners the connector statistics of all fragments; the broker has published the weights."""
        assert self._driver is not None
        deltas = (meta.get("connector_delta") for meta in (update.fragments if update else ()))
        if (state := self._connectors.merge(deltas)) is not None:
            self._driver.set_connector_state(state)

    def _take(self, report: Report, waited_s: float) -> UpdateResult:
        """Account for a committed update."""
        update_id = report.report.update_id
        fragments = self._reader.take_new(report)
        metas = [self._reader.open_meta(fragment, meta) for fragment, _, meta in fragments]
        self._reader.account(report, sum(num_steps for _, num_steps, _ in fragments), self.accounting)
        num_unusable = sum(map(num_left_out, metas))
        self.accounting.add(sampled=num_unusable, dropped={"not_finite": num_unusable})
        results = self._reader.open_results(report.results)
        self._learner_results.append(results)
        self.accounting.note_sources(results)
        self._note_work(report)
        versions = zip(report.report.versions, report.report.version_steps, strict=True)
        steps_by_lag = {update_id - version: num_steps for version, num_steps in versions}
        if faults.is_recording:
            faults.record(
                "report",
                update=update_id,
                generation=report.report.generation,
                broker=report.report.broker_incarnation,
                staleness=self._config.update_plan().staleness,
                steps=report.report.num_env_steps,
                trained=report.report.num_kept_steps,
                lag=max(steps_by_lag, default=0),
                max_lag=self._max_lag(),
                fragments=[[str(fragment), num_steps] for fragment, num_steps, _ in fragments],
                accounting=self.accounting.to_dict(),
            )
        return UpdateResult(
            weights_version=update_id + 1,
            fragments=metas,
            num_env_steps_trained=report.report.num_trained_steps,
            timers={
                "update": waited_s,
                "env_runner_sampling_timer": report.report.sampling_s,
                "learner_update_timer": report.report.training_s,
            },
            steps_by_lag=steps_by_lag,
        )

    def take_learner_results(self) -> list[list[dict[str, Any]]]:
        """Return the ranks' results of the updates since the last call."""
        results, self._learner_results = self._learner_results, []
        return results

    def _max_lag(self) -> int:
        """Return the maximum age of a trained step in weights versions; -1: unlimited."""
        plan = self._config.update_plan()
        # If a batch is smaller than a vector step, its slots are filled with older data by construction.
        return plan.max_policy_lag if plan.num_env_steps >= self._config.num_envs_per_env_runner else -1

    async def _next_result(self) -> UpdateResult | None:
        """Return the result of the first open update; None if the learners were rolled back in the meantime."""
        assert self._driver is not None
        start, reports = time.perf_counter(), self._driver.open_reports
        if not reports:
            return None
        update_id, future = next(iter(reports.items()))
        async with self._watchdog.update():
            report = await self._first_of(future)
        if report is None or reports.get(update_id) is not future:  # rolled back, and accounted for already
            return None
        del reports[update_id]
        self._watchdog.has_tried = False
        return self._take(report, time.perf_counter() - start)

    async def drain(self, *, gives_up: bool = False) -> list[UpdateResult]:
        """Wait until no update is open, or give them up; return the results of the updates that were open."""
        driver = self._driver  # None in a start that did not succeed
        updates = self._give_up_reports() if gives_up else []
        while driver is not None and driver.open_reports:
            if (update := await self._next_result()) is not None:
                await self.publish(update)
                updates.append(update)
        return updates

    def _give_up_reports(self) -> list[UpdateResult]:
        """Stop waiting for open updates; account for, and return, those that were reported already."""
        reports = self._driver.give_up_reports() if self._driver is not None else []
        return [self._take(report, 0.0) for report in reports]

    async def _first_of(self, future: asyncio.Future[Report]) -> Report | None:
        assert self._driver is not None
        failures = [
            self.failed,
            self._runners.supervisor.failed,
            self._learners.formation.failed,
            self._learners.supervisor.failed,
            self._broker.supervisor.failed,
        ]
        waited: list[asyncio.Future[Any]] = [future, self._driver.ended, *failures]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if future.done():
            return None if future.cancelled() else future.result()
        self._give_up_reports()  # a last checkpoint must not wait for them
        for failure in failures:
            if failure.done():
                failure.result()
        reason, detail = self._driver.ended.result()
        raise PeerLostError(f"the broker no longer serves this driver: {reason}, {detail}")

    def _note_work(self, report: Report) -> None:
        """Reset the failure counts of all peers that contributed to a committed update."""
        self._broker.supervisor.note_work(0)
        self._learners.formation.note_work()
        for fragment, _, _ in report.fragments:
            if (index := self._place_of.get(fragment.runner)) is not None:
                self._runners.supervisor.note_work(index)

    def fault_tolerance(self) -> dict[str, int]:
        """Return the number of broker restarts, and of env steps whose fragment metadata was lost with a broker."""
        return {
            "num_broker_restarts": self._broker.supervisor.num_restarts,
            "num_env_steps_without_report": self._reader.num_env_steps_without_report,
        }

    async def restart(self) -> None:
        """Continue from the state that was loaded into the learners; what was sampled meanwhile is dropped."""
        await self._register_learners(begins_lineage=True)

    async def _register_ranks(self, handles: list[Any], *, begins_lineage: bool) -> bool:
        """Register the ranks of a formed group under the next generation; return False if one died in the meantime.

        If it begins a lineage, everything in progress on all peers is discarded.
        """
        assert self._driver is not None
        learners, num_ranks = self._learners, len(handles)
        try:
            version = await handles[0].ping()
            generation = learners.generation = learners.generation + 1
            if begins_lineage:
                self._give_up_reports()
                self._driver.reset(generation, version)
                await self.publish()
            forming = (
                handle.register_as(rank, num_ranks, generation, self.accounting.num_consumed, begins_lineage)
                for rank, handle in enumerate(handles)
            )
            await asyncio.gather(*forming)
        except PeerLostError:
            learners.formation.notice()
            return False
        return True

    async def stop(self) -> None:
        """Disconnect all peers. Pending data is dropped ("stopped")."""
        for part in (self._runners.supervisor, self._learners.formation, self._learners.supervisor):
            if part is not None:
                await part.stop()
        await super().stop()
        self._give_up_reports()
        if self._driver is not None:  # first, so that leaving peers are not reported
            await self._driver.stop()
        handles = [*self._runners.handles, *self._learners.handles]
        # A stopped process does not answer, so it is killed when its actor is ended.
        goodbyes = (handle.call("disconnect", deadline_s=ANSWER_S) for handle in handles)
        await asyncio.gather(*goodbyes, return_exceptions=True)
        await self._broker.stop()
        self.accounting.drop_pending("stopped")
