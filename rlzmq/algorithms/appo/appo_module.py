"""DefaultAPPOModule: the default actor-critic with a target network of its policy."""

from __future__ import annotations

import copy
from typing import Any

import torch

from rlzmq.episodes.columns import Columns
from rlzmq.modules.apis import TargetNetworkAPI
from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule

__all__ = ["DefaultAPPOModule"]


class DefaultAPPOModule(DefaultActorCriticModule, TargetNetworkAPI):
    """A `DefaultActorCriticModule` with target networks for encoder and policy head."""

    def setup(self) -> None:
        super().setup()
        if not self.inference_only:
            self.make_target_networks()

    def make_target_networks(self) -> None:
        self._old_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self._old_pi = copy.deepcopy(self.pi).requires_grad_(False)

    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        return [(self.encoder, self._old_encoder), (self.pi, self._old_pi)]

    def get_non_inference_attributes(self) -> list[str]:
        return [*super().get_non_inference_attributes(), "_old_encoder", "_old_pi"]

    @torch.no_grad()
    def forward_target(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the target policy's ``action_dist_inputs``."""
        outputs, _ = self._act(batch, critic_features=False, encoder=self._old_encoder, pi=self._old_pi)
        return {Columns.ACTION_DIST_INPUTS: outputs[Columns.ACTION_DIST_INPUTS]}
