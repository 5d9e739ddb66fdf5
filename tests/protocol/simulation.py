"""A whole run in one simulated network, driven by one seed: cores, fake clock, faults.

Runners, a broker, learners and a driver exchange messages over a network that drops, duplicates,
delays (and so reorders) them; processes crash at any event and come back, or freeze for good, and only
a supervisor that hears of it ends them; peers are cut off for a while; forming the group fails. After a
time the faults stop, and the run must finish. Everything that happens is written into a `History`,
which `history.check` judges afterwards, and each process records what a real one does, for the checker of real runs.
"""

from __future__ import annotations

import functools
import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from history import History, Step

from rlzmq import PPOConfig
from rlzmq.core.update_plan import ReplayRatio
from rlzmq.driver.driver_link import MetaCheck, ReportReader
from rlzmq.driver.updates import Accounting
from rlzmq.protocol import core as E
from rlzmq.protocol.broker.core import BrokerCore, BrokerOptions
from rlzmq.protocol.broker.state import first_number
from rlzmq.protocol.broker.updates import rank_shares
from rlzmq.protocol.driver_core import DriverCore, Report
from rlzmq.protocol.learner_core import LearnerCore, UnusableError
from rlzmq.protocol.runner_core import RunnerCore
from rlzmq.wire.codec import FragmentId, Publication, new_publication_buffer, seal_publication
from rlzmq.wire.messages import Fragment, Lease, OpenUpdate, Shard, ShardPlan, decode_message
from rlzmq.wire.payloads import FragmentRange, pack_blob, unpack_blob
from tests.support import fault_history

RUN = "run"
_REPLAY_BATCH = 8


@dataclass(frozen=True)
class Plan:
    """One schedule, drawn from its seed."""

    seed: int
    num_runners: int
    num_ranks: int
    num_envs: int
    fragment_length: int
    steps_per_rank: int
    staleness: int
    num_updates: int
    drop: float
    duplicate: float
    slow: float
    faults_until: float
    mean_time_between_crashes: float
    check_wire: bool
    poison: bool
    killer: bool
    allow_broker_crash: bool
    allow_rollback: bool
    allow_freeze: bool = False
    train_ratio: float = 0.0
    warm_up: int = 0

    @property
    def keeps_order(self) -> bool:
        """Whether messages arrive as they were sent, as those of real sockets."""
        return self.drop == self.slow == 0.0

    @property
    def has_replay(self) -> bool:
        """Whether ranks keep what they take in, and whole episodes go to one of them."""
        return self.train_ratio > 0.0

    @staticmethod
    def draw(seed: int) -> Plan:
        """Any combination: from no faults at all to everything at once."""
        rng = random.Random(seed)
        num_envs = rng.choice([1, 2, 4])
        length = rng.choice([1, 4, 8])
        calm = rng.random() < 0.15
        num_ranks = rng.choice([1, 2, 3])
        lossy = 0.0 if calm or rng.random() < 0.3 else rng.choice([0.02, 0.1, 0.25])
        plan = Plan(
            seed=seed,
            num_runners=rng.choice([1, 2, 3]),
            num_ranks=num_ranks,
            num_envs=num_envs,
            fragment_length=length,
            steps_per_rank=rng.randint(1, 3 * num_envs * length),
            staleness=rng.choice([0, 0, 1, 2]),
            num_updates=rng.randint(2, 5),
            drop=lossy,
            duplicate=lossy,
            slow=0.0 if calm else rng.choice([0.0, 0.05, 0.3]),
            faults_until=0.0 if calm else rng.uniform(2.0, 25.0),
            mean_time_between_crashes=1e9 if calm else rng.choice([1.0, 3.0, 10.0, 1e9]),
            check_wire=seed % 20 == 0,
            poison=rng.random() < 0.2,
            # A single rank's death is a rollback each time: nothing would ever be quarantined.
            killer=not calm and num_ranks > 1 and rng.random() < 0.15,
            allow_broker_crash=rng.random() < 0.6,
            allow_rollback=rng.random() < 0.15,
            allow_freeze=rng.random() < 0.3,
            train_ratio=rng.choice([0.0, 0.0, 0.3, 1.0, 4.5]),
            warm_up=rng.choice([0, 20]),
        )
        # By its environments a fragment goes to all ranks: what kills one kills all, each time a rollback.
        return replace(plan, killer=plan.killer and not plan.has_replay)


