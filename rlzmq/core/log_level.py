"""Log level of the library's loggers in one process."""

from __future__ import annotations

import logging
from typing import Any, Protocol

__all__ = ["apply_log_level"]


class _Given(Protocol):
    def given(self) -> dict[str, Any]: ...


def apply_log_level(config: _Given) -> None:
    """Set the level of the ``rlzmq`` loggers to ``config.log_level``, if the user has set it.

    If the process has no logging handlers, add one that writes to stderr.
    """
    given = config.given() if hasattr(config, "given") else {}
    if "log_level" not in given:
        return
    logger = logging.getLogger("rlzmq")
    logger.setLevel(given["log_level"])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
