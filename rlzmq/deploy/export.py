"""Export of policies to files for other programs: torch.export (.pt2) and ONNX."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import math
import os
import secrets
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rlzmq.algorithms.policy import Policy
from rlzmq.core.errors import ConfigurationError, RlzmqError
from rlzmq.core.imports import import_optional
from rlzmq.core.spaces import leaf_spaces
from rlzmq.core.tree import tree_leaves, tree_map, tree_stack
from rlzmq.core.version import __version__
from rlzmq.deploy.policy_graph import FlatPolicyGraph, PolicyGraph
from rlzmq.modules.distributions import num_dist_inputs

__all__ = [
    "FORMATS",
    "TOLERANCE",
    "ExportCheck",
    "ExportError",
    "check_against",
    "export_policy",
]


TOLERANCE = 1e-4
"""Largest difference between floats that counts as rounding, in units of max(1, value)."""

# Number of steps per episode, for comparing policies with a memory.
_EPISODE_STEPS = 50
# Batch sizes other than the traced one, including a single row.
_FIRST_BATCHES = (1, 2, 7)
# Bounds beyond this count as infinite; such parts are drawn from a normal distribution.
_WIDE = 1e3


class ExportError(RlzmqError):
    """An exported file computes other actions than its original policy. The file was not kept."""


@dataclass(frozen=True)
class ExportCheck:
    """Result of comparing an exported policy with its Policy.

    Attributes:
        num_observations: Number of observations compared.
        largest_difference: Largest absolute difference of a float action; 0 if there are no float actions.
        num_choices: Number of discrete choices compared (a MultiDiscrete action has several).
        num_different: Number of choices that differ and are not ties.
        num_ties: Number of choices that differ only because the two values are equal up to rounding.
    """

    num_observations: int
    largest_difference: float = 0.0
    num_choices: int = 0
    num_different: int = 0
    num_ties: int = 0

    def __str__(self) -> str:
        text = (
            f"{self.num_observations:,} random observations, largest difference {self.largest_difference:.3g}"
        )
        if self.num_choices:
            text += f", {self.num_different} of {self.num_choices:,} discrete choices differ"
        return text + (f", {self.num_ties} ties" if self.num_ties else "")


def check_against(
    policy: Policy,
    graph: FlatPolicyGraph,
    call: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]],
    num_observations: int,
    seed: int,
) -> ExportCheck:
    """Compare an exported policy with its Policy.

    Args:
        policy: The policy; its current episode is not affected.
        graph: The exported graph.
        call: Runs the file: maps inputs to outputs, in the graph's order.
        num_observations: Number of observations to compare.
        seed: Seed of the observations.

    Raises:
        ExportError: The actions differ by more than rounding.
    """
    rng = np.random.default_rng(seed)
    is_remembering = bool(graph.policy.initial_state)
    num_steps = min(_EPISODE_STEPS, num_observations) if is_remembering else 1
    total, worst = _Difference(graph.policy.action_space), 0.0
    for num_rows in _batches(-(-num_observations // num_steps)):
        state: dict[str, Any] = graph.initial_rows(num_rows)
        players = [policy.copy() for _ in range(num_rows)] if is_remembering else []
        rewards = np.zeros(num_rows, np.float32)
        for _ in range(num_steps):
            observations = _random(graph.policy.observation_space, num_rows, rng)
            outputs = call(graph.flat_inputs(observations, rewards, state))
            actions, state, dist_inputs = graph.nested_outputs(outputs)
            if is_remembering:
                expected = tree_stack(
                    [
                        player.compute_action(
                            tree_map(lambda leaf, row=row: leaf[row], observations), reward=rewards[row]
                        )
                        for row, player in enumerate(players)
                    ]
                )
            else:
                expected = policy.compute_actions(observations)
            worst = max(worst, total.add(expected, actions, dist_inputs))
            rewards = rng.normal(size=num_rows).astype(np.float32)
    result = ExportCheck(
        total.num_rows, total.largest, total.num_choices, total.num_different, total.num_ties
    )
    if not worst <= TOLERANCE or result.num_different:
        raise ExportError(
            f"the exported policy differs from the policy: {result}; expected floats within {TOLERANCE:g} and equal "
            "choices. Does each custom connector piece's to_torch() do what the piece does?"
        )
    return result


def _batches(num_rows: int) -> list[int]:
    sizes: list[int] = []
    for size in _FIRST_BATCHES:
        if sum(sizes) + size < num_rows:
            sizes.append(size)
    return [*sizes, num_rows - sum(sizes)]


def _random(space: gym.Space[Any], num_rows: int, rng: np.random.Generator) -> Any:
    """Return random values of a space, a tree of arrays ``[num_rows, ...]``."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _random(part, num_rows, rng) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(_random(part, num_rows, rng) for part in space.spaces)
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = np.maximum(space.low, -_WIDE), np.minimum(space.high, _WIDE)
        is_narrow = (space.low == low) & (space.high == high)
        shape = (num_rows, *space.shape)
        drawn = np.where(is_narrow, rng.uniform(low, high, shape), np.clip(rng.normal(size=shape), low, high))
        return drawn.astype(space.dtype)
    space.seed(int(rng.integers(2**31)))
    return np.stack([np.asarray(space.sample(), space.dtype) for _ in range(num_rows)])


