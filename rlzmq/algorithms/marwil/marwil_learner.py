"""MARWILLearner: imitation weighted by the advantages of whole recorded episodes.

Shape suffix: ``B`` rows of a minibatch, ``[B]`` for stateless modules, ``[B, T]`` with a mask for stateful ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from rlzmq.algorithms.marwil import MARWILConfig, MARWILTrainingSettings
from rlzmq.config.base_config import BaseConfig
from rlzmq.connectors.common.agent_to_module_mapping import max_seq_len
from rlzmq.connectors.learner import GeneralAdvantageEstimation
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import Columns
from rlzmq.learners.batches import MaskedMean, TrainBatch
from rlzmq.learners.offline_learner import OfflineLearner
from rlzmq.modules.distributions import TorchDiagGaussian
from rlzmq.modules.rl_module import ValueFunctionAPI

__all__ = [
    "MARWILLearner",
    "MARWILLossTerms",
    "marwil_loss_terms",
    "with_burn_in",
]


_NORM = "moving_avg_sqd_adv_norm"
"""Name of c² in results and coefficients."""

# Bound of the weights' exponent, far above any advantage that a policy learns from, so that weights cannot overflow.
_MAX_EXPONENT = 20.0


class MARWILLossTerms(NamedTuple):
    """Means over the real rows of a minibatch, 0-d tensors, and the updated norm."""

    policy_loss: Tensor
    value_loss: Tensor
    explained_variance: Tensor
    norm: Tensor


def marwil_loss_terms(
    *,
    logp_B: Tensor,
    values_B: Tensor,
    value_targets_B: Tensor,
    norm: Tensor,
    beta: float,
    update_rate: float,
    mask_B: Tensor | None = None,
    log_std_B: Tensor | None = None,
    log_std_coeff: float = 0.0,
) -> MARWILLossTerms:
    """Return the terms of the loss.

    With A = target - V(s), c² ← c² + rate (mean A² - c²) and w = exp(beta A / c), which is not differentiated, the
    policy loss is -mean(w (log π(a|s) + coeff · log σ)), and the value loss ½ mean A².

    Args:
        logp_B: Log-probability of the recorded actions under the trained policy.
        values_B: Predictions of the trained value function.
        value_targets_B: Targets of these predictions.
        norm: c² before this minibatch, float64, 0-d.
        beta: Strength of the weighting; 0: all weights are 1.
        update_rate: Rate of the moving average.
        mask_B: Whether entries are real; None: all.
        log_std_B: log σ, the mean log standard deviation of the policy's dimensions; None: the policy has none.
        log_std_coeff: Weight of it.
    """
    if log_std_B is not None:
        logp_B = logp_B + log_std_coeff * log_std_B
    advantages_B = value_targets_B - values_B
    mean = MaskedMean(mask_B)
    mean_square = mean(advantages_B.square())
    moved = norm + update_rate * (mean_square.detach().double() - norm)
    new_norm = torch.where(moved.isfinite(), moved, norm)
    exponents_B = beta * advantages_B.detach() / (1e-8 + new_norm.sqrt().float())
    weights_B = exponents_B.clamp(max=_MAX_EXPONENT).exp()
    error_variance, target_variance = (
        mean((rows - mean(rows)).square()) for rows in (advantages_B.detach(), value_targets_B)
    )
    return MARWILLossTerms(
        policy_loss=-mean(weights_B * logp_B),
        value_loss=0.5 * mean_square,
        explained_variance=(1.0 - error_variance / target_variance.clamp(min=1e-12)).clamp(min=-1.0),
        norm=new_norm,
    )


class MARWILLearner(OfflineLearner):
    """Trains actor-critic modules with MARWIL.

    Needs the columns ``actions`` and ``value_targets``. The latter come from the learner connector's
    GeneralAdvantageEstimation, computed on whole episodes with the weights at the beginning of each batch.
    ``coefficients["moving_avg_sqd_adv_norm"]`` has c² by module.
    """

    config: MARWILConfig
    trains_whole_episodes: ClassVar[bool] = True

    @classmethod
    def rl_module_required_apis(cls) -> list[type]:
        """Return `ValueFunctionAPI`."""
        return [ValueFunctionAPI]

    def make_estimator(self) -> GeneralAdvantageEstimation:
        """Return the piece that adds the value targets."""
        return GeneralAdvantageEstimation(gamma=self.config.gamma, lambda_=self.config.lambda_)

    @classmethod
    def check_module(cls, module_id: str, module: Any, config: BaseConfig) -> None:
        """Check a module, like Learner, and that the settings for Gaussian and stateful modules fit it."""
        super().check_module(module_id, module, config)
        settings, where = cast(MARWILTrainingSettings, config), module.describe()
        is_gaussian = issubclass(module.get_train_action_dist_cls(), TorchDiagGaussian)
        if settings.bc_logstd_coeff and not is_gaussian:
            raise ConfigurationError(
                f"{where}, config.bc_logstd_coeff={settings.bc_logstd_coeff}: its actions have no standard deviation, "
                "which only Gaussian policies for a Box have. Set bc_logstd_coeff=0."
            )
        longest = max_seq_len(module) if module.is_stateful() else 0
        if settings.burnin_len and settings.burnin_len >= longest:
            advice = "it has no state to warm up. Leave it at 0, or set model_config['use_lstm']."
            if longest:
                advice = (
                    f"a burn-in is shorter than the module's sequences of max_seq_len={longest} steps. Lower "
                    "burnin_len, or raise max_seq_len in the model_config."
                )
            raise ConfigurationError(f"{where}, config.burnin_len={settings.burnin_len}: {advice}")

    def prepare(self, episodes: Any, *, keeps_forward: bool = False) -> TrainBatch:
        train_batch = super().prepare(episodes, keeps_forward=keeps_forward)
        if self.config.burnin_len:
            for module_id, columns in train_batch.columns.items():
                train_batch.columns[module_id] = with_burn_in(columns, self.config.burnin_len)
        return train_batch

    def _prepare_module(self, module_id: str) -> None:
        super()._prepare_module(module_id)
        settings = cast(MARWILTrainingSettings, self.config_for_module(module_id))
        self.coefficients[_NORM][module_id] = float(settings.moving_average_sqd_adv_norm_start)
        self._move_norms()

    def compute_loss_for_module(
        self, *, module_id: str, config: BaseConfig, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        """Return the weighted imitation loss plus the value loss; see `marwil_loss_terms`."""
        settings = cast(MARWILTrainingSettings, config)
        module = self.module[module_id]
        logits = module.require_output(fwd_out, Columns.ACTION_DIST_INPUTS)
        dist: Any = module.get_train_action_dist_cls().from_logits(logits)
        terms = marwil_loss_terms(
            logp_B=dist.logp(batch[Columns.ACTIONS]),
            values_B=module.compute_values(batch, embeddings=fwd_out.get(Columns.EMBEDDINGS)),
            value_targets_B=batch[Columns.VALUE_TARGETS],
            norm=self._norms[module_id],
            beta=settings.beta,
            update_rate=settings.moving_average_sqd_adv_norm_update_rate,
            mask_B=batch.get(Columns.LOSS_MASK),
            log_std_B=dist.log_std.mean(-1) if settings.bc_logstd_coeff else None,
            log_std_coeff=settings.bc_logstd_coeff,
        )
        self._norms[module_id] = terms.norm
        self.log_stats(
            module_id,
            {
                "policy_loss": terms.policy_loss,
                "vf_loss": terms.value_loss,
                "vf_explained_variance": terms.explained_variance,
                _NORM: terms.norm,
            },
        )
        return terms.policy_loss + settings.vf_coeff * terms.value_loss

    def before_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        """Put c² on the learner's device, where minibatches move it without waiting for a number."""
        super().before_gradient_based_update(timesteps=timesteps)
        self._move_norms()

    def _move_norms(self) -> None:
        self._norms = {
            module_id: torch.tensor(norm, dtype=torch.float64, device=self.device)
            for module_id, norm in self.coefficients[_NORM].items()
        }

    def after_gradient_based_update(self, *, timesteps: Mapping[str, Any]) -> None:
        """Set c² to its mean over all ranks. A collective."""
        super().after_gradient_based_update(timesteps=timesteps)
        norms = {module_id: float(norm) for module_id, norm in self._norms.items()}
        self.coefficients[_NORM] |= self.ranks.mean(norms, list(norms))


