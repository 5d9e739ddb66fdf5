"""ServedPolicy: computes the actions of many requests in one forward pass."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from rlzmq.algorithms.policy import Policy
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.tree import leaf_spaces, tree_flatten, tree_leaves
from rlzmq.deploy.episode_graph import EpisodeGraph
from rlzmq.deploy.policy_graph import FlatPolicyGraph, PolicyGraph, Port, zeros_of
from rlzmq.deploy.request_rows import RequestError, check_finite, check_rows, fitting_rows, fitting_values

__all__ = ["Arrays", "ServedPolicy"]

_log = logging.getLogger("rlzmq.serve")

Arrays = list[npt.NDArray[Any]]
"""Arrays ``[N, ...]`` of N rows, each a step of a different episode."""

_REWARDS = Port("rewards", np.dtype(np.float32), ())


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
        ConfigurationError: The policy plays several agents.
    """

    action_space: gym.Space[Any]
    observation_space: gym.Space[Any]

    def __init__(self, policy: Policy) -> None:
        self.graph: FlatPolicyGraph = FlatPolicyGraph(_graph_of(policy))
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
        """Return a request's arrays, of the right shapes and dtypes, in the order of the graph's inputs.

        Args:
            observations: One array for each of `observations`.
            rewards: ``[N]``, the rewards of the previous actions; None: 0.
            state: One array for each of `states`; None: the beginning of an episode.

        Raises:
            RequestError: A shape or dtype is wrong. `compute` checks the values.
        """
        if len(observations) != len(self._leaf_spaces):
            raise RequestError(
                f"expected {len(self._leaf_spaces)} arrays of observations, got {len(observations)}"
            )
        inputs = [
            fitting_rows(space, array, port.name)
            for space, array, port in zip(self._leaf_spaces, observations, self.observations, strict=True)
        ]
        num_rows = len(inputs[0])
        if num_rows == 0 or any(len(array) != num_rows for array in inputs):
            raise RequestError(f"expected as many rows in all arrays, got {[len(array) for array in inputs]}")
        if self.reads_rewards:
            given = np.zeros(num_rows, np.float32) if rewards is None else rewards
            inputs.append(fitting_values(_REWARDS, given, num_rows, "rewards"))
        if state is None:
            return inputs + [np.repeat(leaf[None], num_rows, axis=0) for leaf in self._initial_state]
        if len(state) != len(self.states):
            raise RequestError(f"expected {len(self.states)} arrays of state, got {len(state)}")
        return inputs + [
            fitting_values(port, array, num_rows, port.name)
            for port, array in zip(self.states, state, strict=True)
        ]

    def compute(self, requests: Sequence[Arrays], *, explore: bool) -> list[Arrays | RequestError]:
        """Return the answers to requests: the leaves of the actions, then those of the next state.

        A request whose values are not finite, or out of range, gets an error, without effect on the others.

        Args:
            requests: The inputs of each request, from `inputs_of`.
            explore: Whether to sample from the exploration distribution.
        """
        joined = [_joined(parts) for parts in zip(*requests, strict=True)]
        if self._error_in(joined) is not None:
            errors = [self._error_in(inputs) for inputs in requests]
            good = [inputs for inputs, error in zip(requests, errors, strict=True) if error is None]
            computed = iter(self.compute(good, explore=explore) if good else ())
            return [next(computed) if error is None else error for error in errors]
        answers = self._act(joined, explore=explore)
        if len(requests) == 1:
            return [answers]
        split: list[Arrays | RequestError] = []
        first = 0
        for inputs in requests:
            last = first + len(inputs[0])
            split.append([array[first:last] for array in answers])
            first = last
        return split

    def _error_in(self, inputs: Arrays) -> RequestError | None:
        """Return what is wrong with the values of inputs; None if nothing is."""
        try:
            for index, (port, array) in enumerate(zip(self.graph.inputs, inputs, strict=True)):
                if index < len(self._leaf_spaces):
                    check_rows(self._leaf_spaces[index], array, port.name)
                else:
                    check_finite(array, port.name)
        except RequestError as error:
            return error
        return None

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


def _graph_of(policy: Policy) -> PolicyGraph | EpisodeGraph:
    policy.acting_module()
    try:
        return PolicyGraph(policy)
    except ConfigurationError as error:
        _log.warning("Each observation is computed by itself, in Python, which is slower: %s", error)
        return EpisodeGraph(policy)


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return arrays ``[N, ...]`` of one dtype as one.

    Unlike `numpy.concatenate`, this does not release Python's lock at each part, and so is not held up by the thread
    that receives requests.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    buffers: list[Any] = [part if part.flags.c_contiguous else np.array(part, order="C") for part in parts]
    joined: npt.NDArray[Any] = np.frombuffer(bytearray().join(buffers), first.dtype)
    return joined.reshape(-1, *first.shape[1:])
