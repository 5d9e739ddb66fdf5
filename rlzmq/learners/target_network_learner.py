"""TargetNetworkUpdates, TargetNetworkLearner: bases of learners with target networks (APPO; off-policy ones; IQL)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Literal, Protocol, cast

import gymnasium as gym
import torch
from torch import Tensor

from rlzmq.connectors.defaults import add_next_observations
from rlzmq.core.names import NUM_ENV_STEPS_SAMPLED_LIFETIME
from rlzmq.episodes.columns import Columns
from rlzmq.learners.learner import TorchLearner
from rlzmq.learners.optimizers import make_adam
from rlzmq.modules.rl_module import TargetNetworkAPI
from rlzmq.modules.weights import StructureCache, parameters_of

__all__ = [
    "ErrorLoss",
    "TargetNetworkLearner",
    "TargetNetworkUpdates",
    "discounts",
    "error_loss",
    "target_outputs",
]


ErrorLoss = Literal["mse", "huber"]
"""How a critic's error counts: squared, or half its square up to 1 and linearly beyond (Huber, δ = 1)."""


class _TargetNetworkSettings(Protocol):
    """The config settings that TargetNetworkLearner reads."""

    tau: float
    target_network_update_freq: int


_Tensors = tuple[list[Tensor], list[Tensor], list[tuple[Tensor, Tensor]]]


def _tensors_of(networks: list[Any]) -> _Tensors:
    """Return the parameters of trained networks, those of their target networks, and pairs of buffers."""
    sources: list[Tensor] = []
    copies: list[Tensor] = []
    buffers: list[tuple[Tensor, Tensor]] = []
    for main, target in zip(networks[::2], networks[1::2], strict=True):
        sources += parameters_of(main)
        copies += parameters_of(target)
        buffers += zip(main.buffers(), target.buffers(), strict=True)
    return sources, copies, buffers


