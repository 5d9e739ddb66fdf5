"""UpdateReport: the scalars that an update's losses log, its counts and times, and the results made of these."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rlzmq.core import trace
from rlzmq.core.metrics import LEARNER_STAGES, METRICS_STATES, MetricsLogger, StageTimers
from rlzmq.core.names import ALL_MODULES, BATCH_SOURCE, REPLAY_BUFFER_RESULTS
from rlzmq.core.update_plan import ReplayRatio
from rlzmq.learners.optimizers import Optimizers
from rlzmq.learners.ranks import Ranks, UpdateAgreement
from rlzmq.learners.sources import BatchSource
from rlzmq.learners.train_batch import TrainBatch

__all__ = ["Scalar", "UpdateReport", "UpdateStats", "mean_of"]

Scalar = Tensor | float | Callable[[], Tensor]


class _Learner(Protocol):
    """What results tell of a learner besides the update's report."""

    metrics: MetricsLogger
    source: BatchSource
    ranks: Ranks
    optimizers: Optimizers
    _learner_connector: Any
    weights_seq_no: int
    num_minibatches_per_epoch: int
    num_gradient_updates_lifetime: int
    num_env_steps_trained_lifetime: int
    num_env_steps_of_all_ranks_lifetime: int
    num_module_steps_trained_lifetime: dict[str, int]

    def source_counts(self) -> dict[str, Any]: ...


@dataclass
class UpdateTimes:
    """Seconds that updates took in all, and their number: waiting for data, everything else, and of that each stage."""

    num_updates: int = 0
    waited_s: float = 0.0
    updated_s: float = 0.0
    connector_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    reduced_s: float = 0.0

    def results(self) -> dict[str, float]:
        """Return the means by the names of the results."""
        num = max(1, self.num_updates)
        stages = (self.forward_s, self.backward_s, self.reduced_s)
        return {
            "learner_thread_in_queue_wait_timer": self.waited_s / num,
            "learner_thread_update_timer": self.updated_s / num,
            **{name: seconds / num for name, seconds in zip(LEARNER_STAGES, stages, strict=True)},
        }


