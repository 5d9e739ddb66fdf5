"""ModuleToAgentUnmapping: from data by module back to data by episode and agent."""

from __future__ import annotations

from typing import Any

from rlzmq.connectors.connector_v2 import ConnectorV2

__all__ = ["ModuleToAgentUnmapping"]


class ModuleToAgentUnmapping(ConnectorV2):
    """Undoes AgentToModuleMapping on a module's outputs.

    ``{module: {column: {(episode, agent, module): [items]}}}`` becomes
    ``{column: {(episode, agent, module): [items]}}``.
    """

    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """See ConnectorV2."""
        by_column: dict[str, Any] = {}
        for columns in batch.values():
            for name, by_key in columns.items():
                by_column.setdefault(name, {}).update(by_key)
        return by_column
