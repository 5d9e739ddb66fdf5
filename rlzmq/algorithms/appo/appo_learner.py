"""APPOLearner: the clipped surrogate against a target network, with V-trace advantages (arXiv:1912.00167, section 3).

Shape suffix: ``B`` rows of a minibatch, ``[B]`` for stateless modules, ``[B, T]`` with a mask for stateful
ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from rlzmq.algorithms.appo import APPOConfig, APPOTrainingSettings
from rlzmq.algorithms.impala.impala_learner import IMPALALearner
from rlzmq.algorithms.ppo.ppo_learner import adapt_kl_coeffs
from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.learner import VTrace
from rlzmq.connectors.learner.vtrace import TARGET_DIST_INPUTS
from rlzmq.episodes.columns import Columns
from rlzmq.learners.batches import BatchSource, CircularBuffer, FreshBatch, MaskedMean
from rlzmq.learners.target_network_learner import TargetNetworkUpdates
from rlzmq.modules.default_models.actor_critic import DefaultActorCriticModule
from rlzmq.modules.rl_module import TargetNetworkAPI, ValueFunctionAPI

__all__ = [
    "APPOLearner",
    "APPOPolicyTerms",
    "DefaultAPPOModule",
    "appo_policy_terms",
]


# Bound of μ / π̄, the ratio of the sampling policy to the target network's policy.
_MAX_BEHAVIOR_RATIO = 2.0


class APPOPolicyTerms(NamedTuple):
    """0-d tensors: the loss, and the mean and variance of the clipped ratio of sampling and target policy."""

    policy_loss: Tensor
    mean_is: Tensor
    var_is: Tensor


def appo_policy_terms(
    *,
    logp_B: Tensor,
    target_logp_B: Tensor,
    behavior_logp_B: Tensor,
    advantages_B: Tensor,
    clip_param: float,
    mask_B: Tensor | None = None,
) -> APPOPolicyTerms:
    """Return the clipped surrogate with the ratio min(μ/π̄, 2) · π/μ.

    Args:
        logp_B: Log-probability of the actions under the trained policy π.
        target_logp_B: Log-probability under the target network's policy π̄.
        behavior_logp_B: Log-probability under the policy μ that sampled them.
        advantages_B: V-trace advantages.
        clip_param: The surrogate's clip range around 1.
        mask_B: Whether entries are real; None: all.
    """
    is_B = torch.exp(behavior_logp_B - target_logp_B).clamp(0.0, _MAX_BEHAVIOR_RATIO)
    ratio_B = is_B * torch.exp(logp_B - behavior_logp_B)
    clipped_B = ratio_B.clamp(1.0 - clip_param, 1.0 + clip_param)
    surrogate_B = torch.minimum(ratio_B * advantages_B, clipped_B * advantages_B)
    mean = MaskedMean(mask_B)
    mean_is = mean(is_B)
    return APPOPolicyTerms(
        policy_loss=-mean(surrogate_B), mean_is=mean_is, var_is=mean((is_B - mean_is).square())
    )


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
    def forward_target(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Return the target policy's ``action_dist_inputs``."""
        outputs, _ = self._act(batch, critic_features=False, encoder=self._old_encoder, pi=self._old_pi)
        return {Columns.ACTION_DIST_INPUTS: outputs[Columns.ACTION_DIST_INPUTS]}


class APPOLearner(IMPALALearner, TargetNetworkUpdates):
    """Trains actor-critic modules with APPO (arXiv:1912.00167).

    Needs the columns of IMPALALearner and ``target_action_dist_inputs``; V-trace evaluates the target network's policy
    and adds all of them.
    """

    config: APPOConfig

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        return [ValueFunctionAPI, TargetNetworkAPI]

    def make_source(self) -> BatchSource:
        """Return the circular buffer, or FreshBatch if it is switched off."""
        config = self.config
        if not config.use_circular_buffer:
            return FreshBatch()
        return CircularBuffer(config.circular_buffer_num_batches, config.circular_buffer_iterations_per_batch)

    def make_estimator(self) -> VTrace:
        vtrace = super().make_estimator()
        vtrace.use_target_network = True
        return vtrace

    def compute_loss_for_module(
        self, *, module_id: str, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Clipped surrogate + value loss − entropy bonus + KL penalty."""
        settings = cast(APPOTrainingSettings, config)
        module = self.module[module_id]
        mask = batch.get(Columns.LOSS_MASK)
        actions = batch[Columns.ACTIONS]
        dist_cls = module.get_train_action_dist_cls()
        dist = dist_cls.from_logits(module.require_output(fwd_out, Columns.ACTION_DIST_INPUTS))
        target_dist = dist_cls.from_logits(batch[TARGET_DIST_INPUTS])
        terms = appo_policy_terms(
            logp_B=dist.logp(actions),
            target_logp_B=target_dist.logp(actions),
            behavior_logp_B=batch[Columns.ACTION_LOGP],
            advantages_B=batch[Columns.ADVANTAGES],
            clip_param=settings.clip_param,
            mask_B=mask,
        )
        values = module.compute_values(batch, embeddings=fwd_out.get(Columns.EMBEDDINGS))
        mean = MaskedMean(mask)
        vf_loss = 0.5 * mean((values - batch[Columns.VALUE_TARGETS]).square())
        entropy = mean(dist.entropy())
        stats = {
            "policy_loss": terms.policy_loss,
            "vf_loss": vf_loss,
            "entropy": entropy,
            "mean_IS": terms.mean_is,
            "var_IS": terms.var_is,
        }
        entropy_coeff = self.coefficients["entropy_coeff"][module_id]
        loss: Tensor = terms.policy_loss + settings.vf_loss_coeff * vf_loss - entropy_coeff * entropy
        if settings.use_kl_loss:
            stats["mean_kl_loss"] = mean(target_dist.kl(dist))
            kl_coeff = self.coefficients["kl_coeff"].setdefault(module_id, float(settings.kl_coeff))
            loss = loss + kl_coeff * stats["mean_kl_loss"]
        self.log_stats(module_id, stats)
        return loss

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
        adapt_kl_coeffs(self)
        config = self.config
        every = config.target_network_update_freq * config.train_batch_size_per_learner
        if config.use_circular_buffer:
            every *= config.circular_buffer_num_batches * config.circular_buffer_iterations_per_batch
        self.update_targets_if_due(self.report.num_env_steps_trained_lifetime, int(every))
        self.log_target_updates()
