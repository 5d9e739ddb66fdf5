"""Learner: trains the modules on episodes or batches, through hooks that subclasses override.

One update, in this order::

    before_gradient_based_update(timesteps)
    learner connector                       episodes → module id → train batch
    should_module_be_updated                other modules' batches are dropped
    for each minibatch:
        forward_train
        compute_losses → compute_loss_for_module, or the module's self-supervised loss
        compute_gradients                   one backward pass of the losses' sum
        postprocess_gradients → postprocess_gradients_for_module: norms, clipping
        apply_gradients                     the ranks' vote, then every optimizer's step
    after_gradient_based_update(timesteps)  once

A minibatch whose loss or gradients are not finite on any rank takes no step on all of them, and is counted. Ten updates
in a row without a step end the run.

A Learner works alone, e.g. in a notebook on a list of episodes. As one of several ranks (`setup_distributed`) it
averages gradients with its peers; an update then happens on all ranks or on none.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from rlzmq.config.base_config import BaseConfig
from rlzmq.core import trace
from rlzmq.core.errors import NotFiniteError
from rlzmq.core.metrics import METRICS_STATES, MetricsLogger
from rlzmq.core.names import ALL_MODULES, BATCH_SOURCE, REPLAY_BUFFER_RESULTS
from rlzmq.core.override import TellsUncalled
from rlzmq.core.plain import decode, encode_supported
from rlzmq.core.seeding import derive_seed
from rlzmq.core.signatures import check_takes
from rlzmq.core.stage_timers import LEARNER_STAGES, StageTimers
from rlzmq.core.tracebacks import ShortTraceback
from rlzmq.core.update_plan import ReplayRatio
from rlzmq.learners.learner_hooks import NUM_ENV_STEPS_LIFETIME, LearnerHooks
from rlzmq.learners.learner_ranks import UpdateAgreement, UpdateStart
from rlzmq.learners.minibatches import MinibatchIterator
from rlzmq.learners.sources import num_env_steps_of
from rlzmq.learners.train_batch import TrainBatch, TrainBatchBuilder
from rlzmq.modules.default_models.dense_gradients import recorded

__all__ = ["Learner", "TorchLearner"]

_logger = logging.getLogger(__name__)

# Data that make a loss overflow are rare. After this many updates without a step there must be another cause.
_MAX_UPDATES_IN_VAIN = 10
# Number of searches per update: some steps are found only after worse ones are removed.


@dataclass
class _Trained:
    """Totals of an update so far. `batch` has the counts of all its batches, but not their rows."""

    batch: TrainBatch = field(default_factory=TrainBatch)
    num_batches: int = 0
    num_minibatches: int = 0
    connector_s: float = 0.0

    def add(self, train_batch: TrainBatch, num_minibatches: int) -> None:
        self.batch.add_counts(train_batch)
        self.num_batches += 1
        self.num_minibatches += num_minibatches


class Learner(TellsUncalled, LearnerHooks):
    """Owns the modules and their optimizers, and updates them.

    Subclasses define `compute_loss_for_module` and may override other hooks.

    Example:
        >>> learner = PPOLearner(config=config, module_spec=config.get_multi_rl_module_spec(env=env))
        >>> learner.build()
        >>> learner.update(episodes=env_runner.sample(num_episodes=3))["default_policy"]["policy_loss"]

    Args:
        config: The AlgorithmConfig.
        module_spec: RLModuleSpec or MultiRLModuleSpec of the modules to train.
        module: An existing module, instead of a spec.
        rank: Index of this learner among its peers.
        num_ranks: Number of learners.

    Attributes:
        config: The AlgorithmConfig.
        module: The MultiRLModule (None before `build`).
        metrics: MetricsLogger for a subclass's values. Values logged under ``(module_id, name)`` are part of the
            results of `update`; the run's results merge those of several ranks by their reduction.
        weights_seq_no: Version of the weights, which increases by one per update.
        num_gradient_updates_lifetime: Minibatches trained so far.
        num_env_steps_trained_lifetime: Env steps trained so far; each is counted once, regardless of its epochs.
        num_env_steps_of_all_ranks_lifetime: The same for all ranks together; the default input of schedules.
        num_module_steps_trained_lifetime: Module id → its steps trained so far, on all ranks together.
        trained_module_ids: Modules that the current (or last) update trains, on any rank.
        num_minibatches_per_epoch: For the current (or last) update.
        is_last_epoch: Whether the current minibatch belongs to the last epoch, whose statistics are reported.
        was_trained: Whether the last update took a step; False if none of its minibatches was finite.
        num_updates_in_vain: Number of consecutive updates without a step.
        device: Device of the modules.
    """

    trained_module_ids: list[str]
    weights_seq_no: int
    num_gradient_updates_lifetime: int
    num_env_steps_trained_lifetime: int
    num_env_steps_of_all_ranks_lifetime: int
    is_last_epoch: bool

    _not_called: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("filter_param_dict_for_optimizer", "get_optimizer", "get_optimizers_for_module", "get_param_ref"),
        "override configure_optimizers_for_module(), postprocess_gradients_for_module() or apply_gradients()",
    )

    def __init__(
        self,
        *,
        config: BaseConfig,
        module_spec: Any = None,
        module: Any = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        super().__init__(
            config=config, module_spec=module_spec, module=module, rank=rank, num_ranks=num_ranks
        )
        self.metrics: MetricsLogger = MetricsLogger(
            stats_cls_lookup=getattr(config, "custom_stats_cls_lookup", None)
        )
        self._num_module_steps: dict[str, int] = {}  # of the current update, on all ranks
        self.was_trained: bool = True
        self.num_updates_in_vain: int = 0
        self._ended_at: float | None = None
        self._seconds: list[tuple[float, ...]] = []  # of each update since the last results
        self._forward_s = self._backward_s = 0.0
        self._done = _Trained()
        self._records_networks = False
        self._num_batches = 1  # of the current update

    def build(self) -> None:
        """Create the module, the learner connector and the optimizers. Idempotent.

        The initial weights depend only on ``config.seed`` and are equal on all ranks. torch's global random state is
        not changed.

        Raises:
            ConfigurationError: A module cannot be built.
            TypeError: A module lacks an interface that this learner requires.
        """
        if self.module is None:
            loss = f"{type(self).__name__}.compute_loss_for_module"
            check_takes(
                self.compute_loss_for_module, loss, by_name=("module_id", "config", "batch", "fwd_out")
            )
            super().build()
            # Hooks called by hand before the first update apply to all modules.
            self.trained_module_ids = list(self._module_configs)
            self._loss_weights = dict.fromkeys(self.trained_module_ids, 1.0)
            if self._compiler is not None and self._compiler.compiles_complete_update:
                self._losses_of = self._compiler.compile_losses(  # type: ignore[assignment,method-assign]
                    self._losses_of
                )
            self._builder = TrainBatchBuilder(self._learner_connector, self.module, self.device)

    # -- one update --------------------------------------------------------------------------------

    def update(
        self,
        batch: Mapping[str, Any] | TrainBatch | None = None,
        batches: Sequence[Mapping[str, Any]] | None = None,
        episodes: Any = None,
        data_iterators: Iterable[Iterator[Any]] | None = None,
        *,
        timesteps: Mapping[str, Any] | None = None,
        num_epochs: int | None = None,
        minibatch_size: int | None = None,
        shuffle_batch_per_epoch: bool | None = None,
        num_total_minibatches: int | None = None,
        with_results: bool = True,
    ) -> dict[str, dict[str, Any]]:
        """Train on one source of data.

        Args:
            batch: A train batch: module id → column → array or tensor ``[rows, ...]`` (or just column → … for the
                default module), or a result of `prepare`.
            batches: Several of these, trained as one batch.
            episodes: SingleAgentEpisodes, MultiAgentEpisodes, an EpisodeBatch or a list of EpisodeBatches;
                processed by the learner connector.
            data_iterators: Iterators over train batches, each used as one minibatch; at most `num_total_minibatches`
                of them.
            timesteps: Lifetime counters for schedules, at least ``{"num_env_steps_sampled_lifetime": n}``. Default:
                the env steps that all ranks have trained so far.
            num_epochs: Number of uses of each row; None: as configured.
            minibatch_size: Timesteps per minibatch; None: as configured (where None means the whole batch).
            shuffle_batch_per_epoch: Whether to draw a new order of the rows for every epoch, including the first;
                None: as configured. PPO's default is True, which decorrelates the rows of a minibatch from the start.
            num_total_minibatches: Exact number of minibatches, e.g. as agreed by all ranks.
            with_results: Whether to return the results; if not, `results` does so until the next update.

        Returns:
            ``{module_id: {metric: number}, "__all_modules__": {…}}``: means over the last epoch's minibatches. Values
            logged with `metrics` appear twice: as values, and in ``__all_modules__`` under ``metrics_states`` in the
            form that ``metrics.aggregate`` of another logger accepts.

                If the episodes have no steps, nothing is trained, and ``weights_seq_no``, counters and schedules do
                not change, unless the source keeps data. One of several ranks still takes part in the others' update.

        Raises:
            ValueError: Not exactly one source of data is given.
            NotFiniteError: This was the tenth consecutive update without a step, on all ranks.
            PeerLostError: Another rank died or hangs. The weights are those before the update.
            DesynchronizedError: The ranks are not at the same step. The weights are those before the update.
        """
        self._check_built()
        sources = {"batch": batch, "batches": batches, "episodes": episodes, "data_iterators": data_iterators}
        given = [name for name, source in sources.items() if source is not None]
        if len(given) != 1:
            raise ValueError(
                f"Learner.update: expected exactly one of {', '.join(sources)}, "
                f"got {', '.join(given) or 'none'}."
            )
        counters = dict(timesteps or {NUM_ENV_STEPS_LIFETIME: self.num_env_steps_of_all_ranks_lifetime})
        options = {
            "num_epochs": num_epochs or self._setting("num_epochs", 1),
            "minibatch_size": minibatch_size or self._setting("minibatch_size", None),
            "shuffle": self._setting("shuffle_batch_per_epoch", False)
            if shuffle_batch_per_epoch is None
            else shuffle_batch_per_epoch,
            "num_minibatches": num_total_minibatches or None,
        }
        began_at = time.perf_counter()
        waited_s = 0.0 if self._ended_at is None else began_at - self._ended_at
        self._forward_s = self._backward_s = 0.0
        reduced_before_s = self._reduced_s()
        self._set_source_modules()

        def train(drawn: Sequence[Any] | None = None) -> _Trained:
            self._stats.begin()
            self._num_skipped = {}
            self._num_steps_due: Counter[str] = Counter()
            self._num_module_steps = {}
            self._num_env_steps_agreed = 0
            self.is_last_epoch = True
            self._num_batches = 1 if drawn is None else len(drawn)
            self.before_gradient_based_update(timesteps=counters)
            self._records_networks = self._can_record_networks()
            if drawn is not None:
                return self._train_on(self._built(drawn, options), options)
            if data_iterators is not None:
                self._snapshot.complete()
                return self._train_on_iterators(data_iterators, num_total_minibatches)
            if episodes is not None:
                return self._train_on_source(episodes, options)
            return self._train_on([self._builder.build(batch=batch, batches=batches)], options)

        with (
            ShortTraceback(),
            self.torch_threads(),
            self._random_stream(),
            self._precision(),
            self.all_or_nothing() as start,
        ):
            done = train()
            takes_in = self.group is not None or (episodes is not None and self.source.keeps_data)
            self._done = done
            if not takes_in and not (done.num_minibatches or done.batch.num_env_steps):
                return self.results()  # no data, no update
            self.weights_seq_no += 1
            self._leave_out_skipped(done, start)
            self._count(done)
            self.after_gradient_based_update(timesteps=counters)
            self.commit_update(num_skipped=sum(self._num_skipped.values()))
            self._ended_at = time.perf_counter()
            updated_s, reduced_s = self._ended_at - began_at, self._reduced_s() - reduced_before_s
            seconds = waited_s, updated_s, self._forward_s, self._backward_s, reduced_s, done.connector_s
            self._seconds.append(seconds)
            if trace.is_on:
                trace.span("update", began_at, self._ended_at, weights_version=self.weights_seq_no)
            if not with_results:
                return {}
            results = self.results()
            if self.group is not None:
                results[ALL_MODULES]["speedup_over_one_rank"] = self.speedup_over_one_rank(
                    updated_s, reduced_s
                )
            return results

    def prepare(self, episodes: Any) -> TrainBatch:
        """Run the learner connector before `update`, e.g. on another thread while an update runs.

        Allowed only for pipelines that do not use the weights. PPO's does, for its advantages.

        Args:
            episodes: See `update`.

        Returns:
            A batch for ``update(batch=…)``.
        """
        self._check_built()
        return self._builder.build(episodes=episodes)

    def _get_metrics_state(self) -> Any:
        return encode_supported(self.metrics.get_state())

    def _set_metrics_state(self, state: Any) -> None:
        self.metrics.set_state(decode(state))

    def _drop_untrained(self, train_batch: TrainBatch, num_parameters: Mapping[str, tuple[int, int]]) -> None:
        for module_id in list(train_batch.columns):
            known = num_parameters.get(module_id, (0, 0))[0] > 0
            if not known or not self.should_module_be_updated(module_id, train_batch.columns):
                train_batch.drop(module_id)

    def _train_on_source(self, episodes: Any, options: Mapping[str, Any]) -> _Trained:
        """Add fresh episodes to the rank's source and train the batches that it returns."""
        source = self.source
        num_fresh = num_env_steps_of(episodes)
        source.set_rank(self.rank, self.num_ranks)
        source.add(episodes)
        if self.group is not None and source.keeps_data:
            num_fresh = int(self.group.all_reduce(torch.tensor([num_fresh]))[0])
        num_batches = source.plan_batches(num_fresh, self.num_ranks)
        if self.group is not None and source.keeps_data:
            num_batches = int(self.group.all_reduce(torch.tensor([num_batches]), "min")[0])
        self._num_batches = num_batches
        rng = np.random.default_rng(derive_seed(self._seed, "source", self.rank, self.weights_seq_no))
        return self._train_on(self._built(source.batches(num_batches, rng), options), options)

    def _built(self, batches: Iterable[Any], options: Mapping[str, Any]) -> Iterator[TrainBatch]:
        """Yield the train batches, each built with the weights that the ones before it left."""
        # The estimator's forward pass can serve the loss, too, if nothing happens in between.
        is_whole = options["minibatch_size"] is None and not options["num_minibatches"]
        keeps_forward = (
            is_whole
            and options["num_epochs"] == 1
            and self._forward_is_local
            and type(self).forward_train is LearnerHooks.forward_train
        )
        for batch in batches:
            yield self._builder.build(episodes=batch, keeps_forward=keeps_forward)

    def _train_on(self, train_batches: Iterable[TrainBatch], options: Mapping[str, Any]) -> _Trained:
        """Train the batches one after the other. All ranks must have the same number of batches."""
        done = _Trained()
        iterator = iter(train_batches)
        num_parameters = self._num_parameters()
        while True:
            start = time.perf_counter()
            train_batch = next(iterator, None)
            end = time.perf_counter()
            done.connector_s += end - start
            if trace.is_on:
                trace.span("connector", start, end)
            if train_batch is None:
                return done
            self._drop_untrained(train_batch, num_parameters)
            num_minibatches = self._train(train_batch, options, done.num_batches)
            done.add(train_batch, num_minibatches)

    def _train(self, train_batch: TrainBatch, options: Mapping[str, Any], index: int) -> int:
        minibatches = MinibatchIterator(
            train_batch.columns,
            **options,
            seed=derive_seed(
                self._seed, "minibatch", self.rank, self.weights_seq_no, *([index] if index else [])
            )
            if options["shuffle"]
            else 0,
            timesteps=train_batch.num_module_steps,
            device=self.device,
        )
        rows = {module_id: train_batch.num_module_steps.get(module_id, 0) for module_id in self.module}
        agreed = self.agree_on_update(rows, minibatches.num_of_modules, train_batch.num_env_steps)
        self._follow(agreed)
        minibatches.num_of_modules = agreed.num_minibatches
        num_minibatches = len(minibatches)
        if not self._snapshot.is_complete and self._must_undo_steps(self._num_batches * num_minibatches):
            self._snapshot.complete()
        self.num_minibatches_per_epoch: int = max(1, -(-num_minibatches // options["num_epochs"]))
        self._minibatch_rows = {m: rows.minibatch_rows for m, rows in minibatches.modules.items()}
        first_reported = num_minibatches - self.num_minibatches_per_epoch
        num_trained = 0
        for minibatch in minibatches:
            self.is_last_epoch = num_trained >= first_reported
            self.trained_module_ids = minibatches.due(num_trained)
            self._num_steps_due.update(self.trained_module_ids)
            self._train_minibatch(minibatch)
            num_trained += 1
            if num_trained % self.num_minibatches_per_epoch == 0:
                self.trained_module_ids = agreed.module_ids
                if num_trained < num_minibatches and self.ends_update():
                    break
        self.trained_module_ids = agreed.module_ids
        return num_trained

    def _train_on_iterators(self, iterators: Iterable[Iterator[Any]], limit: int | None) -> _Trained:
        if self.group is not None and limit is None:
            raise ValueError(
                "Learner.update(data_iterators=…) with several ranks needs num_total_minibatches."
            )
        done = _Trained()
        num_parameters = self._num_parameters()
        for iterator in iterators:
            for item in iterator:
                one = self._builder.build(batch=item)
                self._drop_untrained(one, num_parameters)
                agreed = self.agree_on_update(
                    {mid: one.num_module_steps.get(mid, 0) for mid in self.module},
                    dict.fromkeys(one.columns, 1),
                    one.num_env_steps,
                )
                self._follow(agreed)
                self.num_minibatches_per_epoch = done.num_minibatches + 1
                self._num_steps_due.update(agreed.module_ids)
                self._train_minibatch(one.on(self.device))
                done.add(one, 1)
                if done.num_minibatches == limit:
                    return done
        return done

    def _follow(self, agreed: UpdateAgreement) -> None:
        self.trained_module_ids, self._loss_weights = agreed.module_ids, agreed.loss_weights
        self._num_env_steps_agreed += agreed.num_env_steps
        for module_id in agreed.module_ids:
            before = self._num_module_steps.get(module_id, 0)
            self._num_module_steps[module_id] = before + agreed.num_rows[module_id]

    def _train_minibatch(self, minibatch: dict[str, dict[str, Any]]) -> None:
        """Take one step and time its stages."""
        start, reduced_s = time.perf_counter(), self._reduced_s()
        self._stats.take_in()
        losses = self._losses_of(minibatch)
        middle, reduced_until_s = time.perf_counter(), self._reduced_s()
        self._step_on(losses)
        end = time.perf_counter()
        self._forward_s += middle - start - (reduced_until_s - reduced_s)
        self._backward_s += end - middle - (self._reduced_s() - reduced_until_s)
        if trace.is_on:
            trace.span("forward", start, middle)
            trace.span("backward", middle, end)

    def _losses_of(self, minibatch: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
        with recorded() if self._records_networks else nullcontext():
            outputs = self.forward_train(minibatch)
            return self.compute_losses(fwd_out=outputs, batch=minibatch)

    def _step_on(self, losses: dict[str, torch.Tensor]) -> None:
        gradients = self.compute_gradients(losses)
        gradients = self.postprocess_gradients(gradients)
        self.apply_gradients(gradients)
        self.num_gradient_updates_lifetime += 1
        self.num_passes += 1

    def _reduced_s(self) -> float:
        """Return the number of seconds spent in collectives with the other ranks so far."""
        return 0.0 if self.group is None else self.group.waited_s

    def _leave_out_skipped(self, done: _Trained, start: UpdateStart) -> None:
        """Undo the effects of modules that took no optimizer step.

        Raises:
            NotFiniteError: Too many consecutive updates took no step.
        """
        due = self._num_steps_due
        skipped = [m for m in self.trained_module_ids if self._num_skipped.get(m, 0) >= due[m] > 0]
        for module_id in skipped:
            self._num_module_steps.pop(module_id, None)
            if module_id in done.batch.num_module_steps:
                done.batch.num_module_steps[module_id] = 0
        self.was_trained = not skipped or len(skipped) < len(self.trained_module_ids)
        start.weights.restore_not_finite()
        if self.was_trained:
            self.num_updates_in_vain = 0
            return
        start.weights.restore()
        self.source.rollback(start.source)
        done.batch.num_env_steps = self._num_env_steps_agreed = 0
        self.num_updates_in_vain += 1
        if self.num_updates_in_vain >= _MAX_UPDATES_IN_VAIN:
            raise NotFiniteError(
                f"{_MAX_UPDATES_IN_VAIN} updates in a row took no optimizer step, up to weights version "
                f"{self.weights_seq_no}: the losses or gradients of {', '.join(map(repr, skipped))} are NaN or "
                "infinite, whatever the data. Check the loss and the module's outputs, reduce the lr, or set "
                "grad_clip."
            )

    # -- counters and results ----------------------------------------------------------------------

    def _count(self, done: _Trained) -> None:
        self.num_env_steps_trained_lifetime += done.batch.num_env_steps
        self.num_env_steps_of_all_ranks_lifetime += self._num_env_steps_agreed
        for module_id, num_steps in self._num_module_steps.items():
            before = self.num_module_steps_trained_lifetime.get(module_id, 0)
            self.num_module_steps_trained_lifetime[module_id] = before + num_steps
        if self._num_skipped:
            _logger.warning(
                "rank %d, weights version %d: NaN or infinite gradients, no step taken on %s of %d "
                "minibatches. Check for NaN in observations or rewards, reduce the lr, or set grad_clip.",
                self.rank,
                self.weights_seq_no,
                ", ".join(
                    f"{count} (module {module_id!r})" for module_id, count in self._num_skipped.items()
                ),
                done.num_minibatches,
            )

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the results of the last update, see `update`. Times are means over the updates since the last call."""
        done, train_batch = self._done, self._done.batch
        seconds, self._seconds = self._seconds or [(0.0,) * 6], []
        waited_s, updated_s, *stages_s, connector_s = (
            sum(of_updates) / len(seconds) for of_updates in zip(*seconds, strict=True)
        )
        results: dict[str, dict[str, Any]] = dict(self._stats.means(self.num_minibatches_per_epoch))
        num_parameters = self._num_parameters()
        for module_id, num_steps in train_batch.num_module_steps.items():
            module_results = results.setdefault(module_id, {})
            module_results |= {
                "num_module_steps_trained": num_steps,
                "num_module_steps_trained_lifetime": self.num_module_steps_trained_lifetime.get(module_id, 0),
                "num_trainable_parameters": num_parameters[module_id][0],
                "weights_seq_no": self.weights_seq_no,
                "num_nonfinite_gradients_skipped": self._num_skipped.get(module_id, 0),
                "module_train_batch_size_mean": self._minibatch_rows.get(module_id, 0),
            }
            sampled_with = train_batch.mean_weights_seq_no.get(module_id)
            if sampled_with is not None:
                lag = self.weights_seq_no - 1 - sampled_with
                module_results["diff_num_grad_updates_vs_sampler_policy"] = lag
            for entry in self._optimizers.of_module(module_id):
                learning_rate = float(entry.optimizer.param_groups[0]["lr"])
                module_results[f"{entry.name}_learning_rate"] = learning_rate
        own = self.metrics.compile()
        for module_id, values in own.items():
            results.setdefault(module_id, {}).update(
                values if isinstance(values, dict) else {"value": values}
            )
        results.setdefault(ALL_MODULES, {}).update(
            num_env_steps_trained=train_batch.num_env_steps,
            num_env_steps_trained_lifetime=self.num_env_steps_trained_lifetime,
            num_module_steps_trained=sum(train_batch.num_module_steps.values()),
            num_module_steps_trained_lifetime=sum(self.num_module_steps_trained_lifetime.values()),
            num_trainable_parameters=sum(trainable for trainable, _ in num_parameters.values()),
            num_non_trainable_parameters=sum(fixed for _, fixed in num_parameters.values()),
            num_gradient_updates=done.num_minibatches,
            num_gradient_updates_lifetime=self.num_gradient_updates_lifetime,
            num_nonfinite_gradients_skipped=sum(self._num_skipped.values()),
            weights_seq_no=self.weights_seq_no,
            learner_thread_in_queue_wait_timer=waited_s,
            learner_thread_update_timer=updated_s,
            **dict(zip(LEARNER_STAGES, stages_s, strict=True)),
            learner_connector=self._connector_timers(connector_s),
            learner_connector_sum_episodes_length_in=train_batch.num_env_steps,
            learner_connector_sum_episodes_length_out=train_batch.num_env_steps,
        )
        if self.source.keeps_data:
            results[ALL_MODULES][BATCH_SOURCE] = {
                **self.source_counts(),
                "num_bytes": self.source.num_bytes,
                "num_agent_steps_not_kept": self.source.num_agent_steps_not_kept,
            }
            if isinstance(ratio := self.source.progress, ReplayRatio) and ratio.num_counted:
                reached = self.num_env_steps_of_all_ranks_lifetime / ratio.num_counted
                results[ALL_MODULES][BATCH_SOURCE]["train_ratio"] = reached
            if metrics := self.source.get_metrics():
                results[ALL_MODULES][REPLAY_BUFFER_RESULTS] = metrics
        if own:
            results[ALL_MODULES][METRICS_STATES] = own.states
        return results

    def source_counts(self) -> dict[str, Any]:
        """Return the part of the results that accounts for env steps in a source that keeps data."""
        source = self.source
        return {
            "source_id": source.source_id,
            "num_ranks": self.num_ranks,
            "num_env_steps": source.num_env_steps,
            "num_added": source.num_added,
        }

    @property
    def num_env_steps_of_update(self) -> int:
        """Number of env steps that the last update trained."""
        return self._done.batch.num_env_steps

    def _connector_timers(self, connector_s: float) -> dict[str, Any]:
        timers = StageTimers()
        timers.add("connector_pipeline_timer", connector_s)
        if self._learner_connector is not None:
            timers.add_pieces(self._learner_connector)
        return timers.reduce()


class TorchLearner(Learner):
    """Base class of learners that define a loss. `Learner` is that of mix-ins, which may follow in a list of bases.

    Example::

        class LogsGradients(Learner): ...
        class MyLearner(TorchLearner, LogsGradients): ...
    """
