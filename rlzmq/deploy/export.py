"""PolicyGraph: a policy with its connectors as one function of tensors; its export as torch.export (.pt2) or ONNX file.

observations, rewards ─► env-to-module pieces ─► module ─► module-to-env pieces ─► the env's actions
               state ─►  (previous frames, module state, previous actions)  ─► next state
"""

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
import optree
import torch

from rlzmq.algorithms.policy import Policy
from rlzmq.connectors.connector_v2 import Batch, ConnectorV2, TorchPiece
from rlzmq.core.errors import ConfigurationError, RlzmqError, UnsupportedSpaceError
from rlzmq.core.imports import import_optional
from rlzmq.core.spaces import leaf_spaces, space_filler, space_tree
from rlzmq.core.tree import tree_flatten, tree_leaves, tree_map, tree_stack
from rlzmq.core.version import __version__
from rlzmq.episodes.columns import Columns
from rlzmq.modules.distributions import num_dist_inputs

__all__ = [
    "TOLERANCE",
    "ExportCheck",
    "ExportError",
    "PolicyGraph",
    "Port",
    "check_against",
    "choices_of",
    "export_policy",
    "zeros_of",
]


# A class that overrides one of these, but not `to_torch`, behaves differently from its inherited `to_torch`.
_BEHAVIOR = ("__call__", "transform_observations", "preprocess", "apply_vectorized")


