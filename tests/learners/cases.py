"""Small configurations, modules and made-up episodes for the learner tests."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlzmq.algorithms.ppo import PPOConfig
from rlzmq.algorithms.ppo.ppo_learner import PPOLearner
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.learners.learner import Learner
from rlzmq.modules.multi_rl_module_spec import MultiRLModuleSpec
from rlzmq.modules.rl_module import TorchRLModule
from rlzmq.modules.spec import RLModuleSpec

OBSERVATION_SPACE = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
ACTION_SPACE = gym.spaces.Discrete(2)


def ppo_config(model_config: dict[str, Any] | None = None, **training: Any) -> PPOConfig:
    return (
        PPOConfig()
        .environment(observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE)
        .rl_module(model_config=model_config or {"fcnet_hiddens": [16]})
        .training(
            **{"train_batch_size_per_learner": 64, "minibatch_size": 32, "num_epochs": 2, "lr": 1e-3}
            | training
        )
        .debugging(seed=11)
    )


def ppo_learner(config: PPOConfig | None = None, **kwargs: Any) -> PPOLearner:
    config = config or ppo_config()
    spec = RLModuleSpec(
        observation_space=OBSERVATION_SPACE, action_space=ACTION_SPACE, model_config=config.model_config
    )
    learner = PPOLearner(config=config, module_spec=spec, **kwargs)
    learner.build()
    return learner


class LinearModule(TorchRLModule):
    """One linear layer; ``forward_train`` gives its output."""

    def setup(self) -> None:
        self.layer = nn.Linear(self.observation_space.shape[0], self.action_space.n)  # type: ignore[union-attr,index]
        self.extra = nn.Linear(4, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.layer(batch[Columns.OBS])}


class SquareLearner(Learner):
    """Loss: mean square of the outputs, NaN where the batch says so."""

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: dict[str, Any], fwd_out: dict[str, Any]
    ) -> Tensor:
        return fwd_out[Columns.ACTION_DIST_INPUTS].square().mean()


def linear_spec(module_class: type[TorchRLModule] = LinearModule) -> RLModuleSpec:
    return RLModuleSpec(module_class, OBSERVATION_SPACE, ACTION_SPACE)


def square_learner(
    *module_ids: str,
    learner_class: type[Learner] = SquareLearner,
    module_class: type[TorchRLModule] = LinearModule,
    **settings: Any,
) -> Learner:
    config = ppo_config(**settings)
    spec: Any = linear_spec(module_class)
    if module_ids:
        spec = MultiRLModuleSpec(rl_module_specs=dict.fromkeys(module_ids, spec))
    learner = learner_class(config=config, module_spec=spec)
    learner.build()
    return learner


def rows(num_rows: int, seed: int = 0) -> dict[str, Tensor]:
    return {Columns.OBS: torch.randn(num_rows, 4, generator=torch.Generator().manual_seed(seed))}


def episode(
    num_steps: int, *, seed: int = 0, id_: str | None = None, terminated: bool = False, t_started: int = 0
) -> SingleAgentEpisode:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(num_steps, 2)).astype(np.float32)
    actions = rng.integers(0, 2, num_steps)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return SingleAgentEpisode(
        id_=id_ or f"episode_{seed}",
        observations=list(rng.normal(size=(num_steps + 1, 4)).astype(np.float32)),
        observation_space=OBSERVATION_SPACE,
        actions=list(actions),
        action_space=ACTION_SPACE,
        rewards=[float(reward) for reward in rng.normal(size=num_steps)],
        infos=[{} for _ in range(num_steps + 1)],
        terminated=terminated,
        extra_model_outputs={
            Columns.ACTION_DIST_INPUTS: list(logits),
            Columns.ACTION_LOGP: list(logp[np.arange(num_steps), actions]),
        },
        t_started=t_started,
        len_lookback_buffer=0,
    )


def episodes(*num_steps: int) -> list[SingleAgentEpisode]:
    return [episode(n, seed=i, terminated=i % 2 == 0) for i, n in enumerate(num_steps)]


def episode_batch(*num_steps: int) -> EpisodeBatch:
    return EpisodeBatch.from_episodes([one.to_numpy() for one in episodes(*num_steps)])
