"""DefaultSACModule: a stochastic policy with critics and target critics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.core.errors import ConfigurationError, UnsupportedSpaceError
from rlzmq.episodes.columns import Columns
from rlzmq.modules.default_models.actor_critic import ObservationMask, PolicyHead, apply_action_mask
from rlzmq.modules.default_models.encoders import MLP
from rlzmq.modules.default_models.image_encoders import MultiStreamEncoder, build_encoder
from rlzmq.modules.distributions import TorchSquashedGaussian
from rlzmq.modules.rl_module import InferenceOnlyAPI, TargetNetworkAPI, TorchRLModule
from rlzmq.modules.weights import StructureCache, frozen, parameters_of

__all__ = ["Critic", "DefaultSACModule", "critic_values", "require_box"]


class DefaultSACModule(TorchRLModule, TargetNetworkAPI, InferenceOnlyAPI):
    """Policy and critics, configured by a DefaultModelConfig and SAC's settings.

    ::

        obs ────────► pi_encoder ─► pi ─► squashed Gaussian on (-1, 1), or categorical
        obs, action ► qfs[i]           ─► value (Box)
        obs ────────► qfs[i]           ─► a value for each action (Discrete)

    `model_config`: fields of a DefaultModelConfig, and ``twin_q`` and ``initial_alpha`` (see `SACConfig`).

    Attributes:
        qfs, target_qfs: The critics.
        log_alpha: Logarithm of the temperature, a 0-d parameter.
    """

    networks_with_target: ClassVar[Sequence[str]] = ("qfs",)
    target_qfs: nn.ModuleList

    has_temperature: ClassVar[bool] = True
    """Whether the module has `log_alpha`."""

    own_settings: ClassVar[Mapping[str, Any]] = {}
    """Further settings in `model_config`, with their defaults; they become attributes."""

    def setup(self) -> None:
        where = self.describe()
        model = dict(self.model_config)
        alpha = float(model.pop("initial_alpha", 1.0))
        num_critics = int(model.pop("n_critics", 2 if model.pop("twin_q", True) else 1))
        num_outputs = int(model.pop("n_quantiles", 1))
        for name, default in self.own_settings.items():
            setattr(self, name, model.pop(name, default))
        config = DefaultModelConfig.from_dict(model, where=f"model_config of the {where}")
        if config.use_lstm:
            raise ConfigurationError(
                f"{where}: model_config['use_lstm'] is not supported by SAC's default module. Stack frames instead "
                "(FrameStackingEnvToModule and FrameStackingLearner), or use PPO."
            )
        observation_space, action_space = self.observation_space, self.action_space
        assert observation_space is not None
        assert action_space is not None
        self._is_discrete = isinstance(action_space, gym.spaces.Discrete)
        if not self._is_discrete:
            require_box(self, "SAC", "PPO", or_discrete=True)
            shape = action_space.shape
            self.action_dist_cls: type[TorchSquashedGaussian] = (
                TorchSquashedGaussian
                if shape is not None and len(shape) == 1
                else TorchSquashedGaussian.get_partial_dist_cls(action_shape=shape)
            )
        self._obs_mask = ObservationMask(observation_space, action_space, where=where)
        space = self._obs_mask.space
        self.pi_encoder: Any = build_encoder(space, config, where=where)
        self.pi: Any = self.make_policy_head(config, where)
        if not self.inference_only:
            inputs = space if self._is_discrete else gym.spaces.Tuple((space, action_space))
            if isinstance(action_space, gym.spaces.Discrete):
                num_outputs = int(action_space.n)
            self.qfs: nn.ModuleList = nn.ModuleList(
                Critic(inputs, num_outputs, config, where) for _ in range(num_critics)
            )
            if self.has_temperature:
                self.log_alpha: nn.Parameter = nn.Parameter(torch.tensor(math.log(alpha)))
            self.make_target_networks()
            self._critic_parameters = StructureCache(_parameters_of)

    def make_policy_head(self, config: DefaultModelConfig, where: str) -> nn.Module:
        """Return the network `pi`, from features to the inputs of the action distribution."""
        assert self.action_space is not None
        return PolicyHead(self.pi_encoder.output_dim, self.action_space, config, where=where)

    def get_non_inference_attributes(self) -> list[str]:
        return ["qfs", "target_qfs", "log_alpha"]

    # -- forward passes ------------------------------------------------------------------------

    def _forward(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self._logits(batch[Columns.OBS])[0]}

    def _forward_train(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Return the critics' values, and values and log-probabilities of the policy's actions.

        Returns:
            ``qf_preds`` [B, C]: values of the batch's actions, with gradients for the critics; ``q_curr`` [B] and
            ``logp_resampled`` [B]: expectations under the policy (Discrete) or values for one sampled action, with
            gradients for the policy; ``action_dist_inputs``.
        """
        logits, obs = self._logits(batch[Columns.OBS])
        actions = batch[Columns.ACTIONS]
        q = critic_values(self.qfs, obs if self._is_discrete else (obs, actions))
        if isinstance(self.action_space, gym.spaces.Discrete):
            # A Discrete space may start at another number than 0.
            index = actions.long() - int(self.action_space.start)
            qf_preds = q.gather(-1, index[:, None, None].expand(-1, q.shape[1], 1)).squeeze(-1)
        else:
            qf_preds = self._predictions(q)
        with frozen(self._critic_parameters.of([self.qfs])):
            q_curr, logp = self._soft_values(logits, obs, self.qfs)
        return {
            Columns.ACTION_DIST_INPUTS: logits,
            "qf_preds": qf_preds,
            "q_curr": q_curr,
            "logp_resampled": logp,
        }

    @torch.no_grad()
    def forward_target(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """Return ``q_target_next`` and ``logp_next_resampled``, float [B], for the policy's actions at ``obs``."""
        logits, obs = self._logits(batch[Columns.OBS])
        q, logp = self._soft_values(logits, obs, self.target_qfs)
        return {"q_target_next": q, "logp_next_resampled": logp}

    def _logits(self, obs: Any) -> tuple[Tensor, Any]:
        """Return the policy's distribution inputs, and the observations without their mask."""
        obs, mask = self._obs_mask.split(obs)
        logits: Tensor = self.pi(self.pi_encoder(obs))
        return (logits if mask is None else apply_action_mask(logits, mask)), obs

    def _soft_values(self, logits: Tensor, obs: Any, critics: nn.ModuleList) -> tuple[Tensor, Tensor]:
        """Return the smallest value of any critic and the log-probability of the policy's actions, float [B]."""
        if self._is_discrete:
            log_probs = logits.log_softmax(-1)
            probs = log_probs.exp()
            return (probs * critic_values(critics, obs).amin(1)).sum(-1), (probs * log_probs).sum(-1)
        values, logp = self._values_of_policy(logits, obs, critics)
        return self._combined(values), logp

    def _values_of_policy(self, logits: Tensor, obs: Any, critics: nn.ModuleList) -> tuple[Tensor, Tensor]:
        """Return the critics' outputs [B, C, K] for sampled actions of the policy, and their log-probabilities [B]."""
        dist: Any = self.get_train_action_dist_cls().from_logits(logits)
        actions, logp = dist.rsample_and_logp()
        return critic_values(critics, (obs, actions)), logp

    # Meaning of the critics' outputs for Box actions, [B, C, K]; here K = 1. TQC overrides both methods.

    def _predictions(self, outputs: Tensor) -> Tensor:
        """Return the outputs to compare with the targets, as ``qf_preds``."""
        return outputs.squeeze(-1)

    def _combined(self, outputs: Tensor) -> Tensor:
        """Return one value per row, float [B]."""
        return outputs.amin(1).squeeze(-1)


class Critic(nn.Module):
    """Maps observations (with actions) to values [B, K]."""

    def __init__(
        self, space: gym.Space[Any], num_outputs: int, config: DefaultModelConfig, where: str
    ) -> None:
        super().__init__()
        self.encoder: Any = build_encoder(space, config, where=where)
        self.head: MLP = MLP(
            self.encoder.output_dim,
            config.head_fcnet_hiddens,
            config.head_fcnet_activation,
            config=config,
            prefix="head_fcnet",
            use_layernorm=config.head_fcnet_use_layernorm,
            output_dim=num_outputs,
        )

    def forward(self, inputs: Any, vectors: Tensor | None = None) -> Tensor:
        """Return the values for inputs, or for their vector parts [B, N], if they have no others."""
        features = self.encoder(inputs) if vectors is None else self.encoder.vectors(vectors)
        values: Tensor = self.head(features)
        return values


def critic_values(critics: nn.ModuleList, inputs: object) -> Tensor:
    """Return the values of all critics, [B, C, K]."""
    encoder = next(iter(critics)).encoder
    vectors = None
    if isinstance(encoder, MultiStreamEncoder) and encoder.fusion is None:
        vectors = encoder.concatenated(inputs)  # the same for all
    return torch.stack([critic(inputs, vectors) for critic in critics], 1)


def _parameters_of(modules: list[nn.Module]) -> list[Tensor]:
    return [parameter for module in modules for parameter in parameters_of(module)]


def require_box(module: TorchRLModule, algorithm: str, others: str, *, or_discrete: bool = False) -> None:
    """Check that a module's action space is a bounded Box of floats.

    Args:
        module: The module.
        algorithm: The algorithm's name, for the error message.
        others: The algorithms for other action spaces, for the error message.
        or_discrete: Whether the error message also names Discrete spaces as possible.

    Raises:
        UnsupportedSpaceError: The space is another one.
    """
    space, where = module.action_space, module.describe()
    if not isinstance(space, gym.spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise UnsupportedSpaceError(
            f"{where}: {algorithm} needs a Box of floats {'or a Discrete ' if or_discrete else ''}as action space, got "
            f"{space}. Use {others}, or wrap the environment."
        )
    if not space.is_bounded():
        raise UnsupportedSpaceError(
            f"{where}: {algorithm}'s actions lie in (-1, 1) and are scaled to the bounds of the action space, but "
            f"{space} has none. Wrap the environment so that its actions have bounds."
        )
