"""UpdateReport: the scalars that an update's losses log, its counts and times, and the results made of these."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
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

__all__ = ["BACKWARD", "CONNECTOR", "FORWARD", "Scalar", "UpdateReport", "mean_of"]

Scalar = Tensor | float | Callable[[], Tensor]

WAIT, UPDATE = "learner_thread_in_queue_wait_timer", "learner_thread_update_timer"
CONNECTOR = "connector_pipeline_timer"
FORWARD, BACKWARD, REDUCE = LEARNER_STAGES
_TIMERS = (WAIT, UPDATE, *LEARNER_STAGES, CONNECTOR)


class _Learner(Protocol):
    """What results tell of a learner besides the update's report."""

    module: Any
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
    def get_parameters(self, module: Any) -> list[Tensor]: ...


class UpdateReport:
    """What the current or last update did and measured, and the times of all updates since the last results.

    Scalars are logged per module and minibatch; their means over the last epoch are the update's results. Reading a
    scalar tensor costs a device synchronization, so tensors are only collected. Functions of no arguments are called
    when the results are read, if they are: a serial run reads those of an iteration's last update.

    Attributes:
        batch: The counts of all batches that this rank trained, without their rows.
        num_batches: Number of these batches.
        num_minibatches: Number of minibatches.
        num_env_steps: Env steps, on all ranks.
        num_module_steps: Module id → timesteps, on all ranks.
        num_steps_due: Module id → number of its minibatches, on any rank.
        num_skipped: Module id → number of these without an optimizer step, as loss or gradients were not finite.
        minibatch_rows: Module id → rows of its minibatches.
        seconds: Name of a result → seconds of the updates since the last results.
    """

    def __init__(self) -> None:
        self._newest: list[tuple[str, dict[str, Any]]] = []
        self._logged: defaultdict[str, dict[str, list[Any]]] = defaultdict(dict)
        self._earlier: defaultdict[str, dict[str, list[Any]]] = defaultdict(dict)
        self._ended_at: float | None = None
        self._last: tuple[float, float] | None = None  # the last update's seconds, and those of its exchanges
        self._num_updates = 0
        self.seconds: dict[str, float] = dict.fromkeys(_TIMERS, 0.0)
        self.begin(0.0)

    def begin(self, exchanged_s: float) -> None:
        """Begin an update. Values logged so far are kept for names that it does not log.

        Args:
            exchanged_s: Seconds spent in exchanges with other ranks so far.
        """
        for module_id, by_name in self.logged().items():
            for name, values in by_name.items():
                if not isinstance(values[0], tuple):
                    self._earlier[module_id][name] = values
        self._logged.clear()
        self._began_at, self._exchanged_s = time.perf_counter(), exchanged_s
        self.batch: TrainBatch = TrainBatch()
        self.num_batches: int = 0
        self.num_minibatches: int = 0
        self.num_env_steps: int = 0
        self.num_module_steps: dict[str, int] = {}
        self.num_steps_due: defaultdict[str, int] = defaultdict(int)
        self.num_skipped: dict[str, int] = {}
        self.minibatch_rows: dict[str, int] = {}

    def end(self, exchanged_s: float, weights_version: int) -> None:
        """Add up the times of the update that `begin` began."""
        waits_since, self._ended_at = self._ended_at, time.perf_counter()
        self._last = self._ended_at - self._began_at, exchanged_s - self._exchanged_s
        self._num_updates += 1
        self.seconds[WAIT] += 0.0 if waits_since is None else self._began_at - waits_since
        self.seconds[UPDATE] += self._last[0]
        self.seconds[REDUCE] += self._last[1]
        if trace.is_on:
            trace.span("update", self._began_at, self._ended_at, weights_version=weights_version)

    def add_batch(self, train_batch: TrainBatch, agreed: UpdateAgreement, num_minibatches: int) -> None:
        """Count a batch that was trained."""
        self.batch.add_counts(train_batch)
        self.num_batches += 1
        self.num_minibatches += num_minibatches
        self.num_env_steps += agreed.num_env_steps
        for module_id in agreed.module_ids:
            before = self.num_module_steps.get(module_id, 0)
            self.num_module_steps[module_id] = before + agreed.num_rows[module_id]

    def leave_out_skipped(self, module_ids: list[str]) -> list[str]:
        """Take back the counts of the modules that took no optimizer step, and return them."""
        skipped = []
        for module_id, num in self.num_skipped.items():
            if module_id in module_ids and num >= self.num_steps_due[module_id]:
                skipped.append(module_id)
                self.num_module_steps.pop(module_id, None)
                if module_id in self.batch.num_module_steps:
                    self.batch.num_module_steps[module_id] = 0
        return skipped

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
        """Return module id → name → mean over the last `num_last` logged values (or all, if fewer).

        What was logged before the last `begin`, and not since then, has the values of that time.
        """
        result: dict[str, dict[str, float]] = {}
        for module_id, by_name in self.logged().items():
            means = result[module_id] = {}
            for name, values in (self._earlier[module_id] | dict(by_name)).items():
                if not isinstance(values[0], tuple):
                    means[name] = mean_of(values[-num_last:])
        return result

    def forget(self) -> None:
        """Drop all values."""
        self._newest.clear()
        self._logged.clear()
        self._earlier.clear()

    # -- results -----------------------------------------------------------------------------------

    def results(self, learner: _Learner) -> dict[str, dict[str, Any]]:
        """Return the results of the last update, see `Learner.update`. Times are means since the last call."""
        results: dict[str, dict[str, Any]] = dict(self.means(learner.num_minibatches_per_epoch))
        num_trainable = dict.fromkeys(learner.module.keys(), 0)
        num_fixed = 0
        for module_id in num_trainable:
            for parameter in learner.get_parameters(learner.module[module_id]):
                if parameter.requires_grad:
                    num_trainable[module_id] += parameter.numel()
                else:
                    num_fixed += parameter.numel()
        for module_id, num_steps in self.batch.num_module_steps.items():
            module_results = results.setdefault(module_id, {})
            lifetime = learner.num_module_steps_trained_lifetime.get(module_id, 0)
            module_results |= {
                "num_module_steps_trained": num_steps,
                "num_module_steps_trained_lifetime": lifetime,
                "num_trainable_parameters": num_trainable[module_id],
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
        timers, seconds, num_updates = StageTimers(), self.seconds, max(1, self._num_updates)
        self.seconds, self._num_updates = dict.fromkeys(_TIMERS, 0.0), 0
        timers.add(CONNECTOR, seconds.pop(CONNECTOR), num_updates)
        if learner._learner_connector is not None:
            timers.add_pieces(learner._learner_connector)
        overall = results.setdefault(ALL_MODULES, {})
        overall.update(
            num_env_steps_trained=self.batch.num_env_steps,
            num_env_steps_trained_lifetime=learner.num_env_steps_trained_lifetime,
            num_module_steps_trained=sum(self.batch.num_module_steps.values()),
            num_module_steps_trained_lifetime=sum(learner.num_module_steps_trained_lifetime.values()),
            num_trainable_parameters=sum(num_trainable.values()),
            num_non_trainable_parameters=num_fixed,
            num_gradient_updates=self.num_minibatches,
            num_gradient_updates_lifetime=learner.num_gradient_updates_lifetime,
            num_nonfinite_gradients_skipped=sum(self.num_skipped.values()),
            weights_seq_no=learner.weights_seq_no,
            learner_connector=timers.reduce(),
            learner_connector_sum_episodes_length_in=self.batch.num_env_steps,
            learner_connector_sum_episodes_length_out=self.batch.num_env_steps,
        )
        for name, total in seconds.items():
            overall[name] = total / num_updates
        if learner.source.keeps_data:
            _add_source(overall, learner)
        if own:
            overall[METRICS_STATES] = own.states
        if learner.ranks.group is not None and self._last is not None:
            overall["speedup_over_one_rank"] = learner.ranks.speedup_over_one_rank(*self._last)
            self._last = None
        return results


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
