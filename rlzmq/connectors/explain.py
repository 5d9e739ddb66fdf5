"""Implementation of `ConnectorPipelineV2.explain`: a trial run that describes the batch after each piece."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["describe_batch", "explain_pipeline"]

_NUM_KEYS_SHOWN = 3


class _Pipeline(Protocol):
    time_pieces: bool
    after_piece: Callable[[str, dict[str, Any]], None] | None

    def __len__(self) -> int: ...

    def __call__(
        self,
        *,
        batch: dict[str, Any] | None,
        episodes: Sequence[Any],
        shared_data: dict[str, Any] | None,
        **call: Any,
    ) -> dict[str, Any]: ...


def explain_pipeline(
    pipeline: _Pipeline,
    *,
    episodes: Sequence[Any],
    batch: dict[str, Any] | None,
    shared_data: dict[str, Any] | None,
    **call: Any,
) -> str:
    """See `ConnectorPipelineV2.explain`."""
    import torch

    generator = (shared_data or {}).get("generator")
    trial_data = _copied({k: v for k, v in (shared_data or {}).items() if k != "generator"})
    if generator is not None:
        trial_data["generator"] = generator.clone_state()
    trial_batch = _copied(batch) or {}
    trial = copy.deepcopy(pipeline)
    trial.time_pieces = False
    lines = [f"{type(pipeline).__name__}: {len(pipeline)} pieces, {_num_episodes(episodes)}"]
    lines += ["input batch:", *describe_batch(trial_batch)]

    def after_piece(name: str, new_batch: Any) -> None:
        number = sum(line.startswith("after ") for line in lines) + 1
        lines.append(f"after {number}. {name}:")
        lines.extend(describe_batch(new_batch))

    trial.after_piece = after_piece
    # Pieces without their own generator use torch's global one.
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(gpus):
        trial(episodes=copy.deepcopy(list(episodes)), batch=trial_batch, shared_data=trial_data, **call)
    return "\n".join(lines)


def _copied(data: Any) -> Any:
    """Return a deep copy with detached tensors, since torch deep-copies only leaf tensors."""
    tensors = [value for value in _leaves(data) if hasattr(value, "detach")]
    return copy.deepcopy(data, {id(tensor): tensor.detach().clone() for tensor in tensors})


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, dict | list | tuple):
        for part in data.values() if isinstance(data, dict) else data:
            yield from _leaves(part)
    else:
        yield data


def describe_batch(data: Any, indent: int = 2) -> list[str]:
    """Return lines that show a batch's nesting, number of items, shapes and dtypes."""
    pad = " " * indent
    if isinstance(data, dict):
        if not data:
            return [pad + "{}"]
        lines = []
        for index, (key, value) in enumerate(data.items()):
            if isinstance(key, tuple) and index == _NUM_KEYS_SHOWN:
                lines.append(f"{pad}… {len(data) - index} more keys")
                break
            if isinstance(value, dict):
                lines.append(f"{pad}{key}:")
                lines.extend(describe_batch(value, indent + 2))
            else:
                lines.append(f"{pad}{key}: {_describe(value)}")
        return lines
    return [pad + _describe(data)]


def _describe(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} item(s)" + (f" of {_describe(value[0])}" if value else "")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_describe(part) for part in value) + ")"
    if isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "detach"):
        kind = "tensor" if hasattr(value, "detach") else type(value).__name__
        return f"{kind} {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__} {value!r}"[:60]


def _num_episodes(episodes: Sequence[Any]) -> str:
    return f"{len(episodes)} episode{'' if len(episodes) == 1 else 's'}"
