"""DefaultTD3Module: a deterministic policy with critics, and target networks of all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import torch
from torch import Tensor, nn

from rlzmq.algorithms.sac.sac_module import DefaultSACModule, critic_values, require_box
from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.core.update_plan import Schedule
from rlzmq.episodes.columns import Columns
from rlzmq.modules.default_models.encoders import MLP
from rlzmq.modules.weights import frozen

__all__ = ["DefaultTD3Module"]


class DefaultTD3Module(DefaultSACModule):
    """Policy and critics for Box actions.

    `model_config`: fields of a DefaultModelConfig, and ``twin_q`` and ``exploration_noise`` (see `TD3Config`).
    """

    networks_with_target: ClassVar[Sequence[str]] = ("qfs", "pi_encoder", "pi")
    has_temperature: ClassVar[bool] = False
    own_settings: ClassVar[Mapping[str, Any]] = {"exploration_noise": 0.1}
    exploration_noise: float | list[tuple[float, float]]

    def setup(self) -> None:
        require_box(self, "TD3", "DQN for Discrete actions, PPO for others")
        assert isinstance(self.action_space, gym.spaces.Box)
        self._action_shape = self.action_space.shape
        super().setup()
        self._noise = Schedule(self.exploration_noise, "exploration_noise")

    def make_policy_head(self, config: DefaultModelConfig, where: str) -> nn.Module:
        """Return a network with an output for each action."""
        return MLP(
            self.pi_encoder.output_dim,
            config.head_fcnet_hiddens,
            config.head_fcnet_activation,
            config=config,
            prefix="head_fcnet",
            use_layernorm=config.head_fcnet_use_layernorm,
            output_dim=math.prod(self._action_shape),
        )

    def get_non_inference_attributes(self) -> list[str]:
        return ["qfs", "target_qfs", "target_pi_encoder", "target_pi"]

    # -- forward passes ------------------------------------------------------------------------

    def _forward_inference(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        return {Columns.ACTIONS: self._actions(batch[Columns.OBS], self.pi_encoder, self.pi)}

    def _forward_exploration(self, batch: dict[str, Any], *, t: int = 0, **kwargs: Any) -> dict[str, Any]:
        actions = self._actions(batch[Columns.OBS], self.pi_encoder, self.pi)
        generator = torch.Generator().manual_seed(self.exploration_seed + t)  # repeats with the run's seed
        noise = self._noise.value(t) * torch.randn(actions.shape, generator=generator).to(actions.device)
        return {Columns.ACTIONS: (actions + noise).clamp(-1.0, 1.0)}

    def _forward_train(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Return ``qf_preds`` [B, C]: the critics' values of the batch's actions."""
        return {"qf_preds": critic_values(self.qfs, (batch[Columns.OBS], batch[Columns.ACTIONS])).squeeze(-1)}

    def values_of_policy(self, batch: dict[str, Any]) -> Tensor:
        """Return the first critic's values of the policy's actions, float [B], with gradients for the policy."""
        obs = batch[Columns.OBS]
        actions = self._actions(obs, self.pi_encoder, self.pi)
        with frozen(self._critic_parameters.of([self.qfs])):
            values: Tensor = self.qfs[0]((obs, actions)).squeeze(-1)
        return values

    @torch.no_grad()
    def forward_target(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Return ``q_target_next`` [B], the smallest target critic's value of the target policy's action.

        Args:
            batch: The batch, with ``noise`` [B, …] to add to the actions.
            kwargs: Not used.
        """
        obs = batch[Columns.OBS]
        actions = self._actions(obs, self.target_pi_encoder, self.target_pi) + batch["noise"]
        values = critic_values(self.target_qfs, (obs, actions.clamp(-1.0, 1.0))).squeeze(-1)
        return {"q_target_next": values.amin(-1)}

    def _actions(self, obs: Any, encoder: Any, head: Any) -> Tensor:
        actions: Tensor = head(encoder(obs)).tanh()
        return actions.reshape(*actions.shape[:-1], *self._action_shape)
