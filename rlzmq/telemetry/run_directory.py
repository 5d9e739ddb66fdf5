"""A run's directory: its config, one JSON line per iteration, and its checkpoints."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import make_directories, opener, write_text
from rlzmq.core.machine import num_usable_cores
from rlzmq.core.version import __version__
from rlzmq.telemetry.event_log import EVENTS, EventLog

if TYPE_CHECKING:
    from rlzmq.config.base_config import BaseConfig

__all__ = ["RunDirectory"]

_log = logging.getLogger("rlzmq.telemetry")

# Number of lines kept while the disk is full, some kB each.
_MAX_UNWRITTEN = 10_000
_MAX_LOCK_TRIES = 100
_GPUS = Path("/proc/driver/nvidia/gpus")
_GIT_S = 2.0  # a large repository on a slow disk is not worth waiting for


class RunDirectory:
    """The files that a run writes.

    Files: ``config.toml`` (settings that differ from the defaults), ``run.json`` (command, versions, Git commit, seed,
    process), ``metrics.jsonl`` (each iteration's whole result, flushed at once), ``events.jsonl`` (the driver's
    warnings and errors; see `rlzmq.telemetry.event_log`), ``checkpoints/NNNNNN/`` (by iteration; see
    `rlzmq.core.checkpoint_series`), ``arrivals/`` (with
    ``rlzmq train --record``).

    Attributes:
        path: The directory.
        events: The warnings and errors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Unbuffered, so that a line is written completely or not at all.
        self._metrics = open(path / "metrics.jsonl", "ab", buffering=0, opener=opener)  # noqa: SIM115 (see close)
        _lock(self._metrics.fileno())
        self._unwritten: deque[bytes] = deque(maxlen=_MAX_UNWRITTEN)
        self._has_failed = False
        self.events: EventLog = EventLog(path / EVENTS)

    @classmethod
    def create(cls, path: Path, config: BaseConfig, train: Sequence[str] = ()) -> Self:
        """Create or reuse the directory and write the run's settings and facts.

        Args:
            path: The directory, e.g. from `new_path`.
            config: The run's config.
            train: The arguments of ``rlzmq train``; () for a run of a script.
        """
        make_directories(path)
        try:
            text = config.to_toml()
        except ConfigurationError as error:
            text = f"# {error}\n"
        write_text(path / "config.toml", text)
        write_text(path / "run.json", json.dumps(_facts(config, train), indent=1))
        write_text(path / "requirements.txt", _installed_packages())
        return cls(path)

    @staticmethod
    def new_path(name: str, config: BaseConfig) -> Path:
        """Return ``runs/<name>-<env>-<date and time>`` below the working directory, for a new run."""
        path = Path("runs") / f"{_label(name, config)}-{time.strftime('%Y%m%d-%H%M%S')}"
        number = 1
        while path.exists():  # two runs within a second
            number += 1
            path = path.with_name(f"{path.name.partition('_')[0]}_{number}")
        return path

    @staticmethod
    def newest_path(name: str, config: BaseConfig) -> Path | None:
        """Return the directory of the newest run of this algorithm in this env; None if there is none."""
        runs = Path("runs")
        pattern = re.compile(re.escape(_label(name, config)) + r"-(\d{8}-\d{6})(?:_(\d+))?")
        found = [
            (match[1], int(match[2] or 1), path)
            for path in (runs.iterdir() if runs.is_dir() else ())
            if (match := pattern.fullmatch(path.name)) and path.is_dir()
        ]
        return max(found)[2] if found else None

    @property
    def checkpoints(self) -> Path:
        """The directory of the run's checkpoints."""
        return self.path / "checkpoints"

    def log(self, result: Mapping[str, Any]) -> None:
        """Append an iteration's result as a line. While the disk is full, keep the line for later."""
        self._unwritten.append((json.dumps(_jsonable(result)) + "\n").encode())
        self._write()

    def close(self) -> None:
        """Close the metrics file. Later warnings are no longer recorded."""
        self.events.close()
        self._write()
        self._metrics.close()

    def _write(self) -> None:
        file = self._metrics
        try:
            while self._unwritten:
                size = os.fstat(file.fileno()).st_size
                line = self._unwritten[0]
                if file.write(line) != len(line):  # the disk became full in the middle of the line
                    os.ftruncate(file.fileno(), size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._unwritten.popleft()
        except OSError as error:
            if not self._has_failed:
                _log.warning(
                    "Cannot write %s: %s. Training continues.", self.path / "metrics.jsonl", error.strerror
                )
            self._has_failed = True
        else:
            self._has_failed = False


def _lock(fd: int) -> None:
    """Hold a shared lock on the metrics file, which shows that the run's driver is running."""
    for _ in range(_MAX_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is checking the lock
            time.sleep(0.001)
        except OSError:  # this filesystem has no locks
            return
        else:
            return


def _env_label(config: BaseConfig) -> str:
    return str(config.env if isinstance(config.env, str) else getattr(config.env, "__name__", "env"))


def _label(name: str, config: BaseConfig) -> str:
    return f"{name}-" + "".join(c if c.isalnum() or c in "-." else "-" for c in _env_label(config))


def _facts(config: BaseConfig, train: Sequence[str]) -> dict[str, Any]:
    return {
        "command": sys.argv,
        "train": list(train),
        "algorithm": type(config).__name__.removesuffix("Config"),
        "env": _env_label(config),
        "cwd": str(Path.cwd()),
        "git": _git_state(),
        "pid": os.getpid(),
        "host": platform.node(),
        "seed": config.seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {
            "rlzmq": __version__,
            "python": platform.python_version(),
            "torch": metadata.version("torch"),  # importing it would take 134 MB of memory
            "numpy": np.__version__,
        },
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "hardware": {
            "processor": _value_after("model name", "/proc/cpuinfo") or platform.processor(),
            "num_usable_cores": num_usable_cores(),
            "memory": _value_after("MemTotal", "/proc/meminfo"),
            "gpus": [_value_after("Model", str(path)) for path in sorted(_GPUS.glob("*/information"))],
        },
    }


def _value_after(name: str, path: str) -> str | None:
    """Return the value of the first line ``name: value`` of a file in /proc; None where there is none."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)


def _installed_packages() -> str:
    """Return all installed packages with their versions, in pip's form, by the names of their folders."""
    found = (
        re.fullmatch(r"(.+?)-([^-]+)\.dist-info", folder.name)
        for place in sys.path
        if Path(place).is_dir()
        for folder in Path(place).glob("*.dist-info")
    )
    return "".join(sorted(f"{name}=={version}\n" for name, version in {m.groups() for m in found if m}))


def _git_state() -> dict[str, Any] | None:
    """Return the Git commit of the current directory, and whether tracked files differ from it; None outside of Git."""
    answers = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        try:
            # A repository's own settings must not run programs here.
            git = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", *command]
            done = subprocess.run(git, capture_output=True, text=True, timeout=_GIT_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        answers.append(done.stdout.strip())
    return {"commit": answers[0], "is_dirty": bool(answers[1])}


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
        return None  # JSON has no NaN
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
