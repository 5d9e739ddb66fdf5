"""What a runner says of its fragment beside the data, looked at before the driver acts on it."""

from __future__ import annotations

from typing import Any

from rlzmq.config.base_config import BaseConfig
from rlzmq.core.metrics import MetricsLogger
from rlzmq.driver.connector_sync import ConnectorSync
from rlzmq.runners.episode_metrics import EpisodeMetrics
from rlzmq.runners.fragment_metrics import add_fragment_metas
from rlzmq.wire.errors import WireError
from rlzmq.wire.values import unpack_blob

__all__ = ["MetaCheck"]


class MetaCheck:
    """Tries metas on metrics and connectors of its own, so that one that lies cannot end the run.

    Where nobody may join, all runners are the run's own and nothing is tried.

    Args:
        config: The run's.
        spaces: As of `ConnectorSync`.
    """

    def __init__(self, config: BaseConfig, spaces: Any) -> None:
        self._is_joinable = config.listen is not None or config.broker is not None
        if self._is_joinable:
            self._logger = MetricsLogger(stats_cls_lookup=config.custom_stats_cls_lookup)
            self._connectors = ConnectorSync(config, spaces)

    def open(self, blob: Any, *, is_trusted: bool) -> dict[str, Any]:
        """The meta in a fragment's last frame.

        Args:
            blob: As it came.
            is_trusted: Of a runner that this driver has started: it runs this very code.

        Raises:
            ValueError: Not a meta, or not one that can be used.
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
            if not keeps_errors:  # else the user's code logged what does not fit: the run says so itself
                raise ValueError(f"{type(error).__name__}: {error}") from error