def with_burn_in(columns: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """Extend the sequences of whole episodes, [B, T, …], to [B, T + num_steps, …].

    Each begins with the last `num_steps` of its episode's previous sequence. The first sequence of an episode, which
    begins with the right state, repeats its last step instead. There ``loss_mask`` is False.

    Args:
        columns: A stateful module's columns, with ``terminateds``, ``truncateds`` and ``loss_mask``. Sequences of an
            episode follow each other, and its last step is terminated or truncated.
        num_steps: Number of steps, at most T.
    """
    ends = (columns[Columns.TERMINATEDS] | columns[Columns.TRUNCATEDS]).any(1)
    is_first = torch.cat([ends.new_ones(1), ends[:-1]])

    def extended(steps: Tensor) -> Tensor:
        padding = steps[:, -1:].expand(-1, num_steps, *steps.shape[2:])
        first, later = [steps, padding], [steps.roll(1, 0)[:, -num_steps:], steps]
        return torch.where(
            is_first.view(-1, *[1] * (steps.dim() - 1)), torch.cat(first, 1), torch.cat(later, 1)
        )

    kept = {Columns.STATE_IN: columns[Columns.STATE_IN]}
    if Columns.SEQ_LENS in columns:
        kept[Columns.SEQ_LENS] = columns[Columns.SEQ_LENS] + num_steps * ~is_first
    result = {
        name: kept[name] if name in kept else tree_map(extended, column)
        for name, column in columns.items()
        if name != Columns.INFOS
    }
    result[Columns.LOSS_MASK][~is_first, :num_steps] = False
    result[Columns.LOSS_MASK][is_first, -num_steps:] = False
    return result