class _Difference:
    """Accumulates the differences between actions, per leaf of the action space."""

    def __init__(self, space: gym.Space[Any]) -> None:
        self._spaces = leaf_spaces(space)
        self.num_rows = self.num_choices = self.num_different = self.num_ties = 0
        self.largest = 0.0

    def add(self, expected: Any, actual: Any, dist_inputs: Any) -> float:
        """Compare a batch of actions; return the largest difference of floats, in the units of `TOLERANCE`."""
        first, worst = 0, 0.0
        leaves = list(zip(self._spaces, tree_leaves(expected), tree_leaves(actual), strict=True))
        self.num_rows += len(leaves[0][1])
        is_default = dist_inputs is not None and dist_inputs.shape[-1] == sum(
            map(num_dist_inputs, self._spaces)
        )
        for space, ours, theirs in leaves:
            ours, theirs = np.asarray(ours), np.asarray(theirs)
            width = num_dist_inputs(space)
            inputs = dist_inputs[..., first : first + width] if is_default else None
            first += width
            if ours.dtype.kind == "f":
                difference = np.abs(theirs.astype(np.float64) - ours)
                self.largest = max(self.largest, float(difference.max(initial=0.0)))
                worst = max(worst, float((difference / np.maximum(np.abs(ours), 1.0)).max(initial=0.0)))
            else:
                self._add_choices(space, ours, theirs, inputs)
        return worst

    def _add_choices(self, space: gym.Space[Any], ours: Any, theirs: Any, inputs: Any) -> None:
        self.num_choices += ours.size
        rows, choices = np.nonzero((ours != theirs).reshape(len(ours), -1))
        if not len(rows):
            return
        is_tie = np.zeros(len(rows), np.bool_)
        if inputs is not None:
            start, lens = _choices(space)
            begin = np.concatenate([[0], np.cumsum(lens)[:-1]])
            values = [
                inputs[rows, begin[choices] + action.reshape(len(ours), -1)[rows, choices] - start[choices]]
                for action in (ours, theirs)
            ]
            is_tie = np.abs(values[0] - values[1]) <= TOLERANCE * np.maximum(np.abs(values[0]), 1.0)
        self.num_ties += int(is_tie.sum())
        self.num_different += int((~is_tie).sum())


