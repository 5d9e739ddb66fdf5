"""PPOLearner: the clipped surrogate loss and its statistics (arXiv:1707.06347).

Shape suffix: ``B`` rows of a minibatch, ``[B]`` for stateless modules, ``[B, T]`` with a mask for stateful
ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from rlzmq.algorithms.ppo import PPOConfig, PPOTrainingSettings
from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.learner import GeneralAdvantageEstimation
from rlzmq.connectors.learner.advantages import sampled_column
from rlzmq.episodes.columns import Columns
from rlzmq.learners.batches import MaskedMean
from rlzmq.learners.learner import TorchLearner
from rlzmq.modules.rl_module import ValueFunctionAPI

__all__ = [
    "PPOLearner",
    "PPOLossSettings",
    "PPOLossTerms",
    "PPOTorchLearner",
    "adapt_kl_coeffs",
    "adapted_kl_coeff",
    "ppo_loss",
]


class PPOLossSettings(NamedTuple):
    """Constants of the loss; see `PPOTrainingSettings`."""

    clip_param: float
    vf_clip_param: float | None
    vf_loss_coeff: float
    entropy_coeff: float
    kl_coeff: float
    vf_clip_change: float | None = None


class PPOLossTerms(NamedTuple):
    """0-d tensors: the loss, and without gradients its terms, which are means over the real rows of a minibatch."""

    loss: Tensor
    policy_loss: Tensor
    vf_loss: Tensor | None
    entropy: Tensor | None
    mean_kl: Tensor | None


def ppo_loss(
    *,
    logp_B: Tensor,
    old_logp_B: Tensor,
    advantages_B: Tensor,
    values_B: Tensor | None,
    value_targets_B: Tensor | None,
    entropy_B: Tensor | None,
    kl_B: Tensor | None,
    settings: PPOLossSettings,
    mask_B: Tensor | None = None,
    old_values_B: Tensor | None = None,
) -> PPOLossTerms:
    """Return policy loss + value loss − entropy bonus + KL penalty, and its terms.

    Args:
        logp_B: Log-probability of the actions under the trained policy.
        old_logp_B: Log-probability under the policy that sampled them.
        advantages_B: Advantages, standardized.
        values_B: Predictions of the trained value function; None: no critic.
        value_targets_B: Their targets; None: no critic.
        entropy_B: Entropy of the trained policy; None: no such term.
        kl_B: KL divergence from the sampling policy to the trained one; None: no such term.
        settings: Clip ranges and coefficients.
        mask_B: Whether entries are real; None: all.
        old_values_B: The value predictions before the update; needed with ``vf_clip_change``.
    """
    clip, vf_clip, vf_coeff, entropy_coeff, kl_coeff, vf_clip_change = settings
    mean = MaskedMean(mask_B)
    # min(A·r, A·clip(r, 1 − ε, 1 + ε)) is A·min(r, 1 + ε) for A ≥ 0 and A·max(r, 1 − ε) for A < 0. Bounding log r
    # instead of r keeps gradients finite where r overflows and is clipped.
    is_worse_B = advantages_B < 0.0
    low_B = torch.where(is_worse_B, math.log1p(-clip) if clip < 1.0 else -math.inf, -math.inf)
    high_B = torch.where(is_worse_B, math.inf, math.log1p(clip))
    log_ratio_B = mean.of_real(logp_B - old_logp_B).clamp(low_B, high_B)
    policy_loss = loss = -mean(advantages_B * torch.exp(log_ratio_B))
    vf_loss = entropy = mean_kl = None
    if values_B is not None and value_targets_B is not None:
        square_B = mean.of_real(values_B - value_targets_B).square()
        if vf_clip_change is not None:
            assert old_values_B is not None
            change_B = (values_B - old_values_B).clamp(-vf_clip_change, vf_clip_change)
            bounded_B = mean.of_real(old_values_B + change_B - value_targets_B).square()
            square_B = torch.maximum(square_B, bounded_B)
        if vf_clip is not None:
            square_B = square_B.clamp(max=vf_clip)
        vf_loss = mean(square_B)
        loss = loss + vf_coeff * vf_loss
    if entropy_B is not None:
        entropy = mean(entropy_B)
        if entropy_coeff:
            loss = loss - entropy * entropy_coeff
    if kl_B is not None:
        mean_kl = mean(kl_B)
        if kl_coeff:
            loss = loss + mean_kl * kl_coeff
    terms = [None if term is None else term.detach() for term in (policy_loss, vf_loss, entropy, mean_kl)]
    return PPOLossTerms(loss, *terms)  # type: ignore[arg-type]  # the policy loss is there


# What statistics of all rows of the last epoch are made of.
_ROWS = "rows"


class _Rows(NamedTuple):
    """Of a minibatch's rows, or of all real rows of the last epoch: log-probabilities, advantages, values."""

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    values: Tensor | None
    targets: Tensor | None
    mask: Tensor | None = None

    def approx_kl(self) -> Tensor:
        """Return an estimate of the divergence (http://joschu.net/blog/kl-approx.html)."""
        log_ratio = self.logp - self.old_logp
        return (torch.expm1(log_ratio) - log_ratio).mean()


