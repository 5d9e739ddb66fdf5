"""PPOLearner: the clipped surrogate loss and its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from rlzmq.algorithms.ppo.ppo_config import PPOConfig, PPOTrainingSettings
from rlzmq.algorithms.ppo.ppo_loss import PPOLossSettings, ppo_loss
from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.defaults import add_estimator
from rlzmq.connectors.learner import GeneralAdvantageEstimation
from rlzmq.episodes.columns import Columns
from rlzmq.learners.actor_critic import AdaptiveKLLearner

__all__ = ["PPOLearner", "PPOTorchLearner"]

# The last epoch's (value predictions, targets, mask), for statistics that need all of them at once.
_VALUES = "values"


class PPOLearner(AdaptiveKLLearner):
    """Trains actor-critic modules with PPO (arXiv:1707.06347).

    Needs the columns ``actions``, ``action_logp``, ``action_dist_inputs``, ``advantages`` and
    ``value_targets``; the last two come from the learner connector's GeneralAdvantageEstimation.
    """

    config: PPOConfig

    def make_learner_connector(self, observation_space: Any, action_space: Any) -> Any:
        """Return the config's pipeline, with PPO's pieces at the beginning and the end.

        Without ``config.use_gae``, advantages are discounted returns minus the values (λ = 1).
        """
        pipeline = super().make_learner_connector(observation_space, action_space)
        if pipeline is not None and self._setting("add_default_connectors_to_learner_pipeline", True):
            lambda_ = self.config.lambda_ if self._setting("use_gae", True) else 1.0
            estimator = GeneralAdvantageEstimation(
                gamma=self.config.gamma,
                lambda_=lambda_,
                standardize=self.config.standardize_advantages,
                keeps_values=self.config.vf_clip_change is not None,
            )
            add_estimator(pipeline, estimator)
        return pipeline

    def compute_loss_for_module(
        self, *, module_id: str, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Return policy loss + value loss − entropy bonus + KL penalty; see `rlzmq.algorithms.ppo.ppo_loss`."""
        module = self.module[module_id].unwrapped()
        settings = cast(PPOTrainingSettings, config)
        if settings.target_kl is not None:
            self.is_last_epoch = True  # as far as is known
        mask = batch.get(Columns.LOSS_MASK)
        dist_cls = module.get_train_action_dist_cls()
        dist = dist_cls.from_logits(module.require_output(fwd_out, Columns.ACTION_DIST_INPUTS))
        logp = dist.logp(batch[Columns.ACTIONS])

        kl_coeff = self.curr_kl_coeffs_per_module[module_id]
        entropy_coeff = self.entropy_coeff_schedulers_per_module[module_id].current
        # Without a coefficient, entropy and divergence are only reported.
        kl = entropy = None
        if settings.use_kl_loss and (kl_coeff or self.is_last_epoch):
            old_dist = dist_cls.from_logits(batch[Columns.ACTION_DIST_INPUTS])
            with nullcontext() if kl_coeff else torch.no_grad():
                kl = old_dist.kl(dist)
        if entropy_coeff or self.is_last_epoch:
            with nullcontext() if entropy_coeff else torch.no_grad():
                entropy = dist.entropy()
        values: Tensor | None = None
        targets: Any = None
        if settings.use_critic:
            values = module.compute_values(batch, embeddings=fwd_out.get(Columns.EMBEDDINGS))
            targets = batch[Columns.VALUE_TARGETS]
        advantages, old_logp = batch[Columns.ADVANTAGES], batch[Columns.ACTION_LOGP]
        if settings.standardize_advantages == "minibatch":
            advantages = _standardized(advantages, mask)
        terms = ppo_loss(
            logp_B=logp,
            old_logp_B=old_logp,
            advantages_B=advantages,
            values_B=values,
            value_targets_B=targets,
            entropy_B=entropy,
            kl_B=kl,
            settings=PPOLossSettings(
                settings.clip_param,
                settings.vf_clip_param,
                settings.vf_loss_coeff,
                entropy_coeff,
                kl_coeff,
                settings.vf_clip_change,
            ),
            mask_B=mask,
            old_values_B=batch.get(Columns.VF_PREDS),
        )
        names = ("policy_loss", "vf_loss", "entropy", "mean_kl_loss")
        self.log_stats(
            module_id, {name: term for name, term in zip(names, terms[1:], strict=True) if term is not None}
        )
        if self.is_last_epoch:
            log_ratio = _LogRatio(logp.detach(), old_logp, mask)
            self.log_stats(
                module_id,
                {
                    "clip_fraction": lambda: log_ratio.share_beyond(settings.clip_param),
                    "approx_kl": log_ratio.approx_kl,
                    "advantages_std": lambda: _real(advantages, mask).std(correction=0),
                },
            )
            if values is not None:
                self._stats.log(module_id, {_VALUES: (values.detach(), targets, mask)})
        return terms.loss

    def ends_update(self) -> bool:
        """Return whether a module's policy has moved beyond ``target_kl``."""
        limits = {
            m: cast(PPOTrainingSettings, self.config_for_module(m)).target_kl for m in self.trained_module_ids
        }
        if not any(limits.values()):
            return False
        moved = self.mean_stats_over_ranks("approx_kl")
        return any(limit is not None and moved[m] > 1.5 * limit for m, limit in limits.items())

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
        self._log_value_stats()

    def _log_value_stats(self) -> None:
        for module_id, parts in self._stats.newest(_VALUES, self.num_minibatches_per_epoch).items():
            values, targets = (torch.cat([part[i].flatten() for part in parts]) for i in (0, 1))
            masks = [part[2].flatten() for part in parts if part[2] is not None]
            mask = torch.cat(masks) if masks else None
            if mask is not None:
                values, targets = values[mask], targets[mask]
            error = (targets - values).double()
            vf_clip = cast(PPOTrainingSettings, self.config_for_module(module_id)).vf_clip_param
            explained = 1.0 - error.var(correction=0) / targets.double().var(correction=0).clamp(min=1e-12)
            self.log_stats(
                module_id,
                {
                    "vf_loss_unclipped": error.square().mean(),
                    "vf_explained_var": explained.clamp(min=-1.0),
                    **(
                        {}
                        if vf_clip is None
                        else {"vf_clip_fraction": (error.square() > vf_clip).double().mean()}
                    ),
                },
            )


class _LogRatio:
    """The logarithm of the trained and the sampling policy's probabilities' ratio, computed if statistics are read."""

    def __init__(self, logp: Tensor, old_logp: Tensor, mask: Tensor | None) -> None:
        self._logp, self._old_logp, self._mask = logp, old_logp, mask

    def _values(self) -> Tensor:
        return _real(self._logp - self._old_logp, self._mask)

    def share_beyond(self, clip_param: float) -> Tensor:
        """Return the fraction of ratios outside of the surrogate's clip range."""
        return (torch.expm1(self._values()).abs() > clip_param).float().mean()

    def approx_kl(self) -> Tensor:
        """Return an estimate of the KL divergence from the sampling policy (http://joschu.net/blog/kl-approx.html)."""
        log_ratio = self._values()
        return (torch.expm1(log_ratio) - log_ratio).mean()


def _real(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else values[mask]


def _standardized(advantages: Tensor, mask: Tensor | None) -> Tensor:
    """Return advantages with mean 0 and deviation 1 over a minibatch's real rows."""
    real = _real(advantages, mask)
    return (advantages - real.mean()) / (real.std(correction=0) + 1e-8)


PPOTorchLearner = PPOLearner
"""RLlib's name for `PPOLearner`."""