@dataclass
class Process:
    """Something that can be killed: its core and its place in the network."""

    name: str
    routing: bytes
    core: Any
    alive: bool = True
    cut_until: float = 0.0
    is_frozen: bool = False
    missed: list[Callable[[], None]] = field(default_factory=list)
    recorded: dict[int, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int]:
        """Place and pid."""
        return self.name, int(self.core.uuid.rpartition("-")[2])

    def unless_frozen(self, action: Callable[[], None]) -> None:
        """Now, or when it is continued."""
        if self.is_frozen:
            self.missed.append(action)
        else:
            action()


@dataclass
class LearnerProcess(Process):
    """A learner with its model: the chain of steps that made its parameters."""

    chain: list[Step] = field(default_factory=list)
    generation: int = -1
    rank: int = -1
    shards: dict[tuple[int, int], dict[int, FragmentRange]] = field(default_factory=dict)
    num_held: int = 0


class Simulation:
    """One schedule. `run` returns its history; it raises if a core asserts."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed ^ 0x5EED)
        self.now = 0.0
        batch = plan.steps_per_rank * plan.num_ranks
        self.history = History(
            plan.staleness,
            batch,
            # A batch smaller than a vector step is filled with older data by construction.
            max_lag=-1
            if plan.has_replay
            else max(plan.staleness, -(-plan.num_envs // batch))
            if plan.staleness
            else 0,
            train_ratio=plan.train_ratio,
            warm_up=plan.warm_up,
        )
        self.recorded: fault_history.History = {("driver", 0): []}
        self._reader = ReportReader(MetaCheck(PPOConfig(), {}), ())
        self._account = Accounting()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._uuid = 0
        self.broker: BrokerCore | None = None
        self.broker_incarnation = 0
        self.runners: dict[str, Process] = {}
        self.learners: dict[str, LearnerProcess] = {}
        self.by_routing: dict[bytes, Process] = {}
        self.generation = 0
        self.group: list[LearnerProcess] = []
        self.started: dict[tuple[int, int], set[int]] = {}
        self.forming = False
        self.checkpoint: list[Step] = []
        driver = DriverCore(
            RUN, "driver", "driver-uuid", spaces_digest="c", on_report=self.reported, tell=lambda _: None
        )
        self.driver = Process("driver", b"driver", driver)
        self.by_routing[b"driver"] = self.driver

    # ------------------------------------------------------------------ recording

    def record(self, key: tuple[str, int], event: str, **facts: Any) -> None:
        self.recorded.setdefault(key, []).append({"event": event, **facts})

    def record_arrival(self, fragment: Fragment, is_new: bool) -> None:
        """As `BrokerRole` does."""
        assert self.broker is not None
        key, state, id_ = ("broker", self.broker_incarnation), self.broker.state, fragment.fragment_id
        if is_new or (id_ in state.ledger.entries and id_ not in self.held):
            self.held.add(id_)
            update = -1 if state.next_commit is None else state.next_commit
            self.record(key, "held", id=str(id_), version=fragment.weights_version, update=update)
        elif id_ not in state.ledger.entries and state.ledger.is_committed(id_):
            self.record(key, "finished", id=str(id_))

    def record_progress(self, process: Process) -> None:
        """As a runner does."""
        kept = process.core.kept_fragments()
        for seq, (fragment, is_accepted) in kept.items():
            if is_accepted and seq not in process.recorded:
                process.recorded[seq] = str(fragment.fragment_id)
                self.record(process.key, "accepted", id=process.recorded[seq], steps=fragment.num_env_steps)
        for seq in process.recorded.keys() - kept.keys():
            self.record(process.key, "committed", id=process.recorded.pop(seq))

    def record_report(self, report: Report) -> None:
        """As the driver does."""
        done = report.report
        fragments = [[str(fragment), num] for fragment, num, _ in self._reader.take_new(report)]
        self._reader.account(report, sum(num for _, num in fragments), self._account)
        results = [unpack_blob(blob) for blob in report.results]
        assert results, f"update {done.update_id} was reported without results"
        assert self.plan.has_replay or done.num_trained_steps == done.num_env_steps
        self._account.note_sources(results)
        # A rank that has joined repeats the results of the one whose state it adopted.
        of_ranks = [result["__all_modules__"]["batch_source"] for result in results if result]
        sources = {source["source_id"]: source for source in of_ranks}
        if sources and len(sources) == max(source["num_ranks"] for source in sources.values()):
            held = sum(source["num_env_steps"] for source in sources.values())
            assert self.history.rollbacks or held == self._account.trained, f"{held}: {self._account}"
        self.record(
            ("driver", 0),
            "report",
            update=done.update_id,
            broker=done.broker_incarnation,
            staleness=self.plan.staleness,
            steps=done.num_env_steps,
            trained=done.num_kept_steps,
            lag=max((done.update_id - version for version in done.versions), default=0),
            max_lag=self.history.max_lag,
            fragments=fragments,
            accounting=self._account.to_dict(),
        )

    # ------------------------------------------------------------------ running

    def run(self) -> History:
        """Runs until every update is reported and nothing is left to hand over."""
        self.start_broker()
        for index in range(self.plan.num_runners):
            self.start_runner(f"runner-{index}", 1)
        for index in range(self.plan.num_ranks):
            self.start_learner(f"learner-{index}")
        self.form_group()
        self.do(self.driver, self.driver.core.start(self.now))
        self.open_updates()
        self.after(0.25, self.tick)
        if self.plan.mean_time_between_crashes < 1e8:
            self.after(self.rng.expovariate(1 / self.plan.mean_time_between_crashes), self.crash)
        # Where many fragments kill learners, each is put aside after three deaths: slow, but no standstill.
        limit, last, num_quarantined = self.plan.faults_until + 400.0, self.plan.faults_until + 4000.0, 0
        while self._events and self.now < min(limit, last):
            self.now, _, action = heapq.heappop(self._events)
            action()
            if len(self.history.quarantined) > num_quarantined:
                num_quarantined = len(self.history.quarantined)
                limit = max(limit, self.now + 400.0)
            if self.driver.core.next_report >= self.plan.num_updates:
                break
        self.history.finish(
            finished=self.driver.core.next_report >= self.plan.num_updates,
            chain=max((learner.chain for learner in self.group), key=len, default=[]),
            broker=self.broker,
            num_reports=self.driver.core.next_report,
        )
        return self.history

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, action))

    def faulty(self) -> bool:
        return self.now < self.plan.faults_until

    def tick(self) -> None:
        for process in [self.driver, *self.runners.values(), *self.learners.values()]:
            if process.alive and not process.is_frozen:
                self.do(process, process.core.tick(self.now))
                if isinstance(process.core, RunnerCore):
                    self.record_progress(process)
        if self.broker is not None:
            self.do_broker(self.broker.tick(self.now))
        self.after(0.25, self.tick)

    # ------------------------------------------------------------------ network

    def deliver(self, process: Process, to_broker: bool, send: E.Send) -> None:
        """Puts a message on its way: it may get lost, come late, or come twice."""
        rng, plan = self.rng, self.plan
        copies = 1
        if self.faulty():
            if process.cut_until > self.now or rng.random() < plan.drop:
                return
            copies = 2 if rng.random() < plan.duplicate else 1
        message, frames = send.message, send.whole or (b"", *send.payload)
        if plan.check_wire:
            wire = send.frames
            assert decode_message(wire)[0] == message
            frames = tuple(wire)
        event = E.Received(process.routing if to_broker else b"", message, frames)
        for _ in range(copies):
            slow = self.faulty() and rng.random() < plan.slow
            delay = rng.uniform(0.0, 3.0) if slow else rng.uniform(0.0005, 0.002)
            self.after(delay, lambda: self.arrive(process, to_broker, event))

    def arrive(self, process: Process, to_broker: bool, event: E.Received) -> None:
        if to_broker:
            if self.broker is not None:
                num_accepted = self.broker.state.ledger.num_accepted
                self.do_broker(self.broker.handle(event, self.now))
                if isinstance(event.message, Fragment):
                    is_new = self.broker.state.ledger.num_accepted > num_accepted
                    self.record_arrival(event.message, is_new)
        elif process.alive:
            process.unless_frozen(lambda: self.do(process, process.core.handle(event, self.now)))

    def do_broker(self, instructions: list[E.Instruction]) -> None:
        assert self.broker is not None
        self.history.observe_broker(self.broker)
        for item in instructions:
            if isinstance(item, E.Send):
                process = self.by_routing.get(item.peer)
                if process is not None and process.alive:
                    self.deliver(process, False, item)
            elif isinstance(item, E.Publish):
                for runner in self.runners.values():
                    if not (self.faulty() and self.rng.random() < self.plan.drop):
                        delay = self.rng.uniform(0.0005, 0.01)
                        self.after(
                            delay, lambda p=runner, f=item.frame: self.happens(p, p.core.take_weights, f)
                        )
            elif isinstance(item, E.Quarantine):
                self.history.quarantined.append(item.fragment)

    def happens(
        self, process: Process, step: Callable[..., list[E.Instruction]], *args: Any, **kwargs: Any
    ) -> None:
        if process.alive:
            process.unless_frozen(lambda: self.do(process, step(*args, now=self.now, **kwargs)))

    def do(self, process: Process, instructions: list[E.Instruction]) -> None:
        """Carries out what a peer's core says."""
        for item in instructions:
            if isinstance(item, E.Send):
                if isinstance(item.message, Fragment):
                    self.history.sent.add(item.message.fragment_id)
                self.deliver(process, True, item)
            elif isinstance(item, E.Stop) and process.name.startswith("runner") and process.alive:
                # Refused: in this world only as fenced; its supervisor starts a new process.
                self.kill(process)
                self.after(0.5, lambda p=process: self.restart_runner(p))

    # ------------------------------------------------------------------ roles

    def new_uuid(self, name: str) -> str:
        self._uuid += 1
        return f"{name}-{self._uuid:04d}"

    def start_broker(self) -> None:
        self.broker_incarnation += 1
        options = BrokerOptions(RUN, self.broker_incarnation, peer_timeout_s=4.0, death_limit=3)
        self.broker = BrokerCore(options)
        self.history.num_brokers += 1
        self.held: set[FragmentId] = set()
        facts = {"incarnation": options.incarnation, "first_attempt": first_number(options.incarnation)}
        self.record(("broker", options.incarnation), "serves", **facts)

    def start_runner(self, name: str, incarnation: int) -> None:
        uuid = self.new_uuid(name)
        replaces = self.runners[name].core.uuid if name in self.runners else ""
        process = self.runners[name] = Process(name, uuid.encode(), None)
        process.core = RunnerCore(
            RUN,
            name,
            uuid,
            sample=lambda lease, weights, _: self.sample(process, lease, weights),
            num_envs=self.plan.num_envs,
            incarnation=incarnation,
            replaces=replaces,
        )
        self.by_routing[process.routing] = process
        self.do(process, process.core.start(self.now))

    def restart_runner(self, dead: Process) -> None:
        if self.runners.get(dead.name) is dead:
            self.start_runner(dead.name, self.rng.choice([0, dead.core.incarnation + 1]))

    def sample(self, process: Process, lease: Lease, weights: tuple[Publication, Any] | None) -> None:
        core = process.core
        if weights is not None:
            generation, version = weights[0].order
            self.record(process.key, "weights", generation=generation, version=version)
        assert core.weights.satisfies(lease.generation, lease.weights_version, exact=False)
        most = lease.num_vector_steps * self.plan.num_envs
        lost = sum(self.rng.random() < 0.1 for _ in range(most)) if most < 64 else most // 10
        seconds = 0.01 * lease.num_vector_steps
        if lease.max_s > 0.0 and self.rng.random() < 0.2:
            most = self.rng.randint(1, lease.num_vector_steps) * self.plan.num_envs  # it was out of time
            lost = min(lost, most)
        if self.faulty() and self.rng.random() < 0.03:
            seconds += self.rng.uniform(1.0, 12.0)  # hangs, longer than its lease may take
        env_steps: tuple[int, ...] = ()
        if lease.is_sorted_by_env:
            cuts = sorted(self.rng.randint(0, most - lost) for _ in range(self.plan.num_envs - 1))
            env_steps = tuple(np.diff([0, *cuts, most - lost]).tolist())
        self.history.sampled(core.uuid, env_steps)
        fragment = {"num_env_steps": most - lost, "env_steps": env_steps}
        self.after(seconds, lambda: self.happens(process, core.sampled, **fragment))

    def start_learner(self, name: str) -> LearnerProcess:
        uuid = self.new_uuid(name)
        process = LearnerProcess(name, uuid.encode(), None)
        process.core = LearnerCore(
            RUN,
            name,
            uuid,
            decode=lambda shard, _: self.decode(process, shard),
            find_odd=self.find_odd,
            train=lambda plan, shards: self.train(process, plan, shards),
        )
        self.learners[name] = process
        self.by_routing[process.routing] = process
        return process

    def form_group(self) -> None:
        """Survivors adopt the furthest state; replacements get it from them; a new generation."""
        members = [self.learners[name] for name in sorted(self.learners) if self.learners[name].alive]
        if self.fails_to_form(members):
            self.after(1.2, self.form_group)
            return
        self.forming = False
        source = max((m for m in members if m.generation >= 0), key=lambda m: len(m.chain), default=None)
        furthest = None if source is None else source.chain
        memory = b"" if source is None else source.core.export_memory()
        self.generation += 1
        is_rollback = furthest is None and self.generation > 1
        if is_rollback:
            furthest = self.checkpoint
            self.history.rollbacks += 1
            self.do(self.driver, self.driver.core.reset(self.generation, len(furthest)))
            self.after(0.01, self.open_updates)
        self.group, self.started = members, {}
        for rank, member in enumerate(members):
            member.chain = list(furthest or [])
            member.generation, member.rank, member.shards = self.generation, rank, {}
            self.record(member.key, "formed", generation=self.generation, next_update=len(member.chain))
            place = self.generation, rank, len(members), len(member.chain), self.now
            self.do(member, member.core.begin_generation(*place, memory=memory, begins_lineage=is_rollback))
        self.new_weights(members[0])

    def fails_to_form(self, members: list[LearnerProcess]) -> bool:
        """Who is frozen does not come, and is ended, unless it has the only state; now and then one dies."""
        frozen = [member for member in members if member.is_frozen]
        for member in frozen:
            self.end_frozen(member)
        doomed = self.faulty() and self.plan.allow_freeze and self.rng.random() < 0.2
        if doomed and len(members) > 1:
            self.kill_learner(self.rng.choice(members))
        return bool(frozen) or (doomed and len(members) > 1) or not members

    def new_weights(self, member: LearnerProcess) -> None:
        buffer = new_publication_buffer(8)
        buffer[512:] = np.frombuffer(len(member.chain).to_bytes(8, "little"), np.uint8)
        seal_publication(
            buffer, run_id=RUN, generation=self.generation, version=len(member.chain), layout_digest="l"
        )
        self.do(member, member.core.new_weights(self.generation, len(member.chain), buffer))

    def decode(self, process: LearnerProcess, item: Shard) -> FragmentRange:
        if self.plan.poison and item.fragment.seq % 14 == 3:
            raise UnusableError("not_finite", "NaN")
        shard = FragmentRange(item.fragment, item.first, item.num_steps)
        process.shards.setdefault((item.update_id, item.attempt), {})[item.index] = shard
        return shard

    def find_odd(self, shards: Sequence[FragmentRange]) -> dict[int, str]:
        is_odd = (self.plan.poison and shard.fragment.seq % 14 == 10 for shard in shards)
        return {place: "its form" for place, odd in enumerate(is_odd) if odd}

    def train(self, process: LearnerProcess, item: ShardPlan, shards: Sequence[FragmentRange]) -> None:
        """A rank enters the update; when all have, they vote and step, each at its own moment."""
        key = (item.update_id, item.attempt)
        assert len(shards) == item.num_fragments, "incomplete shard"
        assert sum(s.num_steps for s in shards) == item.num_env_steps, "not the planned steps"
        if not self.plan.has_replay:
            shares = rank_shares(item.num_env_steps_all_ranks, len(self.group))
            assert item.num_env_steps == shares[process.rank], "not this rank's share"
        self.history.got(self.generation, process.rank, shards)
        assert item.num_env_steps_all_ranks >= self.plan.steps_per_rank * self.plan.num_ranks
        if self.plan.killer and any(s.fragment.seq % 11 == 4 for s in shards):
            self.after(0.01, lambda: self.kill_learner(process))
            return
        started = self.started.setdefault(key, set())
        started.add(process.rank)
        if len(started) < len(self.group):
            return
        ranges = tuple(
            shard for member in self.group for _, shard in sorted(member.shards.get(key, {}).items())
        )
        num_trained = self.replayed(process.chain, item.num_env_steps_all_ranks)
        step = Step(item.update_id, self.generation, item.attempt, ranges, num_trained, len(self.group))
        generation = self.generation
        for member in self.group:
            take = functools.partial(self.step, member, step, generation)
            self.after(0.02 + self.rng.uniform(0, 0.002), lambda m=member, t=take: m.unless_frozen(t))

    def step(self, member: LearnerProcess, step: Step, generation: int) -> None:
        if not member.alive or generation != self.generation or self.forming:
            return
        assert len(member.chain) == step.update_id, "updates out of order"
        ranges = [[str(id_), first, num] for id_, first, num in member.core.training_ranges(step.update_id)]
        facts = {"update": step.update_id, "attempt": step.attempt, "generation": generation}
        self.record(member.key, "trained", **facts, ranges=ranges)
        member.chain.append(step)
        mine = member.shards.get((step.update_id, step.attempt), {}).values()
        member.num_held += sum(item.num_steps for item in mine)
        before = step.num_replayed - sum(s.num_replayed for s in member.chain[-2:-1])
        source = {
            "source_id": member.core.uuid,
            "num_ranks": len(self.group),
            "num_env_steps": member.num_held,
            "num_added": member.num_held,
        }
        results = pack_blob({"__all_modules__": {"batch_source": source}} if self.plan.has_replay else {})
        num_trained = before if self.plan.has_replay else sum(item.num_steps for item in step.ranges)
        done = member.core.update_trained(step.update_id, step.attempt, True, num_trained, results, self.now)
        self.do(member, done)
        if member.rank == 0:
            self.new_weights(member)

    def replayed(self, chain: list[Step], num_fresh: int) -> int:
        """Env steps replayed after one more update: the ratio's counts go with the learners' state."""
        plan = self.plan
        if not plan.has_replay:
            return 0
        ratio = ReplayRatio(plan.train_ratio, plan.warm_up)
        num_before = chain[-1].num_replayed if chain else 0
        ratio.set_state({"num_sampled": sum(step.num_steps for step in chain), "num_trained": num_before})
        ratio.sampled(num_fresh)
        batch = _REPLAY_BATCH * len(self.group)
        return num_before + ratio.take(batch) * batch

    def open_updates(self) -> None:
        """Opens as many updates as the staleness lets run ahead."""
        plan, driver = self.plan, self.driver.core
        while driver.next_update < min(plan.num_updates, driver.next_report + 1 + plan.staleness):
            update = OpenUpdate(
                driver.next_update,
                plan.steps_per_rank,
                plan.num_ranks,
                weights_version=driver.next_update,
                staleness=plan.staleness,
                max_policy_lag=-1 if plan.has_replay else plan.staleness,
                keeps_episodes=plan.has_replay,
                fragment_length=plan.fragment_length,
                lease_timeout_s=5.0,
            )
            self.do(self.driver, driver.open_update(update))

    def reported(self, report: Report) -> None:
        self.history.reports.append(report)
        self.record_report(report)
        if report.report.update_id % 2 == 0:
            furthest = max((m.chain for m in self.group), key=len)
            self.checkpoint = list(furthest[: report.report.update_id + 1])
        self.open_updates()

    # ------------------------------------------------------------------ faults

    def crash(self) -> None:
        if not self.faulty():
            return
        rng = self.rng
        kinds = ["runner", "runner", "learner", "broker", "cut", "lost"]
        if self.plan.allow_freeze:
            kinds += ["freeze", "freeze", "freeze and broker"]
        kind = rng.choice(kinds)
        if kind == "runner":
            process = self.runners[rng.choice(sorted(self.runners))]
            if process.alive:
                self.kill(process)
                self.after(rng.uniform(0.05, 2.0), lambda: self.restart_runner(process))
        elif kind == "learner" and self.group:
            self.kill_learner(rng.choice(self.group))
            if self.plan.allow_rollback and rng.random() < 0.3:
                for member in list(self.group):
                    self.kill_learner(member)
        if kind.startswith("freeze"):
            frozen = rng.choice([*self.runners.values(), *self.learners.values()])
            frozen.is_frozen = True
            self.after(rng.uniform(0.5, 4.0), lambda: frozen.is_frozen and self.end_frozen(frozen))
            kind = kind.rpartition(" ")[2]
        if kind == "broker" and self.plan.allow_broker_crash and self.broker is not None:
            self.broker = None
            self.after(rng.uniform(0.05, 2.0), self.start_broker)
        if kind == "cut":
            everyone = [*self.runners.values(), *self.learners.values(), self.driver]
            rng.choice(everyone).cut_until = self.now + rng.uniform(0.5, 8.0)
        elif kind == "lost" and self.broker is not None:
            # The transport gives up on a peer that is alive.
            peer = rng.choice([*self.runners.values(), *self.learners.values()])
            self.do_broker(self.broker.lost(peer.routing, self.now))
        self.history.num_faults += 1
        self.after(rng.expovariate(1 / self.plan.mean_time_between_crashes), self.crash)

    def end_frozen(self, process: Process) -> None:
        """The supervisor kills who does not answer, unless it has the only state of the learners."""
        if not process.alive:
            return
        if not isinstance(process, LearnerProcess):
            self.kill(process)
            self.after(0.5, lambda: self.restart_runner(process))
        elif [member for member in self.group if member.alive] == [process]:
            process.is_frozen = False
            missed, process.missed = process.missed, []
            for action in missed:
                action()
        else:
            self.kill_learner(process)

    def kill(self, process: Process) -> None:
        process.alive = False
        self.record(("driver", 0), "ended", place=process.name, pid=process.key[1])
        if self.broker is not None and self.rng.random() < 0.5:
            self.after(
                0.01, lambda: self.broker and self.do_broker(self.broker.lost(process.routing, self.now))
            )

    def kill_learner(self, process: LearnerProcess) -> None:
        if not process.alive:
            return
        self.kill(process)
        delay = self.rng.uniform(0.05, 1.0)
        self.after(delay, lambda: self.start_learner(process.name))
        if not self.forming:
            self.forming = True
            self.after(1.2, self.form_group)


def run_schedule(seed: int) -> History:
    """Runs one schedule and checks its history.

    Raises:
        AssertionError: A promise was broken; the text has the seed.
    """
    try:
        simulation = Simulation(Plan.draw(seed))
        history = simulation.run()
        history.check()
        fault_history.check_weights(simulation.recorded)
        if not history.rollbacks:
            fault_history.check_history(simulation.recorded, keeps_order=simulation.plan.keeps_order)
    except Exception as error:
        raise AssertionError(f"schedule of seed {seed}: {type(error).__name__}: {error}") from error
    return history
