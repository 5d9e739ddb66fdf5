"""A run's directory: its config, one JSON line per iteration, its checkpoints."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from rlzmq.core.errors import ConfigurationError

__all__ = ["RunDirectory"]


class RunDirectory:
    """Where a run leaves what it did.

    Files: ``config.toml`` (settings that differ from the defaults), ``run.json`` (command, versions,
    seed), ``metrics.jsonl`` (each iteration's whole result, flushed at once), ``checkpoint/``.

    Attributes:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = (path / "metrics.jsonl").open("a", encoding="utf-8")

    @classmethod
    def create(cls, path: Path | None, name: str, config: Any) -> Self:
        """Make the directory (or go on in it) and write down what is run.

        Args:
            path: None: ``runs/<name>-<env>-<date and time>`` below the working directory.
            name: The algorithm's.
            config: The run's.
        """
        if path is None:
            env = config.env if isinstance(config.env, str) else getattr(config.env, "__name__", "env")
            label = "".join(c if c.isalnum() or c in "-." else "-" for c in str(env))
            path = Path("runs") / f"{name}-{label}-{time.strftime('%Y%m%d-%H%M%S')}"
        path.mkdir(parents=True, exist_ok=True)
        try:
            text = config.to_toml()
        except ConfigurationError as error:
            text = f"# {error}\n"
        (path / "config.toml").write_text(text, encoding="utf-8")
        (path / "run.json").write_text(json.dumps(_facts(config), indent=1), encoding="utf-8")
        return cls(path)

    def log(self, result: Mapping[str, Any]) -> None:
        """Append one iteration's result as a line."""
        self._metrics.write(json.dumps(_jsonable(result)) + "\n")
        self._metrics.flush()

    def close(self) -> None:
        """Close the metrics file."""
        self._metrics.close()


def _facts(config: Any) -> dict[str, Any]:
    import torch

    import rlzmq

    return {
        "command": sys.argv,
        "seed": config.seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {
            "rlzmq": rlzmq.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    elif isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON knows no NaN
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
