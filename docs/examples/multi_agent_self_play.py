# /// script
# requires-python = ">=3.11"
# dependencies = ["rlzmq"]
# ///
"""Train an agent against frozen copies of itself, and add a copy whenever it wins often."""

import argparse
import random

import gymnasium as gym
import numpy as np

from rlzmq import MultiAgentEnv, PPOConfig


class TugOfWar(MultiAgentEnv):
    """Two players pull a rope for ten rounds, with a strength of 0, 1 or 2; each has a strength of 10 in all.

    Each observes the rope from its side, its own and the other's strength that is left, and the round. The reward is
    +1 for who has the rope on its side at the end, -1 for the other.
    """

    def __init__(self, config=None):
        super().__init__()
        self.possible_agents = self.agents = ["first", "second"]
        space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
        self.observation_spaces = dict.fromkeys(self.agents, space)
        self.action_spaces = dict.fromkeys(self.agents, gym.spaces.Discrete(3))

    def reset(self, *, seed=None, options=None):
        self.rope, self.num_rounds, self.left = (
            0,
            0,
            {"first": 10, "second": 10},
        )
        return self.observe(), {}

    def observe(self):
        def of(agent, other, side):
            values = [
                side * self.rope / 10,
                self.left[agent] / 10,
                self.left[other] / 10,
                self.num_rounds / 10,
            ]
            return np.clip(np.array(values, np.float32), -1.0, 1.0)

        return {
            "first": of("first", "second", 1),
            "second": of("second", "first", -1),
        }

    def step(self, actions):
        for agent, side in (("first", 1), ("second", -1)):
            pull = min(int(actions[agent]), self.left[agent])
            self.left[agent] -= pull
            self.rope += side * pull
        self.num_rounds += 1
        ended = self.num_rounds == 10 or abs(self.rope) >= 4
        won = float(np.sign(self.rope)) if ended else 0.0
        return (
            self.observe(),
            {"first": won, "second": -won},
            {"__all__": ended},
            {"__all__": False},
            {},
        )


class Opponents:
    """Maps "first" to the module that learns and "second" to one of the frozen copies, by episode."""

    def __init__(self, module_ids):
        self.module_ids = module_ids

    def __call__(self, agent_id, episode):
        return (
            "learning"
            if agent_id == "first"
            else random.Random(episode.id_).choice(self.module_ids)
        )


def main(iterations):
    config = (
        PPOConfig()
        .environment(TugOfWar)
        .multi_agent(
            policies={"learning", "copy_0"},
            policy_mapping_fn=Opponents(["copy_0"]),
            policies_to_train=["learning"],
        )
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8)
        .training(
            train_batch_size_per_learner=800,
            minibatch_size=200,
            num_epochs=5,
            lr=1e-3,
        )
        .debugging(seed=0)
    )
    copies = ["copy_0"]
    with config.build() as algo:
        for _ in range(iterations):
            result = algo.train()
            score = result["env_runners"]["agent_episode_return_mean"]["first"]
            print(f"against {len(copies)} frozen copies: {score:+.2f}")
            if score > 0.5:
                copies.append(f"copy_{len(copies)}")
                algo.add_module(
                    copies[-1], new_agent_to_module_mapping_fn=Opponents(copies)
                )
                algo.learner_group.set_weights(
                    {copies[-1]: algo.get_module("learning").get_state()}
                )
                algo.sync_weights()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=40)
    main(parser.parse_args().iterations)
