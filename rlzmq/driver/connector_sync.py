"""ConnectorSync: merges all runners' connector deltas into one state."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.plain import NotPlainError
from rlzmq.core.spaces import space_to_plain

__all__ = ["ConnectorSync"]

_log = logging.getLogger("rlzmq.driver")

_NAMES = ("env_to_module_connector", "module_to_env_connector")


class ConnectorSync:
    """Merges the statistics of runners' connector pieces (running means, …).

    Args:
        config: Source of the runners' connectors.
        spaces: ``{"__env_single__": (obs, act), …}``.

    Attributes:
        is_needed: Whether any piece has such state. If not, nothing is merged or sent.
    """

    def __init__(self, config: BaseConfig, spaces: Mapping[str, Any]) -> None:
        self.spaces = spaces
        env_to_module = config.build_env_to_module_connector(env=None, spaces=spaces)
        module_to_env = config.build_module_to_env_connector(env=None, spaces=spaces)
        self._pipelines = dict(zip(_NAMES, (env_to_module, module_to_env), strict=True))
        self._lets_envs_stray = config.disable_env_checking
        self._merges = config.merge_env_runner_states is not False
        pieces = [piece for p in self._pipelines.values() for piece in p.flat]
        self.is_needed: bool = self._merges and any(piece.has_delta for piece in pieces)

    @property
    def stores_module_outputs(self) -> bool:
        """Whether episodes store the modules' outputs unchanged; custom module-to-env pieces may change them."""
        return bool(self._pipelines["module_to_env_connector"].on_rows)

    def stored_observation_space(self) -> Any:
        """Return the space of the observations in runners' episodes, as plain data.

        None if it cannot be determined, or if the config lets envs violate their spaces.
        """
        pipeline = self._pipelines["env_to_module_connector"]
        if not pipeline.on_rows or self._lets_envs_stray:
            return None
        try:
            return space_to_plain(pipeline.stored_observation_space)
        except NotPlainError:  # a custom space class
            return None

    def merge(self, deltas: Iterable[Mapping[str, Any] | None]) -> dict[str, Any] | None:
        """Merge the results of runners' `get_connector_delta`.

        Returns:
            The merged state for every runner's `set_connector_state`; None if no piece has state.
        """
        if not self.is_needed:
            return None
        listed = []
        for delta in deltas:
            if delta and not _is_finite(delta):
                _log.warning("a runner's connector state holds NaN or infinity: ignored")
            elif delta:
                listed.append(delta)
        for name, pipeline in self._pipelines.items():
            mine = [delta[name] for delta in listed if delta.get(name)]
            if mine:
                pipeline.merge_deltas(mine)
        return self.get_state()

    def get_state(self) -> dict[str, Any]:
        """Return the merged state by pipeline."""
        return {name: state for name, p in self._pipelines.items() if (state := p.get_state())}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Load a state from `get_state`, e.g. from a checkpoint."""
        for name, pipeline in self._pipelines.items():
            pipeline.reset_state()
            if state.get(name):
                pipeline.set_state(state[name])


def _is_finite(delta: object) -> bool:
    if isinstance(delta, Mapping):
        return all(map(_is_finite, delta.values()))
    if isinstance(delta, (list, tuple)):
        return all(map(_is_finite, delta))
    if isinstance(delta, float) or (isinstance(delta, np.ndarray) and delta.dtype.kind == "f"):
        return bool(np.isfinite(delta).all())
    return True
