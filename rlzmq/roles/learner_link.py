"""A learner rank's connection to the broker: shards become an exact batch, results become messages.

| consumes     | produces     | waits for                            | unblocked by           |
|--------------|--------------|--------------------------------------|------------------------|
| SHARD        | decoded views | –                                   | –                      |
| TRAIN        | an update    | the update before it                 | its vote               |
| the vote     | UPDATE_DONE, rank 0: WEIGHTS | –                    | –                      |
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlzmq.core import faults, trace
from rlzmq.core.errors import PeerLostError, ProtocolError
from rlzmq.core.process import end_if_out_of_memory
from rlzmq.core.spaces import space_from_plain
from rlzmq.core.tree import tree_stack
from rlzmq.episodes.columns import Columns
from rlzmq.learners.distributed import DesynchronizedError
from rlzmq.modules.rl_module import RLModule
from rlzmq.modules.weights import WeightsLayout
from rlzmq.protocol.events import (
    DecodeShard,
    DropShards,
    Instruction,
    RunUpdate,
)
from rlzmq.protocol.learner_core import LearnerCore
from rlzmq.protocol.weights import PUBLICATION_PREFIX_BYTES, new_publication_buffer, seal_publication
from rlzmq.roles.arrival_log import ArrivalLog
from rlzmq.roles.batch_check import BatchCheck, decode_steps
from rlzmq.roles.hang_watch import UpdateWatch
from rlzmq.roles.peer_link import Curve, PeerLink, ends_link, new_peer_id
from rlzmq.runners.module_step import ModuleStep
from rlzmq.wire.codec import Buffer
from rlzmq.wire.messages import Shard, ShardPlan
from rlzmq.wire.values import pack_blob

__all__ = ["LearnerLink", "module_outputs"]


_log = logging.getLogger("rlzmq.learners")
_NUM_ROWS = 2


def module_outputs(module: RLModule, *, explore: bool) -> dict[str, Any]:
    """Return the columns that a runner's step with this module adds to episodes, actions left out.

    A copy of the module acts on observations drawn from its space, so neither the module nor torch's random state
    changes.

    Args:
        module: One policy's module, e.g. a learner's.
        explore: Whether runners explore.

    Returns:
        Trees of arrays ``[rows, ...]`` by name; {} if the module cannot be tried, e.g. because it has no spaces or
        reads columns of custom connector pieces.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            own = copy.deepcopy(module.unwrapped())
            own.inference_only = True
            if isinstance(own, torch.nn.Module):
                own = own.cpu().eval()
            space = copy.deepcopy(own.observation_space)
            if space is None:
                return {}
            space.seed(0)
            step = ModuleStep(own, torch.Generator())
            step.begin(explore=explore)
            state = step.initial_state(_NUM_ROWS) if step.is_stateful else None
            columns, _ = step(tree_stack([space.sample() for _ in range(_NUM_ROWS)]), state, 0)
    except Exception as error:
        _log.debug("no trial step of module %s: %s", type(module).__name__, error)
        return {}
    return {
        name: column
        for name, column in columns.items()
        if name not in (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV)
    }


