"""ServedPolicy: computes the actions of many requests in one forward pass; ServedCheckpoint: those of a checkpoint.

Requests of several clients share a forward pass, so each is checked on its arrival (`rows_from_json`): structure, shape
and dtype, that numbers are finite, and discrete values, which modules use as indices, in their range.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from rlzmq.algorithms.policy import Policy
from rlzmq.core.checkpoint import read_manifest
from rlzmq.core.errors import CheckpointError, ConfigurationError, cut, printable
from rlzmq.core.run_dir import checkpoints_at
from rlzmq.core.synonyms import did_you_mean
from rlzmq.deploy.export import PolicyGraph, Port, choices_of

__all__ = [
    "Arrays",
    "CheckpointSource",
    "RequestError",
    "ServedCheckpoint",
    "ServedPolicy",
    "rewards_from_json",
    "rows_from_json",
    "values_from_json",
]


_Array = npt.NDArray[Any]
_REWARD = gym.spaces.Box(-np.inf, np.inf, ())
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
        array = _numbers(values[name], f"{where}.{name}")
        if array.shape != (num_rows, *port.shape):
            raise RequestError(f"{where}.{name}: expected shape {(num_rows, *port.shape)}, got {array.shape}")
        found.append(_as_dtype(array, port.dtype, f"{where}.{name}"))
    return found


def _checked_rows(space: gym.Space[Any], array: _Array, where: str) -> _Array:
    """Return N values of a space without parts, ``[N, ...]``, in the space's dtype."""
    shape = tuple(space.shape or ())
    if array.ndim == 0 or array.shape[1:] != shape:
        raise RequestError(
            f"{where}: expected shape {shape}, got {array.shape[1:]}; the space is {_shown(space)}"
        )
    assert space.dtype is not None
    array = _as_dtype(array, space.dtype, where)
    if not isinstance(space, gym.spaces.Box):
        first, num = choices_of(space)
        flat = array.reshape(len(array), -1)
        if not ((flat >= first) & (flat < first + num)).all():
            raise RequestError(f"{where}: a value is outside of {_shown(space)}")
    return array


def rewards_from_json(values: object, num_rows: int) -> _Array:
    """Return N rewards, ``[N]``, as float32.

    Raises:
        RequestError: They are not a list of N finite numbers.
    """
    if not isinstance(values, list) or len(values) != num_rows:
        raise RequestError(f"rewards: expected a list of {num_rows} numbers (reward: one number)")
    return rows_from_json(_REWARD, values, "rewards")[0]


def _as_dtype(array: _Array, dtype: np.dtype[Any], where: str) -> _Array:
    """Return the same numbers, which are finite, in another dtype."""
    if array.dtype != dtype:
        if array.dtype.kind not in "biuf":
            raise RequestError(f"{where}: expected numbers of dtype {dtype}, got {array.dtype}")
        if dtype.kind == "f":
            with np.errstate(over="ignore"):
                array = array.astype(dtype)
        else:
            _check_fits(array, dtype, where)
            array = array.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise RequestError(f"{where}: expected finite numbers of dtype {dtype}")
    return array


def _check_fits(array: _Array, dtype: np.dtype[Any], where: str) -> None:
    if not array.size:
        return
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == np.trunc(array)).all()):
        raise RequestError(f"{where}: expected whole numbers of dtype {dtype}, got {array.dtype}")
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if array.min() < low or array.max() > high:
        raise RequestError(f"{where}: expected numbers from {low} to {high} (dtype {dtype})")


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


_log = logging.getLogger("rlzmq.serve")

Arrays = list[npt.NDArray[Any]]
"""Arrays ``[N, ...]`` of N rows, each a step of a different episode."""


class ServedPolicy(PolicyGraph):
    """A policy of one agent that maps the arrays of requests to the arrays of answers.

    It keeps no state between calls: the policy's memory of an episode is part of the arrays.

    Args:
        policy: The policy; its current episode is not used.

    Attributes:
        agent: The agent's id as text; "" in single-agent use.

    Raises:
        ConfigurationError: See `PolicyGraph`.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.agent: str = "" if self.agent_id is None else str(self.agent_id)
        self._generator = torch.Generator()
        self._generator.seed()
        self._outputs([np.zeros((1, *port.shape), port.dtype) for port in self.inputs], explore=True)

    def compute(self, requests: Sequence[Arrays], *, explore: bool) -> list[Arrays]:
        """Return the outputs for requests.

        Args:
            requests: The inputs of each request, from `inputs_of`.
            explore: Whether to sample from the exploration distribution.
        """
        answers = self._outputs([_joined(parts) for parts in zip(*requests, strict=True)], explore=explore)
        if len(requests) == 1:
            return [answers]
        split: list[Arrays] = []
        first = 0
        for inputs in requests:
            last = first + len(inputs[0])
            split.append([array[first:last] for array in answers])
            first = last
        return split

    def _outputs(self, inputs: Arrays, *, explore: bool) -> Arrays:
        with torch.inference_mode():
            tensors = [torch.from_numpy(array if array.flags.writeable else array.copy()) for array in inputs]
            outputs = self.explore(self._generator, *tensors) if explore else self(*tensors)
        return [tensor.numpy() for tensor in outputs]


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return arrays ``[N, ...]`` of one dtype as one."""
    # numpy.concatenate would release Python's lock at each part, and be held up by the thread that receives requests.
    first = parts[0]
    if len(parts) == 1:
        return first
    buffers: Any = parts
    joined: npt.NDArray[Any] = np.frombuffer(bytearray().join(buffers), first.dtype)
    return joined.reshape(-1, *first.shape[1:])


