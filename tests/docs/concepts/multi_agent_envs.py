"""Multi-agent envs: a game, a mapping that draws, and heuristic modules beside a learning one."""

import random

import gymnasium as gym
import numpy as np

from rlzmq import (
    Columns,
    MultiAgentEnv,
    MultiRLModuleSpec,
    PPOConfig,
    RLModule,
    RLModuleSpec,
    override,
)


class RockPaperScissors(MultiAgentEnv):
    ROCK, PAPER, SCISSORS = range(3)
    WIN_MATRIX = {  # noqa: RUF012
        (0, 0): (0, 0), (0, 1): (-1, 1), (0, 2): (1, -1), (1, 0): (1, -1), (1, 1): (0, 0),
        (1, 2): (-1, 1), (2, 0): (-1, 1), (2, 1): (1, -1), (2, 2): (0, 0),
    }  # fmt: skip

    def __init__(self, config=None):
        super().__init__()
        self.agents = self.possible_agents = ["player1", "player2"]
        self.observation_spaces = self.action_spaces = {
            "player1": gym.spaces.Discrete(3),
            "player2": gym.spaces.Discrete(3),
        }
        self.num_moves = 0

    def reset(self, *, seed=None, options=None):
        self.num_moves = 0
        return {"player1": 0, "player2": 0}, {}

    def step(self, action_dict):
        self.num_moves += 1
        move1, move2 = action_dict["player1"], action_dict["player2"]
        r1, r2 = self.WIN_MATRIX[move1, move2]
        return (
            {"player1": move2, "player2": move1},
            {"player1": r1, "player2": r2},
            {"__all__": self.num_moves >= 10},
            {},
            {},
        )


class AlwaysSameHeuristicRLM(RLModule):
    @override(RLModule)
    def setup(self):
        super().setup()
        self._move = 2

    @override(RLModule)
    def _forward_inference(self, batch, **kwargs):
        return {Columns.ACTIONS: [self._move] * len(batch[Columns.OBS])}

    @override(RLModule)
    def _forward_exploration(self, batch, **kwargs):
        return self._forward_inference(batch, **kwargs)

    @override(RLModule)
    def _forward_train(self, batch, **kwargs):
        raise NotImplementedError("this module is not trained")


class RandomRLModule(RLModule):
    @override(RLModule)
    def _forward(self, batch, **kwargs):
        return {
            Columns.ACTIONS: np.array([self.action_space.sample() for _ in range(len(batch[Columns.OBS]))])
        }

    @override(RLModule)
    def _forward_train(self, *args, **kwargs):
        raise NotImplementedError("this module is not trained")

    def compile(self, *args, **kwargs):
        pass


def policy_mapping_fn(agent_id, episode, **kwargs):
    if agent_id == "player1":
        return "learned"
    return random.choice(["always_same", "random"])


config = (
    PPOConfig()
    .environment(RockPaperScissors)
    .env_runners(num_env_runners=1, num_envs_per_env_runner=2)
    .learners(num_learners=1)
    .multi_agent(
        policies={"always_same", "random", "learned"},
        policy_mapping_fn=policy_mapping_fn,
        policies_to_train=["learned"],
    )
    .rl_module(
        rl_module_spec=MultiRLModuleSpec(
            rl_module_specs={
                "always_same": RLModuleSpec(module_class=AlwaysSameHeuristicRLM),
                "random": RLModuleSpec(module_class=RandomRLModule),
                "learned": RLModuleSpec(),
            }
        )
    )
    .evaluation(evaluation_interval=1, evaluation_duration=2)
)
algo = config.build_algo()
result = algo.train()
assert result["learners"]["learned"]["num_module_steps_trained"] >= 250
assert "random" not in result["learners"]
assert result["evaluation"]["env_runners"]["num_episodes"] == 2
path = algo.save_to_path()
algo.stop()
algo = config.build_algo()
algo.restore_from_path(path)
algo.sync_weights()
assert algo.train()["training_iteration"] == 2
assert isinstance(algo.get_module("always_same"), AlwaysSameHeuristicRLM)
algo.stop()
