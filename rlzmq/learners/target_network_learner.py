"""TargetNetworkLearner: base of learners that bootstrap from target networks (DQN, SAC, CQL, IQL)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from rlzmq.connectors.defaults import add_next_observations
from rlzmq.episodes.columns import Columns
from rlzmq.learners.learner import TorchLearner
from rlzmq.learners.target_networks import update_target_networks
from rlzmq.modules.apis import TargetNetworkAPI

__all__ = ["TargetNetworkLearner", "discounts"]


class _TargetNetworkSettings(Protocol):
    """The config settings that TargetNetworkLearner reads."""

    tau: float
    target_network_update_freq: int


class TargetNetworkLearner(TorchLearner):
    """Base of learners with target networks, which follow after each minibatch's step if they are due.

    Train batches have next observations, column ``new_obs``.

    Attributes:
        num_target_updates: Number of updates of the target networks.
        last_target_update_ts: Lifetime env steps at the last one.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_target_updates = 0
        self.last_target_update_ts = 0
        self._num_env_steps = 0

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """`TargetNetworkAPI`."""
        return [TargetNetworkAPI]

    def make_learner_connector(self, observation_space: Any, action_space: Any) -> Any:
        """Return the config's pipeline, with next observations."""
        pipeline = super().make_learner_connector(observation_space, action_space)
        if pipeline is not None and self._setting("add_default_connectors_to_learner_pipeline", True):
            add_next_observations(pipeline)
        return pipeline

    def before_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        super().before_gradient_based_update(timesteps=timesteps)
        self._num_env_steps = self._clock(timesteps)

    def apply_gradients(self, gradients_dict: dict[Tensor, Tensor]) -> None:
        """Step the optimizers, then, if due, update the target networks."""
        super().apply_gradients(gradients_dict)
        settings = cast(_TargetNetworkSettings, self.config)
        if self._num_env_steps - self.last_target_update_ts >= settings.target_network_update_freq:
            for module_id in self.module:
                module = self.module[module_id].unwrapped()
                if isinstance(module, TargetNetworkAPI):
                    update_target_networks(module, settings.tau)
            self.num_target_updates += 1
            self.last_target_update_ts = self._num_env_steps

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
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
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        super().set_extra_state(state)
        self.num_target_updates = int(state["num_target_updates"])
        self.last_target_update_ts = int(state["last_target_update_ts"])


def discounts(batch: Mapping[str, Any], gamma: float) -> Tensor:
    """Return the factor of each row's bootstrapped value, γ^n_step, and 0 after a terminal step: float [B].

    Without a column ``n_step`` (batches that do not come from a replay buffer) n is 1.
    """
    terminateds = batch[Columns.TERMINATEDS]
    factors: Tensor = gamma ** batch.get("n_step", torch.ones_like(terminateds, dtype=torch.int64))
    return factors.masked_fill(terminateds, 0.0)
