"""EpisodeGraph: a policy whose connectors only work on episodes, as one function of tensors.

    observation, reward, state ─► episode of the last steps ─► the policy's pipelines ─► the env's action
                                            └─► the last steps, with this one ─► next state

It answers the same calls as `PolicyGraph`, for connector pieces without `to_torch`. Each row is computed in Python, so
it is slower, and it cannot be exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rlzmq.algorithms.policy import Policy
from rlzmq.core.tree import tree_map, tree_stack, tree_unstack
from rlzmq.deploy.policy_graph import GraphOutputs, zeros_of

__all__ = ["EpisodeGraph"]

_NUM_STEPS = "num_steps"


class EpisodeGraph:
    """A policy of one agent as a function of tensors, whose state are the last steps of the episode.

    Each of the B rows is a step of a different episode. Pieces see an episode with as many earlier steps as
    ``Policy`` keeps: the largest `required_lookback`, `episode_lookback_horizon`, at least one. A piece that
    keeps data of an episode itself sees a new episode at every step.

    Attributes:
        observation_space, action_space: The agent's spaces in the env.
        initial_state: The number of steps so far, and the last steps as arrays ``[lookback, ...]``, oldest first.
        reads_rewards: True.
        module_id, agent_id: See `Policy.acting_module`.

    Raises:
        ConfigurationError: The policy plays several agents.
    """

    agent_id: Any
    module_id: str
    reads_rewards: bool = True

    def __init__(self, policy: Policy) -> None:
        self.module_id, _, self.agent_id = policy.acting_module()
        self.observation_space: gym.Space[Any] = policy.observation_space
        self.action_space: gym.Space[Any] = policy.action_space
        self._policy = policy.copy()
        self._lookback = policy.lookback
        observation = tree_map(lambda leaf: leaf[0], zeros_of(self.observation_space, 1))
        # With exploration modules have more outputs.
        (_, (greedy,)), (_, (drawn,)) = (
            self._acted([self._policy.begin_episode(observation)], explore, None) for explore in (False, True)
        )
        step = {**greedy, "extras": {**greedy["extras"], **drawn["extras"]}}
        self._blank: dict[str, Any] = tree_map(lambda leaf: np.zeros_like(np.asarray(leaf)), step)
        self.initial_state: dict[str, Any] = {
            _NUM_STEPS: np.zeros((), np.int64),
            **tree_map(lambda leaf: np.repeat(leaf[None], self._lookback, axis=0), self._blank),
        }

    def __call__(
        self,
        observations: Any,
        state: dict[str, Any],
        rewards: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> GraphOutputs:
        """Compute the actions of B episodes for one step; see `PolicyGraph.forward`."""
        observations, state = tree_map(lambda tensor: tensor.numpy(), (observations, state))
        rows, memories = tree_unstack(observations), tree_unstack(state)
        given = np.zeros(len(rows), np.float32) if rewards is None else rewards.numpy()
        episodes = [
            self._continued(observation, memory, reward)
            if memory[_NUM_STEPS] > 0
            else self._policy.begin_episode(observation)
            for observation, memory, reward in zip(rows, memories, given, strict=True)
        ]
        for_env, steps = self._acted(episodes, generator is not None, generator)
        next_memories = [
            self._remembered(memory, reward, step)
            for memory, reward, step in zip(memories, given, steps, strict=True)
        ]
        actions_for_env, next_state = tree_map(
            lambda array: torch.from_numpy(np.ascontiguousarray(array)),
            (tree_stack(for_env), tree_stack(next_memories)),
        )
        return GraphOutputs(actions_for_env, next_state, None)

    def _remembered(self, memory: Mapping[str, Any], reward: Any, step: Mapping[str, Any]) -> dict[str, Any]:
        past = {name: memory[name] for name in self._blank}
        past["rewards"] = np.append(past["rewards"][:-1], np.float32(reward))
        step = {**step, "extras": {**self._blank["extras"], **step["extras"]}}
        shifted = tree_map(
            lambda before, newest: np.concatenate([before[1:], np.asarray(newest, before.dtype)[None]]),
            past,
            step,
        )
        return {_NUM_STEPS: memory[_NUM_STEPS] + 1, **shifted}

    def _continued(self, observation: Any, memory: Mapping[str, Any], reward: Any) -> Any:
        num_steps = int(memory[_NUM_STEPS])
        known = min(num_steps, self._lookback)
        past = {
            name: tree_unstack(tree_map(lambda leaf: leaf[self._lookback - known :], memory[name]))
            for name in self._blank
        }
        return self._policy.continue_episode(
            [*past["observations"], observation],
            past["actions"],
            [float(each) for each in past["rewards"][:-1]] + [float(reward)],
            past["extras"],
            num_steps,
        )

    def _acted(
        self, episodes: list[Any], explore: bool, generator: torch.Generator | None
    ) -> tuple[list[Any], list[dict[str, Any]]]:
        """Return the actions for the env, and the steps as they are remembered."""
        for_env, actions, extras = self._policy.act_in(episodes, explore=explore, generator=generator)
        agent = self.agent_id
        own = episodes if agent is None else [episode.agent_episodes[agent] for episode in episodes]
        steps = [
            {
                "observations": episode.get_observations(-1),
                "actions": action,
                "rewards": np.float32(0.0),  # known at the next step
                "extras": extra,
            }
            for episode, action, extra in zip(own, actions, extras, strict=True)
        ]
        return for_env, steps
