"""A learner rank's connection to the broker: shards are checked and become an exact batch, results become messages.

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
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import optree
import torch
from numpy.typing import NDArray

from rlzmq.core import faults, trace
from rlzmq.core.call_watch import UpdateWatch
from rlzmq.core.errors import PeerLostError, ProtocolError
from rlzmq.core.process import end_if_out_of_memory
from rlzmq.core.spaces import space_from_plain
from rlzmq.core.tree import tree_stack
from rlzmq.episodes.bad_values import find_bad_values
from rlzmq.episodes.batch_columns import ragged_arange
from rlzmq.episodes.batch_items import kind_of
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.learners.distributed import DesynchronizedError
from rlzmq.modules.rl_module import RLModule
from rlzmq.modules.weights import WeightsLayout
from rlzmq.net.keys import CurveClient
from rlzmq.protocol.learner_core import LearnerCore, UnusableError
from rlzmq.roles.arrival_log import ArrivalLog
from rlzmq.roles.peer_link import PeerLink, ends_link, new_peer_id
from rlzmq.runners.module_step import ModuleStep
from rlzmq.wire.codec import (
    PUBLICATION_PREFIX_BYTES,
    Buffer,
    new_publication_buffer,
    seal_publication,
)
from rlzmq.wire.messages import Shard, ShardPlan
from rlzmq.wire.payloads import decode_fragment, pack_blob

__all__ = ["BatchCheck", "BatchForm", "LearnerLink", "decode_steps", "form_of", "module_outputs"]

# Votes of the last trained update, and batches refused since then that have one, too.
_TRAINED_VOTES, _MAX_REFUSED = 3, 100
# Leaf path → (shape of one step, kind of dtype).
_Form = dict[str, tuple[tuple[int, ...], str]]
# Form of the columns by (module, agent); the only agent is None.
BatchForm = dict[tuple[str, Any], _Form]
_Decoded = tuple[EpisodeBatch, BatchForm, Shard, Sequence[Buffer]]


class BatchCheck:
    """Check that refuses batches which would spoil an update.

    Observations and actions must match the run's spaces, and the columns that a module adds its own outputs
    (`module_outputs`), whatever batches hold. Only batches can tell the shape per step and dtype kind of columns that
    custom connector pieces or callbacks add: `find_odd` compares those of one update. In multi-agent batches each agent
    has columns, which may be missing.

    Discrete values, also within Dict and Tuple spaces, index tables: a value outside of its Discrete, MultiDiscrete
    or MultiBinary space is refused. The spaces are the run's, not the batch's.

    Args:
        of_agents: Whether episodes have several agents; None: either.
    """

    def __init__(self, *, of_agents: bool | None = None) -> None:
        self._whose = {None: "", False: "one agent", True: "several agents"}[of_agents]
        self._trained: list[BatchForm] = []  # of the last update, as often as it has a vote
        self._refused: deque[BatchForm] = deque(maxlen=_MAX_REFUSED)  # since then
        self._actions: dict[Any, list[_Leaf]] = {}
        self._observations: dict[Any, list[_Leaf]] = {}
        self._outputs: dict[str, dict[str, _Form]] = {}

    def expect(
        self,
        action_spaces: Mapping[str, Any],
        observation_space: object = None,
        outputs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Set what columns are checked against.

        Args:
            action_spaces: Action space by module id.
            observation_space: Space of the stored observations (multi-agent: a Dict by agent id); None: unknown.
            outputs: By module id, the columns that the module adds, as trees of arrays ``[rows, ...]``; None:
                unknown.
        """
        self._outputs = {
            module_id: {name: _form_of({name: column}) for name, column in columns.items()}
            for module_id, columns in (outputs or {}).items()
        }
        self._actions = _leaves_by_id(action_spaces)
        by_agent = observation_space.spaces if isinstance(observation_space, gym.spaces.Dict) else {}
        self._observations = _leaves_by_id({**by_agent, None: observation_space})

    def check(self, batch: EpisodeBatch) -> None:
        """Check a batch.

        Raises:
            ValueError: It cannot be trained; the text names column, expected and actual.
        """
        if self._whose not in ("", kind_of(batch)):
            raise ValueError(f"expected episodes of {self._whose}, got episodes of {kind_of(batch)}")
        if (found := find_bad_values(batch)) is not None:
            raise ValueError(f"{found.values[0]}, which no loss can use")
        for part in batch.agent_batches:
            module_ids, agent_ids = part.owners()
            _check_column(part, Columns.ACTIONS, self._actions, module_ids)
            _check_column(part, Columns.OBS, self._observations, agent_ids)
            for module_id in sorted(set(module_ids)):
                _check_outputs(part, self._outputs.get(module_id, {}))

    def find_odd(self, forms: Sequence[BatchForm]) -> dict[int, str]:
        """Return how some of an update's batches differ from most, by their place.

        The last update and the batches refused since then have votes, too: a form that most come in prevails, even if
        an update has one batch, or begins with an odd one.
        """
        former = [*self._trained, *self._refused]
        votes = [*former, *forms]
        odd: dict[int, str] = {}
        if all(form == votes[0] for form in votes):  # as nearly always
            return odd
        for key in dict.fromkeys(key for form in votes for key in form):
            has_all = key[1] is None  # one of several agents may lack columns
            mine = [form.get(key, {}) for form in votes]
            for name in dict.fromkeys(name for form in mine for name in form):
                found = Counter(form.get(name) for form in mine if has_all or name in form)
                usual = found.most_common(1)[0][0]
                for place, form in enumerate(mine[len(former) :]):
                    if (got := form.get(name)) != usual and (has_all or name in form):
                        odd.setdefault(place, f"column {name!r}: expected {_text(usual)}, got {_text(got)}")
        if odd:
            self._refused.append(forms[next(iter(odd))])  # of the others, the update is planned again
        return odd

    def trained(self, forms: Sequence[BatchForm]) -> None:
        """Note that an update of batches in these forms was trained."""
        if forms:
            self._trained = [forms[0]] * _TRAINED_VOTES
            self._refused.clear()

    def forget(self) -> None:
        """Forget the last update after the modules changed."""
        self._trained = []
        self._refused.clear()


