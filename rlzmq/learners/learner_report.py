"""LearnerReport: what a learner counts, measures and logs, in an update and over its lifetime, and its results."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rlzmq.core import trace
from rlzmq.core.errors import NotFiniteError
from rlzmq.core.metrics import LEARNER_STAGES, MetricsLogger, ReducedMetrics, StageTimers
from rlzmq.core.names import ALL_MODULES, BATCH_SOURCE, LEARNER_CONNECTOR, REPLAY_BUFFER_RESULTS
from rlzmq.core.update_plan import ReplayRatio
from rlzmq.learners.batches import BatchLearner, BatchSource, TrainBatch
from rlzmq.learners.optimizers import Optimizers
from rlzmq.learners.ranks import UpdateAgreement

__all__ = ["LearnerReport", "ReportedLearner", "Scalar"]

_logger = logging.getLogger("rlzmq.learners")

Scalar = Tensor | float | Callable[[], Tensor]

WAIT, UPDATE = "learner_thread_in_queue_wait_timer", "learner_thread_update_timer"
CONNECTOR = "connector_pipeline_timer"
FORWARD, BACKWARD, REDUCE = LEARNER_STAGES

# Data that make a loss overflow are rare. After this many updates without a step there must be another cause.
_MAX_UPDATES_IN_VAIN = 10


class ReportedLearner(BatchLearner, Protocol):
    """What results tell of a learner besides its report."""

    metrics: MetricsLogger
    optimizers: Optimizers
    weights_seq_no: int

    def get_parameters(self, module: Any) -> list[Tensor]: ...


class LearnerReport:
    """What the updates of a learner did and measured: the current or last one, and all of them.

    Scalars are logged per module and minibatch; their means over the last epoch are the update's results. Reading a
    scalar tensor costs a device synchronization, so tensors are only collected. Functions of no arguments are called
    when the results are read, if they are: a serial run reads those of an iteration's last update.

    Attributes:
        num_gradient_updates_lifetime: Minibatches trained so far.
        num_env_steps_trained_lifetime: Env steps trained so far; each is counted once, regardless of its epochs.
        num_env_steps_of_all_ranks_lifetime: The same for all ranks together; the default input of schedules.
        num_module_steps_trained_lifetime: Module id → its steps trained so far, on all ranks together.
        was_trained: Whether the last update took a step; False if none of its minibatches was finite.
        num_updates_in_vain: Number of consecutive updates without a step.
        batch: The counts of all batches that this rank trained in the update, without their rows.
        num_minibatches: Number of minibatches.
        num_env_steps: Env steps, on all ranks.
        num_module_steps: Module id → timesteps, on all ranks.
        num_steps_due: Module id → number of its minibatches, on any rank.
        num_skipped: Module id → number of these without an optimizer step, as loss or gradients were not finite.
        minibatch_rows: Module id → rows of its minibatches.
    """

    def __init__(self) -> None:
        self.num_gradient_updates_lifetime: int = 0
        self.num_env_steps_trained_lifetime: int = 0
        self.num_env_steps_of_all_ranks_lifetime: int = 0
        self.num_module_steps_trained_lifetime: Counter[str] = Counter()
        self.was_trained: bool = True
        self.num_updates_in_vain: int = 0
        self.num_module_steps: Counter[str] = Counter()
        self.num_steps_due: Counter[str] = Counter()
        self.num_skipped: Counter[str] = Counter()
        self._newest: list[tuple[str, dict[str, Any]]] = []
        self._logged: defaultdict[str, dict[str, list[Any]]] = defaultdict(dict)
        self._earlier: defaultdict[str, dict[str, list[Any]]] = defaultdict(dict)
        self._ended_at: float | None = None
        self._last: tuple[float, float] | None = None  # the last update's seconds, and those of its exchanges
        self._timers = StageTimers()  # of the updates since the last results
        self.begin(0.0)

    # -- an update ---------------------------------------------------------------------------------

    def begin(self, exchanged_s: float) -> None:
        """Begin an update. Values logged so far are kept for names that it does not log.

        Args:
            exchanged_s: Seconds spent in exchanges with other ranks so far.
        """
        for module_id, by_name in self.logged().items():
            for name, values in by_name.items():
                if not isinstance(values[0], tuple):  # which may be as large as a batch
                    self._earlier[module_id][name] = values
        self._logged.clear()
        self._began_at, self._exchanged_s = time.perf_counter(), exchanged_s
        self.batch: TrainBatch = TrainBatch()
        self.num_minibatches: int = 0
        self.num_env_steps: int = 0
        for counts in (self.num_module_steps, self.num_steps_due, self.num_skipped):
            counts.clear()
        self.minibatch_rows: dict[str, int] = {}

    def end(self, exchanged_s: float, weights_version: int) -> None:
        """Add up the times of the update that `begin` began."""
        waits_since, self._ended_at = self._ended_at, time.perf_counter()
        self._last = self._ended_at - self._began_at, exchanged_s - self._exchanged_s
        self._timers.add(WAIT, 0.0 if waits_since is None else self._began_at - waits_since)
        self._timers.add(UPDATE, self._last[0])
        self._timers.add(REDUCE, self._last[1])
        for name in (CONNECTOR, FORWARD, BACKWARD):  # summed up before
            self._timers.add(name, 0.0)
        if trace.is_on:
            trace.span("update", self._began_at, self._ended_at, weights_version=weights_version)

    def add_batch(self, train_batch: TrainBatch, agreed: UpdateAgreement, num_minibatches: int) -> None:
        """Count a batch that was trained."""
        mine = self.batch
        mine.num_env_steps += train_batch.num_env_steps
        for module_id, num_added in train_batch.num_module_steps.items():
            num = mine.num_module_steps[module_id] = mine.num_module_steps.get(module_id, 0) + num_added
            if (version := train_batch.mean_weights_seq_no.get(module_id)) is not None:
                before = mine.mean_weights_seq_no.get(module_id, 0.0)
                mean = (before * (num - num_added) + version * num_added) / num
                mine.mean_weights_seq_no[module_id] = mean
        self.num_minibatches += num_minibatches
        self.num_env_steps += agreed.num_env_steps
        for module_id, num_rows in agreed.num_rows.items():  # Counter.update takes three times as long
            self.num_module_steps[module_id] += num_rows

    def count(self, module_ids: list[str], rank: int, weights_version: int) -> None:
        """Count what the update trained, without modules that took no optimizer step.

        Args:
            module_ids: The modules that the update was to train.
            rank, weights_version: For messages.

        Raises:
            NotFiniteError: Too many consecutive updates took no step.
        """
        skipped = []
        for module_id, num in self.num_skipped.items():
            if module_id in module_ids and num >= self.num_steps_due[module_id]:
                skipped.append(module_id)
                self.num_module_steps.pop(module_id, None)
                if module_id in self.batch.num_module_steps:
                    self.batch.num_module_steps[module_id] = 0
        self.was_trained = not skipped or len(skipped) < len(module_ids)
        if self.was_trained:
            self.num_updates_in_vain = 0
        else:
            self.batch.num_env_steps = self.num_env_steps = 0
            self.num_updates_in_vain += 1
        if self.num_updates_in_vain >= _MAX_UPDATES_IN_VAIN:
            raise NotFiniteError(
                f"{_MAX_UPDATES_IN_VAIN} updates in a row took no optimizer step, up to weights version "
                f"{weights_version}: the losses or gradients of {', '.join(map(repr, skipped))} are NaN or "
                "infinite, whatever the data. Check the loss and the module's outputs, reduce the lr, or set "
                "grad_clip."
            )
        self.num_env_steps_trained_lifetime += self.batch.num_env_steps
        self.num_env_steps_of_all_ranks_lifetime += self.num_env_steps
        self.num_module_steps_trained_lifetime.update(self.num_module_steps)
        if self.num_skipped:
            _logger.warning(
                "rank %d, weights version %d: NaN or infinite gradients, no step taken on %s of %d "
                "minibatches. Check for NaN in observations or rewards, reduce the lr, or set grad_clip.",
                rank,
                weights_version,
                ", ".join(f"{num} (module {module_id!r})" for module_id, num in self.num_skipped.items()),
                self.num_minibatches,
            )

    # -- times -------------------------------------------------------------------------------------

    def timed(self, batches: Iterator[TrainBatch]) -> Iterator[TrainBatch]:
        """Yield the batches, each built when it is asked for, and add up the time that this takes."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            end = time.perf_counter()
            self._timers.add(CONNECTOR, end - start, 0)
            if trace.is_on:
                trace.span("connector", start, end)
            if batch is None:
                return
            yield batch

    def add_minibatch(self, start: float, middle: float, end: float, waited_s: float) -> None:
        """Count a minibatch, and add the times of its loss (up to `middle`) and its step, without waits for peers."""
        self.num_gradient_updates_lifetime += 1
        self._timers.add(FORWARD, middle - start, 0)
        self._timers.add(BACKWARD, end - middle - waited_s, 0)
        if trace.is_on:
            trace.span("forward", start, middle)
            trace.span("backward", middle, end)

    # -- lifetime counts, as a learner's state -----------------------------------------------------

    def get_counters(self) -> dict[str, Any]:
        """Return the counts over the learner's lifetime."""
        return {
            "num_gradient_updates_lifetime": self.num_gradient_updates_lifetime,
            "num_env_steps_trained_lifetime": self.num_env_steps_trained_lifetime,
            "num_env_steps_of_all_ranks_lifetime": self.num_env_steps_of_all_ranks_lifetime,
            "num_module_steps_trained_lifetime": dict(self.num_module_steps_trained_lifetime),
        }

    def set_counters(self, counters: Mapping[str, Any]) -> None:
        """Restore the counts of `get_counters`."""
        for name in self.get_counters():
            value = counters[name]
            setattr(self, name, Counter(value) if isinstance(value, Mapping) else int(value))

    # -- scalars -----------------------------------------------------------------------------------

    def log(self, module_id: str, values: Mapping[str, Scalar | tuple[Any, ...]]) -> None:
        """Log one minibatch's values. Tuples are kept for `logged`, and have no means."""
        detached: dict[str, Any] = {}
        for name, value in values.items():
            detached[name] = value.detach() if isinstance(value, Tensor) else value
        self._newest.append((module_id, detached))

    def logged(self) -> Mapping[str, Mapping[str, list[Any]]]:
        """Return module id → name → the values that this update has logged so far.

        It is called before each minibatch, so that a compiled step always begins with the same empty list.
        """
        for module_id, values in self._newest:
            by_name = self._logged[module_id]
            for name, value in values.items():
                by_name.setdefault(name, []).append(value)
        self._newest.clear()
        return self._logged

    def means(self, num_last: int) -> dict[str, dict[str, float]]:
        """Return module id → name → mean over the values of the last `num_last` minibatches (or all, if fewer).

        What was logged before the last `begin`, and not since then, has the values of that time.
        """
        result: dict[str, dict[str, float]] = {}
        for module_id, by_name in self.logged().items():
            means = result[module_id] = {}
            for name, values in (self._earlier[module_id] | dict(by_name)).items():
                if not isinstance(values[0], tuple):
                    means[name] = _mean_of(values[-self.num_of_last(module_id, num_last) :])
        return result

    def num_of_last(self, module_id: str, num_last: int) -> int:
        """Return how many of the last `num_last` minibatches have a module, which may have fewer rows than others."""
        most = max(self.num_steps_due.values(), default=0)
        return max(1, -(-num_last * self.num_steps_due[module_id] // most)) if most else num_last

    def mean(self, name: str, num_last: int) -> dict[str, float]:
        """Return module id → mean over the last `num_last` minibatches of this update, if it was logged."""
        means: dict[str, float] = {}
        for module_id, by_name in self.logged().items():
            if name in by_name:
                means[module_id] = _mean_of(by_name[name][-self.num_of_last(module_id, num_last) :])
        return means

    def forget(self) -> None:
        """Drop all values."""
        self._newest.clear()
        self._logged.clear()
        self._earlier.clear()

    # -- results -----------------------------------------------------------------------------------

    def results(self, learner: ReportedLearner) -> ReducedMetrics:
        """Return the results of the last update, see `Learner.update`. Times are means since the last call."""
        log = ReducedMetrics({}, {})
        num_trainable = dict.fromkeys(learner.module.keys(), 0)
        num_fixed = 0
        for module_id in num_trainable:
            for parameter in learner.get_parameters(learner.module[module_id]):
                if parameter.requires_grad:
                    num_trainable[module_id] += parameter.numel()
                else:
                    num_fixed += parameter.numel()
        for module_id, means in self.means(learner.num_minibatches_per_epoch).items():
            log.put("mean", means, module_id)
        for module_id, num_steps in self.batch.num_module_steps.items():
            log.put("sum", {"num_module_steps_trained": num_steps}, module_id)
            of_all_ranks = {
                "num_module_steps_trained_lifetime": self.num_module_steps_trained_lifetime.get(module_id, 0),
                "num_trainable_parameters": num_trainable[module_id],
                "weights_seq_no": learner.weights_seq_no,
                "num_nonfinite_gradients_skipped": self.num_skipped.get(module_id, 0),
            }
            log.put("item", of_all_ranks, module_id)
            means = {"module_train_batch_size_mean": self.minibatch_rows.get(module_id, 0)}
            sampled_with = self.batch.mean_weights_seq_no.get(module_id)
            if sampled_with is not None:
                means["diff_num_grad_updates_vs_sampler_policy"] = learner.weights_seq_no - 1 - sampled_with
            for entry in learner.optimizers.of_module(module_id):
                means[f"{entry.name}_learning_rate"] = float(entry.optimizer.param_groups[0]["lr"])
            log.put("mean", means, module_id)
        of_rank = {
            "num_env_steps_trained": self.batch.num_env_steps,
            "num_env_steps_trained_lifetime": self.num_env_steps_trained_lifetime,
            "num_module_steps_trained": sum(self.batch.num_module_steps.values()),
            "learner_connector_sum_episodes_length_in": self.batch.num_env_steps,
            "learner_connector_sum_episodes_length_out": self.batch.num_env_steps,
        }
        log.put("sum", of_rank, ALL_MODULES)
        of_all_ranks = {
            "num_module_steps_trained_lifetime": sum(self.num_module_steps_trained_lifetime.values()),
            "num_trainable_parameters": sum(num_trainable.values()),
            "num_non_trainable_parameters": num_fixed,
            "num_gradient_updates": self.num_minibatches,
            "num_gradient_updates_lifetime": self.num_gradient_updates_lifetime,
            "num_nonfinite_gradients_skipped": sum(self.num_skipped.values()),
            "weights_seq_no": learner.weights_seq_no,
        }
        log.put("item", of_all_ranks, ALL_MODULES)
        if learner.ranks.group is not None and self._last is not None:
            speedup = learner.ranks.speedup_over_one_rank(*self._last)
            log.put("mean", {"speedup_over_one_rank": speedup}, ALL_MODULES)
            self._last = None
        if learner.source.keeps_data:
            self._put_source(log, learner.source, learner.ranks.num)
        times = self._timers.reduce()
        of_connector: dict[str, Any] = {CONNECTOR: times.pop(CONNECTOR, 0.0)}
        if learner._learner_connector.timers:
            pieces = StageTimers()
            pieces.add_pieces(learner._learner_connector)
            of_connector |= pieces.reduce()
        log.put("mean", times, ALL_MODULES)
        log.put("mean", of_connector, ALL_MODULES, LEARNER_CONNECTOR)
        if learner.metrics:
            own = learner.metrics.compile()
            for name, got in own.items():
                log.setdefault(name, {}).update(got if isinstance(got, dict) else {"value": got})
            log.states |= own.states
        return log

    def _put_source(self, log: ReducedMetrics, source: BatchSource, num_ranks: int) -> None:
        """Add the counts of a source that keeps data, and its own metrics."""
        held = {
            "num_env_steps": source.num_env_steps,
            "num_bytes": source.num_bytes,
        }
        facts = {"source_id": source.source_id, "num_ranks": num_ranks, "num_added": source.num_added}
        if isinstance(ratio := source.progress, ReplayRatio) and ratio.num_counted:
            facts["train_ratio"] = self.num_env_steps_of_all_ranks_lifetime / ratio.num_counted
        log.put("sum", held, ALL_MODULES, BATCH_SOURCE)
        log.put("item", facts, ALL_MODULES, BATCH_SOURCE)
        log.put("sum", source.get_metrics(), ALL_MODULES, REPLAY_BUFFER_RESULTS)


@torch.no_grad()
def _mean_of(values: list[Any]) -> float:
    """Return the mean of logged values; functions are called."""
    values = [value() if callable(value) else value for value in values]
    first = values[0]
    if isinstance(first, Tensor):
        if len(values) == 1 and not first.dim():
            return first.item()
        return float(torch.stack(values).double().mean())
    return float(sum(values) / len(values))
