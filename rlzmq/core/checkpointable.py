"""Checkpointable: saving and restoring single parts of a run.

A part's own checkpoint stores its state under the same name as an algorithm's checkpoint, so both can restore it::

    learner.save_to_path("checkpoints/learner")
    learner.restore_from_path("checkpoints/learner")                        # its own
    learner.restore_from_path("checkpoints/run")                            # an algorithm's
    learner.restore_from_path("checkpoints/run/learner_group/learner")      # the same, as RLlib spells it
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from rlzmq.core.checkpoint import find_inside, read_checkpoint, write_checkpoint
from rlzmq.core.errors import CheckpointError

__all__ = ["Checkpointable", "part_of", "read_part", "write_part"]


class Checkpointable:
    """Mix-in with `save_to_path`, `restore_from_path` and `from_checkpoint`, based on `get_state` and `set_state`.

    A checkpoint contains no code: `from_checkpoint` takes the constructor's arguments.
    """

    checkpoint_name: ClassVar[str]
    """Name of this state in an algorithm's checkpoint."""

    def save_to_path(self, path: str | Path | None = None) -> str:
        """Write the state as a checkpoint, atomically, and return its absolute path.

        Args:
            path: The directory, or ``s3://…``. An existing one is replaced. None: a new temporary directory.

        Raises:
            CheckpointError: The checkpoint cannot be written; the content of `path` is unchanged.
        """
        return write_part(path, self.checkpoint_name, self.get_state(), type(self))  # type: ignore[attr-defined]

    def restore_from_path(self, path: str | Path, component: str | None = None) -> None:
        """Load the state of a checkpoint.

        Args:
            path: A result of `save_to_path`, an algorithm's checkpoint, or a path into one.
            component: The part of the state that is at `path`, e.g. ``"rl_module/p0"``; the rest is unchanged.

        Raises:
            CheckpointError: There is no such state, or the checkpoint is torn or altered.
        """
        self.set_state(read_part(path, self.checkpoint_name, component))  # type: ignore[attr-defined]

    @classmethod
    def from_checkpoint(cls, path: str | Path, *args: Any, **kwargs: Any) -> Self:
        """Create a new object with the state of a checkpoint.

        Args:
            path: See `restore_from_path`.
            args, kwargs: The constructor's arguments.
        """
        new = cls(*args, **kwargs)
        new.restore_from_path(path)
        return new


def write_part(path: str | Path | None, name: str, state: Any, kind: type) -> str:
    """Write one part's state as its own checkpoint and return its absolute path."""
    if path is None:
        path = Path(tempfile.mkdtemp(prefix="rlzmq-checkpoint-")) / "checkpoint"
    return str(write_checkpoint(path, {name: state}, about={"part": kind.__qualname__}))


def read_part(path: str | Path, name: str, component: str | None = None) -> Any:
    """Return one part's state.

    Args:
        path: The part's own checkpoint, an algorithm's, or a path into one.
        name: The state's name in both.
        component: Path of the state below the part's name; None: the whole state.

    Raises:
        CheckpointError: There is no such component.
    """
    folder, inside = find_inside(path)
    tree: dict[str, Any] = {}
    for part, state in read_checkpoint(folder).items():
        place = tree
        *above, last = part.split("/")
        for key in above:
            place = place.setdefault(key, {})
        place[last] = state
    wanted = inside or (f"{name}/{component}" if component else name)
    state = part_of(tree, wanted)
    if state is None:
        raise CheckpointError(f"The checkpoint {folder} has no component {wanted!r}. It has {sorted(tree)}.")
    for key in reversed((component or "").strip("/").split("/") if component else []):
        state = {key: state}
    return state


def part_of(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path, or None. Keys may contain slashes (as module ids do)."""
    here: Any = tree
    while path:
        keys = (path, path.partition("/")[0])
        key = next((key for key in keys if isinstance(here, Mapping) and key in here), None)
        if key is None:
            return None
        here, path = here[key], path[len(key) + 1 :]
    return here