def decode_steps(frames: Sequence[Any], check: BatchCheck, first: int, num_steps: int) -> EpisodeBatch:
    """Decode and check some env steps of a fragment from a runner, which is not trusted.

    Args:
        frames: Frames of the fragment's message, or of the message of this range.
        check: The check to apply.
        first, num_steps: Range of env steps.

    Returns:
        A batch of these steps, in chunk order.

    Raises:
        ProtocolError: It cannot be decoded.
        ValueError: It does not pass the check, or does not have these steps.
    """
    header, arrays, _ = decode_fragment(frames)
    batch = EpisodeBatch.from_wire(header.batch, arrays)
    check.check(batch)
    # A message of this range alone, or of the whole fragment.
    begin = 0 if header.num_env_steps == num_steps else first
    last = begin + num_steps
    if last > batch.num_env_steps:
        raise ValueError(f"steps {begin}…{last} are wanted of a fragment of {batch.num_env_steps}")
    if (begin, last) != (0, batch.num_env_steps):
        batch = batch.slice_steps(begin, last)
    return batch


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One leaf of a space at `path`; discrete values are within `low` and `high` (arrays of the space's shape)."""

    space: Any
    path: tuple[Any, ...]
    low: Any = None
    high: Any = None


def _leaves(space: gym.Space[Any], path: tuple[Any, ...] = ()) -> Iterator[_Leaf]:
    """Yield the leaves of known types; other spaces (custom ones, graphs, sequences) are skipped."""
    if isinstance(space, gym.spaces.Dict):
        for key, part in space.spaces.items():
            yield from _leaves(part, (*path, key))
    elif isinstance(space, gym.spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from _leaves(part, (*path, index))
    elif isinstance(space, gym.spaces.Discrete):
        yield _Leaf(space, path, int(space.start), int(space.start + space.n - 1))
    elif isinstance(space, gym.spaces.MultiDiscrete):
        yield _Leaf(space, path, np.asarray(space.start), space.start + space.nvec - 1)
    elif isinstance(space, gym.spaces.MultiBinary):
        yield _Leaf(space, path, 0, 1)
    elif isinstance(space, gym.spaces.Box):
        yield _Leaf(space, path)


def _leaves_by_id(spaces: Mapping[Any, Any]) -> dict[Any, list[_Leaf]]:
    """Return the leaves of each space; equal spaces share one list, so that they are checked together."""
    seen: list[tuple[Any, list[_Leaf]]] = []
    by_id = {}
    for id_, space in spaces.items():
        leaves = next((known for other, known in seen if other == space), None)
        if leaves is None:
            leaves = list(_leaves(space))
            seen.append((space, leaves))
        by_id[id_] = leaves
    return by_id


def _check_column(part: EpisodeBatch, name: str, expected: Mapping[Any, list[_Leaf]], ids: list[Any]) -> None:
    """Raise ValueError if a column of an EpisodeBatch, lookback included, has values outside of its space."""
    num_more = int(name == Columns.OBS)  # the observation after the last step
    for leaves in {id(expected[id_]): expected[id_] for id_ in set(ids) if expected.get(id_)}.values():
        mine = [expected.get(id_) is leaves for id_ in ids]
        chosen = slice(None) if all(mine) else np.array(mine)
        start, lookback, length = part.start[chosen], part.lookback[chosen], part.length[chosen]
        slots = ragged_arange(start - lookback, lookback + length + num_more)
        for leaf in leaves if len(slots) else ():
            _check_leaf(_leaf_at(part.columns.get(name), leaf.path), leaf, name, slots)


def _check_leaf(column: NDArray[Any] | None, leaf: _Leaf, name: str, slots: NDArray[np.int64]) -> None:
    where = f"column {name!r}{''.join(f'[{key!r}]' for key in leaf.path)}"
    if column is None or column.dtype.kind not in "biuf":
        got = "none" if column is None else str(column.dtype)
        raise ValueError(f"{where}: expected numbers of {leaf.space}, got {got}")
    shape, expected = column.shape[1:], leaf.space.shape
    if shape != expected and (name == Columns.OBS or math.prod(shape) != math.prod(expected)):
        raise ValueError(f"{where}: expected shape {expected} per step of {leaf.space}, got {shape}")
    if leaf.low is None:
        return
    values = column[slots].reshape(len(slots), *expected)
    is_bad = (values < leaf.low) | (values > leaf.high)
    if is_bad.any():
        raise ValueError(f"{where}: expected values of {leaf.space}, got {values[is_bad][0]}")


def _leaf_at(column: object, path: tuple[Any, ...]) -> Any:
    """Return the array at this path of a column, or None if the column has another structure."""
    for key in path:
        if isinstance(column, dict):
            column = column.get(key)
        elif isinstance(column, tuple) and type(key) is int and key < len(column):
            column = column[key]
        else:
            return None
    return column if isinstance(column, np.ndarray) else None


def form_of(batch: EpisodeBatch) -> BatchForm:
    """Return the form of a batch, for `BatchCheck.find_odd`."""
    forms: BatchForm = {}
    for part in batch.agent_batches:
        forms |= dict.fromkeys(zip(*part.owners(), strict=True), _form_of(part.columns))
    return forms


def _check_outputs(part: EpisodeBatch, outputs: Mapping[str, _Form]) -> None:
    """Raise ValueError if a column that the module adds is there in another form; it may be missing."""
    for name, expected in outputs.items():
        if name not in part.columns or (got := _form_of({name: part.columns[name]})) == expected:
            continue
        leaf = next(leaf for leaf in {**expected, **got} if expected.get(leaf) != got.get(leaf))
        raise ValueError(
            f"column {leaf!r}: expected {_text(expected.get(leaf))}, got {_text(got.get(leaf))}; "
            "the module's own outputs define it"
        )


def _form_of(columns: Any) -> _Form:
    paths, leaves, _ = optree.tree_flatten_with_path(columns)
    form = {
        "/".join(map(str, path)): (leaf.shape[1:], leaf.dtype.kind)
        for path, leaf in zip(paths, leaves, strict=True)
    }
    shape, kind = form.get(Columns.REWARDS, ((), ""))
    if kind and kind in "biu":  # an environment may return 0 in one fragment, and 0.5 in the next
        form[Columns.REWARDS] = shape, "f"
    return form


def _text(what: tuple[tuple[int, ...], str] | None) -> str:
    return "none" if what is None else f"shape {what[0]} per step of dtype kind {what[1]!r}"


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
            own = copy.deepcopy(module)
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
            with torch.inference_mode():
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
        curve: CurveClient | None = None,
        arrivals: ArrivalLog | None = None,
        watch: UpdateWatch | None = None,
    ) -> None:
        core = LearnerCore(
            run_id, name, new_peer_id(), decode=self._decode, find_odd=self._find_odd, train=self._train
        )
        super().__init__(core, data_address, curve)
        self._learner = learner
        self._run_blocking = run_blocking
        self._watch = watch
        self._run_id = run_id
        self.num_env_steps_before = num_env_steps_before
        self._arrivals = arrivals
        self._layout: Any = None
        self._synced_module_ids: list[str] | None = None
        self._check = BatchCheck(of_agents=of_agents)
        self._trained_at: float | None = None  # when the last update ended, for the trace
        self._observation_space = space_from_plain(observation_space)
        self._stores_module_outputs = stores_module_outputs
        self.group_lost: asyncio.Future[str] = self._loop.create_future()

    def register(self) -> None:
        """Do nothing: registration follows in `enlist`."""

    def begin_forming(self) -> None:
        """Stop training updates of the current generation, before the group is re-formed."""
        self.core.is_forming = True

    def enlist(
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
        if self.group_lost.done():
            self.group_lost = self._loop.create_future()
        if self._arrivals is not None and begins_lineage:
            self._arrivals.state_is_due()
        version = self._learner.weights_seq_no
        faults.record("formed", generation=generation, rank=rank, num_ranks=num_ranks, next_update=version)
        self.do(
            self.core.begin_generation(
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
        self.core.progress = self._learner.ranks.progress
        if self._watch is not None:
            self.core.patience_s = self._watch.patience_s
        super()._tick()

    def _decode(self, shard: Shard, frames: tuple[Buffer, ...]) -> _Decoded:
        """Decode and check a shard on the loop (views, no copies)."""
        start = time.perf_counter()
        try:
            batch = decode_steps(frames, self._check, shard.first, shard.num_steps)
            form = form_of(batch)
        except MemoryError as error:
            end_if_out_of_memory(error, self.core.name)
            raise
        except Exception as error:  # data from a peer may raise anything: the shard is refused
            reason, detail = getattr(error, "reason", "unusable"), str(error)
            if not isinstance(error, (ProtocolError, ValueError)):
                _log.error("fragment %s raised an error in its check:", shard.fragment, exc_info=error)
                detail = f"{type(error).__name__}: {detail}"
            raise UnusableError(reason, detail) from error
        if trace.is_on:
            trace.span("decode", start, time.perf_counter(), fragment=str(shard.fragment))
        return batch, form, shard, frames

    def _find_odd(self, decoded: Sequence[_Decoded]) -> dict[int, str]:
        return self._check.find_odd([form for _, form, _, _ in decoded])

    def _train(self, update: ShardPlan, decoded: Sequence[_Decoded]) -> None:
        """Train a plan's shards on the learner thread."""
        if self.core.is_forming:
            return  # void: `enlist` will name the next update
        batches = [batch for batch, *_ in decoded]  # a rank may have no fresh data
        num_steps = self.num_env_steps_before + update.num_env_steps_all_ranks
        # Without sampling, schedules follow the learner's count of trained steps.
        timesteps = {"num_env_steps_sampled_lifetime": num_steps} if num_steps else None

        faults.at("learner.train")

        def job() -> tuple[bytes, Any, int]:
            if self._arrivals is not None:
                arrived = [(shard, frames) for _, _, shard, frames in decoded]
                self._arrivals.begin_update(self._learner, arrived, timesteps)
            start = time.perf_counter()
            if trace.is_on and self._trained_at is not None:
                trace.span("wait", self._trained_at, start)
            with nullcontext() if self._watch is None else self._watch.call("an update"):
                results = self._learner.update(episodes=batches, timesteps=timesteps)
            if self._arrivals is not None:
                self._arrivals.end_update(self._learner)
            weights = self._snapshot(num_steps) if self.core.rank == 0 else None
            if trace.is_on:
                self._trained_at = time.perf_counter()
                trace.span("train", start, self._trained_at, update=update.update_id)
                for _, _, shard, _ in decoded:
                    trace.flow(str(shard.fragment), start, ends=True)
            return pack_blob(results), weights, self._learner.report.num_env_steps

        def finish(done: asyncio.Future[Any]) -> None:
            if (error := done.exception()) is not None:
                end_if_out_of_memory(error, self.core.name)
                if not isinstance(error, (PeerLostError, DesynchronizedError)):
                    self.fail(error)
                elif not self.group_lost.done():
                    self.group_lost.set_result(str(error))
                return
            faults.at("learner.trained")
            self._check.trained([form for _, form, _, _ in decoded])
            was_trained = self._learner.report.was_trained
            if was_trained:
                self.num_env_steps_before = num_steps
            if faults.is_recording:
                ranges = [[str(f), first, n] for f, first, n in self.core.training_ranges(update.update_id)]
                faults.record(
                    "trained",
                    update=update.update_id,
                    attempt=update.attempt,
                    generation=self.core.generation,
                    rank=self.core.rank,
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
        layout, generation, version = self._layout, self.core.generation, self._learner.weights_seq_no

        def write(buffer: npt.NDArray[np.uint8], *, is_shared: bool) -> None:
            layout.snapshot(self._learner.module, out=buffer[PUBLICATION_PREFIX_BYTES:])
            seal_publication(
                buffer,
                run_id=self._run_id,
                generation=generation,
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
        return generation, version, buffer.data

    def _publish(self, done: asyncio.Future[Any]) -> None:
        if (error := done.exception()) is not None:
            self.fail(error)
        else:
            self.do(self.core.new_weights(*done.result()))