class UpdateReport:
    """What the current or last update did and measured, and the times of all updates since the last results.

    Attributes:
        stats: The scalars that were logged.
        times: Times of the updates since the last results.
        batch: The counts of all batches that this rank trained, without their rows.
        num_batches: Number of these batches.
        num_minibatches: Number of minibatches.
        num_env_steps: Env steps, on all ranks.
        num_module_steps: Module id → timesteps, on all ranks.
        num_steps_due: Module id → number of its minibatches, on any rank.
        num_skipped: Module id → number of these without an optimizer step, as loss or gradients were not finite.
        minibatch_rows: Module id → rows of its minibatches.
    """

    def __init__(self) -> None:
        self.stats: UpdateStats = UpdateStats()
        self.times: UpdateTimes = UpdateTimes()
        self._began_at = 0.0
        self._ended_at: float | None = None
        self._exchanged_s = 0.0  # with other ranks, before the update
        self._last: tuple[float, float] | None = None  # the last update's seconds, and those of its exchanges
        self._clear()

    def _clear(self) -> None:
        self.batch: TrainBatch = TrainBatch()
        self.num_batches: int = 0
        self.num_minibatches: int = 0
        self.num_env_steps: int = 0
        self.num_module_steps: dict[str, int] = {}
        self.num_steps_due: defaultdict[str, int] = defaultdict(int)
        self.num_skipped: dict[str, int] = {}
        self.minibatch_rows: dict[str, int] = {}

    def begin(self, exchanged_s: float) -> None:
        """Begin an update.

        Args:
            exchanged_s: Seconds spent in exchanges with other ranks so far.
        """
        self._clear()
        self.stats.begin()
        self._began_at, self._exchanged_s = time.perf_counter(), exchanged_s

    def end(self, exchanged_s: float, weights_version: int) -> None:
        """Add up the times of the update that `begin` began."""
        times, waits_since, self._ended_at = self.times, self._ended_at, time.perf_counter()
        updated_s, reduced_s = self._ended_at - self._began_at, exchanged_s - self._exchanged_s
        times.num_updates += 1
        times.waited_s += 0.0 if waits_since is None else self._began_at - waits_since
        times.updated_s += updated_s
        times.reduced_s += reduced_s
        self._last = updated_s, reduced_s
        if trace.is_on:
            trace.span("update", self._began_at, self._ended_at, weights_version=weights_version)

    def add_agreement(self, agreed: UpdateAgreement) -> None:
        """Count a batch on all ranks."""
        self.num_env_steps += agreed.num_env_steps
        for module_id in agreed.module_ids:
            before = self.num_module_steps.get(module_id, 0)
            self.num_module_steps[module_id] = before + agreed.num_rows[module_id]

    def add_batch(self, train_batch: TrainBatch, num_minibatches: int) -> None:
        """Count a batch that this rank has trained."""
        self.batch.add_counts(train_batch)
        self.num_batches += 1
        self.num_minibatches += num_minibatches

    def leave_out_skipped(self, module_ids: list[str]) -> list[str]:
        """Take back the counts of the modules that took no optimizer step, and return them."""
        due = self.num_steps_due
        skipped = [m for m in module_ids if self.num_skipped.get(m, 0) >= due[m] > 0]
        for module_id in skipped:
            self.num_module_steps.pop(module_id, None)
            if module_id in self.batch.num_module_steps:
                self.batch.num_module_steps[module_id] = 0
        return skipped

    def results(
        self, learner: _Learner, num_parameters: dict[str, tuple[int, int]]
    ) -> dict[str, dict[str, Any]]:
        """Return the results of the last update, see `Learner.update`. Times are means since the last call.

        Args:
            learner: The learner.
            num_parameters: Module id → numbers of trainable and other parameters.
        """
        results: dict[str, dict[str, Any]] = dict(self.stats.means(learner.num_minibatches_per_epoch))
        for module_id, num_steps in self.batch.num_module_steps.items():
            module_results = results.setdefault(module_id, {})
            lifetime = learner.num_module_steps_trained_lifetime.get(module_id, 0)
            module_results |= {
                "num_module_steps_trained": num_steps,
                "num_module_steps_trained_lifetime": lifetime,
                "num_trainable_parameters": num_parameters[module_id][0],
                "weights_seq_no": learner.weights_seq_no,
                "num_nonfinite_gradients_skipped": self.num_skipped.get(module_id, 0),
                "module_train_batch_size_mean": self.minibatch_rows.get(module_id, 0),
            }
            sampled_with = self.batch.mean_weights_seq_no.get(module_id)
            if sampled_with is not None:
                lag = learner.weights_seq_no - 1 - sampled_with
                module_results["diff_num_grad_updates_vs_sampler_policy"] = lag
            for entry in learner.optimizers.of_module(module_id):
                learning_rate = float(entry.optimizer.param_groups[0]["lr"])
                module_results[f"{entry.name}_learning_rate"] = learning_rate
        own = learner.metrics.compile() if learner.metrics else None
        for module_id, values in (own or {}).items():
            results.setdefault(module_id, {}).update(
                values if isinstance(values, dict) else {"value": values}
            )
        times, self.times = self.times, UpdateTimes()
        overall = results.setdefault(ALL_MODULES, {})
        overall.update(
            num_env_steps_trained=self.batch.num_env_steps,
            num_env_steps_trained_lifetime=learner.num_env_steps_trained_lifetime,
            num_module_steps_trained=sum(self.batch.num_module_steps.values()),
            num_module_steps_trained_lifetime=sum(learner.num_module_steps_trained_lifetime.values()),
            num_trainable_parameters=sum(trainable for trainable, _ in num_parameters.values()),
            num_non_trainable_parameters=sum(fixed for _, fixed in num_parameters.values()),
            num_gradient_updates=self.num_minibatches,
            num_gradient_updates_lifetime=learner.num_gradient_updates_lifetime,
            num_nonfinite_gradients_skipped=sum(self.num_skipped.values()),
            weights_seq_no=learner.weights_seq_no,
            **times.results(),
            learner_connector=_connector_timers(learner._learner_connector, times),
            learner_connector_sum_episodes_length_in=self.batch.num_env_steps,
            learner_connector_sum_episodes_length_out=self.batch.num_env_steps,
        )
        if learner.source.keeps_data:
            _add_source(overall, learner)
        if own:
            overall[METRICS_STATES] = own.states
        if learner.ranks.group is not None and self._last is not None:
            overall["speedup_over_one_rank"] = learner.ranks.speedup_over_one_rank(*self._last)
            self._last = None
        return results


