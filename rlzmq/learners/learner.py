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

Works alone in a notebook on a list of episodes. As one of several ranks (`setup_distributed`) it averages
gradients with its peers; an update then happens on all ranks or on none.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlzmq.core.metrics import MetricsLogger
from rlzmq.core.seeding import derive_seed
from rlzmq.learners.distributed import Vote
from rlzmq.learners.gradients import clip_gradients, global_norm
from rlzmq.learners.learner_ranks import LearnerRanks
from rlzmq.learners.minibatches import MinibatchIterator
from rlzmq.learners.optimizers import ALL_MODULES
from rlzmq.learners.train_batch import TrainBatch, TrainBatchBuilder
from rlzmq.learners.update_stats import UpdateStats
from rlzmq.modules.apis import SelfSupervisedLossAPI

__all__ = ["Learner", "TorchLearner"]

_logger = logging.getLogger(__name__)

_NUM_ENV_STEPS_LIFETIME = "num_env_steps_sampled_lifetime"


class Learner(LearnerRanks):
    """Holds the modules and their optimizers, and updates them.

    Subclasses give `compute_loss_for_module`, and override other hooks where they need to.

    Example:
        >>> learner = PPOLearner(config=config, module_spec=config.get_multi_rl_module_spec(env=env))
        >>> learner.build()
        >>> learner.update(episodes=env_runner.sample(num_episodes=3))["default_policy"]["policy_loss"]

    Args:
        config: The AlgorithmConfig.
        module_spec: RLModuleSpec or MultiRLModuleSpec of what is trained.
        module: A ready module instead of a spec.
        rank: Index of this learner among its peers.
        num_ranks: How many learners there are.

    Attributes:
        config: As given.
        module: The MultiRLModule (None before `build`).
        metrics: MetricsLogger for a subclass's own values: what is logged under ``(module_id, name)`` ends up
            in the results of `update`.
        weights_seq_no: Version of the weights: rises by one per update.
        num_gradient_updates_lifetime: Minibatches trained so far.
        num_env_steps_trained_lifetime: Env steps trained so far, each counted once however many epochs it was
            in.
        device: Where the modules live.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.metrics = MetricsLogger()
        self.num_minibatches_per_epoch = 1
        self._stats = UpdateStats()
        self._active: list[str] = []
        self._loss_weights: dict[str, float] = {}
        self._minibatch_rows: dict[str, int] = {}
        self._is_finite: dict[str, bool] = {}
        self._num_skipped: dict[str, int] = {}
        self._vote: Vote | None = None
        # A subclass that changes gradients may bring in what the norm taken before it did not see.
        self._recheck_gradients = (
            type(self).postprocess_gradients_for_module is not Learner.postprocess_gradients_for_module
            or type(self).postprocess_gradients is not Learner.postprocess_gradients
        )

    def build(self) -> None:
        """Make the module, the learner connector and the optimizers. Calling it again changes nothing.

        The initial weights follow from ``config.seed`` and are the same on every rank; torch's global random
        state is left alone.

        Raises:
            ConfigurationError: A module cannot be built.
            TypeError: A module lacks what this learner needs.
        """
        if self.module is None:
            super().build()
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
    ) -> dict[str, dict[str, Any]]:
        """Train on one source of data.

        Args:
            batch: A ready train batch: module id → column → array or tensor ``[rows, ...]`` (or just column →
                … for the default module), or what `prepare` made.
            batches: Several of these, to be trained as one.
            episodes: SingleAgentEpisodes, MultiAgentEpisodes, an EpisodeBatch or a list of EpisodeBatches;
                they go through the learner connector.
            data_iterators: Iterators of ready train batches, each used as one minibatch; at most
                `num_total_minibatches` of them.
            timesteps: Lifetime counters that schedules follow, at least ``{"num_env_steps_sampled_lifetime":
                n}``. Left out: the env steps trained so far.
            num_epochs: How often each row is used; None: as configured.
            minibatch_size: Timesteps per minibatch; None: as configured (there None means the whole batch).
            shuffle_batch_per_epoch: Draw a fresh order of rows for every epoch, the first one included. None:
                as configured; PPO's default is True, which decorrelates the rows of a minibatch from the
                start.
            num_total_minibatches: Take exactly so many minibatches, e.g. what all ranks agreed on.

        Returns:
            ``{module_id: {metric: number}, "__all_modules__": {…}}``; means over the last epoch's
            minibatches.

        Raises:
            ValueError: Not exactly one source was given.
            PeerLostError: Another rank died or hangs. The weights are those before the update.
            DesynchronizedError: The ranks are not at the same step. Likewise.
        """
        self._check_built()
        sources = {"batch": batch, "batches": batches, "episodes": episodes, "data_iterators": data_iterators}
        given = [name for name, source in sources.items() if source is not None]
        if len(given) != 1:
            raise ValueError(
                f"Learner.update: expected exactly one of {', '.join(sources)}, "
                f"got {', '.join(given) or 'none'}."
            )
        counters = dict(timesteps or {_NUM_ENV_STEPS_LIFETIME: self.num_env_steps_trained_lifetime})
        options = {
            "num_epochs": num_epochs or self._setting("num_epochs", 1),
            "minibatch_size": minibatch_size or self._setting("minibatch_size", None),
            "shuffle": self._setting("shuffle_batch_per_epoch", False)
            if shuffle_batch_per_epoch is None
            else shuffle_batch_per_epoch,
            "num_minibatches": num_total_minibatches or None,
        }
        self._stats.clear()
        self._num_skipped = {}
        with self._torch_threads(), self.all_or_nothing():
            self.before_gradient_based_update(timesteps=counters)
            start = time.perf_counter()
            if data_iterators is None:
                train_batch = self._builder.build(batch=batch, batches=batches, episodes=episodes)
                connector_s = time.perf_counter() - start
                self._drop_untrained(train_batch)
                num_minibatches = self._train(train_batch, options)
            else:
                connector_s = 0.0
                train_batch, num_minibatches = self._train_on_iterators(data_iterators, num_total_minibatches)
            self.weights_seq_no += 1
            self._count(train_batch, num_minibatches)
            self.after_gradient_based_update(timesteps=counters)
            self.commit_update(num_skipped=sum(self._num_skipped.values()))
            return self._results(train_batch, num_minibatches, connector_s)

    def prepare(self, episodes: Any) -> TrainBatch:
        """Run the learner connector ahead of `update`, e.g. on another thread while an update runs.

        Only for pipelines that do not compute with the weights (PPO's does, for its advantages).

        Args:
            episodes: As of `update`.

        Returns:
            What ``update(batch=…)`` takes.
        """
        self._check_built()
        return self._builder.build(episodes=episodes)

    def _drop_untrained(self, train_batch: TrainBatch) -> None:
        for module_id in list(train_batch.columns):
            known = module_id in self.module and self._has_parameters(module_id)
            if not known or not self.should_module_be_updated(module_id, train_batch.columns):
                train_batch.drop(module_id)

    def _train(self, train_batch: TrainBatch, options: Mapping[str, Any]) -> int:
        minibatches = MinibatchIterator(
            train_batch.columns,
            **{**options, "num_minibatches": None},
            seed=derive_seed(self._seed, "minibatch", self.rank, self.weights_seq_no),
            timesteps=train_batch.num_module_steps,
            device=self.device,
        )
        rows = {module_id: train_batch.num_module_steps.get(module_id, 0) for module_id in self.module}
        agreed = self.agree_on_update(rows, options["num_minibatches"] or len(minibatches))
        self._active, self._loss_weights = agreed.module_ids, agreed.loss_weights
        self.num_minibatches_per_epoch = max(1, -(-agreed.num_minibatches // options["num_epochs"]))
        self._minibatch_rows = {m: rows.minibatch_rows for m, rows in minibatches.modules.items()}
        minibatches.num_minibatches = agreed.num_minibatches
        for minibatch in minibatches:
            self._train_minibatch(minibatch)
        return agreed.num_minibatches

    def _train_on_iterators(
        self, iterators: Iterable[Iterator[Any]], limit: int | None
    ) -> tuple[TrainBatch, int]:
        if self.group is not None and limit is None:
            raise ValueError("Learner.update(data_iterators=…) of several ranks: give num_total_minibatches.")
        total = TrainBatch()
        num_minibatches = 0
        for iterator in iterators:
            for item in iterator:
                one = self._builder.build(batch=item)
                self._drop_untrained(one)
                total.add_counts(one)
                agreed = self.agree_on_update(
                    {mid: one.num_module_steps.get(mid, 0) for mid in self.module},
                    1,
                )
                self._active, self._loss_weights = agreed.module_ids, agreed.loss_weights
                self.num_minibatches_per_epoch = num_minibatches + 1
                self._train_minibatch(one.on(self.device))
                num_minibatches += 1
                if num_minibatches == limit:
                    return total, num_minibatches
        return total, num_minibatches

    def _train_minibatch(self, minibatch: dict[str, dict[str, Any]]) -> None:
        outputs = self.forward_train(minibatch)
        losses = self.compute_losses(fwd_out=outputs, batch=minibatch)
        gradients = self.compute_gradients(losses)
        gradients = self.postprocess_gradients(gradients)
        self.apply_gradients(gradients)
        self.num_gradient_updates_lifetime += 1

    # -- hooks -------------------------------------------------------------------------------------

    def before_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        """Called first in each update.

        Args:
            timesteps: The lifetime counters given to `update`.
        """

    def forward_train(self, batch: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The modules' training forward pass on a minibatch: module id → outputs."""
        if self.group is not None:
            return self.data_parallel().forward_train(batch)
        outputs: dict[str, dict[str, Any]] = self.module.forward_train(batch)
        return outputs

    def compute_losses(
        self, *, fwd_out: dict[str, dict[str, Any]], batch: dict[str, dict[str, Any]]
    ) -> dict[str, Tensor]:
        """Each module's loss on its minibatch.

        Args:
            fwd_out: Module id → outputs of `forward_train`.
            batch: Module id → minibatch.

        Returns:
            Module id → 0-d tensor.
        """
        losses: dict[str, Tensor] = {}
        for module_id, outputs in fwd_out.items():
            module = self.module[module_id].unwrapped()
            config = self._module_configs[module_id]
            module_batch = batch[module_id]
            if isinstance(module, SelfSupervisedLossAPI):
                loss = module.compute_self_supervised_loss(
                    learner=self, module_id=module_id, config=config, batch=module_batch, fwd_out=outputs
                )
                if isinstance(loss, Mapping):
                    self.log_stats(module_id, loss)
                    loss = loss["total_loss"]
            else:
                loss = self.compute_loss_for_module(
                    module_id=module_id, config=config, batch=module_batch, fwd_out=outputs
                )
            losses[module_id] = loss
        return losses

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """One module's loss. Subclasses override this.

        Args:
            module_id: The module.
            config: The config with the module's own overrides.
            batch: Its minibatch: column → tensor ``[rows, ...]`` (``[B, T, ...]`` with ``loss_mask`` if
                stateful).
            fwd_out: What its `forward_train` returned.

        Returns:
            0-d tensor.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no loss for module {module_id!r}: override compute_loss_for_module."
        )

    def compute_gradients(self, loss_per_module: dict[str, Tensor]) -> dict[Tensor, Tensor]:
        """One backward pass of the sum of all losses; of several ranks, the mean of their gradients.

        Args:
            loss_per_module: Module id → 0-d tensor.

        Returns:
            Parameter → gradient, for the parameters of all modules that are trained in this update.
        """
        entries = self._optimizers.of_modules(self._active)
        for entry in self._optimizers:
            for parameter in entry.parameters:
                parameter.grad = None
        if self.group is not None:
            self._vote = self._start_vote(loss_per_module)
            losses = [loss * self._loss_weights[module_id] for module_id, loss in loss_per_module.items()]
            self.data_parallel().backward(
                sum(losses, torch.zeros((), device=self.device, requires_grad=True))
            )
        elif loss_per_module:
            total: Any = sum(loss_per_module.values())
            total.backward()
        for module_id, loss in loss_per_module.items():
            self._stats.log(module_id, {"total_loss": loss})
        return {p: p.grad for entry in entries for p in entry.parameters if p.grad is not None}

    def postprocess_gradients(self, gradients_dict: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Change the gradients before they are applied; by default each module's for itself.

        Args:
            gradients_dict: Parameter → gradient.

        Returns:
            Likewise.
        """
        result: dict[Tensor, Tensor] = {}
        self._is_finite = {}
        for module_id in (*self._active, ALL_MODULES):
            mine: dict[Tensor, Tensor] = {}
            for entry in self._optimizers.of_module(module_id):
                mine.update((p, gradients_dict[p]) for p in entry.parameters if p in gradients_dict)
            if mine:
                config = self._module_configs.get(module_id, self.config)
                result.update(
                    self.postprocess_gradients_for_module(
                        module_id=module_id, config=config, module_gradients_dict=mine
                    )
                )
        return result

    def postprocess_gradients_for_module(
        self, *, module_id: str, config: Any, module_gradients_dict: dict[Tensor, Tensor]
    ) -> dict[Tensor, Tensor]:
        """Clip one module's gradients, each optimizer's for itself, as ``config.grad_clip(_by)`` says.

        Logs each optimizer's global norm, taken before clipping.

        Args:
            module_id: The module.
            config: The config with the module's own overrides.
            module_gradients_dict: Parameter → gradient.

        Returns:
            Likewise.
        """
        for entry in self._optimizers.of_module(module_id):
            mine = [module_gradients_dict[p] for p in entry.parameters if p in module_gradients_dict]
            norm = float(global_norm(mine))
            self._stats.log(module_id, {f"gradients_{entry.name}_global_norm": norm})
            is_finite = math.isfinite(norm)
            self._is_finite[module_id] = is_finite and self._is_finite.get(module_id, True)
            if is_finite:
                clip_gradients(mine, grad_clip=config.grad_clip, grad_clip_by=config.grad_clip_by, norm=norm)
        return module_gradients_dict

    def apply_gradients(self, gradients_dict: dict[Tensor, Tensor]) -> None:
        """Step the optimizers of each trained module whose gradients are finite on all ranks.

        A module with a NaN or infinite gradient takes no step on this minibatch: one such step would stay in
        Adam's state for ever. It is counted (``num_nonfinite_gradients_skipped``) and warned of once per
        update.

        Args:
            gradients_dict: Parameter → gradient.

        Raises:
            PeerLostError: Another rank died or hangs before the vote.
            DesynchronizedError: The ranks are not at the same step.
        """
        for parameter, gradient in gradients_dict.items():
            if parameter.grad is not gradient:
                parameter.grad = gradient
        module_ids = [*self._active, ALL_MODULES]
        agreed = [True] * len(module_ids)
        if self.group is not None:
            # The ranks' gradients are the same by now, so each finds for itself what the others find.
            vote, self._vote = self._vote or self._start_vote({}), None
            agreed = vote.result()
        for module_id, is_agreed in zip(module_ids, agreed, strict=True):
            if not (is_agreed and self._gradients_are_finite(module_id, gradients_dict)):
                self._num_skipped[module_id] = self._num_skipped.get(module_id, 0) + 1
                continue
            for entry in self._optimizers.of_module(module_id):
                entry.optimizer.step()

    def _start_vote(self, losses: Mapping[str, Tensor]) -> Vote:
        assert self.group is not None
        finite = [m not in losses or math.isfinite(losses[m].detach()) for m in self._active]
        return self.group.start_vote(
            [*finite, True],
            step_id=self.num_gradient_updates_lifetime,
            num_skipped=sum(self._num_skipped.values()),
        )

    def _gradients_are_finite(self, module_id: str, gradients: Mapping[Tensor, Tensor]) -> bool:
        if not self._recheck_gradients:
            return self._is_finite.get(module_id, True)
        mine = [
            gradients[p]
            for entry in self._optimizers.of_module(module_id)
            for p in entry.parameters
            if p in gradients
        ]
        return math.isfinite(float(global_norm(mine)))

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        """Called once at the end of each update. Default: move the learning rates along their schedules.

        Args:
            timesteps: The lifetime counters given to `update`.
        """
        for module_id in (*self.module.keys(), ALL_MODULES):
            self._optimizers.update_learning_rates(module_id, self._clock(timesteps))

    def log_stats(self, module_id: str, values: Mapping[str, Tensor | float]) -> None:
        """Log scalars of one minibatch (tensors stay unread); results are means over the last epoch."""
        self._stats.log(module_id, values)

    def mean_stats(self, name: str) -> dict[str, float]:
        """Module id → mean of one logged scalar over the last epoch, where it was logged in this update."""
        return self._stats.means_of(name, self.num_minibatches_per_epoch)

    # -- counters and results ----------------------------------------------------------------------

    def _count(self, train_batch: TrainBatch, num_minibatches: int) -> None:
        self.num_env_steps_trained_lifetime += train_batch.num_env_steps
        for module_id, num_steps in train_batch.num_module_steps.items():
            before = self.num_module_steps_trained_lifetime.get(module_id, 0)
            self.num_module_steps_trained_lifetime[module_id] = before + num_steps
        if self._num_skipped:
            _logger.warning(
                "rank %d, weights version %d: NaN or infinite gradients, no step taken on %s of %d "
                "minibatches. Look for NaN in observations or rewards, a high lr, or no grad_clip.",
                self.rank,
                self.weights_seq_no,
                ", ".join(
                    f"{count} (module {module_id!r})" for module_id, count in self._num_skipped.items()
                ),
                num_minibatches,
            )

    def _results(
        self, train_batch: TrainBatch, num_minibatches: int, connector_s: float
    ) -> dict[str, dict[str, Any]]:
        results: dict[str, dict[str, Any]] = dict(self._stats.means(self.num_minibatches_per_epoch))
        for module_id, num_steps in train_batch.num_module_steps.items():
            module_results = results.setdefault(module_id, {})
            module_results |= {
                "num_module_steps_trained": num_steps,
                "num_module_steps_trained_lifetime": self.num_module_steps_trained_lifetime[module_id],
                "num_trainable_parameters": self._num_parameters(module_id, trainable=True),
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
        for module_id, values in self.metrics.reduce().items():
            results.setdefault(module_id, {}).update(
                values if isinstance(values, dict) else {"value": values}
            )
        results.setdefault(ALL_MODULES, {}).update(
            num_env_steps_trained=train_batch.num_env_steps,
            num_env_steps_trained_lifetime=self.num_env_steps_trained_lifetime,
            num_module_steps_trained=sum(train_batch.num_module_steps.values()),
            num_module_steps_trained_lifetime=sum(self.num_module_steps_trained_lifetime.values()),
            num_trainable_parameters=sum(self._num_parameters(m, trainable=True) for m in self.module),
            num_non_trainable_parameters=sum(self._num_parameters(m, trainable=False) for m in self.module),
            num_gradient_updates=num_minibatches,
            num_gradient_updates_lifetime=self.num_gradient_updates_lifetime,
            num_nonfinite_gradients_skipped=sum(self._num_skipped.values()),
            weights_seq_no=self.weights_seq_no,
            learner_connector={"connector_pipeline_timer": connector_s},
            learner_connector_sum_episodes_length_in=train_batch.num_env_steps,
            learner_connector_sum_episodes_length_out=train_batch.num_env_steps,
        )
        return results

    def _num_parameters(self, module_id: str, *, trainable: bool) -> int:
        if not isinstance(self.module[module_id].unwrapped(), nn.Module):
            return 0
        return sum(
            p.numel() for p in self.get_parameters(self.module[module_id]) if p.requires_grad == trainable
        )

    def _clock(self, timesteps: Mapping[str, Any] | None) -> int:
        return int((timesteps or {}).get(_NUM_ENV_STEPS_LIFETIME, self.num_env_steps_trained_lifetime))


TorchLearner = Learner
