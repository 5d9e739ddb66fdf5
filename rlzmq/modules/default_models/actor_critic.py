"""The default module of PPO and its relatives: encoder, policy head, value head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.spaces import leaf_spaces
from rlzmq.episodes.columns import Columns
from rlzmq.modules.default_models.encoders import MLP, RecurrentEncoder
from rlzmq.modules.default_models.image_encoders import build_encoder, mismatch
from rlzmq.modules.distributions import num_dist_inputs
from rlzmq.modules.rl_module import InferenceOnlyAPI, TorchRLModule, ValueFunctionAPI

__all__ = [
    "ACTION_MASK",
    "ActingChain",
    "DefaultActorCriticModule",
    "DefaultPPOTorchRLModule",
    "ObservationMask",
    "PolicyHead",
    "acting_chain",
    "apply_action_mask",
]


ACTION_MASK = "action_mask"

# Small initial outputs, so that all actions are about equally likely at first, for any features.
_INITIAL_SCALE = 0.01


class PolicyHead(MLP):
    """Maps features ``[..., D]`` to action distribution inputs ``[..., K]``.

    Log standard deviations of Box actions are clamped to ±``log_std_clip_param``. With ``free_log_std`` they are
    separate parameters (initially ``log_std_init``).

    Raises:
        ConfigurationError: ``free_log_std`` is set for another space than a Box of floats.
    """

    _low: Tensor | None
    _high: Tensor | None

    def __init__(
        self,
        input_dim: int,
        action_space: gym.Space[Any],
        config: DefaultModelConfig,
        *,
        where: str = "module",
    ) -> None:
        num_inputs = num_dist_inputs(action_space)
        free = config.free_log_std
        if free and not _is_float_box(action_space):
            raise ConfigurationError(
                f"{where}: model_config['free_log_std'] needs an action space that is a Box of floats, got "
                f"{action_space}"
            )
        super().__init__(
            input_dim,
            config.head_fcnet_hiddens,
            config.head_fcnet_activation,
            config=config,
            prefix="head_fcnet",
            use_layernorm=config.head_fcnet_use_layernorm,
            output_dim=num_inputs // 2 if free else num_inputs,
            output_scale=_INITIAL_SCALE if config.head_fcnet_kernel_initializer is None else 1.0,
        )
        self.log_std: nn.Parameter | None = (
            nn.Parameter(torch.full((num_inputs // 2,), float(config.log_std_init))) if free else None
        )
        bound = _log_std_bound(action_space, config.log_std_clip_param)
        self.register_buffer("_low", None if bound is None else -bound, persistent=False)
        self.register_buffer("_high", bound, persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        outputs = super().forward(features)
        if self.log_std is not None:
            outputs = torch.cat([outputs, self.log_std.expand_as(outputs)], -1)
        # Access as an attribute would cost a search by torch; it is usually None.
        high = self._buffers["_high"]
        if high is not None:
            outputs = outputs.clamp(self._low, high)
        return outputs


def _is_float_box(space: gym.Space[Any]) -> bool:
    return isinstance(space, gym.spaces.Box) and not np.issubdtype(space.dtype, np.integer)


def _log_std_bound(space: gym.Space[Any], clip: float) -> Tensor | None:
    """Return the bound on the magnitude of each distribution input (inf: no bound); None if no input has a bound."""
    if clip is None or math.isinf(clip):
        return None
    if clip <= 0:
        raise ConfigurationError(
            f"model_config['log_std_clip_param']: expected a number above 0, got {clip!r}"
        )
    found: list[float] = []
    for leaf in leaf_spaces(space):
        num_inputs = num_dist_inputs(leaf)
        bounded = num_inputs // 2 if _is_float_box(leaf) else 0
        found += [math.inf] * (num_inputs - bounded) + [float(clip)] * bounded
    return torch.tensor(found) if any(map(math.isfinite, found)) else None


class ObservationMask:
    """Separates observations from their action mask, if there is one.

    A mask is the part ``"action_mask"`` of a Dict (or of its ``"_orig_obs"``, if previous actions were added), for
    Discrete and MultiDiscrete actions: one number per choice, 0 for forbidden ones. A Dict with a single part besides
    the mask becomes that part.

    Attributes:
        space: The observation space without the mask.
        is_there: Whether the observations have a mask.

    Raises:
        ConfigurationError: The mask's size is not the number of choices, or there is nothing besides it.
    """

    space: gym.Space[Any]

    def __init__(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], *, where: str = "module"
    ) -> None:
        self.space = observation_space
        self.is_there: bool = False
        self._key: str | None = None  # of the Dict with the mask; None: the observation
        self._only_key: str | None = None  # of the only part besides the mask
        inner: Any = observation_space
        if isinstance(inner, gym.spaces.Dict) and ACTION_MASK not in inner.spaces:
            self._key, inner = "_orig_obs", inner.spaces.get("_orig_obs")
        is_discrete = isinstance(action_space, gym.spaces.Discrete | gym.spaces.MultiDiscrete)
        if not is_discrete or not isinstance(inner, gym.spaces.Dict) or ACTION_MASK not in inner.spaces:
            return
        mask, num_choices = inner[ACTION_MASK], num_dist_inputs(action_space)
        size = int(np.prod(mask.shape)) if mask.shape is not None else 0
        if size != num_choices:
            raise ConfigurationError(
                f"{where}: observation part {ACTION_MASK!r} is {mask} with {size} numbers, but the action space "
                f"{action_space} has {num_choices} choices; expected one number per choice"
            )
        others = {key: sub for key, sub in inner.spaces.items() if key != ACTION_MASK}
        if not others:
            raise ConfigurationError(
                f"{where}: the observation space {inner} holds an action mask and nothing else; "
                'expected {"observations": …, "action_mask": …}'
            )
        self.is_there = True
        self._only_key = next(iter(others)) if len(others) == 1 else None
        self.space = gym.spaces.Dict(others) if self._only_key is None else others[self._only_key]
        if self._key is not None:
            self.space = gym.spaces.Dict({**observation_space.spaces, self._key: self.space})  # type: ignore[attr-defined]

    def split(self, obs: Any) -> tuple[Any, Any]:
        """Return the observation without its mask, and the mask; None if there is no mask."""
        if not self.is_there:
            return obs, None
        inner = obs if self._key is None else obs[self._key]
        mask = inner[ACTION_MASK]
        if self._only_key is None:
            return obs, mask
        rest = inner[self._only_key]
        return (rest if self._key is None else {**obs, self._key: rest}), mask


def apply_action_mask(logits: Tensor, mask: Tensor) -> Tensor:
    """Return the logits with the lowest float where the mask is 0.

    The value is not -inf, so that a row in which every action is forbidden (often an episode's last observation)
    remains a valid, uniform distribution.
    """
    return logits.masked_fill(mask.reshape(logits.shape) == 0, torch.finfo(logits.dtype).min)


class DefaultActorCriticModule(TorchRLModule, ValueFunctionAPI, InferenceOnlyAPI):
    """Policy and value function for every supported pair of spaces, configured by a DefaultModelConfig.

    ::

        obs ─► encoder ──────────────► pi ─► action_dist_inputs
                  │ vf_share_layers
        obs ─► vf_encoder (otherwise) ► vf ─► values

    Acting computes the upper row only. If the value function has its own LSTM, it runs, too, because training needs its
    state in the episodes.
    """

    def setup(self) -> None:
        config = DefaultModelConfig.from_dict(
            self.model_config, where=f"model_config of the {self.describe()}"
        )
        where = self.describe()
        for name in ("action_space", "observation_space"):
            if getattr(self, name) is None:
                raise ConfigurationError(f"{where} has no {name}")
        assert self.observation_space is not None
        assert self.action_space is not None
        _check_previous(self.observation_space, config, where)
        self._obs_mask = ObservationMask(self.observation_space, self.action_space, where=where)
        space = self._obs_mask.space
        self.encoder: Any = self._encoder(space, config, where)
        self.pi: PolicyHead = PolicyHead(self.encoder.output_dim, self.action_space, config, where=where)
        self.vf_encoder: Any = None if config.vf_share_layers else self._encoder(space, config, where)
        features = self.encoder if self.vf_encoder is None else self.vf_encoder
        for name, part in (("actor_encoder", self.encoder), ("critic_encoder", features)):
            object.__setattr__(self.encoder, name, part)  # RLlib's names for them; not parts of it
        self.vf: MLP = MLP(
            features.output_dim,
            config.head_fcnet_hiddens,
            config.head_fcnet_activation,
            config=config,
            prefix="head_fcnet",
            use_layernorm=config.head_fcnet_use_layernorm,
            output_dim=1,
        )
        self._recurrent = config.use_lstm
        self._separate = self.vf_encoder is not None

    @staticmethod
    def _encoder(space: gym.Space[Any], config: DefaultModelConfig, where: str) -> Any:
        encoder = build_encoder(space, config, where=where)
        return RecurrentEncoder(encoder, config) if config.use_lstm else encoder

    def get_non_inference_attributes(self) -> list[str]:
        if self._separate and not self._recurrent:
            return ["vf", "vf_encoder"]
        return ["vf"]

    def get_initial_state(self) -> Any:
        if not self._recurrent:
            return {}
        if self._separate:
            return {"actor": self.encoder.initial_state(), "critic": self.vf_encoder.initial_state()}
        return self.encoder.initial_state()

    # -- forward passes ------------------------------------------------------------------------

    def _forward(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        try:
            if not (self._recurrent or self._obs_mask.is_there):
                return {Columns.ACTION_DIST_INPUTS: self.pi(self.encoder(batch[Columns.OBS]))}
            outputs, _ = self._act(batch, critic_features=False)
        except Exception as error:
            self._explain(batch, error)
            raise
        return outputs

    def _forward_train(self, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        try:
            outputs, features = self._act(batch, critic_features=True)
        except Exception as error:
            self._explain(batch, error)
            raise
        outputs[Columns.EMBEDDINGS] = features
        return outputs

    def _explain(self, batch: dict[str, Any], error: Exception) -> None:
        """Raise a clearer error if a forward pass failed because of the batch."""
        for column in (Columns.OBS, Columns.STATE_IN)[: 1 + self._recurrent]:
            if column not in batch:
                raise ConfigurationError(
                    f"{self.describe()}: the batch has no column {column!r}, only {sorted(batch)}"
                ) from error
        assert self.observation_space is not None
        problem = mismatch(batch[Columns.OBS], self.observation_space)
        if problem is not None:
            raise ConfigurationError(f"{self.describe()}: {problem}") from error

    def _act(
        self, batch: dict[str, Any], *, critic_features: bool, encoder: Any = None, pi: Any = None
    ) -> tuple[dict[str, Any], Any]:
        """Compute the outputs, and the value head's features (`critic_features`: with a separate encoder, too)."""
        encoder, pi = encoder or self.encoder, pi or self.pi
        obs, mask = self._obs_mask.split(batch[Columns.OBS])
        outputs: dict[str, Any] = {}
        if self._recurrent:
            state = batch[Columns.STATE_IN]
            if self._separate:
                features, actor = encoder(obs, state["actor"])
                value_features, critic = self.vf_encoder(obs, state["critic"])
                outputs[Columns.STATE_OUT] = {"actor": actor, "critic": critic}
            else:
                features, outputs[Columns.STATE_OUT] = encoder(obs, state)
                value_features = features
        else:
            features = encoder(obs)
            value_features = self.vf_encoder(obs) if self._separate and critic_features else features
        logits = pi(features)
        if mask is not None:
            logits = apply_action_mask(logits, mask)
        outputs[Columns.ACTION_DIST_INPUTS] = logits
        return outputs, value_features

    def compute_values(self, batch: dict[str, Any], embeddings: object = None) -> Tensor:
        if "vf" not in self._modules:
            raise RuntimeError(
                f"{self.describe()} was built with inference_only=True and has no value function: build it "
                "without, on the learner's side"
            )
        if embeddings is None:
            obs, _ = self._obs_mask.split(batch[Columns.OBS])
            encoder = self.vf_encoder if self._separate else self.encoder
            if self._recurrent:
                state = batch[Columns.STATE_IN]
                embeddings, _ = encoder(obs, state["critic"] if self._separate else state)
            else:
                embeddings = encoder(obs)
        values: Tensor = self.vf(embeddings).squeeze(-1)
        return values


def _check_previous(space: gym.Space[Any], config: DefaultModelConfig, where: str) -> None:
    parts = space.spaces if isinstance(space, gym.spaces.Dict) else {}
    for setting, part in (
        ("lstm_use_prev_action", "prev_n_actions"),
        ("lstm_use_prev_reward", "prev_n_rewards"),
    ):
        if getattr(config, setting) and part not in parts:
            raise ConfigurationError(
                f"{where}: model_config[{setting!r}] needs {part!r} in the observations, but the observation "
                f"space is {space}. Add the piece: config.env_runners(env_to_module_connector=lambda env, "
                "spaces, device: PrevActionsPrevRewards())"
            )


#: RLlib's name for this class.
DefaultPPOTorchRLModule = DefaultActorCriticModule


DenseLayer = tuple[Tensor, Tensor, Callable[[Tensor], Tensor] | None]
"""(weight, bias, activation)."""

_LSTM_WEIGHTS = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")


class ActingChain:
    """The acting forward pass of the default module with dense encoders, one time step for every row.

    It is the fastest form for few environments, and returns exactly the numbers of the module's forward pass. The
    tensors are the module's own parameters, so weights loaded in place take effect at once.

    Args:
        encoders: The key of an LSTM's part of the state (None: it is the whole state), the layers before it, and its
            weights. The first one's output is the head's input. Empty without an LSTM.
        head: All other layers.
        max_rows: Maximum number of rows; None: any number.
    """

    def __init__(
        self,
        encoders: list[tuple[str | None, list[DenseLayer], list[Any]]],
        head: list[DenseLayer],
        max_rows: int | None,
    ) -> None:
        self._encoders = encoders
        self._head = head
        self._max_rows = max_rows
        first = encoders[0][1] if encoders else head
        self._width = first[0][0].shape[1] if first else None

    def takes(self, x: object) -> bool:
        """Return whether the chain computes what the module does for these inputs."""
        return (
            type(x) is Tensor
            and x.dtype is torch.float32
            and self._width in (x.shape[-1], None)
            and (self._max_rows is None or (x.dim() == 2 and len(x) <= self._max_rows))
        )

    def __call__(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the distribution inputs ``[N, K]`` and the next state.

        Args:
            x: Observations, float32 ``[N, D]``.
            state: The module's state, leaves ``[N, cell]``; None if it has none.
        """
        features: Tensor | None = None
        state_out: Any = None
        for key, layers, weights in self._encoders:
            before = state if key is None else state[key]
            h, c = torch.lstm_cell(run_chain(layers, x), (before["h"], before["c"]), *weights)
            after = {"h": h, "c": c}
            state_out = after if key is None else {**(state_out or {}), key: after}
            if features is None:
                features = h
        return run_chain(self._head, x if features is None else features), state_out


def acting_chain(module: object) -> ActingChain | None:
    """Return the chain of an unchanged default module of dense layers, with an LSTM or without; None for any other.

    It has no layer norm, no action mask and no separate log standard deviations.
    """
    if type(module) is not DefaultActorCriticModule or module._obs_mask.is_there:
        return None
    parts: dict[str | None, Any] = {None: module.encoder}
    if module._recurrent and module._separate:
        parts = {"actor": module.encoder, "critic": module.vf_encoder}
    encoders: list[tuple[str | None, list[DenseLayer], list[Any]]] = []
    first: list[DenseLayer] = []
    max_rows = None
    for key, part in parts.items():
        lstm = part if type(part) is RecurrentEncoder else None
        if _has_hooks(module) or _has_hooks(part) or (lstm is not None and not _is_plain(lstm.lstm)):
            return None
        layers = _dense_layers(part if lstm is None else lstm.tokenizer)
        if layers is None:
            return None
        if lstm is None:
            first = layers
        else:
            encoders.append((key, layers, [lstm.lstm._parameters[name] for name in _LSTM_WEIGHTS]))
            max_rows = lstm.max_cell_rows  # the same for both
    head = _dense_layers(module.pi)
    return None if head is None else ActingChain(encoders, [*first, *head], max_rows)


def run_chain(layers: list[DenseLayer], x: Tensor) -> Tensor:
    """Return the outputs of dense layers for float32 inputs ``[N, D]``."""
    linear = torch.nn.functional.linear
    for weight, bias, activation in layers:
        x = linear(x, weight, bias)
        if activation is not None:
            x = activation(x)
    return x


def _is_plain(lstm: nn.Module) -> bool:
    return not _has_hooks(lstm) and all(name in lstm._parameters for name in _LSTM_WEIGHTS)


def _dense_layers(part: Any) -> list[DenseLayer] | None:
    """Return the layers of an unchanged part of the default module if it consists of dense layers only, else None."""
    is_bounded = type(part) is PolicyHead and (part.log_std is not None or part._high is not None)
    if type(part) not in (MLP, PolicyHead) or is_bounded or _has_hooks(part):
        return None
    layers: list[DenseLayer] = []
    for parameters, _, activation in part.steps():
        if parameters is None:
            return None
        layers.append((parameters["weight"], parameters["bias"], activation))
    return layers


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