class TargetNetworkUpdates(TorchLearner):
    """Base class of learners with target networks. It updates and counts them; subclasses decide when.

    Attributes:
        num_target_updates: Number of updates of the target networks.
        last_target_update_ts: Lifetime env steps at the last update.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_target_updates: int = 0
        self.last_target_update_ts: int = 0
        self._trained_since: set[str] = set()
        # By module. Listing them takes longer than an update of small networks.
        self._tensors: defaultdict[str, StructureCache[_Tensors]] = defaultdict(
            lambda: StructureCache(_tensors_of)
        )

    def _on_modules_changed(self) -> None:
        super()._on_modules_changed()
        self._tensors.clear()

    def update_targets_if_due(self, num_env_steps: int, period: int) -> None:
        """Update the target networks if `period` env steps have passed since the last update.

        They are those of the modules that were trained since then.

        Args:
            num_env_steps: Current lifetime env steps.
            period: Env steps, >= 0.
        """
        self._trained_since.update(self.trained_module_ids)
        if num_env_steps - self.last_target_update_ts < period:
            return
        due, self._trained_since = self._trained_since, set()
        for module_id in due:
            module = self.module.get(module_id)
            if isinstance(module, TargetNetworkAPI):
                networks = chain.from_iterable(module.get_target_network_pairs())
                sources, copies, buffers = self._tensors[module_id].of(networks)
                with torch.set_grad_enabled(False):
                    if sources:
                        tau = cast(_TargetNetworkSettings, self.config).tau
                        torch._foreach_lerp_(copies, sources, tau)  # θ̄ ← τ θ + (1 - τ) θ̄
                    for source, copy in buffers:
                        copy.copy_(source)
        self.num_target_updates += 1
        self.last_target_update_ts = num_env_steps

    def log_target_updates(self) -> None:
        """Log the counters for every trained module."""
        counters = {
            "num_target_updates": self.num_target_updates,
            "last_target_update_ts": self.last_target_update_ts,
        }
        for module_id in self.trained_module_ids:
            self.log_stats(module_id, counters)

    def get_extra_state(self) -> dict[str, Any]:
        return {
            **super().get_extra_state(),
            "num_target_updates": self.num_target_updates,
            "last_target_update_ts": self.last_target_update_ts,
            "trained_since": sorted(self._trained_since),
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        super().set_extra_state(state)
        self.num_target_updates = int(state["num_target_updates"])
        self.last_target_update_ts = int(state["last_target_update_ts"])
        self._trained_since = set(state.get("trained_since", ()))


class TargetNetworkLearner(TargetNetworkUpdates):
    """Base class of learners that bootstrap from target networks. Updates are due after a minibatch's step.

    Train batches contain next observations, column ``new_obs``.
    """

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """Return `TargetNetworkAPI`."""
        return [TargetNetworkAPI]

    def make_learner_connector(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> Any:
        """Return the config's pipeline, extended by next observations."""
        pipeline = super().make_learner_connector(observation_space, action_space)
        if self.config.add_default_connectors_to_learner_pipeline:
            add_next_observations(pipeline)
        return pipeline

    def register_adam_optimizers(
        self,
        module_id: str,
        parts: Mapping[str, tuple[Sequence[Tensor] | None, Any]],
        every: Mapping[str, int] | None = None,
    ) -> None:
        """Register an Adam optimizer for each part of a module.

        Args:
            module_id: The module's id.
            parts: Name → (parameters, learning rate or schedule). One of them may have None as parameters: all
                trainable parameters that belong to no other part.
            every: Name → ``every`` of `register_optimizer`, for parts that step with some minibatches only.
        """
        named = {id(p) for parameters, _ in parts.values() for p in parameters or ()}
        module = self.module[module_id]
        for name, (given, lr) in parts.items():
            if given is None:
                given = [p for p in self.get_parameters(module) if p.requires_grad and id(p) not in named]
            self.register_optimizer(
                module_id=module_id,
                optimizer_name=name,
                optimizer=make_adam(given, self.config_for_module(module_id).adam_epsilon),
                params=given,
                lr_or_lr_schedule=lr,
                every=(every or {}).get(name, 1),
            )

    def apply_gradients(self, gradients_dict: dict[Tensor, Tensor]) -> None:
        """Step the optimizers, then update the target networks if due."""
        super().apply_gradients(gradients_dict)
        period = cast(_TargetNetworkSettings, self.config).target_network_update_freq
        if self.updates_targets():
            self.update_targets_if_due(self.num_env_steps_lifetime(), period)

    def num_env_steps_lifetime(self) -> int:
        """Return the lifetime env steps by which target networks are due."""
        return int(self.timesteps.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, 0))

    def updates_targets(self) -> bool:
        """Return whether target networks may follow this minibatch's step; called after it. Override to delay them."""
        return True

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
        self.log_target_updates()


def target_outputs(module: TargetNetworkAPI, batch: dict[str, Any]) -> Any:
    """Return ``module.forward_target(batch)``, computed without gradients."""
    with torch.set_grad_enabled(False):
        return module.forward_target(batch)


def discounts(batch: Mapping[str, Any], gamma: float) -> Tensor:
    """Return the factor of each row's bootstrapped value: γ^n_step, or 0 after a terminal step; float [B].

    Without a column ``n_step`` (batches that do not come from a replay buffer), n is 1.
    """
    terminateds = batch[Columns.TERMINATEDS]
    n_step = batch.get("n_step")
    if n_step is None:
        n_step = torch.ones_like(terminateds, dtype=torch.int64)
    return torch.pow(gamma, n_step).masked_fill(terminateds, 0.0)


def error_loss(values: Tensor, targets: Tensor, kind: ErrorLoss) -> Tensor:
    """Return the loss of each element; checks of torch's functions would take longer than they do."""
    function = torch._C._nn.huber_loss if kind == "huber" else torch._C._nn.mse_loss
    losses: Tensor = function(values, targets, 0)  # type: ignore[arg-type]
    return losses
