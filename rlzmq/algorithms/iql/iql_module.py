"""DefaultIQLModule: SAC's default module for Box actions, with a value function instead of a temperature."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from rlzmq.algorithms.sac.sac_module import Critic, DefaultSACModule, critic_values, require_box
from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.episodes.columns import Columns

__all__ = ["DefaultIQLModule"]


class DefaultIQLModule(DefaultSACModule):
    """Policy, critics and value function for Box actions.

    `model_config`: fields of a DefaultModelConfig, and ``twin_q`` (see `IQLConfig`).

    Attributes:
        vf: The value function.
    """

    has_temperature: ClassVar[bool] = False

    def setup(self) -> None:
        require_box(self, "IQL", "BC or MARWIL")
        super().setup()
        if not self.inference_only:
            where = self.describe()
            model = {name: value for name, value in self.model_config.items() if name != "twin_q"}
            config = DefaultModelConfig.from_dict(model, where=f"model_config of the {where}")
            self.vf: Critic = Critic(self._mask.space, 1, config, where)

    def get_non_inference_attributes(self) -> list[str]:
        return ["qfs", "target_qfs", "vf"]

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return ``qf_preds`` [B, C] of the batch's actions, ``vf_preds`` [B] and ``action_dist_inputs``."""
        logits, obs = self._logits(batch[Columns.OBS])
        return {
            Columns.ACTION_DIST_INPUTS: logits,
            "qf_preds": critic_values(self.qfs, (obs, _in_range(batch))).squeeze(-1),
            "vf_preds": self.vf(obs).squeeze(-1),
        }

    @torch.no_grad()
    def forward_target(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return ``qf_target_preds``, the smallest of the target critics' values, and ``vf_preds_next``, float [B]."""
        obs, next_obs = (self._mask.split(batch[name])[0] for name in (Columns.OBS, Columns.NEXT_OBS))
        q_BC = critic_values(self.target_qfs, (obs, _in_range(batch))).squeeze(-1)
        return {"qf_target_preds": q_BC.amin(-1), "vf_preds_next": self.vf(next_obs).squeeze(-1)}


def _in_range(batch: dict[str, Any]) -> Any:
    # The environment clips actions further out, which other algorithms' policies may have recorded.
    return batch[Columns.ACTIONS].clamp(-1.0, 1.0)
