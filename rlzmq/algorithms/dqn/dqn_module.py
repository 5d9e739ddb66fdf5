"""DefaultDQNModule: action values with a dueling head, atoms, and ε-greedy exploration."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor, nn

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.core.errors import UnsupportedSpaceError
from rlzmq.core.tree import tree_leaves
from rlzmq.core.update_plan import Schedule
from rlzmq.episodes.columns import Columns
from rlzmq.modules.default_models.actor_critic import ObservationMask, apply_action_mask
from rlzmq.modules.default_models.encoders import MLP, RecurrentEncoder
from rlzmq.modules.default_models.image_encoders import build_encoder
from rlzmq.modules.rl_module import InferenceOnlyAPI, QNetAPI, TargetNetworkAPI, TorchRLModule

__all__ = [
    "DefaultDQNModule",
    "NoisyLinear",
]


class NoisyLinear(nn.Linear):
    """A linear layer whose weights are mean + σ · noise, with factorized Gaussian noise (equations 10 and 11).

    In training mode every forward pass samples new noise from torch's global generator. In evaluation mode there is no
    noise, unless `fix_noise` has set some.

    Args:
        inputs, outputs: Number of features per row.
        sigma0: Initial σ, in units of 1 / √inputs.
    """

    def __init__(self, inputs: int, outputs: int, sigma0: float) -> None:
        super().__init__(inputs, outputs)
        bound = 1.0 / math.sqrt(inputs)
        with torch.no_grad():
            self.weight.uniform_(-bound, bound)
            self.bias.uniform_(-bound, bound)
        self.weight_sigma: nn.Parameter = nn.Parameter(torch.full_like(self.weight, sigma0 * bound))
        self.bias_sigma: nn.Parameter = nn.Parameter(torch.full_like(self.bias, sigma0 * bound))
        self._fixed: tuple[Tensor, Tensor] | None = None

    def fix_noise(self, generator: torch.Generator | None, num_rows: int = 1) -> None:
        """Use the same noise from a generator in all forward passes, another one for each row; None: end this."""
        self._fixed = None if generator is None else self._draw(generator, num_rows)

    def _draw(self, generator: torch.Generator | None, num_rows: int = 1) -> tuple[Tensor, Tensor]:
        device = self.weight.device
        ins, outs = (
            torch.randn(num_rows, size, generator=generator).to(device)
            for size in (self.in_features, self.out_features)
        )
        return tuple(noise.sign() * noise.abs().sqrt() for noise in (ins, outs))  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        noise = self._draw(None) if self._fixed is None and self.training else self._fixed
        if noise is None:
            return super().forward(x)
        ins, outs = noise
        if len(ins) == 1:
            weight = self.weight + self.weight_sigma * torch.outer(outs[0], ins[0])
            return nn.functional.linear(x, weight, self.bias + self.bias_sigma * outs[0])
        while ins.dim() < x.dim():  # rows of sequences
            ins, outs = ins.unsqueeze(1), outs.unsqueeze(1)
        # Each row has its own noise of the weights, outs ⊗ ins.
        return super().forward(x) + outs * nn.functional.linear(x * ins, self.weight_sigma, self.bias_sigma)


_TARGETS = ("_target_encoder", "_target_af", "_target_vf")


class DefaultDQNModule(TorchRLModule, QNetAPI, TargetNetworkAPI, InferenceOnlyAPI):
    """Action values for Discrete actions, configured by a DefaultModelConfig and DQN's settings.

    ::

        obs ─► encoder ─┬─► af ─► advantages [B, A] (or logits [B, A, Z])
                        └─► vf ─► values     [B, 1] (or logits [B, 1, Z]), if dueling

    With a dueling head Q = V + A - mean_a A, atom by atom. While exploring, the outputs are the log-probabilities of
    the ε-greedy policy, so that the runner samples the actions with its random generator. With ``use_lstm`` the
    encoder ends with an LSTM, and observations and values are ``[B, T, …]``.

    `model_config`: fields of a DefaultModelConfig, and ``dueling``, ``epsilon``, ``noisy``, ``sigma0``, ``num_atoms``,
    ``v_min``, ``v_max`` (see `DQNConfig`).
    """

    atoms: Tensor

    def setup(self) -> None:
        where = self.describe()
        model = dict(self.model_config)
        self.dueling: bool = bool(model.pop("dueling", True))
        self.epsilon: Schedule = Schedule(model.pop("epsilon", 0.05), "epsilon")
        sigma0 = float(model.pop("sigma0", 0.5))
        self._sigma0 = sigma0 if model.pop("noisy", False) else None
        self.num_atoms: int = int(model.pop("num_atoms", 1))
        v_min, v_max = model.pop("v_min", -10.0), model.pop("v_max", 10.0)
        config = DefaultModelConfig.from_dict(model, where=f"model_config of the {where}")
        if not isinstance(self.action_space, gym.spaces.Discrete):
            raise UnsupportedSpaceError(
                f"{where}: DQN needs a Discrete action space, got {self.action_space}. Use PPO (for a Box "
                "also SAC), or wrap the environment so that its actions are Discrete."
            )
        assert self.observation_space is not None
        self._obs_mask = ObservationMask(self.observation_space, self.action_space, where=where)
        encoder = build_encoder(self._obs_mask.space, config, where=where)
        self._recurrent = config.use_lstm
        self.encoder: Any = RecurrentEncoder(encoder, config) if self._recurrent else encoder
        self.af: MLP = self._head(config, int(self.action_space.n))
        self.vf: MLP | None = self._head(config, 1) if self.dueling else None
        if self.num_atoms > 1:
            self.register_buffer("atoms", torch.linspace(v_min, v_max, self.num_atoms), persistent=False)
        if not self.inference_only:
            self.make_target_networks()

    def _head(self, config: DefaultModelConfig, width: int) -> MLP:
        head = MLP(
            self.encoder.output_dim,
            config.head_fcnet_hiddens,
            config.head_fcnet_activation,
            config=config,
            prefix="head_fcnet",
            use_layernorm=config.head_fcnet_use_layernorm,
            output_dim=width * self.num_atoms,
        )
        if self._sigma0 is not None:
            for i, layer in enumerate(head.layers):
                if isinstance(layer, nn.Linear):
                    head.layers[i] = NoisyLinear(layer.in_features, layer.out_features, self._sigma0)
        return head

    def make_target_networks(self) -> None:
        for name, network in zip(_TARGETS, self._networks(), strict=False):
            setattr(self, name, copy.deepcopy(network).requires_grad_(False))

    def get_target_network_pairs(self) -> list[tuple[Any, Any]]:
        return [
            (network, getattr(self, name)) for name, network in zip(_TARGETS, self._networks(), strict=False)
        ]

    def _networks(self) -> list[nn.Module]:
        return [self.encoder, self.af, *([] if self.vf is None else [self.vf])]

    def get_non_inference_attributes(self) -> list[str]:
        return list(_TARGETS)

    def get_initial_state(self) -> Any:
        return self.encoder.initial_state() if self._recurrent else {}

    # -- forward passes ------------------------------------------------------------------------

    def compute_q_values(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return self._values(batch, self.encoder, self.af, self.vf)

    def rank_actions(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Return the advantages as ``qf_preds``: all actions share V. With atoms or noise, return the values."""
        is_ours = getattr(self.compute_q_values, "__func__", None) is DefaultDQNModule.compute_q_values
        if self.num_atoms == 1 and self._sigma0 is None and is_ours:
            return self._values(batch, self.encoder, self.af)
        return self.compute_q_values(batch)

    def forward_target(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Tensor]:
        """Return the target networks' values, with the keys of `compute_q_values`."""
        vf = None if self.vf is None else self._target_vf
        return self._values(batch, self._target_encoder, self._target_af, vf)

    def _values(self, batch: dict[str, Any], encoder: Any, af: Any, vf: Any = None) -> dict[str, Tensor]:
        obs, mask = self._obs_mask.split(batch[Columns.OBS])
        outputs: dict[str, Any] = {}
        if self._recurrent:
            features, outputs[Columns.STATE_OUT] = encoder(obs, batch[Columns.STATE_IN])
        else:
            features = encoder(obs)
        if self.num_atoms == 1:
            q_BA = af(features)
            if vf is not None:
                q_BA = vf(features) + q_BA - q_BA.mean(-1, keepdim=True)
        else:
            q_BAZ = af(features).unflatten(-1, (-1, self.num_atoms))
            if vf is not None:
                q_BAZ = vf(features).unsqueeze(-2) + q_BAZ - q_BAZ.mean(-2, keepdim=True)
            probs_BAZ = q_BAZ.softmax(-1)
            # Not a matrix product, which torch.autocast would round.
            q_BA = (probs_BAZ * self.atoms).sum(-1)
            outputs |= {"atoms": self.atoms, "qf_logits": q_BAZ, "qf_probs": probs_BAZ}
        if mask is not None:
            # Where every action is forbidden, as often after an episode's last step, targets need a value all the same.
            is_allowed = mask.reshape(q_BA.shape) != 0
            q_BA = apply_action_mask(q_BA, is_allowed | ~is_allowed.any(-1, keepdim=True))
        outputs["qf_preds"] = q_BA
        return outputs

    def _forward_train(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        return dict(self.compute_q_values(batch))

    def _forward_inference(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        return self._acting(values := self.compute_q_values(batch), values["qf_preds"])

    def _forward_exploration(self, batch: dict[str, Any], *, t: int = 0, **kwargs: Any) -> dict[str, Any]:
        if self._sigma0 is None:
            values = self.rank_actions(batch)
        else:
            with self._noise_of_step(t, len(tree_leaves(batch[Columns.OBS])[0])):
                values = self.rank_actions(batch)
        q_BA = values["qf_preds"]
        least, epsilon = torch.finfo(q_BA.dtype).min, self.epsilon.value(t)
        greedy_B1 = q_BA.argmax(-1, keepdim=True)
        if not self._obs_mask.is_there:  # there are only two probabilities
            share = epsilon / q_BA.shape[-1]
            log_probs_BA = torch.full_like(q_BA, math.log(share) if share else least)
            log_probs_BA.scatter_(-1, greedy_B1, math.log(share + 1.0 - epsilon))
            return self._acting(values, log_probs_BA)
        is_allowed = q_BA > least
        probs_BA = epsilon * is_allowed / is_allowed.sum(-1, keepdim=True).clamp(min=1)
        probs_BA.scatter_(-1, greedy_B1, 1.0 - epsilon, reduce="add")
        return self._acting(values, probs_BA.log_().clamp_(min=least))

    def _acting(self, values: dict[str, Any], dist_inputs: Tensor) -> dict[str, Any]:
        outputs: dict[str, Any] = {Columns.ACTION_DIST_INPUTS: dist_inputs}
        if self._recurrent:
            outputs[Columns.STATE_OUT] = values[Columns.STATE_OUT]
        return outputs

    @contextmanager
    def _noise_of_step(self, t: int, num_rows: int) -> Iterator[None]:
        """Fix the noise of noisy layers in the block, another one for each row; it repeats with the run's seed."""
        layers = [layer for layer in self.modules() if isinstance(layer, NoisyLinear)]
        generator = torch.Generator().manual_seed(self.exploration_seed + t)
        for layer in layers:
            layer.fix_noise(generator, num_rows)
        try:
            yield
        finally:
            for layer in layers:
                layer.fix_noise(None)