@dataclass(frozen=True)
class Port:
    """An input or output of an exported policy.

    Attributes:
        name: Its name, e.g. ``"obs"``, ``"obs.door"``, ``"state.module.h"``, ``"actions"``.
        dtype: Its numpy dtype.
        shape: Its shape without the batch axis.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class PolicyGraph(torch.nn.Module):
    """A policy of one agent as a function of tensors, with explicit state and frozen statistics.

    It maps a list of tensors to a tuple of tensors, in the order of `inputs` and `outputs`. Each row is a step of a
    different episode. Inputs are ``obs…``, ``rewards`` (those of the previous actions, 0 at the beginning of an
    episode; if it reads them) and ``state…``; outputs ``action_dist_inputs`` (if the module has them), ``actions…``
    and ``next_state…``, with one next state per state.

    Args:
        policy: The policy; later changes of its weights take effect. The graph is called once.

    Attributes:
        observation_space, action_space: The agent's spaces in the env.
        initial_state: The policy's memory at the beginning of an episode: name -> tree of arrays without batch axis;
            {} for stateless policies.
        reads_rewards: Whether it needs the reward of the previous action.
        inputs, outputs: The name, dtype and shape of each tensor.
        module_id, agent_id: See `Policy.acting_module`.

    Raises:
        ConfigurationError: A connector piece has no `to_torch`, or the policy plays several agents.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.module_id: str
        self.module: Any
        self.agent_id: Any
        self.module_id, self.module, self.agent_id = policy.acting_module()
        self.observation_space: gym.Space[Any] = policy.observation_space
        self.action_space: gym.Space[Any] = policy.action_space
        self._num_env_steps = policy.num_env_steps_sampled
        pipelines = policy.pipelines()
        self._before = self._pieces_of(pipelines["env_to_module_connector"])
        self._after = self._pieces_of(pipelines["module_to_env_connector"])
        # For each piece: (the piece's name of a part of its memory, the name in the state).
        self._names: list[list[tuple[str, str]]] = []
        self.initial_state: dict[str, Any] = {}
        for piece in (*self._before, *self._after):
            names = [(name, self._free_name(name)) for name in piece.initial_memory]
            for name, unique in names:
                self.initial_state[unique] = tree_map(np.asarray, piece.initial_memory[name])
            self._names.append(names)
        self.reads_rewards: bool = any(piece.reads_rewards for piece in (*self._before, *self._after))
        tree: dict[str, Any] = {"obs": zeros_of(self.observation_space, 1)}
        tree["state"] = tree_map(lambda leaf: leaf[None], self.initial_state)
        if self.reads_rewards:
            tree["rewards"] = np.zeros(1, np.float32)
        leaves, self._spec = tree_flatten(tree)
        self.inputs: list[Port] = _ports(tree)
        with torch.inference_mode():
            self.outputs: list[Port] = _ports(self._act([torch.from_numpy(leaf) for leaf in leaves]))

    def _free_name(self, name: str) -> str:
        number, unique = 1, name
        while unique in self.initial_state:
            number += 1
            unique = f"{name}_{number}"
        return unique

    def _pieces_of(self, pipeline: Any) -> list[TorchPiece]:
        pieces = pipeline.flat
        found = []
        for index, piece in enumerate(pieces):
            try:
                if not _is_current(piece):
                    return [ConnectorV2.to_torch(piece, rl_module=self.module, agent_id=self.agent_id)]
                found.append(piece.to_torch(rl_module=self.module, agent_id=self.agent_id))
            except ConfigurationError as error:
                raise ConfigurationError(
                    f"connector piece {type(piece).__name__!r} (number {index + 1} of {len(pieces)} in "
                    f"{type(pipeline).__name__}): {error}"
                ) from None
        return found

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute greedy actions and the next state; see the class."""
        return tuple(tree_leaves(self._act(tensors)))

    def explore(self, generator: torch.Generator, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sample actions from the exploration distribution and compute the next state; see the class."""
        return tuple(tree_leaves(self._act(tensors, generator)))

    def _act(
        self, tensors: Sequence[torch.Tensor], generator: torch.Generator | None = None
    ) -> dict[str, Any]:
        """Return the outputs by name, as trees."""
        tree = self._spec.unflatten(tensors)
        batch: Batch = {Columns.OBS: tree["obs"]}
        if self.reads_rewards:
            batch[Columns.REWARDS] = tree["rewards"]
        memories = [{name: tree["state"][unique] for name, unique in names} for names in self._names]
        batch = self._run(self._before, 0, batch, memories, generator)
        batch.pop(Columns.REWARDS, None)
        if generator is None:
            batch = dict(self.module._forward_inference(batch))
        else:
            batch = dict(self.module._forward_exploration(batch, t=self._num_env_steps))
        batch = self._run(self._after, len(self._before), batch, memories, generator)
        next_state = {}
        for piece, names, memory in zip((*self._before, *self._after), self._names, memories, strict=True):
            remembered = piece.remember(batch, memory)
            next_state.update({unique: remembered[name] for name, unique in names})
        actions = batch.get(Columns.ACTIONS_FOR_ENV, batch[Columns.ACTIONS])
        named = {"actions": actions, "next_state": next_state}
        if (dist_inputs := batch.get(Columns.ACTION_DIST_INPUTS)) is not None:
            named["action_dist_inputs"] = dist_inputs
        return named

    @staticmethod
    def _run(
        pieces: Sequence[TorchPiece],
        first: int,
        batch: Batch,
        memories: list[Any],
        generator: torch.Generator | None,
    ) -> Batch:
        for index, piece in enumerate(pieces, first):
            if generator is not None and piece.forward_exploration is not None:
                batch, memories[index] = piece.forward_exploration(batch, memories[index], generator)
            else:
                batch, memories[index] = piece.forward(batch, memories[index])
        return dict(batch)

    @property
    def states(self) -> list[Port]:
        """The inputs that hold the policy's memory."""
        return [port for port in self.inputs if port.name.partition(".")[0] == "state"]

    def inputs_of(
        self,
        observations: Sequence[np.ndarray],
        rewards: np.ndarray | None = None,
        state: Sequence[np.ndarray] | None = None,
    ) -> list[np.ndarray]:
        """Return the inputs of N rows.

        Args:
            observations: The leaves of the observations, ``[N, ...]``.
            rewards: ``[N]``, the rewards of the previous actions; None: 0.
            state: An array ``[N, ...]`` for each of `states`; None: the beginning of an episode.
        """
        num_rows = len(observations[0])
        inputs = list(observations)
        if self.reads_rewards:
            inputs.append(np.zeros(num_rows, np.float32) if rewards is None else rewards)
        if state is None:
            first = tree_leaves(self.initial_state) if self.initial_state else []
            state = [np.repeat(leaf[None], num_rows, axis=0) for leaf in first]
        return [np.ascontiguousarray(array) for array in (*inputs, *state)]

    def named_outputs(self, arrays: Sequence[np.ndarray]) -> tuple[Any, dict[str, np.ndarray], Any]:
        """Return (tree of actions, next state by name, ``action_dist_inputs`` or None) of the list of outputs."""
        by_kind: dict[str, dict[str, np.ndarray]] = {}
        for port, array in zip(self.outputs, arrays, strict=True):
            kind, _, name = port.name.partition(".")
            by_kind.setdefault(kind, {})[name] = array
        spec = tree_flatten(zeros_of(self.action_space, 1))[1]
        actions = spec.unflatten(by_kind["actions"].values())
        return actions, by_kind.get("next_state", {}), by_kind.get("action_dist_inputs", {}).get("")


