"""The driver's side of connector state: all runners' deltas in, one merged state out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rlzmq.connectors.connector_v2 import ConnectorV2
from rlzmq.connectors.plans import flat_pieces

__all__ = ["ConnectorSync"]

_NAMES = ("env_to_module_connector", "module_to_env_connector")


class ConnectorSync:
    """Merges what runners' connector pieces learned from samples (running means, …).

    Args:
        config: Whose connectors the runners use.
        spaces: ``{"__env_single__": (obs, act), …}``.

    Attributes:
        is_needed: Whether any piece has such state; without one nothing is merged or sent.
    """

    def __init__(self, config: Any, spaces: Mapping[str, Any]) -> None:
        self.spaces = spaces
        env_to_module = config.build_env_to_module_connector(env=None, spaces=spaces)
        module_to_env = config.build_module_to_env_connector(env=None, spaces=spaces)
        self._pipelines = dict(zip(_NAMES, (env_to_module, module_to_env), strict=True))
        self._merges = config.merge_env_runner_states is not False
        pieces = [piece for p in self._pipelines.values() for piece in flat_pieces(p.connectors)]
        self.is_needed = self._merges and any(_has_state(piece) for piece in pieces)

    def merge(self, deltas: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
        """Fold in what runners' `get_connector_delta` returned.

        Returns:
            The merged state for every runner's `set_connector_state`, or None if no piece has any.
        """
        if not self.is_needed:
            return None
        listed = [delta for delta in deltas if delta]
        for name, pipeline in self._pipelines.items():
            mine = [delta[name] for delta in listed if delta.get(name)]
            if mine:
                pipeline.merge_deltas(mine)
        return self.get_state()

    def get_state(self) -> dict[str, Any]:
        """The merged state by pipeline."""
        return {name: state for name, p in self._pipelines.items() if (state := p.get_state())}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Become what `get_state` returned, e.g. out of a checkpoint."""
        for name, pipeline in self._pipelines.items():
            pipeline.reset_state()
            if state.get(name):
                pipeline.set_state(state[name])


def _has_state(piece: ConnectorV2) -> bool:
    """Whether the piece keeps a state at all; before the first sample it may still be empty."""
    names = ("get_state", "get_delta")
    return any(getattr(type(piece), name) is not getattr(ConnectorV2, name) for name in names)
