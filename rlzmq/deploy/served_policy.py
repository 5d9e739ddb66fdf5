"""ServedPolicy: computes the actions of many requests in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from rlzmq.algorithms.policy import Policy
from rlzmq.core.tree import leaf_spaces, tree_flatten, tree_leaves
from rlzmq.deploy.policy_graph import FlatPolicyGraph, PolicyGraph, Port, zeros_of
from rlzmq.deploy.request_rows import RequestError, checked_rows, checked_values

__all__ = ["Arrays", "ServedPolicy"]

Arrays = list[npt.NDArray[Any]]
"""Arrays ``[N, ...]`` of N rows, each a step of a different episode."""


class ServedPolicy:
    """A policy of one agent that maps the arrays of requests to the arrays of answers.

    It keeps no state between calls: the policy's memory of an episode is part of the arrays.

    Args:
        policy: The policy; its current episode is not used.

    Attributes:
        module_id: Id of the module that acts.
        agent_id: The agent's id as text; "" in single-agent use.
        graph: The policy as a function of tensors.
        observation_space, action_space: The agent's spaces.
        observations, states: Inputs: the leaves of the observation space, and the parts of the policy's memory.
        reads_rewards: Whether the rewards of the previous actions are also an input.

    Raises:
        ConfigurationError: See `PolicyGraph`.
    """

    action_space: gym.Space[Any]
    observation_space: gym.Space[Any]

    def __init__(self, policy: Policy) -> None:
        self.graph: FlatPolicyGraph = FlatPolicyGraph(PolicyGraph(policy))
        inner = self.graph.policy
        self.module_id: str = inner.module_id
        self.agent_id: str = "" if inner.agent_id is None else str(inner.agent_id)
        self.observation_space, self.action_space = inner.observation_space, inner.action_space
        self.reads_rewards: bool = inner.reads_rewards
        self.observations: list[Port] = [
            port for port in self.graph.inputs if port.name.partition(".")[0] == "obs"
        ]
        self.states: list[Port] = [
            port for port in self.graph.inputs if port.name.partition(".")[0] == "state"
        ]
        self._leaf_spaces = leaf_spaces(self.observation_space)
        self._initial_state = tree_leaves(inner.initial_state) if inner.initial_state else []
        kinds = [port.name.partition(".")[0] for port in self.graph.outputs]
        self._is_answer = [kind in ("actions", "next_state") for kind in kinds]
        self._num_actions = kinds.count("actions")
        self._action_spec = tree_flatten(zeros_of(self.action_space, 1))[1]
        self._generator = torch.Generator()
        self._generator.seed()
        self._act([np.zeros((1, *port.shape), port.dtype) for port in self.graph.inputs], explore=True)

    @property
    def ports(self) -> tuple[list[Port], list[Port]]:
        """Inputs and outputs; policies with equal ports answer the same requests."""
        return self.graph.inputs, [
            port for port, is_answer in zip(self.graph.outputs, self._is_answer, strict=True) if is_answer
        ]

    def inputs_of(
        self, observations: Arrays, rewards: npt.NDArray[Any] | None, state: Arrays | None
    ) -> Arrays:
        """Return a request's arrays, checked, in the order of the graph's inputs.

        Args:
            observations: One array for each of `observations`.
            rewards: ``[N]``, the rewards of the previous actions; None: 0.
            state: One array for each of `states`; None: the beginning of an episode.

        Raises:
            RequestError: The arrays do not fit; see `checked_rows`.
        """
        if len(observations) != len(self._leaf_spaces):
            raise RequestError(
                f"expected {len(self._leaf_spaces)} arrays of observations, got {len(observations)}"
            )
        inputs = [
            checked_rows(space, array, port.name)
            for space, array, port in zip(self._leaf_spaces, observations, self.observations, strict=True)
        ]
        num_rows = len(inputs[0])
        if num_rows == 0 or any(len(array) != num_rows for array in inputs):
            raise RequestError(f"expected as many rows in all arrays, got {[len(array) for array in inputs]}")
        if self.reads_rewards:
            given = np.zeros(num_rows, np.float32) if rewards is None else rewards
            inputs.append(
                checked_values(Port("rewards", np.dtype(np.float32), ()), given, num_rows, "rewards")
            )
        if state is None:
            return inputs + [
                np.broadcast_to(leaf, (num_rows, *np.shape(leaf))) for leaf in self._initial_state
            ]
        if len(state) != len(self.states):
            raise RequestError(f"expected {len(self.states)} arrays of state, got {len(state)}")
        return inputs + [
            checked_values(port, array, num_rows, port.name)
            for port, array in zip(self.states, state, strict=True)
        ]

    def compute(self, requests: Sequence[Arrays], *, explore: bool) -> list[Arrays]:
        """Return the answers to requests: the leaves of the actions, then those of the next state.

        Args:
            requests: The inputs of each request, from `inputs_of`.
            explore: Whether to sample from the exploration distribution.
        """
        joined = [
            np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in zip(*requests, strict=True)
        ]
        answers = self._act(joined, explore=explore)
        if len(requests) == 1:
            return [answers]
        split, first = [], 0
        for inputs in requests:
            last = first + len(inputs[0])
            split.append([array[first:last] for array in answers])
            first = last
        return split

    def nested(self, answer: Arrays) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
        """Return an answer as (tree of actions, next state by name)."""
        actions = self._action_spec.unflatten(answer[: self._num_actions])
        names = (port.name.partition(".")[2] for port in self.states)
        return actions, dict(zip(names, answer[self._num_actions :], strict=True))

    def _act(self, inputs: Arrays, *, explore: bool) -> Arrays:
        with torch.inference_mode():
            tensors = [
                torch.from_numpy(
                    array if array.flags.writeable and array.flags.c_contiguous else array.copy()
                )
                for array in inputs
            ]
            outputs = self.graph.explore(self._generator, *tensors) if explore else self.graph(*tensors)
        return [
            tensor.numpy() for tensor, is_answer in zip(outputs, self._is_answer, strict=True) if is_answer
        ]
