"""The default module of PPO and its relatives: encoder, policy head, value head."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from torch import Tensor

from rlzmq.config.model_config import DefaultModelConfig
from rlzmq.core.errors import ConfigurationError
from rlzmq.episodes.columns import Columns
from rlzmq.modules.apis import InferenceOnlyAPI, ValueFunctionAPI
from rlzmq.modules.default_models.heads import ObservationMask, PolicyHead, apply_action_mask
from rlzmq.modules.default_models.mlp import MLP
from rlzmq.modules.default_models.recurrent import RecurrentEncoder
from rlzmq.modules.default_models.streams import build_encoder, mismatch
from rlzmq.modules.rl_module import TorchRLModule

__all__ = ["DefaultActorCriticModule", "DefaultPPOTorchRLModule"]


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
        self._mask = ObservationMask(self.observation_space, self.action_space, where=where)
        space = self._mask.space
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
        self._plain = not (self._recurrent or self._mask.is_there)

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

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        try:
            if self._plain:
                return {Columns.ACTION_DIST_INPUTS: self.pi(self.encoder(batch[Columns.OBS]))}
            outputs, _ = self._act(batch, critic_features=False)
        except Exception as error:
            self._explain(batch, error)
            raise
        return outputs

    def _forward_train(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
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
                raise ValueError(
                    f"{self.describe()}: the batch has no column {column!r}, only {sorted(batch)}"
                ) from error
        assert self.observation_space is not None
        problem = mismatch(batch[Columns.OBS], self.observation_space)
        if problem is not None:
            raise ValueError(f"{self.describe()}: {problem}") from error

    def _act(
        self, batch: dict[str, Any], *, critic_features: bool, encoder: Any = None, pi: Any = None
    ) -> tuple[dict[str, Any], Any]:
        """Compute the outputs, and the value head's features.

        Args:
            batch: Column -> tensor or tree.
            critic_features: Whether to compute the features of a separate value encoder, too.
            encoder, pi: Replacements for the module's own parts, e.g. of a target network.
        """
        encoder, pi = encoder or self.encoder, pi or self.pi
        obs, mask = self._mask.split(batch[Columns.OBS])
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

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> Tensor:
        if "vf" not in self._modules:
            raise RuntimeError(
                f"{self.describe()} was built with inference_only=True and has no value function: build it "
                "without, on the learner's side"
            )
        if embeddings is None:
            obs, _ = self._mask.split(batch[Columns.OBS])
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
