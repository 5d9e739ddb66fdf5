"""A user's script with an env, a module, a connector, callbacks and a run: type checkers have nothing to say."""

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from rlzmq import (
    Algorithm,
    Columns,
    ConnectorV2,
    EnvContext,
    PPOConfig,
    RLlibCallback,
    RLModuleSpec,
    SingleAgentEpisode,
    TorchRLModule,
    ValueFunctionAPI,
)

Observation = npt.NDArray[np.float32]


class Corridor(gym.Env[Observation, np.int64]):
    def __init__(self, config: EnvContext) -> None:
        self.length = int(config.get("length", 5))
        self.observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self.position = self.num_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        super().reset(seed=seed)
        self.position = self.num_steps = 0
        return self.observe(), {}

    def step(self, action: np.int64) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self.position = max(0, self.position + (1 if action else -1))
        self.num_steps += 1
        return self.observe(), -0.1, self.position >= self.length, self.num_steps >= 50, {}

    def observe(self) -> Observation:
        return np.array([self.position / self.length], np.float32)


class Net(TorchRLModule, ValueFunctionAPI):
    def setup(self) -> None:
        self.layer = torch.nn.Linear(1, 2)
        self.critic = torch.nn.Linear(1, 1)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: self.layer(batch[Columns.OBS])}

    def compute_values(self, batch: dict[str, Any], embeddings: torch.Tensor | None = None) -> torch.Tensor:
        values: torch.Tensor = self.critic(batch[Columns.OBS])
        return values.squeeze(-1)


class Doubled(ConnectorV2):
    def __call__(
        self, *, batch: dict[str, Any], episodes: Sequence[SingleAgentEpisode], **kwargs: Any
    ) -> Any:
        for episode in episodes:
            self.add_batch_item(batch, Columns.OBS, 2 * episode.get_observations(-1), episode)
        return batch


class Report(RLlibCallback):
    def on_train_result(self, *, algorithm: Algorithm, result: dict[str, Any], **kwargs: Any) -> None:
        print(algorithm.iteration, result["env_runners"]["episode_return_mean"])


def main() -> None:
    config = (
        PPOConfig()
        .environment(Corridor, env_config={"length": 3})
        .env_runners(num_env_runners=0, env_to_module_connector=lambda env, spaces, device: Doubled())
        .training(lr=1e-3, train_batch_size_per_learner=500, minibatch_size=100, clip_param=0.2)
        .rl_module(rl_module_spec=RLModuleSpec(module_class=Net))
        .callbacks(Report)
        .evaluation(evaluation_interval=1, evaluation_config={"explore": False})
    )
    config.lr = 1e-4
    with config.build() as algo:
        for _ in range(3):
            print(algo.train()["env_runners"]["episode_return_mean"])
        path = algo.save_to_path()
    with Algorithm.from_checkpoint(path, config=config.copy(copy_frozen=False)) as again:
        again.evaluate()


if __name__ == "__main__":
    main()