class LearnerLink(PeerLink):
    """Trains the broker's shards with a Learner.

    Args:
        learner: Used on the learner thread only.
        run_blocking: ``run_blocking(fn)`` runs `fn` on the learner thread, in order; returns an awaitable.
        run_id, name: Identity of this learner.
        data_address: The broker's data address.
        num_env_steps_before: Env steps trained in the run before the learner's current version.
        of_agents: Whether fragments hold episodes of several agents.
        observation_space: Space of the stored observations, as plain data; None: not checked.
        stores_module_outputs: Whether no custom connector piece changes the modules' outputs before they are stored.
        curve: Keys for a broker reached by TCP.
        arrivals: Log of the trained fragments; None: no log.
        watch: Watches the updates.
    """

    def __init__(
        self,
        learner: Any,
        run_blocking: Callable[[Callable[[], Any]], Any],
        *,
        run_id: str,
        name: str,
        data_address: str,
        num_env_steps_before: int = 0,
        of_agents: bool = False,
        observation_space: Any = None,
        stores_module_outputs: bool = False,
        curve: Curve = None,
        arrivals: ArrivalLog | None = None,
        watch: UpdateWatch | None = None,
    ) -> None:
        super().__init__(LearnerCore(run_id, name, new_peer_id()), data_address, curve)
        self._learner = learner
        self._run_blocking = run_blocking
        self._watch = watch
        self._run_id = run_id
        self.num_env_steps_before = num_env_steps_before
        self._arrivals = arrivals
        self._shards: dict[tuple[int, int], dict[int, tuple[Any, Shard, Sequence[Buffer]]]] = {}
        self._layout: Any = None
        self._synced_module_ids: list[str] | None = None
        self._rank = 0
        self._generation = -1
        self._check = BatchCheck(of_agents=of_agents)
        self._trained_at: float | None = None  # when the last update ended, for the trace
        self._observation_space = space_from_plain(observation_space)
        self._stores_module_outputs = stores_module_outputs
        self.group_lost: asyncio.Future[str] = self._loop.create_future()

    def register(self) -> None:
        """Do nothing: registration follows in `form`."""

    def begin_forming(self) -> None:
        """Stop training updates of the current generation, before the group is re-formed."""
        self.core.is_forming = True

    def form(
        self,
        *,
        generation: int,
        rank: int,
        num_ranks: int,
        memory: bytes = b"",
        begins_lineage: bool = False,
    ) -> None:
        """Register under a new generation, and (rank 0) publish the current weights.

        Args:
            generation, rank, num_ranks: The generation, this learner's rank and the group's size.
            memory: `LearnerCore.export_memory` of the rank whose state all ranks adopted.
            begins_lineage: A checkpoint was restored.
        """
        self._rank, self._generation = rank, generation
        if self.group_lost.done():
            self.group_lost = self._loop.create_future()
        self._shards.clear()
        if self._arrivals is not None and begins_lineage:
            self._arrivals.state_is_due()
        version = self._learner.weights_seq_no
        faults.record("formed", generation=generation, rank=rank, num_ranks=num_ranks, next_update=version)
        self.do(
            self.core.form_group(
                generation,
                rank,
                num_ranks,
                version,
                self.now(),
                memory=memory,
                begins_lineage=begins_lineage,
            )
        )
        if rank == 0:
            num_steps = self.num_env_steps_before
            self.when_done(self._run_blocking(lambda: self._snapshot(num_steps)), self._publish)

    @ends_link
    def _tick(self) -> None:
        self.core.progress = self._learner.progress
        if self._watch is not None:
            self.core.patience_s = self._watch.patience_s
        super()._tick()

    def act(self, instruction: Instruction) -> None:
        """Decode shards on the loop (views, no copies); train on the learner thread."""
        if isinstance(instruction, DecodeShard):
            self._decode(instruction.shard, instruction.frames)
        elif isinstance(instruction, DropShards):
            self._shards.pop((instruction.update_id, instruction.attempt), None)
        elif isinstance(instruction, RunUpdate):
            self._train(instruction.plan)

    def _decode(self, shard: Shard, frames: Sequence[Buffer]) -> None:
        num_replaced = self._check.num_replaced
        start = time.perf_counter()
        try:
            batch = decode_steps(frames, self._check, shard.fragment, shard.first, shard.num_steps)
        except MemoryError as error:
            end_if_out_of_memory(error, self.core.name)
            raise
        except Exception as error:  # data from a peer may raise anything: the shard is refused
            reason, detail = getattr(error, "reason", "unusable"), str(error)
            if not isinstance(error, (ProtocolError, ValueError)):
                _log.error("fragment %s raised an error in its check:", shard.fragment, exc_info=error)
                detail = f"{type(error).__name__}: {detail}"
            failed = self.core.shard_failed(shard.update_id, shard.attempt, shard.index, str(reason), detail)
            self.do(failed)
            return
        if trace.is_on:
            trace.span("decode", start, time.perf_counter(), fragment=str(shard.fragment))
        self._shards.setdefault((shard.update_id, shard.attempt), {})[shard.index] = batch, shard, frames
        if self._check.num_replaced > num_replaced:
            self._refuse_misfits()  # before this shard may complete its update
        self.do(self.core.shard_decoded(shard.update_id, shard.attempt, shard.index, self.now()))

    def _refuse_misfits(self) -> None:
        """Refuse received shards of the former form after the expected form was replaced."""
        for (update_id, attempt), batches in list(self._shards.items()):
            for index, (batch, *_) in list(batches.items()):
                if self.core.is_receiving(update_id, attempt) and (misfit := self._check.misfit(batch)):
                    del batches[index]
                    self.do(self.core.shard_failed(update_id, attempt, index, "unusable", misfit))

    def _train(self, update: ShardPlan) -> None:
        if self.core.is_forming:
            return  # void: GroupFormed will name the next update
        shards = self._shards.pop((update.update_id, update.attempt), {})  # a rank may have no fresh data
        batches = [shards[index][0] for index in range(update.num_fragments)]
        num_steps = self.num_env_steps_before + update.num_env_steps_all_ranks
        # Without sampling, schedules follow the learner's count of trained steps.
        timesteps = {"num_env_steps_sampled_lifetime": num_steps} if num_steps else None

        faults.at("learner.train")

        def job() -> tuple[bytes, Any, int]:
            if self._arrivals is not None:
                ordered = [shards[index][1:] for index in range(update.num_fragments)]
                self._arrivals.begin_update(self._learner, ordered, timesteps)
            start = time.perf_counter()
            if trace.is_on and self._trained_at is not None:
                trace.span("wait", self._trained_at, start)
            with nullcontext() if self._watch is None else self._watch.call("an update"):
                results = self._learner.update(episodes=batches, timesteps=timesteps)
            if self._arrivals is not None:
                self._arrivals.end_update(self._learner)
            weights = self._snapshot(num_steps) if self._rank == 0 else None
            if trace.is_on:
                self._trained_at = time.perf_counter()
                trace.span("train", start, self._trained_at, update=update.update_id)
                for _, shard, _ in shards.values():
                    trace.flow_end(str(shard.fragment), start)
            return pack_blob(results), weights, results["__all_modules__"]["num_env_steps_trained"]

        def finish(done: asyncio.Future[Any]) -> None:
            end_if_out_of_memory(done.exception(), self.core.name)
            if isinstance(done.exception(), (PeerLostError, DesynchronizedError)):
                if not self.group_lost.done():
                    self.group_lost.set_result(str(done.exception()))
                return
            if (error := done.exception()) is not None:
                self.fail(error)
                return
            faults.at("learner.trained")
            self._check.trained()
            was_trained = self._learner.was_trained
            if was_trained:
                self.num_env_steps_before = num_steps
            if faults.is_recording:
                ranges = [[str(f), first, n] for f, first, n in self.core.training_ranges(update.update_id)]
                faults.record(
                    "trained",
                    update=update.update_id,
                    attempt=update.attempt,
                    generation=self._generation,
                    rank=self._rank,
                    ranges=ranges,
                )
            blob, weights, num_trained = done.result()
            if weights is not None:
                self.do(self.core.new_weights(*weights))
            self.do(
                self.core.update_trained(
                    update.update_id, update.attempt, was_trained, num_trained, blob, self.now()
                )
            )

        self.when_done(self._run_blocking(job), finish)

    def change_layout(self, synced_module_ids: list[str] | None) -> None:
        """Adopt a new set of modules; called on the learner thread, between two updates.

        Args:
            synced_module_ids: Modules whose weights runners need; None: all.
        """
        self._synced_module_ids = synced_module_ids
        self._layout = None
        self._check.forget()
        modules = dict(self._learner.module.items())
        spaces = {module_id: module.action_space for module_id, module in modules.items()}
        outputs = None
        if self._stores_module_outputs:
            explore = self._learner.config.explore
            outputs = {
                module_id: module_outputs(module, explore=explore) for module_id, module in modules.items()
            }
        self._check.expect(spaces, self._observation_space, outputs)

    def _snapshot(self, num_env_steps: int) -> tuple[int, int, Buffer]:
        """Return (generation, version, a sealed publication frame) of the newest weights."""
        if self._layout is None:
            self._layout = WeightsLayout.of(
                self._learner.module, inference_only=True, module_ids=self._synced_module_ids
            )
        layout, version = self._layout, self._learner.weights_seq_no

        def write(buffer: npt.NDArray[np.uint8], *, is_shared: bool) -> None:
            layout.snapshot(self._learner.module, out=buffer[PUBLICATION_PREFIX_BYTES:])
            seal_publication(
                buffer,
                run_id=self._run_id,
                generation=self._generation,
                version=version,
                layout_digest=layout.digest,
                num_env_steps=num_env_steps,
                has_digest=not is_shared,
            )

        buffer = None
        if self._segments is not None:
            num_bytes = PUBLICATION_PREFIX_BYTES + layout.num_bytes
            buffer = self._segments.make(num_bytes, partial(write, is_shared=True))
        if buffer is None:
            buffer = new_publication_buffer(layout.num_bytes)
            write(buffer, is_shared=False)
        return self._generation, version, buffer.data

    def _publish(self, done: asyncio.Future[Any]) -> None:
        if (error := done.exception()) is not None:
            self.fail(error)
        else:
            self.do(self.core.new_weights(*done.result()))
