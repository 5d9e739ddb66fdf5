"""ListifyDataForVectorEnv: one list entry per sub-env."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlzmq.connectors.connector_v2 import ConnectorV2

__all__ = ["ListifyDataForVectorEnv"]

_EPISODES_MAP = "vector_env_episodes_map"


class ListifyDataForVectorEnv(ConnectorV2):
    """Turns ``{column: {key: [item]}}`` into ``{column: [one entry per sub-env]}``.

    Single-agent: the items, in the order of the batch. Multi-agent: dicts ``{agent_id: item}``, one per
    episode of `episodes` (or at the index that ``shared_data["vector_env_episodes_map"]`` says).
    """

    def __call__(
        self,
        *,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: Multi-agent data of an episode that is not among `episodes`.
        """
        index_of = dict((shared_data or {}).get(_EPISODES_MAP) or {})
        if not index_of:
            index_of = {episode.id_: index for index, episode in enumerate(episodes)}
        return {name: self._listified(name, column, episodes, index_of) for name, column in batch.items()}

    def _listified(
        self, name: str, column: Any, episodes: Sequence[Any], index_of: dict[Any, int]
    ) -> list[Any]:
        if isinstance(column, list):
            return column
        if len(next(iter(column), ())) != 3:
            entries = [item for items in column.values() for item in items]
            is_multi_agent = bool(len(episodes)) and hasattr(episodes[0], "agent_episodes")
            return [{} for _ in episodes] if is_multi_agent and not entries else entries
        by_env: list[Any] = [{} for _ in episodes]
        for (episode_id, agent_id, _), items in column.items():
            if episode_id not in index_of:
                raise ValueError(f"column {name!r}: episode {episode_id!r} is not one of the given episodes.")
            by_env[index_of[episode_id]][agent_id] = items[0]
        return by_env
