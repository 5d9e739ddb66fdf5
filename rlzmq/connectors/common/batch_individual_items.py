"""BatchIndividualItems: batches lists of items into arrays."""

from __future__ import annotations

from typing import Any

from rlzmq.connectors.batching import batch_items
from rlzmq.connectors.common.agent_to_module_mapping import MAP_STRUCTURE
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.rl_modules import is_multi_rl_module
from rlzmq.connectors.torch_piece import TorchPiece
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns

__all__ = ["BatchIndividualItems"]


class BatchIndividualItems(ConnectorV2):
    """Converts every column's items to one tree of arrays ``[B, ...]``. Infos become one list.

    Single-agent data is stored under ``"default_policy"`` if `rl_module` is a MultiRLModule.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        multi_agent: Whether the batch is ``{module_id: {column: [items]}}``.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        multi_agent: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self._multi_agent = multi_agent

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
            ValueError: Items of a column differ in shape or structure; the text names the column.
        """
        if self._multi_agent:
            return {
                module_id: (
                    {name: _batched(name, data) for name, data in columns.items()}
                    if isinstance(columns, dict)
                    else _batched(module_id, columns)
                )
                for module_id, columns in batch.items()
            }
        if shared_data is not None and isinstance(batch.get(Columns.OBS), dict):
            by_key = batch[Columns.OBS]
            if all(isinstance(key, tuple) for key in by_key):
                shared_data[MAP_STRUCTURE] = [key[0] for key, items in by_key.items() for _ in items]
        if not is_multi_rl_module(rl_module):
            return {name: _batched(name, data) for name, data in batch.items()}
        by_module: dict[str, Any] = {DEFAULT_MODULE_ID: {}}
        for name, data in batch.items():
            if name in rl_module and isinstance(data, dict):
                by_module.setdefault(name, {}).update(
                    {col: _batched(col, part) for col, part in data.items()}
                )
            else:
                by_module[DEFAULT_MODULE_ID][name] = _batched(name, data)
        return by_module

    def to_torch(self, *, rl_module: Any, agent_id: Any) -> TorchPiece:
        """See ConnectorV2; tensors have this layout already."""
        return TorchPiece()


def _batched(name: str, data: Any) -> Any:
    """Return one column, batched. Data that is batched already is unchanged."""
    if isinstance(data, dict) and data and all(isinstance(key, tuple) for key in data):
        data = [item for items in data.values() for item in items]
    elif isinstance(data, dict) and not data:
        data = []
    if not isinstance(data, list) or name == Columns.INFOS or not data:
        return data
    try:
        return batch_items(data)
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from None