def _choices(space: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the first value and the number of values of each choice in a discrete leaf."""
    if isinstance(space, gym.spaces.Discrete):
        return np.array([int(space.start)]), np.array([int(space.n)])
    if isinstance(space, gym.spaces.MultiDiscrete):
        return space.start.reshape(-1).astype(np.int64), space.nvec.reshape(-1).astype(np.int64)
    if isinstance(space, gym.spaces.Box):
        low, high = (bound.reshape(-1).astype(np.int64) for bound in (space.low, space.high))
        return low, high - low + 1
    size = int(np.prod(space.shape))
    return np.zeros(size, np.int64), np.full(size, 2)


FORMATS = ("onnx", "pt2")
_METADATA = "rlzmq.json"
# Number of rows in the traced example: neither 0 nor 1, which torch might treat as constants.
_EXAMPLE_ROWS = 2

_Call = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]


def export_policy(
    policy: Policy, path: str | Path, *, format: str = "onnx", num_checked: int = 1000, seed: int = 0
) -> ExportCheck:
    """Write a policy with its connectors to one file, and compare the file with the policy.

    The file computes greedy actions with the current statistics. The policy's memory of an episode (module state,
    previous frames, …) becomes explicit inputs and outputs; docs/deploy.md describes them.

    Args:
        policy: A policy of one agent.
        path: The file to write. It is replaced only if the new file passes the check.
        format: "onnx" or "pt2".
        num_checked: Number of random observations to compare.
        seed: Seed of the observations.

    Returns:
        The result of the comparison.

    Raises:
        ConfigurationError: A connector piece cannot be exported, the policy plays several agents, or packages are
            missing.
        ExportError: The file's actions differ from the policy's by more than rounding.
    """
    if format not in FORMATS:
        raise ConfigurationError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}.")
    graph = FlatPolicyGraph(PolicyGraph(policy))
    program = _traced(graph)
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.{format}")
    write, load = {"onnx": (_write_onnx, _load_onnx), "pt2": (_write_pt2, _load_pt2)}[format]
    try:
        write(program, graph, json.dumps(describe(graph), allow_nan=False), temporary)
        result = check_against(policy, graph, load(temporary), num_checked, seed)
        os.replace(temporary, target)
    except OSError as error:
        raise ConfigurationError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return result


def describe(graph: FlatPolicyGraph) -> dict[str, Any]:
    """Return a description of the file for its users, as JSON values."""
    policy = graph.policy
    flat_state = dict(
        zip(
            (port.name for port in graph.inputs if port.name.startswith("state.")),
            tree_leaves(policy.initial_state) if policy.initial_state else (),
            strict=True,
        )
    )
    ports = {
        kind: [
            {"name": port.name, "dtype": port.dtype.name, "shape": ["batch", *port.shape]} for port in found
        ]
        for kind, found in (("inputs", graph.inputs), ("outputs", graph.outputs))
    }
    return {
        "rlzmq_version": __version__,
        "module": policy.module_id,
        "agent": None if policy.agent_id is None else str(policy.agent_id),
        "observation_space": _described(policy.observation_space),
        "action_space": _described(policy.action_space),
        **ports,
        "initial_state": {
            name: 0 if not value.any() else value.tolist() for name, value in flat_state.items()
        },
    }


def _described(space: gym.Space[Any]) -> dict[str, Any]:
    """Return a space as JSON values; infinite bounds of a Box become None."""
    about: dict[str, Any] = {"type": type(space).__name__}
    if isinstance(space, gym.spaces.Dict):
        return about | {"spaces": {str(key): _described(part) for key, part in space.spaces.items()}}
    if isinstance(space, gym.spaces.Tuple):
        return about | {"spaces": [_described(part) for part in space.spaces]}
    about |= {"shape": list(space.shape or ()), "dtype": str(space.dtype)}
    if isinstance(space, gym.spaces.Box):
        about |= {"low": _short(space.low), "high": _short(space.high)}
    elif isinstance(space, gym.spaces.Discrete):
        about |= {"n": int(space.n), "start": int(space.start)}
    elif isinstance(space, gym.spaces.MultiDiscrete):
        about |= {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
    return about


def _short(bound: np.ndarray) -> Any:
    """Return one number if all elements are equal, nested lists otherwise."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(part) for part in value]
        return value if math.isfinite(value) else None

    is_one = bound.size and bool((bound == bound.flat[0]).all())
    return plain(bound.flat[0].item() if is_one else bound.tolist())


def _traced(graph: FlatPolicyGraph) -> torch.export.ExportedProgram:
    # A copy, because default models keep references to tensors that tracing replaces.
    graph = copy.deepcopy(graph).requires_grad_(False)
    example = tuple(
        torch.from_numpy(np.zeros((_EXAMPLE_ROWS, *port.shape), port.dtype)) for port in graph.inputs
    )
    batch = torch.export.Dim("batch", min=1)
    with _quiet():
        try:
            return torch.export.export(graph, example, dynamic_shapes=(tuple({0: batch} for _ in example),))
        except Exception as error:
            error.add_note(
                f"while torch.export traced the module {graph.policy.module_id!r} and its connector pieces: their "
                "forward passes may depend on shapes, but not on values"
            )
            raise


def _write_pt2(
    program: torch.export.ExportedProgram, graph: FlatPolicyGraph, metadata: str, path: Path
) -> None:
    content = io.BytesIO()  # torch ends the process if its file cannot be written
    torch.export.save(program, content, extra_files={_METADATA: metadata})
    path.write_bytes(content.getbuffer())


def _load_pt2(path: Path) -> _Call:
    module = torch.export.load(path).module()

    def call(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        with torch.inference_mode():
            return [tensor.numpy() for tensor in module(*map(torch.from_numpy, arrays))]

    return call


def _write_onnx(
    program: torch.export.ExportedProgram, graph: FlatPolicyGraph, metadata: str, path: Path
) -> None:
    import_optional("onnx", "Exporting to ONNX", "rlzmq[onnx]")
    import_optional("onnxruntime", "Exporting to ONNX", "rlzmq[onnx]")
    import_optional("onnxscript", "Exporting to ONNX", "rlzmq[onnx]")
    with _quiet():
        made = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[port.name for port in graph.inputs],
            output_names=[port.name for port in graph.outputs],
            verbose=False,
        )
    assert made is not None
    made.model.metadata_props["rlzmq"] = metadata
    made.save(path, external_data=False)


def _load_onnx(path: Path) -> _Call:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]

    def call(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        found: Sequence[np.ndarray] = session.run(None, dict(zip(names, arrays, strict=True)))
        return found

    return call


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide torch's messages about tracing; errors are still raised."""
    loggers = [logging.getLogger(name) for name in ("torch.export", "torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
