"""RemoveSingleTsTimeRankFromBatch: undoes what AddTimeDimToBatchAndZeroPad did in the env runner."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlzmq.connectors.common.add_time_dim import SINGLE_TIME_RANK_FLAG
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.rl_modules import stateful_module_for_key
from rlzmq.core.tree import tree_map
from rlzmq.episodes.columns import Columns

__all__ = ["RemoveSingleTsTimeRankFromBatch"]

_WITHOUT_TIME_AXIS = (Columns.STATE_OUT, Columns.STATE_IN, Columns.INFOS)


class RemoveSingleTsTimeRankFromBatch(ConnectorV2):
    """Takes the time axis of length 1 off the items of stateful modules; states have none."""

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: If an item's first axis is not of length 1.
        """
        if not shared_data or not shared_data.pop(SINGLE_TIME_RANK_FLAG, False):
            return batch
        for name, column in batch.items():
            if name in _WITHOUT_TIME_AXIS:
                continue
            for key, items in column.items() if isinstance(column, dict) else [(None, column)]:
                if rl_module is None or stateful_module_for_key(rl_module, key) is not None:
                    items[:] = [
                        tree_map(lambda leaf, name=name, key=key: _squeezed(leaf, name, key), item)
                        for item in items
                    ]
        return batch


def _squeezed(leaf: Any, column: str, key: Any) -> Any:
    shape = np.shape(leaf)
    if not shape or shape[0] != 1:
        raise ValueError(
            f"column {column!r}, key {key}: expected a time axis of length 1 first, got shape "
            f"{tuple(shape)}. "
            "Stateful modules get [B, 1, ...] and return all columns but state_out as [B, 1, ...]."
        )
    return leaf[0]