class PPOLearner(TorchLearner):
    """Trains actor-critic modules with PPO (arXiv:1707.06347).

    Needs the columns ``actions``, ``action_logp``, ``action_dist_inputs``, ``advantages`` and
    ``value_targets``; the last two come from the learner connector's GeneralAdvantageEstimation.
    """

    config: PPOConfig
    scheduled_settings: ClassVar[Sequence[str]] = ["entropy_coeff"]

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """Return `ValueFunctionAPI`."""
        return [ValueFunctionAPI]

    def make_estimator(self) -> GeneralAdvantageEstimation:
        """Return GAE. Without ``config.use_gae``, advantages are discounted returns minus values (λ = 1), if any."""
        config = self.config
        return GeneralAdvantageEstimation(
            gamma=config.gamma,
            lambda_=config.lambda_ if config.use_gae else 1.0,
            standardize=config.standardize_advantages,
            keeps_values=config.vf_clip_change is not None,
            use_critic=config.use_critic,
        )

    def compute_loss_for_module(
        self, *, module_id: str, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Return policy loss + value loss − entropy bonus + KL penalty; see `rlzmq.algorithms.ppo.ppo_learner`."""
        module = self.module[module_id]
        settings = cast(PPOTrainingSettings, config)
        if settings.target_kl is not None:
            self.is_last_epoch = True  # as far as is known
        mask = batch.get(Columns.LOSS_MASK)
        dist_cls = module.get_train_action_dist_cls()
        dist = dist_cls.from_logits(module.require_output(fwd_out, Columns.ACTION_DIST_INPUTS))
        logp = dist.logp(batch[Columns.ACTIONS])

        kl_coeff = self.coefficients["kl_coeff"].setdefault(module_id, float(settings.kl_coeff))
        entropy_coeff = self.coefficients["entropy_coeff"][module_id]
        # Without a coefficient, entropy and divergence are only reported.
        kl = entropy = None
        if settings.use_kl_loss and (kl_coeff or self.is_last_epoch):
            old_dist = dist_cls.from_logits(sampled_column(batch, Columns.ACTION_DIST_INPUTS, module_id))
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
        advantages = batch[Columns.ADVANTAGES]
        old_logp = sampled_column(batch, Columns.ACTION_LOGP, module_id)
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
        stats = {}
        for name, term in zip(("policy_loss", "vf_loss", "entropy", "mean_kl_loss"), terms[1:], strict=True):
            if term is not None:
                stats[name] = term
        self.log_stats(module_id, stats)
        if self.is_last_epoch:
            predicted = None if values is None else values.detach()
            rows = _Rows(logp.detach(), old_logp, advantages, predicted, targets, mask)
            self.report.log(module_id, {_ROWS: rows})
        return terms.loss

    def _last_epoch(self, module_id: str) -> _Rows | None:
        """Return a module's rows of the last epoch so far that was kept; None if there are none."""
        logged = self.report.logged().get(module_id, {})
        num = self.report.num_of_last(module_id, self.num_minibatches_per_epoch)
        parts: list[_Rows] = logged.get(_ROWS, [])[-num:]
        if not parts:
            return None
        columns: list[Any] = []
        for column in zip(*parts, strict=True):
            columns.append(None if column[0] is None else torch.cat([*map(torch.flatten, column)]))
        *columns, mask = columns
        return _Rows(*columns if mask is None else [c if c is None else c[mask] for c in columns])

    def ends_update(self) -> bool:
        """Return whether a module's policy has moved beyond ``target_kl``."""
        limits: dict[str, float | None] = {}
        moved: dict[str, float] = {}
        for module_id in self.trained_module_ids:
            limits[module_id] = cast(PPOTrainingSettings, self.config_for_module(module_id)).target_kl
            if limits[module_id] is not None and (rows := self._last_epoch(module_id)) is not None:
                moved[module_id] = rows.approx_kl().item()
        if not any(limits.values()):
            return False
        moved = self.ranks.mean(moved, self.trained_module_ids)
        return any(limit is not None and moved[m] > 1.5 * limit for m, limit in limits.items())

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        super().after_gradient_based_update(timesteps=timesteps)
        adapt_kl_coeffs(self)
        for module_id in self.trained_module_ids:
            rows = self._last_epoch(module_id)
            if rows is None:
                continue
            settings = cast(PPOTrainingSettings, self.config_for_module(module_id))
            is_clipped = torch.expm1(rows.logp - rows.old_logp).abs() > settings.clip_param
            stats = {
                "clip_fraction": is_clipped.float().mean(),
                "approx_kl": rows.approx_kl(),
                "advantages_std": rows.advantages.std(correction=0),
                "sampled_entropy": -rows.old_logp.mean(),
            }
            if rows.values is not None and rows.targets is not None:
                error = (rows.targets - rows.values).double()
                variance = rows.targets.double().var(correction=0).clamp(min=1e-12)
                stats["vf_loss_unclipped"] = error.square().mean()
                stats["vf_explained_var"] = (1.0 - error.var(correction=0) / variance).clamp(min=-1.0)
                if settings.vf_clip_param is not None:
                    stats["vf_clip_fraction"] = (error.square() > settings.vf_clip_param).double().mean()
            self.log_stats(module_id, stats)


def adapt_kl_coeffs(learner: TorchLearner) -> None:
    """Adapt ``learner.coefficients["kl_coeff"]`` to the measured divergence; call it after every update.

    A trained module's coefficient is multiplied by 1.5 if the mean of its logged ``mean_kl_loss`` over the last epoch
    and all ranks exceeds twice ``config.kl_target``, and by 0.5 if it is below half of it. Needs
    ``config.use_kl_loss``.
    """
    coefficients = learner.coefficients["kl_coeff"]
    for module_id, measured in learner.mean_stats_over_ranks("mean_kl_loss").items():
        settings: Any = learner.config_for_module(module_id)
        if settings.use_kl_loss:
            coefficient = coefficients.get(module_id, float(settings.kl_coeff))
            coefficients[module_id] = adapted_kl_coeff(coefficient, measured, settings.kl_target)
            learner.log_stats(module_id, {"curr_kl_coeff": coefficients[module_id]})


def adapted_kl_coeff(coefficient: float, measured: float, target: float) -> float:
    """Return the next update's KL coefficient: ×1.5 above twice the target, ×0.5 below half of it.

    A NaN or infinite divergence leaves the coefficient unchanged.
    """
    if not math.isfinite(measured):
        return coefficient
    if measured > 2.0 * target:
        return coefficient * 1.5
    return coefficient * 0.5 if measured < 0.5 * target else coefficient


def _standardized(advantages: Tensor, mask: Tensor | None) -> Tensor:
    """Return advantages with mean 0 and deviation 1 over a minibatch's real rows."""
    real = advantages if mask is None else advantages[mask]
    return (advantages - real.mean()) / (real.std(correction=0) + 1e-8)


PPOTorchLearner = PPOLearner
"""RLlib's name for `PPOLearner`."""
