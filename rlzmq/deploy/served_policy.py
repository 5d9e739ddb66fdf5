"""ServedPolicy: computes the actions of many requests in one forward pass.

Requests of several clients share a forward pass, so they are checked first: structure, shape and dtype of each on its
arrival (`fitting_rows`, `fitting_values`); then, for all rows of the forward pass at once, that numbers are finite and
discrete values, which modules use as indices, in their range (`check_rows`).

    observation, reward, state ─► episode of the last steps ─► the policy's pipelines ─► the env's action
                                            └─► the last steps, with this one ─► next state

`EpisodeGraph` answers the same calls as `PolicyGraph`, for connector pieces without `to_torch`. Each row is computed in
Python, so it is slower, and it cannot be exported.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from rlzmq.algorithms.policy import Policy
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.printable import cut
from rlzmq.core.spaces import leaf_spaces
from rlzmq.core.tree import tree_flatten, tree_leaves, tree_map, tree_stack, tree_unstack
from rlzmq.deploy.policy_graph import FlatPolicyGraph, GraphOutputs, PolicyGraph, Port, zeros_of

__all__ = ["Arrays", "RequestError", "ServedPolicy", "check_rows", "rows_from_json", "values_from_json"]


_Array = npt.NDArray[Any]
_SPACE_BYTES = 200  # the bounds of images are long


class RequestError(ValueError):
    """A request that does not fit the policy. The text describes what is expected."""


def rows_from_json(space: gym.Space[Any], values: Sequence[Any], where: str) -> list[_Array]:
    """Return values of a space as arrays ``[N, ...]``, one for each leaf of the space.

    Args:
        space: The space; a Dict's value is an object, a Tuple's a list.
        values: N values as `json.loads` returns them.
        where: Name of the values in error messages.

    Raises:
        RequestError: A value is not in the space.
    """
    if isinstance(space, gym.spaces.Dict):
        keys = sorted(space.spaces)
        for value in values:
            if not isinstance(value, dict) or sorted(value) != keys:
                got = f"the keys {sorted(value)}" if isinstance(value, dict) else _kind(value)
                raise RequestError(f"{where}: expected an object with the keys {keys}, got {got:.200}")
        parts = [(f"{where}.{key}", space.spaces[key], [value[key] for value in values]) for key in keys]
    elif isinstance(space, gym.spaces.Tuple):
        for value in values:
            if not isinstance(value, list) or len(value) != len(space.spaces):
                got = f"a list of {len(value)}" if isinstance(value, list) else _kind(value)
                raise RequestError(f"{where}: expected a list of {len(space.spaces)} parts, got {got}")
        parts = [
            (f"{where}.{index}", part, [value[index] for value in values])
            for index, part in enumerate(space.spaces)
        ]
    else:
        return [_checked_rows(space, _numbers(values, where), where)]
    return [leaf for name, part, own in parts for leaf in rows_from_json(part, own, name)]


def values_from_json(ports: Sequence[Port], values: object, num_rows: int, where: str) -> list[_Array]:
    """Return the arrays of ports, from a dict of a port's name (without its first part) to N JSON values.

    Raises:
        RequestError: A port is missing or unknown, or its value has the wrong shape.
    """
    names = [port.name.partition(".")[2] for port in ports]
    if not isinstance(values, Mapping) or sorted(values) != sorted(names):
        got = f"the keys {sorted(values)}" if isinstance(values, Mapping) else _kind(values)
        raise RequestError(f"{where}: expected an object with the keys {sorted(names)}, got {got:.200}")
    found = []
    for name, port in zip(names, ports, strict=True):
        if not isinstance(values[name], list):
            raise RequestError(f"{where}.{name}: expected a list, got {_kind(values[name])}")
        found.append(
            fitting_values(port, _numbers(values[name], f"{where}.{name}"), num_rows, f"{where}.{name}")
        )
    return found


def _checked_rows(space: gym.Space[Any], array: _Array, where: str) -> _Array:
    array = fitting_rows(space, array, where)
    check_rows(space, array, where)
    return array


def fitting_rows(space: gym.Space[Any], array: _Array, where: str) -> _Array:
    """Return N values of a space without parts, in the space's dtype. Their values are not checked.

    Args:
        space: Box, Discrete, MultiDiscrete or MultiBinary.
        array: ``[N, ...]`` of any numbers.
        where: Name of the array in error messages.

    Raises:
        RequestError: The shape or dtype is wrong.
    """
    shape = tuple(space.shape or ())
    if array.ndim == 0 or array.shape[1:] != shape:
        raise RequestError(
            f"{where}: expected shape {shape}, got {array.shape[1:]}; the space is {_shown(space)}"
        )
    assert space.dtype is not None
    return _as_dtype(array, space.dtype, where)


def check_rows(space: gym.Space[Any], array: _Array, where: str) -> None:
    """Check the values of an array from `fitting_rows`.

    Raises:
        RequestError: A number is not finite, or a discrete value is out of range.
    """
    check_finite(array, where)
    if isinstance(space, gym.spaces.Discrete):
        _check_range(array, space.start, space.start + space.n - 1, space, where)
    elif isinstance(space, gym.spaces.MultiDiscrete):
        _check_range(array, space.start, space.start + space.nvec - 1, space, where)
    elif isinstance(space, gym.spaces.MultiBinary):
        _check_range(array, 0, 1, space, where)


def check_finite(array: _Array, where: str) -> None:
    """Raise a RequestError if a number is not finite."""
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError(f"{where}: expected finite numbers of dtype {array.dtype}")


def fitting_values(port: Port, array: _Array, num_rows: int, where: str) -> _Array:
    """Return a port's array ``[N, ...]``, converted to its dtype.

    Raises:
        RequestError: The shape or dtype is wrong.
    """
    if array.shape != (num_rows, *port.shape):
        raise RequestError(f"{where}: expected shape {(num_rows, *port.shape)}, got {array.shape}")
    return _as_dtype(array, port.dtype, where)


def _as_dtype(array: _Array, dtype: np.dtype[Any], where: str) -> _Array:
    """Return the same numbers in another dtype."""
    if array.dtype != dtype:
        if array.dtype.kind not in "biuf":
            raise RequestError(f"{where}: expected numbers of dtype {dtype}, got {array.dtype}")
        if dtype.kind == "f":
            with np.errstate(over="ignore"):
                array = array.astype(dtype)
        else:
            _check_fits(array, dtype, where)
            array = array.astype(dtype)
    return array


def _check_fits(array: _Array, dtype: np.dtype[Any], where: str) -> None:
    if not array.size:
        return
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == np.trunc(array)).all()):
        raise RequestError(f"{where}: expected whole numbers of dtype {dtype}, got {array.dtype}")
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if array.min() < low or array.max() > high:
        raise RequestError(f"{where}: expected numbers from {low} to {high} (dtype {dtype})")


def _check_range(array: _Array, low: object, high: object, space: gym.Space[Any], where: str) -> None:
    if not ((array >= low) & (array <= high)).all():
        raise RequestError(f"{where}: a value is outside of {_shown(space)}")


def _shown(space: gym.Space[Any]) -> str:
    return cut(" ".join(str(space).split()), _SPACE_BYTES)


def _numbers(values: Sequence[Any], where: str) -> _Array:
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise RequestError(f"{where}: expected numbers, got lists of different lengths") from None
    if array.dtype.kind not in "biuf" or not len(array):
        raise RequestError(f"{where}: expected numbers, got something else")
    return array


def _kind(value: object) -> str:
    """Return the JSON name of a value's type."""
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


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