def _is_current(piece: ConnectorV2) -> bool:
    """Return whether `to_torch` is defined in the same class as the piece's behavior, or in a subclass of it."""
    for cls in type(piece).__mro__:
        if "to_torch" in vars(cls):
            return True
        if any(name in vars(cls) for name in _BEHAVIOR):
            return False
    return False


def zeros_of(space: gym.Space[Any], num_rows: int) -> Any:
    """Return zeros in the shape of `num_rows` values of a space, as a tree of arrays.

    Raises:
        UnsupportedSpaceError: A part of the space does not hold numbers of a fixed shape.
    """
    for leaf in leaf_spaces(space):
        if leaf.shape is None or leaf.dtype is None or leaf.dtype.kind not in "biuf":
            raise UnsupportedSpaceError(
                "expected a space of numbers (Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them), "
                f"got {leaf}: its values are not tensors."
            )
    return space_filler(space, 0, lead=(num_rows,))


def _ports(tree: Any) -> list[Port]:
    paths = optree.tree_paths(tree, none_is_leaf=True)
    leaves = [np.asarray(leaf) for leaf in tree_leaves(tree)]
    return [
        Port(".".join(map(str, path)), leaf.dtype, leaf.shape[1:])
        for path, leaf in zip(paths, leaves, strict=True)
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


@dataclass
class ExportCheck:
    """Result of comparing an exported policy with its Policy.

    Attributes:
        num_observations: Number of observations compared.
        largest_difference: Largest absolute difference of a float action; 0 if there are no float actions.
        num_choices: Number of discrete choices compared (a MultiDiscrete action has several).
        num_different: Number of choices that differ and are not ties.
        num_ties: Number of choices that differ only because the two values are equal up to rounding.
    """

    num_observations: int = 0
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

    def _add(
        self, spaces: Sequence[gym.Space[Any]], expected: object, actual: object, dist_inputs: Any
    ) -> float:
        """Compare a batch of actions, of these leaves; return floats' largest difference, in units of `TOLERANCE`."""
        first, worst = 0, 0.0
        leaves = list(zip(spaces, tree_leaves(expected), tree_leaves(actual), strict=True))
        self.num_observations += len(leaves[0][1])
        is_default = dist_inputs is not None and dist_inputs.shape[-1] == sum(map(num_dist_inputs, spaces))
        for space, ours, theirs in leaves:
            ours, theirs = np.asarray(ours), np.asarray(theirs)
            width = num_dist_inputs(space)
            inputs = dist_inputs[..., first : first + width] if is_default else None
            first += width
            if ours.dtype.kind == "f":
                difference = np.abs(theirs.astype(np.float64) - ours)
                self.largest_difference = max(self.largest_difference, float(difference.max(initial=0.0)))
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
            start, lens = choices_of(space)
            begin = np.concatenate([[0], np.cumsum(lens)[:-1]])
            values = [
                inputs[rows, begin[choices] + action.reshape(len(ours), -1)[rows, choices] - start[choices]]
                for action in (ours, theirs)
            ]
            is_tie = np.abs(values[0] - values[1]) <= TOLERANCE * np.maximum(np.abs(values[0]), 1.0)
        self.num_ties += int(is_tie.sum())
        self.num_different += int((~is_tie).sum())


def check_against(
    policy: Policy,
    graph: PolicyGraph,
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
    is_remembering = bool(graph.states)
    num_steps = min(_EPISODE_STEPS, num_observations) if is_remembering else 1
    result, worst, spaces = ExportCheck(), 0.0, leaf_spaces(graph.action_space)
    for num_rows in _batches(-(-num_observations // num_steps)):
        state: Sequence[np.ndarray] | None = None
        players = [policy.copy() for _ in range(num_rows)] if is_remembering else []
        rewards = np.zeros(num_rows, np.float32)
        for _ in range(num_steps):
            observations = _random(graph.observation_space, num_rows, rng)
            outputs = call(graph.inputs_of(tree_leaves(observations), rewards, state))
            actions, next_state, dist_inputs = graph.named_outputs(outputs)
            state = list(next_state.values())
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
            worst = max(worst, result._add(spaces, expected, actions, dist_inputs))
            rewards = rng.normal(size=num_rows).astype(np.float32)
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


def _random(space: gym.Space[Any], num_rows: int, rng: np.random.Generator) -> object:
    """Return random values of a space, a tree of arrays ``[num_rows, ...]``."""

    def drawn(leaf: Any) -> object:
        if isinstance(leaf, gym.spaces.Box) and np.issubdtype(leaf.dtype, np.floating):
            low, high = np.maximum(leaf.low, -_WIDE), np.minimum(leaf.high, _WIDE)
            is_narrow = (leaf.low == low) & (leaf.high == high)
            shape = (num_rows, *leaf.shape)
            wide = np.clip(rng.normal(size=shape), low, high)
            return np.where(is_narrow, rng.uniform(low, high, shape), wide).astype(leaf.dtype)
        leaf.seed(int(rng.integers(2**31)))
        return np.stack([np.asarray(leaf.sample(), leaf.dtype) for _ in range(num_rows)])

    return tree_map(drawn, space_tree(space))


def choices_of(space: Any) -> tuple[np.ndarray, np.ndarray]:
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
    formats = {"onnx": (_write_onnx, _load_onnx), "pt2": (_write_pt2, _load_pt2)}
    if format not in formats:
        raise ConfigurationError(f"format: expected one of {', '.join(formats)}, got {format!r}.")
    write, load = formats[format]
    target = Path(path)
    if target.is_dir():
        raise ConfigurationError(
            f"cannot write {target}: it is a directory. Name a file, e.g. {target / f'policy.{format}'}."
        )
    graph = PolicyGraph(policy)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.{format}")
    try:
        temporary.touch()  # where nothing can be written is found out before the work
        try:
            write(_traced(graph), graph, json.dumps(describe(graph), allow_nan=False), temporary)
            result = check_against(policy, graph, load(temporary), num_checked, seed)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write {target}: {error.strerror or error}") from error
    return result


def describe(graph: PolicyGraph) -> dict[str, Any]:
    """Return a description of the file for its users, as JSON values."""
    first = tree_leaves(graph.initial_state) if graph.initial_state else []
    ports = {
        kind: [
            {"name": port.name, "dtype": port.dtype.name, "shape": ["batch", *port.shape]} for port in found
        ]
        for kind, found in (("inputs", graph.inputs), ("outputs", graph.outputs))
    }
    return {
        "rlzmq_version": __version__,
        "module": graph.module_id,
        "agent": None if graph.agent_id is None else str(graph.agent_id),
        "observation_space": _described(graph.observation_space),
        "action_space": _described(graph.action_space),
        **ports,
        "initial_state": {
            port.name: value.tolist() if value.any() else 0
            for port, value in zip(graph.states, first, strict=True)
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


def _short(bound: np.ndarray) -> object:
    """Return one number if all elements are equal, nested lists otherwise."""

    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(part) for part in value]
        return value if math.isfinite(value) else None

    is_one = bound.size and bool((bound == bound.flat[0]).all())
    return plain(bound.flat[0].item() if is_one else bound.tolist())


def _traced(graph: PolicyGraph) -> torch.export.ExportedProgram:
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
                f"while torch.export traced the module {graph.module_id!r} and its connector pieces: their "
                "forward passes may depend on shapes, but not on values"
            )
            raise


def _write_pt2(program: torch.export.ExportedProgram, graph: PolicyGraph, metadata: str, path: Path) -> None:
    content = io.BytesIO()  # torch ends the process if its file cannot be written
    torch.export.save(program, content, extra_files={_METADATA: metadata})
    path.write_bytes(content.getbuffer())


def _load_pt2(path: Path) -> _Call:
    module = torch.export.load(path).module()

    def call(arrays: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        with torch.inference_mode():
            return [tensor.numpy() for tensor in module(*map(torch.from_numpy, arrays))]

    return call


def _write_onnx(program: torch.export.ExportedProgram, graph: PolicyGraph, metadata: str, path: Path) -> None:
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
