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
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rlzmq.algorithms.policy import Policy
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import import_optional
from rlzmq.core.tree import tree_leaves
from rlzmq.core.version import __version__
from rlzmq.deploy.export_check import ExportCheck, check_against
from rlzmq.deploy.policy_graph import FlatPolicyGraph, PolicyGraph

__all__ = ["FORMATS", "export_policy"]

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
