"""UnBatchToIndividualItems: from arrays back to items by episode."""

from __future__ import annotations

from typing import Any

from rlzmq.connectors.common.agent_to_module_mapping import MAP_STRUCTURE
from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.rl_modules import is_multi_rl_module
from rlzmq.core.suggest import did_you_mean
from rlzmq.core.tree import tree_unstack
from rlzmq.episodes.columns import DEFAULT_MODULE_ID

__all__ = ["UnBatchToIndividualItems"]


class UnBatchToIndividualItems(ConnectorV2):
    """Splits every column into items, under the keys that env-to-module used.

    Without these keys in `shared_data`, columns become plain lists.
    """

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See ConnectorV2. Multi-agent: ``{module_id: {column: {(episode, agent, module): [item]}}}``.

        Raises:
            ValueError: If a module's outputs have another number of rows than its inputs had.
        """
        structure = (shared_data or {}).get(MAP_STRUCTURE)
        if structure is None:
            return {name: tree_unstack(data) for name, data in batch.items()}
        if isinstance(structure, list):
            if is_multi_rl_module(rl_module) and DEFAULT_MODULE_ID in batch:
                batch = batch[DEFAULT_MODULE_ID]
            rows = [(episode_id,) for episode_id in structure]
            return {name: _by_key(name, data, rows, None) for name, data in batch.items()}
        unbatched = {}
        for module_id, columns in batch.items():
            if module_id not in structure:
                raise ValueError(
                    f"module {module_id!r} has outputs, but no agent had inputs for it at this step."
                    f"{did_you_mean(module_id, structure)}"
                )
            keys = [(episode_id, agent_id, module_id) for episode_id, agent_id in structure[module_id]]
            unbatched[module_id] = {
                name: _by_key(name, data, keys, module_id) for name, data in columns.items()
            }
        return unbatched


def _by_key(name: str, data: Any, keys: list[Any], module_id: Any) -> dict[Any, list[Any]]:
    items = tree_unstack(data)
    if len(items) != len(keys):
        raise ValueError(
            f"column {name!r}{f' of module {module_id!r}' if module_id is not None else ''}: expected "
            f"{len(keys)} rows, as many as the module's inputs had, got {len(items)}."
        )
    by_key: dict[Any, list[Any]] = {}
    for key, item in zip(keys, items, strict=True):
        by_key.setdefault(key, []).append(item)
    return by_key
