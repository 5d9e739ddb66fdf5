"""LearnerHooks: the default hooks of an update, which subclasses override, and the scalars that they measure."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.learner.whole_batch_estimator import FORWARD_OUTPUTS
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.names import ALL_MODULES
from rlzmq.learners.distributed import Vote
from rlzmq.learners.learner_ranks import LearnerRanks
from rlzmq.learners.optimizers import RegisteredOptimizer, clip_gradients, global_norm
from rlzmq.modules.apis import SelfSupervisedLossAPI
from rlzmq.modules.default_models.dense_gradients import backward

__all__ = ["NUM_ENV_STEPS_LIFETIME", "LearnerHooks", "Scalar", "UpdateStats"]

NUM_ENV_STEPS_LIFETIME = "num_env_steps_sampled_lifetime"

_DIFFERENTIATED = ("forward_train", "compute_losses", "compute_loss_for_module", "compute_gradients")
_AFTER_STEPS = ("apply_gradients", "after_gradient_based_update")


Scalar = Tensor | float | Callable[[], Tensor]


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
        self._newest.append(
            (module_id, {n: v.detach() if isinstance(v, Tensor) else v for n, v in values.items()})
        )

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
                name: _mean(values[-num_last:])
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


def _is_ours(item: Any) -> bool:
    return bool(item.__module__.startswith("rlzmq."))


@functools.cache
def _define_hooks(learner_class: Any, hooks: tuple[str, ...]) -> bool:
    return all(_is_ours(getattr(learner_class, name)) for name in hooks)


@torch.no_grad()
def _mean(values: list[Any]) -> float:
    values = [value() if callable(value) else value for value in values]
    first = values[0]
    if isinstance(first, Tensor):
        if len(values) == 1 and not first.dim():
            return first.item()
        return float(torch.stack(values).double().mean())
    return float(sum(values) / len(values))


class LearnerHooks(LearnerRanks):
    """The part of a Learner that computes losses and gradients and takes steps; see `Learner`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._stats = UpdateStats()
        self.trained_module_ids: list[str] = []
        self.num_minibatches_per_epoch = 1
        self.is_last_epoch: bool = True
        self._loss_weights: dict[str, float] = {}
        self._minibatch_rows: dict[str, int] = {}
        self._is_finite: dict[str, bool] = {}
        self._finite_losses: list[bool] = []
        self._num_skipped: dict[str, int] = {}
        self._vote: Vote | None = None
        # A subclass that changes gradients may introduce NaN after the norm was computed.
        self._recheck_gradients = (
            type(self).postprocess_gradients_for_module is not LearnerHooks.postprocess_gradients_for_module
            or type(self).postprocess_gradients is not LearnerHooks.postprocess_gradients
        )

    @property
    def _forward_is_local(self) -> bool:
        """Whether the training forward pass is just the modules' own."""
        return self._compiler is None and (self.group is None or self.data_parallel().is_forward_local)

    def _can_record_networks(self) -> bool:
        """Return whether hooks and modules are this package's: others may use torch's graph in any way."""
        classes = [type(self.module), *(type(module.unwrapped()) for module in self.module.values())]
        return self._forward_is_local and self._are_ours(_DIFFERENTIATED) and all(map(_is_ours, classes))

    def _must_undo_steps(self, num_steps: int) -> bool:
        """Return whether an update of so many optimizer steps may fail after the first one, and must then be undone."""
        return not (
            num_steps == 1
            and self.group is None
            and len(self.trained_module_ids) == 1
            and not self._optimizers.of_module(ALL_MODULES)
            and self._are_ours(_AFTER_STEPS)
        )

    def _are_ours(self, hooks: tuple[str, ...]) -> bool:
        """Return whether hooks are this package's."""
        return _define_hooks(cast(Any, type(self)), hooks) and self.__dict__.keys().isdisjoint(hooks)

    def leave_distributed(self) -> None:
        """Leave the group, if there is one. Allowed right after a failure of the group."""
        self._vote = None
        super().leave_distributed()

    def before_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        """Run before everything else in an update.

        Args:
            timesteps: The lifetime counters given to `update`.
        """

    def forward_train(self, batch: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the outputs of the modules' training forward pass on a minibatch, by module id."""
        kept = {
            module_id: columns.pop(FORWARD_OUTPUTS)
            for module_id, columns in batch.items()
            if FORWARD_OUTPUTS in columns
        }
        if kept and len(kept) == len(batch):
            return kept
        if self.group is not None:
            return self.data_parallel().forward_train(batch)
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
            losses[module_id] = self._checked_loss(loss, module_id)
        return losses

    def _checked_loss(self, loss: Any, module_id: str) -> Tensor:
        """Return the loss as a 0-d tensor.

        Raises:
            ConfigurationError: The loss is not a single tensor.
        """
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss.reshape(()) if loss.dim() else loss
        module = self.module[module_id].unwrapped()
        own = isinstance(module, SelfSupervisedLossAPI)
        method = f"{type(module if own else self).__name__}." + (
            "compute_self_supervised_loss" if own else "compute_loss_for_module"
        )
        if loss is None:
            what = "None. Does it end with `return loss`?"
        elif isinstance(loss, Tensor):
            what = f"a tensor of shape {tuple(loss.shape)}. Take its mean: loss.mean()."
        else:
            what = (
                f"a {type(loss).__name__}. Keep it a tensor, without float(), .item() or .numpy(): gradients flow "
                "through it."
            )
        raise ConfigurationError(
            f"{method}() of module {module_id!r}: expected one number as a tensor, got {what}"
        )

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
        entries = self._optimizers.of_modules(self.trained_module_ids)
        for entry in self._optimizers:
            for parameter in entry.parameters:
                parameter.grad = None
        self._finite_losses = self._are_finite(loss_per_module)
        if self.group is not None:
            self._vote = self._start_vote()
            self.data_parallel().backward(self._weighted_sum(loss_per_module))
        elif loss_per_module:
            first, *others = loss_per_module.values()
            total: Any = sum(others, first)
            if not total.requires_grad:
                raise ConfigurationError(
                    f"The loss of {', '.join(map(repr, loss_per_module))} depends on no trainable parameter: was it "
                    "computed under torch.no_grad(), from detached tensors, or from the batch alone?"
                )
            backward(total)
        for module_id, loss in loss_per_module.items():
            self._stats.log(module_id, {"total_loss": loss})
        return {p: p.grad for entry in entries for p in entry.parameters if p.grad is not None}

    def _weighted_sum(self, losses: Mapping[str, Tensor]) -> Tensor:
        """Return the sum of this rank's losses, weighted by its rows. It always requires a gradient."""
        weighted = [
            loss if (weight := self._loss_weights[module_id]) == 1.0 else loss * weight
            for module_id, loss in losses.items()
        ]
        total = torch.zeros((), device=self.device)
        if weighted:
            total = sum(weighted[1:], weighted[0])
        return total if total.requires_grad else total.detach().requires_grad_()

    def postprocess_gradients(self, gradients_dict: dict[Tensor, Tensor]) -> dict[Tensor, Tensor]:
        """Change the gradients before they are applied; by default, separately for each module.

        Args:
            gradients_dict: Parameter → gradient.

        Returns:
            Parameter → gradient.
        """
        result: dict[Tensor, Tensor] = {}
        self._is_finite = {}
        entries_by_module = {
            module_id: entries
            for module_id in (*self.trained_module_ids, ALL_MODULES)
            if (entries := self._optimizers.of_module(module_id))
        }
        for module_id, entries in entries_by_module.items():
            if (
                len(entries_by_module) == 1
            ):  # looking up each parameter takes longer than summing its gradient
                mine = gradients_dict
            else:
                mine = {
                    p: gradient
                    for entry in entries
                    for p in entry.parameters
                    if (gradient := gradients_dict.get(p)) is not None
                }
            if mine:
                config = self._module_configs.get(module_id, self.config)
                result.update(
                    self.postprocess_gradients_for_module(
                        module_id=module_id, config=config, module_gradients_dict=mine
                    )
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
        entries = self._optimizers.of_module(module_id)
        for entry in entries:
            if len(entries) == 1:  # all are its gradients
                mine = [g for g in module_gradients_dict.values() if g is not None]
            else:
                mine = [g for p in entry.parameters if (g := module_gradients_dict.get(p)) is not None]
            norm = float(global_norm(mine))
            if getattr(config, "log_gradients", True) and self._is_due(entry):
                self._stats.log(module_id, {f"gradients_{entry.name}_global_norm": norm})
            is_finite = math.isfinite(norm)
            self._is_finite[module_id] = is_finite and self._is_finite.get(module_id, True)
            if is_finite:
                clip_gradients(mine, grad_clip=config.grad_clip, grad_clip_by=config.grad_clip_by, norm=norm)
        return module_gradients_dict

    def apply_gradients(self, gradients_dict: dict[Tensor, Tensor]) -> None:
        """Step the optimizers of each trained module if its gradients are finite on all ranks.

        A module with a NaN or infinite gradient takes no step on this minibatch, since one such step would corrupt
        Adam's state. The step is counted (``num_nonfinite_gradients_skipped``), with one warning per update.

        Args:
            gradients_dict: Parameter → gradient.

        Raises:
            PeerLostError: Another rank died or hangs before the vote.
            DesynchronizedError: The ranks are not at the same step.
        """
        for parameter, gradient in gradients_dict.items():
            if parameter.grad is not gradient:
                parameter.grad = gradient
        module_ids = [*self.trained_module_ids, ALL_MODULES]
        agreed = self._verdicts()
        if self.group is not None:
            # The ranks' gradients are equal at this point, so every rank reaches the same verdict.
            vote, self._vote = self._vote or self._start_vote(), None
            agreed = vote.result()
        self._finite_losses = []
        for module_id, is_agreed in zip(module_ids, agreed, strict=True):
            if not (is_agreed and self._gradients_are_finite(module_id, gradients_dict)):
                self._num_skipped[module_id] = self._num_skipped.get(module_id, 0) + 1
                continue
            for entry in self._optimizers.of_module(module_id):
                if self._is_due(entry):
                    entry.optimizer.step()

    def steps_optimizer(self, module_id: str, optimizer_name: str) -> bool:
        """Return whether the current minibatch's step includes an optimizer, see ``every`` of `register_optimizer`."""
        return self._is_due(self._optimizers.entry(module_id, optimizer_name))

    def _is_due(self, entry: RegisteredOptimizer) -> bool:
        return entry.every == 1 or self.num_gradient_updates_lifetime % entry.every == 0

    def _are_finite(self, losses: Mapping[str, Tensor]) -> list[bool]:
        return [m not in losses or math.isfinite(losses[m].detach()) for m in self.trained_module_ids]

    def _verdicts(self) -> list[bool]:
        """Return this rank's verdicts on its losses, even if a subclass has not used `compute_gradients`."""
        return [*(self._finite_losses or [True] * len(self.trained_module_ids)), True]

    def _start_vote(self) -> Vote:
        assert self.group is not None
        return self.group.start_vote(
            self._verdicts(),
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

    def ends_update(self) -> bool:
        """Return whether the update ends with the epoch that has just been trained, on all ranks alike."""
        return False

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        """Run once at the end of each update. By default, update the learning rates from their schedules.

        Args:
            timesteps: The lifetime counters given to `update`.
        """
        num_env_steps = self._clock(timesteps)
        for module_id in (*self.module.keys(), ALL_MODULES):
            self._optimizers.update_learning_rates(module_id, num_env_steps)

    def log_stats(self, module_id: str, values: Mapping[str, Scalar]) -> None:
        """Log scalars of one minibatch; results are means over the last epoch.

        Tensors are not read until then, and functions that return one are not called.
        """
        self._stats.log(module_id, values)

    def mean_stats(self, name: str) -> dict[str, float]:
        """Return module id → mean of one logged scalar over the last epoch, if it was logged in this update."""
        logged = self._stats.newest(name, self.num_minibatches_per_epoch)
        return {module_id: _mean(values) for module_id, values in logged.items()}

    def mean_stats_over_ranks(self, name: str) -> dict[str, float]:
        """Return module id → mean of one logged scalar over the last epoch and all ranks. A collective.

        Only modules that this update trained are included.
        """
        mine = self.mean_stats(name)
        module_ids = self.trained_module_ids
        return self.mean_over_ranks(
            {module_id: mine.get(module_id, 0.0) for module_id in module_ids},
            {module_id: float(module_id in mine) for module_id in module_ids},
        )

    def _clock(self, timesteps: Mapping[str, Any] | None) -> int:
        return int((timesteps or {}).get(NUM_ENV_STEPS_LIFETIME, self.num_env_steps_of_all_ranks_lifetime))
