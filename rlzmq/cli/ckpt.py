"""``rlzmq ckpt``: check checkpoints, or show what differs between two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from rlzmq.cli.parsing import parse
from rlzmq.core.checkpoint import read_checkpoint
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.printable import cut, printable
from rlzmq.telemetry.metric_paths import flatten

__all__ = ["CkptOptions", "run"]

_LEARNER = "learner_group/learner"
_LISTED = ("config", "accounting", "algorithm", f"{_LEARNER}/counters")
"""Parts whose single values are printed; of other parts, how many differ."""
_MAX_BYTES = 80  # of a printed value
_ABSENT = object()


@dataclass
class CkptOptions:
    """Options of ``rlzmq ckpt``."""

    action: tyro.conf.Positional[Literal["ls", "diff"]]
    """List checkpoints and check every byte, or show what differs between two."""
    paths: tyro.conf.Positional[list[str]]
    """ls: a run directory or checkpoint. diff: two of them; a run directory stands for its newest checkpoint."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq ckpt``; return the exit code."""
    options = parse(
        CkptOptions,
        arguments,
        usage="rlzmq ckpt ls RUN_OR_CHECKPOINT, or rlzmq ckpt diff A B",
        description="List and check checkpoints, or show what differs between two: settings, weights, counters.",
    )
    expected = {"ls": 1, "diff": 2}[options.action]
    if len(options.paths) != expected:
        raise ConfigurationError(
            f"rlzmq ckpt {options.action}: expected {expected} checkpoint{'s' * (expected - 1)} or run director"
            f"{'ies' if expected > 1 else 'y'}, got {len(options.paths)}: {' '.join(options.paths)}"
        )
    if options.action == "ls":
        from rlzmq.cli.inspect import show_checkpoints

        return show_checkpoints(Path(options.paths[0]))
    return _diff(*options.paths)


def _diff(first: str, second: str) -> int:
    from rlzmq.algorithms.checkpoints import checkpoint_place

    sides = []
    for name, path in (("A", first), ("B", second)):
        place = checkpoint_place(path)
        sides.append(_parts(read_checkpoint(place)))
        print(f"{name}  {printable(str(place))}")
    lines = []
    for part in dict.fromkeys([*sides[0], *sides[1]]):
        pair = [side.get(part) for side in sides]
        if None in pair:
            lines.append(f"{part}  only in {'B' if pair[0] is None else 'A'}")
        else:
            lines += [f"{part}  {line}" for line in _differences(part, *pair)]  # type: ignore[arg-type]
    print(printable("\n".join(lines or ["nothing differs"]), keep="\n"))
    return 0


def _parts(components: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the leaves of each component by their paths; the learner's parts and modules are parts of their own."""
    found: dict[str, Any] = {}
    for component, state in components.items():
        if component != _LEARNER:
            found[component] = state
            continue
        for name, part in state.items():
            modules = part.items() if name == "rl_module" else ()
            found |= {f"{component}/{name}/{module_id}": module for module_id, module in modules}
            if name != "rl_module":
                found[f"{component}/{name}"] = part
    return {
        part: flatten(state) if isinstance(state, Mapping) else {"": state} for part, state in found.items()
    }


def _differences(part: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each value that differs in a listed part, or in shape; then one about all others."""
    num_others, distances = 0, {}
    names = dict.fromkeys([*first, *second])
    for name in names:
        old, new = first.get(name, _ABSENT), second.get(name, _ABSENT)
        if _is_same(old, new):
            continue
        is_listed = part == "config" or (part in _LISTED and not isinstance(old, (list, np.ndarray)))
        if is_listed or old is _ABSENT or new is _ABSENT or _shape(old) != _shape(new):
            yield f"{name.removeprefix('values/')}  {_text(old, part)} → {_text(new, part)}"
        else:
            num_others += 1
            if isinstance(old, np.ndarray) and old.dtype.kind == "f":
                gaps = np.abs(old.astype(np.float64) - new.astype(np.float64))
                distances[name] = float(np.nanmax(gaps, initial=0.0))
    if num_others:
        largest = max(distances, key=distances.__getitem__, default="")
        by = f", the largest difference is {distances[largest]:.3g} in {largest}" if largest else ""
        yield f"{num_others} of {len(names)} values differ{by}"


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return _shape(first) == _shape(second) and first.tobytes() == second.tobytes()
    if type(first) is not type(second):
        return False
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(map(_is_same, first.values(), second.values()))
    return bool(first == second or (first != first and second != second))


def _shape(value: object) -> str:
    return f"{value.shape} {value.dtype}" if isinstance(value, np.ndarray) else ""


def _text(value: object, part: str) -> str:
    if value is _ABSENT:
        return "default" if part == "config" else "absent"
    return _shape(value) or cut(repr(value), _MAX_BYTES)
