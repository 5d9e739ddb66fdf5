"""A user's own code that breaks: an env, a module, a connector, a loss, a callback; all of an episode of 10 steps."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rlzmq import (
    Callback,
    Columns,
    ConnectorV2,
    PPOConfig,
    PPOLearner,
    RLModuleSpec,
    TorchRLModule,
    ValueFunctionAPI,
)
from tests.support.runs import ShortEnv


class Env(ShortEnv):
    observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
    length = 10

    def observation(self) -> Any:
        return np.zeros(3, np.float32)

    def reward(self, action: Any) -> float:
        if self.t == 2 and self.config.get("breaks"):
            self.helper()
        return 1.0

    def helper(self) -> None:
        raise ValueError("the env's own")


class BrokenModule(TorchRLModule, ValueFunctionAPI):
    def setup(self) -> None:
        self.pi = torch.nn.Linear(3, 2)
        self.num_calls = 0

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        if self.num_calls > 4:
            raise RuntimeError("the module's own")
        return {Columns.ACTION_DIST_INPUTS: self.pi(batch[Columns.OBS])}

    def compute_values(self, batch: Any, embeddings: Any = None) -> Any:
        return batch[Columns.OBS].sum(-1)


class BrokenConnector(ConnectorV2):
    def __call__(self, **kwargs: Any) -> Any:
        return {}["the connector's own"]


class BrokenLoss(PPOLearner):
    def compute_loss_for_module(self, **kwargs: Any) -> Any:
        raise ZeroDivisionError("the loss's own")


class BrokenCallback(Callback):
    def on_episode_end(self, **kwargs: Any) -> None:
        raise LookupError("the callback's own")


def broken(part: str, num_processes: int = 0) -> PPOConfig:
    """A config whose `part` breaks; "" has none."""
    config = (
        PPOConfig()
        .environment(Env, env_config={"breaks": part == "env"})
        .env_runners(num_env_runners=num_processes)
        .learners(num_learners=num_processes)
        .training(train_batch_size_per_learner=40, minibatch_size=20, num_epochs=1)
        .debugging(seed=1)
    )
    if part == "module":
        config.rl_module(rl_module_spec=RLModuleSpec(module_class=BrokenModule))
    elif part == "env_to_module":
        config.env_runners(env_to_module_connector=lambda env, spaces, device: BrokenConnector())
    elif part == "learner_connector":
        config.learners(learner_connector=lambda *spaces: BrokenConnector())
    elif part == "loss":
        config.training(learner_class=BrokenLoss)
    elif part == "callback":
        config.callbacks(BrokenCallback)
    return config
