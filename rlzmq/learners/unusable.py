"""UnusableSteps: finds the steps of an update that made a loss overflow, and returns the batches without them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlzmq.episodes.bad_values import BadValues
from rlzmq.episodes.columns import ORIGIN
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_batch import MultiAgentEpisodeBatch
from rlzmq.learners.learner_hooks import UpdateStats
from rlzmq.learners.optimizers import global_norm

__all__ = ["LeftOut", "UnusableSteps", "as_batches"]

_log = logging.getLogger("rlzmq.learners")

_STEPS = "steps_of_whole"  # in the meta of a cut batch: its env steps within the whole batch

# Number of halvings per search, each a forward and a backward pass. A part that is still too large is left out whole.
_MAX_HALVINGS = 100
_MAX_SHOWN = 5


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Steps that were left out of an update.

    Attributes:
        origin: Origin of the batch, from its meta; None: unknown.
        first, num_steps: Env steps of the original batch, as counted by `slice_steps`.
        is_fresh: Whether they arrived with this update. If not, they were in a buffer before.
    """

    origin: Any
    first: int
    num_steps: int
    is_fresh: bool


@dataclass(slots=True)
class UnusableSteps:
    """Searches some batches for env steps that alone make a loss or its gradients NaN or infinite.

    Args:
        learner: A Learner with the weights from the beginning of the update.
        batches: EpisodeBatches or MultiAgentEpisodeBatches, uncut.

    Attributes:
        found: (index of the batch, first env step, end), in order.
        num_steps: Number of env steps in all batches.
    """

    learner: Any
    batches: Sequence[Any]
    found: list[tuple[int, int, int]] = field(default_factory=list)
    num_steps: int = 0
    _num_halvings: int = 0

    def __post_init__(self) -> None:
        self.num_steps = sum(batch.num_env_steps for batch in self.batches)

    @property
    def num_found(self) -> int:
        """Number of env steps found."""
        return sum(end - begin for _, begin, end in self.found)

    def search(self) -> Iterator[None]:
        """Search; yield before each pass through the loss, so that ranks may wait for each other.

        Parts of a minibatch's size are tried first, then halves of the unusable ones. If both halves of a part are
        usable, the whole part is unusable. Each rank searches alone, and only the learner's buffers change.
        """
        size = self.learner._setting("minibatch_size", None) or max(1, self.num_steps)
        try:
            for index, batch in enumerate(self.batches):
                for begin in range(0, batch.num_env_steps, size):
                    part = begin, min(begin + size, batch.num_env_steps)
                    yield
                    if not self._is_usable(batch, *part):
                        yield from self._narrow(index, *part)
        except Exception:  # a failed search must not fail the update
            _log.warning(
                "rank %d: could not find the steps that made the loss overflow",
                self.learner.rank,
                exc_info=True,
            )
            self.found.clear()

    def without(self) -> list[Any]:
        """Return the batches without the steps found; batches that become empty are left out."""
        usable = []
        for index, batch in enumerate(self.batches):
            bad = [(begin, end) for of, begin, end in self.found if of == index]
            if bad:
                mask = np.ones(batch.num_env_steps, np.bool_)
                for begin, end in bad:
                    mask[begin:end] = False
                cut = BadValues(usable=mask).cut_out_of(batch)
                cut.meta = {**batch.meta, _STEPS: _steps_of_whole(batch)[mask]}
                if cut.num_env_steps:
                    usable.append(cut)
            else:
                usable.append(batch)
        return usable or [self.batches[0].slice_steps(0, 0)]

    def steps(self) -> Iterator[tuple[Any, Any]]:
        """Yield (batch, int64 [K]: its env steps) for the steps found."""
        for index, batch in enumerate(self.batches):
            steps = [np.arange(begin, end) for of, begin, end in self.found if of == index]
            if steps:
                yield batch, np.concatenate(steps)

    def left_out(self) -> Iterator[tuple[Any, int, int]]:
        """Yield (origin of the batch, first, num_steps) of the steps found, relative to the uncut batch."""
        for index, begin, end in self.found:
            batch = self.batches[index]
            steps = _steps_of_whole(batch)[begin:end]
            for run in np.split(steps, np.flatnonzero(np.diff(steps) != 1) + 1):
                yield batch.meta.get(ORIGIN), int(run[0]), len(run)

    def __str__(self) -> str:
        shown = [self._describe(*item) for item in self.found[:_MAX_SHOWN]]
        return ", ".join(shown) + (", …" if len(self.found) > _MAX_SHOWN else "")

    def _narrow(self, index: int, begin: int, end: int) -> Iterator[None]:
        batch, middle = self.batches[index], (begin + end) // 2
        bad = []
        if end - begin > 1 and self._num_halvings < _MAX_HALVINGS:
            self._num_halvings += 1
            for half in ((begin, middle), (middle, end)):
                yield
                if not self._is_usable(batch, *half):
                    bad.append(half)
        if not bad:
            self.found.append((index, begin, end))
        for half in bad:
            yield from self._narrow(index, *half)

    def _is_usable(self, batch: Any, begin: int, end: int) -> bool:
        with _alone(self.learner):
            return _is_finite(self.learner, batch.slice_steps(begin, end))

    def _describe(self, index: int, begin: int, end: int) -> str:
        part = self.batches[index].slice_steps(begin, end)
        steps = f"{end - begin} env step{'s' if end - begin > 1 else ''}"
        if isinstance(part, EpisodeBatch):
            episode, t = part.episode_ids[0], int(part.t_started[0])
        else:
            episode, t = part.episode_ids[0], int(part.env_t_started[0])
        where = f"{steps} from step {t} of episode {episode} (env {int(part.env_index[0])}"
        origin = part.meta.get(ORIGIN)
        return where + (")" if origin is None else f", fragment {'/'.join(map(str, origin[:3]))})")


def _steps_of_whole(batch: Any) -> Any:
    steps = batch.meta.get(_STEPS)
    return np.arange(batch.num_env_steps) if steps is None else steps


def as_batches(episodes: Any) -> list[Any]:
    """Return `Learner.update`'s episodes as a list of batches on columns; [] if this is not possible."""
    kinds = (EpisodeBatch, MultiAgentEpisodeBatch)
    listed: list[Any] = [episodes] if isinstance(episodes, kinds) else list(episodes)
    if listed and all(isinstance(item, kinds) for item in listed):
        return [batch.updated() for batch in listed]
    for kind in kinds:
        try:
            return [kind.from_episodes(listed)]
        except (TypeError, ValueError):
            continue
    return []


@contextmanager
def _alone(learner: Any) -> Iterator[None]:
    """Isolate the learner: random draws, logged values and requests to other ranks have no effect in the block."""
    stats, learner._stats = learner._stats, UpdateStats()
    metrics = learner.metrics.get_state()
    try:
        with torch.random.fork_rng(), learner.group_aside():
            yield
    finally:
        learner._stats = stats
        learner.num_passes += 1
        learner.metrics.set_state(metrics)


def _is_finite(learner: Any, batch: Any) -> bool:
    prepared = learner.prepare([batch]).on(learner.device)
    columns = {m: item for m, item in prepared.items() if m in learner.trained_module_ids}
    if not columns:
        return True
    losses = learner.compute_losses(fwd_out=learner.forward_train(columns), batch=columns)
    total: Any = sum(losses.values())
    if not math.isfinite(total.detach()) or not total.requires_grad:
        return math.isfinite(total.detach())
    parameters = [p for p in learner.module.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    return math.isfinite(float(global_norm([gradient for gradient in gradients if gradient is not None])))