def _connector_timers(connector: Any, times: UpdateTimes) -> dict[str, Any]:
    timers = StageTimers()
    timers.add("connector_pipeline_timer", times.connector_s / max(1, times.num_updates))
    if connector is not None:
        timers.add_pieces(connector)
    return timers.reduce()


def _add_source(overall: dict[str, Any], learner: _Learner) -> None:
    """Add the counts of a source that keeps data, and its own metrics."""
    source = learner.source
    overall[BATCH_SOURCE] = counts = {
        **learner.source_counts(),
        "num_bytes": source.num_bytes,
        "num_agent_steps_not_kept": source.num_agent_steps_not_kept,
    }
    if isinstance(ratio := source.progress, ReplayRatio) and ratio.num_counted:
        counts["train_ratio"] = learner.num_env_steps_of_all_ranks_lifetime / ratio.num_counted
    if metrics := source.get_metrics():
        overall[REPLAY_BUFFER_RESULTS] = metrics


class UpdateStats:
    """Scalars logged per module and minibatch. Their means over the last epoch are the update's results.

    Reading a scalar tensor costs a device synchronization, so tensors are only collected here. Functions of no
    arguments are called when the results are read, if they are: a serial run reads those of an iteration's last update.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        self._newest: list[tuple[str, dict[str, Any]]] = []
        self._earlier: dict[str, dict[str, list[Any]]] = {}  # of names that later updates did not log

    def log(self, module_id: str, values: Mapping[str, Scalar | tuple[Any, ...]]) -> None:
        """Log one minibatch's values. Tuples are kept for `newest`, and have no means."""
        detached: dict[str, Any] = {}
        for name, value in values.items():
            detached[name] = value.detach() if isinstance(value, Tensor) else value
        self._newest.append((module_id, detached))

    def take_in(self) -> None:
        """Sort the newest values by name, so that a compiled step always begins with the same empty list."""
        for module_id, values in self._newest:
            collected = self._values[module_id]
            for name, value in values.items():
                collected[name].append(value)
        self._newest.clear()

    def newest(self, name: str, num_last: int) -> dict[str, list[Any]]:
        """Return module id → the last `num_last` values of one name, for modules that logged it."""
        self.take_in()
        return {
            module_id: collected[name][-num_last:]
            for module_id, collected in self._values.items()
            if name in collected
        }

    def means(self, num_last: int) -> dict[str, dict[str, float]]:
        """Return module id → name → mean over the last `num_last` logged values (or all, if fewer).

        What was logged before the last `begin`, and not since then, has the values of that time.
        """
        self.take_in()
        return {
            module_id: {
                name: mean_of(values[-num_last:])
                for name, values in {**self._earlier.get(module_id, {}), **_with_means(collected)}.items()
            }
            for module_id, collected in self._values.items()
        }

    def begin(self) -> None:
        """Begin an update: keep the values so far only for names that it does not log."""
        self.take_in()
        for module_id, collected in self._values.items():
            self._earlier.setdefault(module_id, {}).update(_with_means(collected))
        self._values.clear()

    def clear(self) -> None:
        """Drop all values."""
        self._newest.clear()
        self._values.clear()
        self._earlier.clear()


def _with_means(collected: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: values for name, values in collected.items() if not isinstance(values[0], tuple)}


@torch.no_grad()
def mean_of(values: list[Any]) -> float:
    """Return the mean of logged values; functions are called."""
    values = [value() if callable(value) else value for value in values]
    first = values[0]
    if isinstance(first, Tensor):
        if len(values) == 1 and not first.dim():
            return first.item()
        return float(torch.stack(values).double().mean())
    return float(sum(values) / len(values))