_MAX_TRIES = 5

LoadPolicies = Callable[[Path], Sequence[Policy]]
"""Loads the policies of a checkpoint: one, or one for each agent."""


class ServedCheckpoint:
    """The policies of one checkpoint.

    Attributes:
        name: The checkpoint's name, e.g. "000120".
        policies: The served policies.

    Raises:
        ConfigurationError: There is no policy, or a connector piece cannot be served.
    """

    def __init__(self, path: Path, policies: Sequence[Policy]) -> None:
        self.path = path
        self.name: str = path.name
        self.policies: list[ServedPolicy] = [ServedPolicy(policy) for policy in policies]
        if not self.policies:
            raise ConfigurationError(
                f"{path}: which module an agent uses depends on the episode: choose one with module_id and agent_id "
                "(--module, --agent)."
            )

    def choose(self, module_id: str = "", agent_id: str = "") -> ServedPolicy:
        """Return the policy of a module or agent; "" stands for any, if there is only one.

        Raises:
            KeyError: There is no such policy.
            RequestError: There are several, and none was chosen.
        """
        fitting = [
            policy
            for policy in self.policies
            if module_id in ("", policy.module_id) and agent_id in ("", policy.agent)
        ]
        modules = sorted({policy.module_id for policy in self.policies})
        agents = [policy.agent for policy in self.policies]
        if len(fitting) > 1 and not module_id and not agent_id:
            raise RequestError(
                f"choose one of the modules {modules} with module, or of the agents {agents} with agent"
            )
        if fitting:
            return fitting[0]
        for what, given, known in (("module", module_id, modules), ("agent", agent_id, agents)):
            if given not in ("", *known):
                raise KeyError(f"no {what} {given[:100]!r}.{did_you_mean(given[:100], known)}")
        raise KeyError(f"agent {agent_id[:100]!r} does not use module {module_id[:100]!r}")

    def check_replaces(self, old: ServedCheckpoint) -> None:
        """Check that this checkpoint can answer every request that another one answers.

        Raises:
            CheckpointError: It lacks a policy, or its observations, actions or state differ.
        """
        ours = {(policy.module_id, policy.agent): policy for policy in self.policies}
        for policy in old.policies:
            new = ours.get((policy.module_id, policy.agent))
            what = f"module {policy.module_id!r}" + (f" (agent {policy.agent!r})" if policy.agent else "")
            if new is None:
                raise CheckpointError(f"it has no {what}")
            spaces = (policy.observation_space, policy.action_space)
            is_same = spaces == (new.observation_space, new.action_space)
            if not is_same or (policy.inputs, policy.outputs) != (new.inputs, new.outputs):
                raise CheckpointError(f"{what} has other spaces or another state than the served one")


class CheckpointSource:
    """Finds and loads the newest checkpoint of a path. Its methods block; call one at a time.

    Args:
        path: A checkpoint, or a directory of a run or of checkpoints.
        load: See `LoadPolicies`.
        on_skipped: Called, on the thread of `newer_than`, for each checkpoint that cannot be served.
    """

    def __init__(
        self, path: str | Path, load: LoadPolicies, *, on_skipped: Callable[[], None] = lambda: None
    ) -> None:
        self._path = path
        self._load = load
        self._on_skipped = on_skipped
        self._current: tuple[str, str] | None = None
        self._failures: Counter[tuple[str, str]] = Counter()

    def retry(self) -> None:
        """Let `newer_than` retry all skipped checkpoints."""
        self._failures.clear()

    def newer_than(self, served: ServedCheckpoint | None) -> ServedCheckpoint | None:
        """Return the newest complete checkpoint, or None if it was the last one returned.

        A checkpoint that cannot be served is skipped with a warning. It is retried a few times, since it may be an
        incomplete copy.

        Args:
            served: The checkpoint to replace; None for the first one, whose errors are raised.

        Raises:
            CheckpointError, ConfigurationError: `served` is None, and no checkpoint can be served.
        """
        first_error: Exception | None = None
        for candidate in checkpoints_at(self._path):
            identity = _identity(candidate)
            if identity == self._current:
                return None
            if self._failures.get(identity, 0) >= _MAX_TRIES:
                continue
            try:
                found = ServedCheckpoint(candidate, self._load(candidate))
                if served is not None:
                    found.check_replaces(served)
            except Exception as error:  # whatever the error, the current checkpoint stays in use
                first_error = first_error or error
                if identity not in self._failures:
                    _log.warning("skipped the checkpoint %s: %s", candidate, printable(str(error)))
                    self._on_skipped()
                self._failures[identity] += 1
                continue
            self._current = identity
            return found
        if served is not None:
            return None
        if first_error is not None:
            raise first_error
        raise CheckpointError(f"{self._path} holds no checkpoint.")


def _identity(path: Path) -> tuple[str, str]:
    """Return a value that changes when another checkpoint is written to the same path."""
    try:
        return str(path), str(read_manifest(path)["sha256"])
    except CheckpointError as error:
        return str(path), str(error)
