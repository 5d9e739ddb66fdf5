"""DefaultTQCModule: SAC's default module with critics that predict quantiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlzmq.algorithms.sac.sac_module import DefaultSACModule, require_box
from rlzmq.episodes.columns import Columns

__all__ = ["DefaultTQCModule"]


class DefaultTQCModule(DefaultSACModule):
    """Policy and quantile critics for Box actions.

    `model_config`: fields of a DefaultModelConfig, and ``n_critics``, ``n_quantiles`` and ``initial_alpha`` (see
    `TQCConfig`). ``qf_preds`` and ``q_target_next`` are [B, C, Q]; ``q_curr`` is the mean of all quantiles.
    """

    def setup(self) -> None:
        require_box(self, "TQC", "SAC for Discrete actions, PPO for others")
        super().setup()

    def _predictions(self, outputs: Tensor) -> Tensor:
        return outputs

    def _combined(self, outputs: Tensor) -> Tensor:
        return outputs.mean((1, 2))

    @torch.no_grad()
    def forward_target(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return ``q_target_next`` [B, C, Q] and ``logp_next_resampled`` [B] for the policy's actions at ``obs``."""
        logits, obs = self._logits(batch[Columns.OBS])
        values, logp = self._values_of_policy(logits, obs, self.target_qfs)
        return {"q_target_next": values, "logp_next_resampled": logp}
