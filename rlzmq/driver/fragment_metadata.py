"""Validation of the fragment metadata from runners, before the driver uses it."""

from __future__ import annotations

from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.metrics import MetricsLogger
from rlzmq.driver.connector_sync import ConnectorSync
from rlzmq.runners.episode_metrics import EpisodeMetrics, add_fragment_metas
from rlzmq.wire.errors import WireError
from rlzmq.wire.values import unpack_blob

__all__ = ["MetaCheck"]


class MetaCheck:
    """Applies metadata to scratch metrics and connectors first, so that invalid metadata cannot end the run.

    If no external peers may join, all runners belong to the run and nothing is checked.

    Args:
        config: The run's config.
        spaces: See `ConnectorSync`.
    """

    def __init__(self, config: BaseConfig, spaces: Any) -> None:
        self._is_joinable = config.listen is not None or config.broker is not None
        if self._is_joinable:
            self._logger = MetricsLogger(stats_cls_lookup=config.custom_stats_cls_lookup)
            self._connectors = ConnectorSync(config, spaces)

    def open(self, blob: Any, *, is_trusted: bool) -> dict[str, Any]:
        """Return the metadata in a fragment's last frame.

        Args:
            blob: The frame as received.
            is_trusted: Whether this driver started the runner, which then runs the same code.

        Raises:
            ValueError: The frame is not metadata, or cannot be used.
        """
        try:
            meta = unpack_blob(blob)
        except WireError as error:
            raise ValueError(str(error)) from error
        if not isinstance(meta, dict):
            raise ValueError(f"expected a dict, got {type(meta).__name__}")
        if self._is_joinable and (not is_trusted or meta.get("custom_metrics")):
            self._try(meta, keeps_errors=is_trusted)
        return meta

    def _try(self, meta: dict[str, Any], *, keeps_errors: bool) -> None:
        try:
            add_fragment_metas(EpisodeMetrics(), self._logger, [meta])
            self._logger.reduce()
            if not keeps_errors and meta.get("connector_delta"):
                self._connectors.merge([meta["connector_delta"]])
        except Exception as error:
            if not keeps_errors:  # otherwise the run reports the user's error
                raise ValueError(f"{type(error).__name__}: {error}") from error
