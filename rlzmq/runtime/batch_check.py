"""What a learner looks at before it trains a fragment: finite numbers, and the form of those trained before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import optree

__all__ = ["BatchCheck", "check_finite"]

# Leaf path → (shape of one step, kind of dtype).
_Form = dict[str, tuple[tuple[int, ...], str]]
_MAX_AGENTS = 10_000


class BatchCheck:
    """Refuses batches that would spoil an update, before they are part of one.

    The form of a batch is the names, shapes per step and kinds of its columns. What was trained once is the
    form that all later batches must have; before that, the first one's, unless it contradicts its own
    observation space. Of multi-agent batches each agent has a form, and columns may be missing.
    """

    def __init__(self) -> None:
        self._forms: OrderedDict[Any, tuple[_Form, bool]] = OrderedDict()
        self._is_proven = False

    def check(self, batch: Any) -> None:
        """Look at one.

        Args:
            batch: EpisodeBatch or MultiAgentEpisodeBatch.

        Raises:
            ValueError: It cannot be trained; the text names column, expected and actual.
        """
        check_finite(batch)
        for key, part in _parts(batch):
            form = _form_of(part)
            known = self._forms.get(key)
            if known is not None:
                misfit = _misfit(known[0], form, may_lack=key is not None)
                # Two that differ before any was trained: the one that contradicts its own space is wrong.
                if misfit and (self._is_proven or known[1] or not _fits_its_space(part)):
                    raise ValueError(misfit)
                if not misfit:
                    continue
            self._forms[key] = form, _fits_its_space(part)
            if len(self._forms) > _MAX_AGENTS:
                self._forms.popitem(last=False)

    def trained(self) -> None:
        """What was checked so far has been trained: the forms are right."""
        self._is_proven = True

    def forget(self) -> None:
        """The modules changed, and what they put out may have."""
        self._forms.clear()
        self._is_proven = False


def check_finite(batch: Any) -> None:
    """Raise ValueError where a step that would be trained holds NaN or infinity, naming column and step.

    Args:
        batch: EpisodeBatch or MultiAgentEpisodeBatch.
    """
    for part in getattr(batch, "agent_batches", [batch]):
        slots = part.step_slots()
        for name, column in part.columns.items():
            for leaf in optree.tree_leaves(column):
                if leaf.dtype.kind != "f":
                    continue
                finite = np.isfinite(leaf[slots])
                if not finite.all():
                    first = int(np.argwhere(~finite.reshape(len(slots), -1).all(axis=1))[0, 0])
                    raise ValueError(f"column {name!r} is not finite at step {first} of the fragment")


def _parts(batch: Any) -> Iterator[tuple[Any, Any]]:
    """(whose form it is: None for the only agent, the part)."""
    if not hasattr(batch, "agent_batches"):
        yield None, batch
        return
    for part in batch.agent_batches:
        for key in sorted(set(zip(part.module_ids or (), map(str, part.agent_ids or ()), strict=False))):
            yield key, part


def _form_of(part: Any) -> _Form:
    paths, leaves, _ = optree.tree_flatten_with_path(part.columns)
    return {
        "/".join(map(str, path)): (leaf.shape[1:], leaf.dtype.kind)
        for path, leaf in zip(paths, leaves, strict=True)
    }


def _misfit(expected: _Form, actual: _Form, *, may_lack: bool) -> str:
    """What does not fit, in words; "" if nothing."""
    if not may_lack and expected.keys() != actual.keys():
        return f"expected the columns {sorted(expected)}, got {sorted(actual)}"
    for name in expected.keys() & actual.keys():
        if expected[name] != actual[name]:
            (shape, kind), (got_shape, got_kind) = expected[name], actual[name]
            return (
                f"column {name!r}: expected shape {shape} per step and dtype kind {kind!r}, "
                f"got {got_shape} and {got_kind!r}"
            )
    return ""


def _fits_its_space(part: Any) -> bool:
    """Whether the observations are of the shape that the batch itself declares; True where it says nothing."""
    shape = getattr(part.observation_space, "shape", None)
    observations = part.columns.get("obs")
    return shape is None or not isinstance(observations, np.ndarray) or observations.shape[1:] == shape
