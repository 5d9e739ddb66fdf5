"""Learner: trains the modules on episodes or batches, through hooks that subclasses override.

One update, in this order::

    before_gradient_based_update(timesteps)
    learner connector                       episodes → module id → train batch
    should_module_be_updated                other modules' batches are dropped
    ranks.agree_on_update                   numbers of minibatches, the same on all ranks
    for each minibatch:
        forward_train
        compute_losses → compute_loss_for_module, or the module's self-supervised loss
        compute_gradients                   optimizers.backward: one pass of the losses' sum; ranks.average_gradients
        postprocess_gradients → postprocess_gradients_for_module: optimizers.clip
        apply_gradients                     optimizers.step, unless a gradient is not finite
    after_gradient_based_update(timesteps)  once
    ranks.commit_update                     all ranks took the same steps, or none keeps the update

A minibatch whose loss or gradients are not finite on any rank takes no step on all of them, and is counted. Ten updates
in a row without a step end the run.

A Learner works alone, e.g. in a notebook on a list of episodes. As one of several ranks (`ranks.join`) it
averages gradients with its peers; an update then happens on all ranks or on none.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.defaults import add_estimator
from rlzmq.connectors.learner.advantages import FORWARD_OUTPUTS, WholeBatchEstimator
from rlzmq.core.checkpoint import Checkpointable
from rlzmq.core.metrics import MetricsLogger, ReducedMetrics
from rlzmq.core.names import ALL_MODULES, LEARNER_PATH, NUM_ENV_STEPS_SAMPLED_LIFETIME
from rlzmq.core.signatures import TellsUncalled, check_takes
from rlzmq.core.update_plan import derive_seed
from rlzmq.episodes.columns import DEFAULT_MODULE_ID
from rlzmq.learners.batches import BatchSource, FreshBatch, MinibatchIterator, TrainBatch, TrainBatches
from rlzmq.learners.execution import Execution
from rlzmq.learners.learner_report import LearnerReport, Scalar
from rlzmq.learners.optimizers import DEFAULT_OPTIMIZER, Optimizers, make_adam
from rlzmq.learners.ranks import Ranks, learner_device
from rlzmq.learners.snapshot import Snapshot
from rlzmq.modules.multi_rl_module import MultiRLModule
from rlzmq.modules.output_check import check_interfaces, check_training_outputs, no_loss
from rlzmq.modules.rl_module import SelfSupervisedLossAPI, ValueFunctionAPI
from rlzmq.modules.saving import read_module_states
from rlzmq.modules.weights import is_trainable

__all__ = ["Learner", "TorchLearner"]

# Random numbers of one update; an odd number as `numpy.random.PCG64.jumped` has it, so that updates are not correlated.
_STREAM_LENGTH = 0x9E3779B97F4A7C15F39CC0605CEDC835


class _Options(NamedTuple):
    """How an update cuts its batches into minibatches; see `MinibatchIterator`."""

    num_epochs: int = 1
    minibatch_size: int | None = None
    shuffle: bool = False
    num_minibatches: int | None = None


class Learner(TellsUncalled, Checkpointable):
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
        trained_module_ids: Modules that the current (or last) update trains, on any rank.
        timesteps: Lifetime counters given to the current (or last) update.
        num_minibatches_per_epoch: For the current (or last) update.
        is_last_epoch: Whether the current minibatch belongs to the last epoch, whose statistics are reported.
        policies_to_train: The config's: None (all), ids, or ``fn(module_id, batch) -> bool``.
        coefficients: Setting → module id → its value: of `scheduled_settings`, and of what else changes; part of the
            state.
        optimizers: The modules' optimizers.
        report: What it counts and measures.
        source: Its batch source (from `build` on).
        ranks: Its peers, if it is one of several.
        device: Device of the modules.
    """

    checkpoint_name = LEARNER_PATH
    scheduled_settings: ClassVar[Sequence[str]] = ()
    """Settings besides ``lr`` that may be schedules, e.g. ["entropy_coeff"]."""

    _not_called: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (
                "filter_param_dict_for_optimizer",
                "get_optimizer",
                "get_optimizers_for_module",
                "get_param_ref",
            ),
            "override configure_optimizers_for_module(), postprocess_gradients_for_module() or apply_gradients()",
        ),
        "apply": "use LearnerGroup.foreach_learner()",
        "shutdown": "use the callback on_algorithm_end",
    }

    def __init__(
        self,
        *,
        config: BaseConfig,
        module_spec: Any = None,
        module: Any = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        if (module_spec is None) == (module is None):
            raise ValueError("Learner: expected either module_spec or module, got both or neither.")
        self.config: BaseConfig = config
        self.module: Any = None
        self.device: torch.device = learner_device(config, rank)
        self.metrics: MetricsLogger = MetricsLogger(stats_cls_lookup=config.custom_stats_cls_lookup)
        self.weights_seq_no: int = 0
        self.trained_module_ids: list[str] = []
        self.timesteps: Mapping[str, Any] = {}
        self.num_minibatches_per_epoch: int = 1
        self.is_last_epoch: bool = True
        self.policies_to_train: Any = config.policies_to_train
        self._module_spec = module_spec
        self._given_module = module
        self._configs: dict[str, BaseConfig] = {}
        self.seed: int = (
            int(np.random.SeedSequence().generate_state(1)[0]) if config.seed is None else int(config.seed)
        )
        self._learner_connector: Any = None
        self._estimator: WholeBatchEstimator | None = None
        self.source: BatchSource
        self.ranks: Ranks = Ranks(self, rank, num_ranks)
        self.optimizers: Optimizers = Optimizers()
        self.coefficients: dict[str, dict[str, float]] = self.optimizers.coefficients
        self.report: LearnerReport = LearnerReport()
        self.snapshot: Snapshot = Snapshot(self)
        self._batches = TrainBatches(self)
        self._options = _Options(config.num_epochs, config.minibatch_size, config.shuffle_batch_per_epoch)
        self._loss_weights: Mapping[str, float] = {}
        self._rng = np.random.Generator(np.random.PCG64(0))  # of the current update

    @property
    def rank(self) -> int:
        """Index of this learner among its peers."""
        return self.ranks.rank

    # -- one update --------------------------------------------------------------------------------

    def update(
        self,
        batch: Mapping[str, Any] | None = None,
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
    ) -> ReducedMetrics:
        """Train on one source of data.

        Args:
            batch: A train batch: module id → column → array or tensor ``[rows, ...]`` (or just column → … for the
                default module).
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
            ``{module_id: {metric: number}, "__all_modules__": {…}}``: means over the last epoch's minibatches, counts,
            and what was logged with `metrics`; ``metrics.aggregate`` of another logger accepts them.

                If the episodes have no steps, nothing is trained, and ``weights_seq_no``, counters and schedules do
                not change, unless the source keeps data. One of several ranks still takes part in the others' update.

        Raises:
            ValueError: Not exactly one source of data is given.
            NotFiniteError: This was the tenth consecutive update without a step, on all ranks.
            PeerLostError: Another rank died or hangs. The weights are those before the update.
            DesynchronizedError: The ranks are not at the same step. The weights are those before the update.
        """
        self._check_built()
        given = {"batch": batch, "batches": batches, "episodes": episodes, "data_iterators": data_iterators}
        if [*given.values()].count(None) != len(given) - 1:
            names = ", ".join(name for name, data in given.items() if data is not None)
            raise ValueError(
                f"Learner.update: expected exactly one of {', '.join(given)}, got {names or 'none'}."
            )
        configured = self._options
        options = _Options(
            num_epochs or configured.num_epochs,
            minibatch_size or configured.minibatch_size,
            configured.shuffle if shuffle_batch_per_epoch is None else shuffle_batch_per_epoch,
            num_total_minibatches or None,
        )
        if episodes is not None:
            # The estimator's forward pass can serve the loss, too, if nothing happens in between.
            is_one_pass = options == _Options(shuffle=options.shuffle) and not self._execution.is_compiled
            keeps_forward = is_one_pass and type(self).forward_train is Learner.forward_train
            train_batches = self._batches.drawn(episodes, self._rng, keeps_forward=keeps_forward)
        elif data_iterators is not None:
            train_batches = self._batches.of_iterators(data_iterators, options.num_minibatches)
            options = _Options()
        else:
            train_batches = iter([self._batches.of([batch] if batch is not None else batches or [])])
        trained = self.report.num_env_steps_of_all_ranks_lifetime
        self._train(train_batches, options, {NUM_ENV_STEPS_SAMPLED_LIFETIME: trained, **(timesteps or {})})
        return self.results() if with_results else ReducedMetrics({}, {})

    def _train(
        self, train_batches: Iterator[TrainBatch], options: _Options, timesteps: Mapping[str, Any]
    ) -> None:
        """Train on batches, each of which is made when it is asked for: an update in the order of its hooks."""
        report, ranks, self.timesteps = self.report, self.ranks, timesteps
        report.begin(ranks.waited_s)
        with self._running(), self.snapshot:
            self.before_gradient_based_update(timesteps=timesteps)
            for train_batch in report.timed(train_batches):
                for minibatch in self._minibatches_of(train_batch, options):
                    self._train_minibatch(minibatch)
            has_data = report.num_minibatches or report.batch.num_env_steps
            if not (has_data or ranks.group or self.source.keeps_data):
                return
            self.weights_seq_no += 1
            self.snapshot.restore_not_finite()
            report.count(self.trained_module_ids, ranks.rank, self.weights_seq_no)
            if not report.was_trained:
                self.snapshot.undo_steps()
            self.after_gradient_based_update(timesteps=timesteps)
            ranks.commit_update(report.num_gradient_updates_lifetime, report.num_skipped.total())
        report.end(ranks.waited_s, self.weights_seq_no)

    def _train_minibatch(self, minibatch: dict[str, dict[str, Any]]) -> None:
        """Take one step: loss, gradients, optimizers."""
        report, ranks = self.report, self.ranks
        report.logged()
        start = time.perf_counter()
        losses = self._losses_of(minibatch)
        middle, waited_s = time.perf_counter(), ranks.waited_s
        gradients = self.compute_gradients(losses)
        gradients = self.postprocess_gradients(gradients)
        self.apply_gradients(gradients)
        report.add_minibatch(start, middle, time.perf_counter(), ranks.waited_s - waited_s)

    def _losses_of(self, minibatch: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
        return self.compute_losses(fwd_out=self.forward_train(minibatch), batch=minibatch)

    def prepare(self, episodes: Any, *, keeps_forward: bool = False) -> TrainBatch:
        """Return the train batch of episodes: run the learner connector, as `update` does.

        Args:
            episodes: See `update`.
            keeps_forward: Whether the batch gets a column ``FORWARD_OUTPUTS`` where the connector computes them anyway;
                it may then be trained once, with the current weights.
        """
        self._check_built()
        return self._batches.of_episodes(episodes, keeps_forward=keeps_forward)

    def _minibatches_of(self, train_batch: TrainBatch, options: _Options) -> Iterator[dict[str, Any]]:
        """Yield the minibatches of a batch, as many on all ranks. All ranks must have the same number of batches."""
        for module_id in list(train_batch.columns):
            is_known = module_id in self.module and is_trainable(self.module[module_id])
            if not (is_known and self.should_module_be_updated(module_id, train_batch.columns)):
                train_batch.drop(module_id)
        report = self.report
        minibatches = MinibatchIterator(
            train_batch.columns,
            **options._asdict(),
            seed=self._rng.bit_generator.random_raw() if options.shuffle else 0,
            timesteps=train_batch.num_module_steps,
            device=self.device,
        )
        agreed = self.ranks.agree_on_update(
            train_batch.num_module_steps, minibatches.num_of_modules, train_batch.num_env_steps
        )
        self._loss_weights = agreed.loss_weights
        num_minibatches = max(agreed.num_minibatches.values(), default=0)
        # A single step of one learner is the last thing that happens in an update.
        if num_minibatches > 1 or not train_batch.is_last or self.ranks.group is not None:
            self.snapshot.complete()
        self.num_minibatches_per_epoch = max(1, -(-num_minibatches // options.num_epochs))
        first_reported = num_minibatches - self.num_minibatches_per_epoch
        num_trained = 0
        for due, minibatch in minibatches.take(agreed.num_minibatches):
            self.is_last_epoch = num_trained >= first_reported
            self.trained_module_ids = due
            for module_id in due:
                report.num_steps_due[module_id] += 1
            yield minibatch
            num_trained += 1
            if num_trained % self.num_minibatches_per_epoch == 0:
                self.trained_module_ids = list(agreed.num_rows)
                if num_trained < num_minibatches and self.ends_update():
                    break
        self.trained_module_ids = list(agreed.num_rows)
        for module_id, rows in minibatches.modules.items():
            report.minibatch_rows[module_id] = rows.minibatch_rows
        report.add_batch(train_batch, agreed, num_trained)

    # -- hooks, in the order in which an update calls them -------------------------------------------

    def before_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        """Run before everything else in an update.

        Args:
            timesteps: The lifetime counters given to `update`.
        """

    def forward_train(self, batch: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the outputs of the modules' training forward pass on a minibatch, by module id."""
        kept: dict[str, dict[str, Any]] = {}
        for module_id, columns in batch.items():
            if FORWARD_OUTPUTS in columns:
                kept[module_id] = columns.pop(FORWARD_OUTPUTS)
        if len(kept) == len(batch):
            return kept
        outputs: dict[str, dict[str, Any]] = self.module.forward_train(batch)
        return outputs

    def compute_losses(
        self, *, fwd_out: dict[str, dict[str, Any]], batch: dict[str, dict[str, Any]]
    ) -> dict[str, Tensor]:
        """Return each module's loss on its minibatch.

        Args:
            fwd_out: Module id → outputs of `forward_train`.
            batch: Module id → minibatch.

        Returns:
            Module id → 0-d tensor.
        """
        losses: dict[str, Tensor] = {}
        for module_id, outputs in fwd_out.items():
            module = self.module[module_id]
            arguments: dict[str, Any] = {
                "module_id": module_id,
                "config": self._configs[module_id],
                "batch": batch[module_id],
                "fwd_out": outputs,
            }
            owner: Any = self
            if isinstance(module, SelfSupervisedLossAPI):
                owner = module
                loss: Any = module.compute_self_supervised_loss(learner=self, **arguments)
                if isinstance(loss, Mapping):
                    self.log_stats(module_id, loss)
                    loss = loss["total_loss"]
            else:
                loss = self.compute_loss_for_module(**arguments)
            if not (isinstance(loss, Tensor) and loss.numel() == 1):
                raise no_loss(loss, owner, module_id)
            losses[module_id] = loss.reshape(()) if loss.dim() else loss
        return losses

    def compute_loss_for_module(
        self, *, module_id: str, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Return one module's loss. Subclasses override this.

        Args:
            module_id: The module.
            config: The config with the module's own overrides.
            batch: Its minibatch: column → tensor ``[rows, ...]`` (``[B, T, ...]`` with ``loss_mask`` if
                stateful).
            fwd_out: Outputs of the module's `forward_train`.

        Returns:
            0-d tensor.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no loss for module {module_id!r}: override compute_loss_for_module."
        )

    def compute_gradients(self, loss_per_module: dict[str, Tensor]) -> dict[Tensor, Tensor]:
        """Run one backward pass on the sum of all losses; with several ranks, average their gradients.

        Args:
            loss_per_module: Module id → 0-d tensor.

        Returns:
            Parameter → gradient, for the parameters of all modules trained in this update.
        """
        for module_id, loss in loss_per_module.items():
            self.report.log(module_id, {"total_loss": loss})
        self.optimizers.backward(loss_per_module, self._loss_weights)
        self.ranks.average_gradients()
        return self.optimizers.gradients(sorted(self.trained_module_ids))

    def postprocess_gradients(self, gradients_dict: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Change the gradients before they are applied; by default, separately for each module.

        Args:
            gradients_dict: Parameter → gradient.

        Returns:
            Parameter → gradient.
        """
        result: dict[Tensor, Tensor] = {}
        by_module = self.optimizers.by_module(self.trained_module_ids)
        for module_id, entries in by_module.items():
            mine = gradients_dict
            if len(by_module) > 1:  # looking up each parameter takes longer than summing its gradient
                parameters = chain.from_iterable(entry.parameters for entry in entries)
                mine = {p: gradients_dict[p] for p in parameters if gradients_dict.get(p) is not None}
            if mine:
                config = self._configs.get(module_id, self.config)
                result |= self.postprocess_gradients_for_module(
                    module_id=module_id, config=config, module_gradients_dict=mine
                )
        return result

    def postprocess_gradients_for_module(
        self, *, module_id: str, config: BaseConfig, module_gradients_dict: dict[Tensor, Tensor]
    ) -> dict[Tensor, Tensor]:
        """Clip one module's gradients, separately for each optimizer, according to ``config.grad_clip(_by)``.

        Logs each optimizer's global norm before clipping.

        Args:
            module_id: The module.
            config: The config with the module's own overrides.
            module_gradients_dict: Parameter → gradient.

        Returns:
            Parameter → gradient.
        """
        num_before = self.report.num_gradient_updates_lifetime
        norms = self.optimizers.clip(module_id, module_gradients_dict, config, num_before)
        if config.log_gradients:
            self.report.log(module_id, norms)
        return module_gradients_dict

    def apply_gradients(self, gradients_dict: dict[Tensor, Tensor]) -> None:
        """Step the optimizers of each trained module if its gradients are finite on all ranks.

        A module with a NaN or infinite gradient takes no step on this minibatch, since one such step would corrupt
        Adam's state. The step is counted (``num_nonfinite_gradients_skipped``), with one warning per update.

        Args:
            gradients_dict: Parameter → gradient.
        """
        report, own, base = self.report, type(self), Learner
        # A subclass that changes gradients may introduce NaN after they were clipped.
        are_clipped = (
            own.postprocess_gradients is base.postprocess_gradients
            and own.postprocess_gradients_for_module is base.postprocess_gradients_for_module
        )
        num_before = report.num_gradient_updates_lifetime
        trained = self.trained_module_ids
        skipped = self.optimizers.step(gradients_dict, trained, num_before, are_clipped=are_clipped)
        if skipped:
            report.num_skipped.update(skipped)

    def steps_optimizer(self, module_id: str, optimizer_name: str) -> bool:
        """Return whether the current minibatch's step includes an optimizer, see ``every`` of `register_optimizer`."""
        num_before = self.report.num_gradient_updates_lifetime
        entries = self.optimizers.of_module(module_id)
        return all(num_before % entry.every == 0 for entry in entries if entry.name == optimizer_name)

    def ends_update(self) -> bool:
        """Return whether the update ends with the epoch that has just been trained, on all ranks alike."""
        return False

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        """Run once at the end of each update. By default, set learning rates and coefficients to their schedules.

        Args:
            timesteps: The lifetime counters given to `update`.
        """
        num_env_steps = int(timesteps[NUM_ENV_STEPS_SAMPLED_LIFETIME])
        for setting, module_id, value in self.optimizers.follow_schedules(num_env_steps):
            if module_id in self.trained_module_ids:
                self.log_stats(module_id, {f"curr_{setting}": value})

    # -- what an update measured -------------------------------------------------------------------

    def log_stats(self, module_id: str, values: Mapping[str, Scalar]) -> None:
        """Log scalars of one minibatch; results are means over the last epoch.

        Tensors are not read until then, and functions that return one are not called.
        """
        self.report.log(module_id, values)

    def mean_stats_over_ranks(self, name: str) -> dict[str, float]:
        """Return module id → mean of one logged scalar over the last epoch and all ranks. A collective.

        Only modules that this update trained are included.
        """
        mine = self.report.mean(name, self.num_minibatches_per_epoch)
        return self.ranks.mean(mine, self.trained_module_ids)

    def results(self) -> ReducedMetrics:
        """Return the results of the last update, see `update`. Times are means over the updates since the last call."""
        return self.report.results(self)

    # -- modules and optimizers --------------------------------------------------------------------

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """Return the interfaces that every trained module must implement, classes of `rlzmq.modules.rl_module`."""
        return []

    def build(self) -> None:
        """Create the module, the learner connector, the optimizers and the batch source. Idempotent.

        The initial weights depend only on ``config.seed`` and are equal on all ranks. torch's global random state is
        not changed.

        Raises:
            ConfigurationError: A module cannot be built, or lacks what this learner needs.
        """
        if self.module is not None:
            return
        loss = f"{type(self).__name__}.compute_loss_for_module"
        check_takes(self.compute_loss_for_module, loss, by_name=("module_id", "config", "batch", "fwd_out"))
        if self._given_module is not None:
            self.module = self._given_module.as_multi_rl_module()
        else:
            spec = self._module_spec.as_multi_rl_module_spec()
            self.module = spec.build(seed=self.config.seed)
        self.module.to(self.device)
        self._module = self.module  # losses written for RLlib use this name
        self._execution = Execution(self.config, self.device)
        self._execution.prepare(self.module)
        if len(self.module) == 1 and DEFAULT_MODULE_ID in self.module:
            only = self.module[DEFAULT_MODULE_ID]
            spaces = only.observation_space, only.action_space
        else:
            spaces = self.config.observation_space, self.config.action_space
        self._learner_connector = self.make_learner_connector(*spaces)
        for module_id in self.module:
            self._prepare_module(module_id)
        self.configure_optimizers()
        if type(self.module)._forward_train is not MultiRLModule._forward_train:
            self.optimizers.shared = [m for m in self.module if m not in self.config.module_ids]
        for module_id, module in self.module.items():
            if self.rl_module_is_compatible(module):
                self.optimizers.warn_of_untrained(module_id, module)
        # Hooks called by hand before the first update apply to all modules.
        self.trained_module_ids = list(self._configs)
        if self._execution.compiles_complete_update:
            losses: Any = self._execution.compile_in_parts(self._losses_of)
            self._losses_of = losses  # type: ignore[method-assign]
        self.source = self.make_source()

    def make_source(self) -> BatchSource:
        """Return this rank's batch source; by default, each fresh step is trained once. Algorithms override this."""
        return FreshBatch()

    def make_learner_connector(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Any:
        """Return the config's learner pipeline with `make_estimator`'s piece. Algorithms that add others extend it."""
        pipeline = self.config.build_learner_connector(observation_space, action_space, self.device)
        estimator = self._estimator = self.make_estimator()
        if estimator is not None and self.config.add_default_connectors_to_learner_pipeline:
            add_estimator(pipeline, estimator)
        return pipeline

    def make_estimator(self) -> WholeBatchEstimator | None:
        """Return the last piece of the learner pipeline, which adds advantages or value targets; by default None.

        It is also called for each module with settings of its own, which are then in ``self.config``.
        """
        return None

    @classmethod
    def check_module(cls, module_id: str, module: Any, config: BaseConfig) -> None:
        """Check that learners of this class can train a module. Also called before a module is added to a run.

        Args:
            module_id: The module's id.
            module: The RLModule.
            config: The run's config.

        Raises:
            ConfigurationError: The module lacks an interface of `rl_module_required_apis`, or the config's settings do
                not fit it.
        """
        check_interfaces(module_id, module, cls.rl_module_required_apis(), cls.__name__)

    def _prepare_module(self, module_id: str) -> None:
        module = self.module[module_id]
        self.check_module(module_id, module, self.config)
        # Shares nothing with others.
        is_alone = type(self.module)._forward_train is MultiRLModule._forward_train
        if is_alone and not isinstance(module, SelfSupervisedLossAPI) and is_trainable(module):
            check_training_outputs(module, with_values=ValueFunctionAPI in self.rl_module_required_apis())
        self._execution.prepare(module)
        config = self._configs[module_id] = self.config.get_config_for_module(module_id)
        if self._estimator is not None:
            mine, self.config = self.config, config
            self._estimator.of_modules[module_id] = None if config is mine else self.make_estimator()
            self.config = mine
        self.optimizers.schedule(module_id, {name: getattr(config, name) for name in self.scheduled_settings})

    def config_for_module(self, module_id: str) -> BaseConfig:
        """Return the config with the module's own overrides."""
        return self._configs[module_id]

    def configure_optimizers(self) -> None:
        """Register all optimizers after the modules are built; by default one per module."""
        for module_id in self.module:
            if self.rl_module_is_compatible(self.module[module_id]):
                self.configure_optimizers_for_module(module_id, self._configs[module_id])

    def configure_optimizers_for_module(self, module_id: str, config: BaseConfig) -> None:
        """Register the module's optimizers; by default one Adam for all its parameters, at ``config.lr``.

        Args:
            module_id: The module.
            config: The config with the module's own overrides.
        """
        parameters = [p for p in self.get_parameters(self.module[module_id]) if p.requires_grad]
        if parameters:
            self.register_optimizer(
                module_id=module_id,
                optimizer=make_adam(parameters, config.adam_epsilon),
                params=parameters,
                lr_or_lr_schedule=config.lr,
            )

    def register_optimizer(
        self,
        *,
        module_id: str = ALL_MODULES,
        optimizer_name: str = DEFAULT_OPTIMIZER,
        optimizer: Optimizer,
        params: Sequence[Tensor],
        lr_or_lr_schedule: float | Sequence[Sequence[float]] | None = None,
        every: int = 1,
    ) -> None:
        """Add an optimizer; call it from `configure_optimizers_for_module`.

        Args:
            module_id: The module whose updates step the optimizer; by default, the optimizer steps with every
                minibatch.
            optimizer_name: Unique within the module.
            optimizer: A torch optimizer.
            params: The optimizer's parameters.
            lr_or_lr_schedule: A number, or ``[(0, v0), (t1, v1), …]`` over lifetime env steps; None: keep the
                optimizer's own learning rate.
            every: The optimizer steps with every so many minibatches only, from the first on (delayed updates, as
                TD3's). A loss for it may be left out of the others: `steps_optimizer` says which they are.

        Raises:
            ValueError: The name is taken, or `params` are not the optimizer's parameters.
            ConfigurationError: The schedule is malformed.
        """
        self.optimizers.register(module_id, optimizer_name, optimizer, params, lr_or_lr_schedule, every)

    def rl_module_is_compatible(self, module: Any) -> bool:
        """Return whether the module gets optimizers; by default whether it is a ``torch.nn.Module``."""
        return isinstance(module, torch.nn.Module)

    def get_optimizer(
        self, module_id: str = DEFAULT_MODULE_ID, optimizer_name: str = DEFAULT_OPTIMIZER
    ) -> Optimizer:
        """Return one of the module's optimizers.

        Raises:
            KeyError: There is no optimizer of this name.
        """
        return self.optimizers.get(module_id, optimizer_name)

    def get_optimizers_for_module(self, module_id: str = ALL_MODULES) -> list[tuple[str, Optimizer]]:
        """Return the module's optimizers as (name, optimizer)."""
        return [(entry.name, entry.optimizer) for entry in self.optimizers.of_module(module_id)]

    def get_parameters(self, module: Any) -> list[Tensor]:
        """Return the parameters of one module; [] for a plain RLModule, which has no networks."""
        return list(module.parameters()) if isinstance(module, nn.Module) else []

    def get_param_ref(self, param: Tensor) -> Tensor:
        """Return the key of a parameter in gradient dicts: the parameter itself."""
        return param

    def filter_param_dict_for_optimizer(
        self, param_dict: Mapping[Tensor, Any], optimizer: Optimizer
    ) -> dict[Tensor, Any]:
        """Return the entries of a parameter → value dict that belong to one optimizer."""
        return {
            p: param_dict[p] for group in optimizer.param_groups for p in group["params"] if p in param_dict
        }

    def add_module(
        self,
        *,
        module_id: str,
        module_spec: Any,
        config_overrides: Mapping[str, Any] | None = None,
        new_should_module_be_updated: Any = None,
    ) -> None:
        """Add a module with its optimizers. All ranks must do this between the same two updates.

        Args:
            module_id: The module's id, which must be new.
            module_spec: Its RLModuleSpec.
            config_overrides: Settings for this module only.
            new_should_module_be_updated: New ``policies_to_train``: ids, or ``fn(module_id, batch) -> bool``.

        Raises:
            ValueError: A module with this id exists.
        """
        self._check_built()
        if module_id in self.module:
            raise ValueError(
                f"the Learner already has a module {module_id!r}: remove it first, or use another id."
            )
        module = module_spec.build(seed=self.seed, module_id=module_id)
        self.module.add_module(module_id, module.to(self.device))
        if config_overrides:
            overrides = {**self.config.algorithm_config_overrides_per_module, module_id: {**config_overrides}}
            self.config = self.config.copy(copy_frozen=False)
            self.config.algorithm_config_overrides_per_module = overrides
        self._prepare_module(module_id)
        self.configure_optimizers_for_module(module_id, self._configs[module_id])
        if new_should_module_be_updated is not None:
            self.policies_to_train = new_should_module_be_updated
        self._on_modules_changed()

    def remove_module(self, module_id: str, *, new_should_module_be_updated: Any = None) -> None:
        """Remove a module and its optimizers. All ranks must do this between the same two updates.

        Raises:
            KeyError: There is no such module.
        """
        self._check_built()
        self.module.remove_module(module_id)
        self.optimizers.remove(module_id)
        self._configs.pop(module_id, None)
        if new_should_module_be_updated is not None:
            self.policies_to_train = new_should_module_be_updated
        self._on_modules_changed()

    def should_module_be_updated(self, module_id: str, multi_agent_batch: Any = None) -> bool:
        """Return whether ``config.policies_to_train`` includes the module (None: every module).

        Args:
            module_id: The module.
            multi_agent_batch: Module id → train batch, for functions that depend on the data.
        """
        chosen = self.policies_to_train
        if callable(chosen):
            return bool(chosen(module_id, multi_agent_batch))
        return chosen is None or module_id in chosen

    def _on_modules_changed(self) -> None:
        """React to an added or removed module."""
        self.ranks.on_modules_changed()

    # -- state -------------------------------------------------------------------------------------

    def get_state(
        self,
        components: str | Sequence[str] | None = None,
        *,
        not_components: str | Sequence[str] | None = None,
        inference_only: bool = False,
    ) -> dict[str, Any]:
        """Return everything that an equal Learner needs to continue exactly like this one: named arrays, plain values.

        Args:
            components: Only these components: "rl_module" (or "rl_module/<module_id>"), "optimizer",
                "weights_seq_no", "counters", "learner_connector", "metrics", "random" (the seed of each update's
                random numbers), "extra", "source" (the content of the batch source, which differs per rank); None:
                all but "source".
            not_components: Components to leave out.
            inference_only: Whether to leave out the modules' parts that only learners need.

        Raises:
            ValueError: A component is unknown.
        """
        self._check_built()
        return self.snapshot.get_state(components, not_components, inference_only)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load the components of a state from `get_state`. Missing components keep their state.

        Raises:
            ValueError: A component is unknown, the weights do not fit, or the counts are another algorithm's.
            KeyError: The optimizer state is for other modules or optimizers.
        """
        self._check_built()
        self.snapshot.set_state(state)

    def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Load the state of a checkpoint, or a part of it. Builds the learner if that has not been done.

        Args:
            path: A checkpoint written by `save_to_path`, an algorithm's checkpoint, or a path into one.
            component: Only this part is at `path`; ``"rl_module/p0"`` also accepts a module's own checkpoint.

        Raises:
            CheckpointError: There is no such checkpoint, or it is incomplete or altered.
        """
        self.build()
        name, _, module_id = (component or "").strip("/").partition("/")
        if name == "rl_module":
            self.set_state({"rl_module": read_module_states(path, module_id or None)})
        else:
            super().restore_from_path(path, component)

    def get_extra_state(self) -> dict[str, Any]:
        """Return a subclass's state beyond modules and optimizers as plain values and arrays. Override both methods."""
        return {}

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Load a state from `get_extra_state`."""

    def parameter_hash(self, *, with_buffers: bool = True) -> str:
        """Return the SHA-256 (hex) of all weights, for comparison across ranks and runs.

        Args:
            with_buffers: Whether it covers the modules' buffers, too.
        """
        return self.snapshot.parameter_hash(with_buffers)

    # -- internals ---------------------------------------------------------------------------------

    def _check_built(self) -> None:
        if self.module is None:
            raise RuntimeError(f"{type(self).__name__}: call build() first.")

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Run torch as configured in the block: threads, precision, and the random numbers of this update only.

        Numbers too small for float32's full precision (below 1.2e-38) count as 0: Adam's averages of weights that get
        no gradient fall there, where a processor is a hundred times slower.
        """
        generators = [torch.default_generator]
        if self.device.type == "cuda":
            generators.append(torch.cuda.default_generators[self.device.index or 0])
        before = [*map(torch.Generator.get_state, generators)]
        # Moved to the update's numbers, since a new generator would take longer than a small update's draws.
        numbers: Any = self._rng.bit_generator
        numbers.state = _first_numbers(self.seed, self.ranks.rank)
        numbers.advance(self.weights_seq_no * _STREAM_LENGTH)
        seed = numbers.random_raw()
        for generator in generators:
            generator.manual_seed(seed)
        flushes = sys.float_info.min / 2 == 0.0
        torch.set_flush_denormal(True)
        try:
            with self.ranks.torch_threads():
                yield
        finally:
            torch.set_flush_denormal(flushes)
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


@functools.cache
def _first_numbers(seed: int, rank: int) -> Mapping[str, Any]:
    """Return the state of a generator before the random numbers of a learner's first update."""
    return np.random.PCG64(derive_seed(seed, "learner", rank)).state


class TorchLearner(Learner):
    """Base class of learners that define a loss. `Learner` is that of mix-ins, which may follow in a list of bases.

    Example::

        class LogsGradients(Learner): ...
        class MyLearner(TorchLearner, LogsGradients): ...
    """
