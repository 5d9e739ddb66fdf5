"""A run's directory: who drives it, its config, one JSON line per iteration, and its checkpoints."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from importlib import metadata
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from rlzmq.config.plain import to_json
from rlzmq.core.errors import ConfigurationError, printable
from rlzmq.core.files import make_directories, opener, write_text
from rlzmq.core.process import num_usable_cores
from rlzmq.core.run_dir import RunDir
from rlzmq.core.tracebacks import format_error
from rlzmq.core.version import __version__
from rlzmq.telemetry.runs import FoundRun, find_run, finite

if TYPE_CHECKING:
    from rlzmq.config.base_config import BaseConfig

__all__ = [
    "EVENTS",
    "EventLog",
    "RunDirectory",
    "check_continues",
]


EVENTS = "events.jsonl"
"""Name of the file in a run directory."""

_LOGGER = "rlzmq"
_MAX_EVENTS = 10_000
_MAX_CHARS = 20_000


class EventLog(logging.Handler):
    """A logging handler that appends rlzmq's log records of this process, from level WARNING, to a file.

    A line has ``time`` (seconds since 1970), ``level``, ``source`` (the logger), ``text``, and ``trace`` if there is a
    traceback: from the record's ``exc_info``, or from the error given as ``extra={"error": error}``. The file is
    created with the first event. Events that cannot be written are dropped.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(logging.WARNING)
        self._path = path
        self._num_events = 0
        self._file_lock = threading.Lock()
        self._logger = logging.getLogger(_LOGGER)
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        error = getattr(record, "error", None)
        if error is None and record.exc_info:
            error = record.exc_info[1]
        try:
            self._write(record.created, record.levelname.lower(), record.name, record.getMessage(), error)
        except Exception:
            self.handleError(record)
        # Without this handler, logging would have printed them.
        root = logging.getLogger().handlers if self._logger.propagate else []
        has_others = any(handler is not self for handler in (*self._logger.handlers, *root))
        if logging.lastResort is not None and not has_others:
            logging.lastResort.handle(record)

    def add_error(self, error: BaseException) -> None:
        """Write the error that ends the run."""
        self._write(time.time(), "error", "run", f"{type(error).__name__}: {error}", error)

    def close(self) -> None:
        """Stop recording."""
        self._logger.removeHandler(self)
        super().close()

    def _write(self, at: float, level: str, source: str, text: str, error: BaseException | None) -> None:
        with self._file_lock:
            if self._num_events >= _MAX_EVENTS:
                return
            self._num_events += 1
            if self._num_events == _MAX_EVENTS:
                text, error = f"{_MAX_EVENTS:,} events are written: later ones are left out.", None
            event = {"time": round(at, 3), "level": level, "source": source, "text": _shown(text)}
            if error is not None:
                event["trace"] = _shown(format_error(error))
            try:
                with open(self._path, "ab", buffering=0, opener=opener) as file:
                    file.write(json.dumps(event).encode() + b"\n")
            except OSError:  # the disk is full; the text has been printed
                pass


def _shown(text: str) -> str:
    return printable(text, keep="\n\t")[:_MAX_CHARS]


_log = logging.getLogger("rlzmq.telemetry")

# Number of lines kept while the disk is full, some kB each.
_MAX_UNWRITTEN = 10_000
_GPUS = Path("/proc/driver/nvidia/gpus")
_GIT_S = 2.0  # a large repository on a slow disk is not worth waiting for


class RunDirectory(RunDir):
    """The directory of one run, with its settings and results; `Algorithm.keep_checkpoints` adds the checkpoints.

    Files beside those of a `RunDir`: ``config.toml`` (settings that differ from the defaults), ``run.json`` (command,
    versions, Git commit, seed, process), ``metrics.jsonl`` (each iteration's whole result, flushed at once),
    ``events.jsonl`` (the driver's warnings and errors; see `EventLog`), ``arrivals/`` (with ``rlzmq train --record``).

    A context manager. Use `create`; or `open`, and later `begin`, for a directory that is refused before the run is
    built.

    Attributes:
        found: The run that was in the directory when it was taken; None if there was none.
        moved_to: Where the former directory is, if it was to be overwritten; else None.
        events: The warnings and errors.
    """

    events: EventLog

    def __init__(self, path: Path, made: Sequence[Path] = ()) -> None:
        super().__init__(path)
        self.path = path
        self.found: FoundRun | None = None
        self.moved_to: Path | None = None
        self._made = made
        self._metrics: FileIO | None = None
        self._unwritten: deque[bytes] = deque(maxlen=_MAX_UNWRITTEN)
        self._has_failed = False

    @classmethod
    def create(
        cls, path: Path, config: BaseConfig, train: Sequence[str] = (), *, resumes: bool = False
    ) -> Self:
        """Take the directory and write the run's settings and facts.

        Args:
            path: The directory, e.g. ``Path("runs/mine")``.
            config: The run's config.
            train: The arguments of ``rlzmq train``; () for a run of a script.
            resumes: Whether the run that is in the directory continues.

        Raises:
            ConfigurationError: There is a run in the directory, or another driver has it.
        """
        directory = cls.open(
            path, resumes=resumes, ways="Continue it with resumes=True, or name another directory."
        )
        directory.begin(config, train)
        return directory

    @classmethod
    def open(cls, path: Path, *, resumes: bool = False, overwrites: bool = False, ways: str = "") -> Self:
        """Create the directory if it is missing, and take it for this process until `close`. Write nothing else.

        Args:
            path: The directory.
            resumes: Whether the run that is in the directory continues.
            overwrites: Whether a run that is in the directory is moved aside.
            ways: What the error's reader can do if there is a run in the directory.

        Raises:
            ConfigurationError: There is a run in the directory and neither is set, another driver has it, or it cannot
                be written.
        """
        made = [place for place in (path, *path.parents) if not place.exists()]
        directory = cls(path, made)
        directory.take()
        directory.found = found = find_run(path)
        if found is None or resumes:
            return directory
        if not overwrites:
            directory.close()
            raise ConfigurationError(f"{path} holds a run: {found}. {ways}")
        directory.moved_to, directory.found = directory.move_aside(), None
        directory._made = [path]
        return directory

    @classmethod
    def open_new(cls, name: str, config: BaseConfig) -> Self:
        """Create ``runs/<name>-<env>-<date and time>`` below the working directory, and take it.

        Raises:
            ConfigurationError: It cannot be written.
        """
        runs = Path("runs")
        first = runs / f"{_label(name, config)}-{time.strftime('%Y%m%d-%H%M%S')}"
        made = [] if runs.exists() else [runs]
        try:
            make_directories(runs)
            for number in itertools.count(1):  # several runs within a second
                path = first if number == 1 else first.with_name(f"{first.name}_{number}")
                with contextlib.suppress(FileExistsError):
                    path.mkdir(mode=0o775)
                    break
        except OSError as error:
            raise ConfigurationError(f"cannot create a run directory in {runs}: {error.strerror}") from error
        directory = cls(path, [path, *made])
        directory.take()
        return directory

    def begin(self, config: BaseConfig, train: Sequence[str] = ()) -> None:
        """Write the run's settings and facts; see `create`."""
        try:
            text = config.to_toml()
        except ConfigurationError as error:
            text = f"# {error}\n"
        write_text(self.path / "config.toml", text)
        write_text(self.path / "run.json", json.dumps(_facts(config, train), indent=1))
        write_text(self.path / "requirements.txt", _installed_packages())
        # Unbuffered, so that a line is written completely or not at all.
        self._metrics = open(self.path / "metrics.jsonl", "ab", buffering=0, opener=opener)  # noqa: SIM115 (see close)
        self.events = EventLog(self.path / EVENTS)

    @staticmethod
    def newest_path(name: str, config: BaseConfig) -> Path | None:
        """Return the directory of the newest run of this algorithm in this env, or None."""
        runs = Path("runs")
        pattern = re.compile(re.escape(_label(name, config)) + r"-(\d{8}-\d{6})(?:_(\d+))?")
        found = [
            (match[1], int(match[2] or 1), path)
            for path in (runs.iterdir() if runs.is_dir() else ())
            if (match := pattern.fullmatch(path.name)) and (path / "run.json").exists()
        ]
        return max(found)[2] if found else None

    def log(self, result: Mapping[str, Any]) -> None:
        """Append an iteration's result as a line. While the disk is full, keep the line for later."""
        self._unwritten.append((json.dumps(finite(to_json(result))) + "\n").encode())
        self._write()

    def close(self) -> None:
        """Release the directory. Later warnings are no longer recorded. If nothing began, undo what `take` did."""
        if self._metrics is not None and not self._metrics.closed:
            self.events.close()
            self._write()
            self._metrics.close()
        self.release()
        if self._metrics is None:
            with contextlib.suppress(OSError):  # it contains other files
                for place in self._made:
                    place.rmdir()
                if self.moved_to is not None:
                    self.moved_to.rename(self.path)

    def __enter__(self) -> Self:
        return self  # it was taken when it was opened

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _write(self) -> None:
        file = self._metrics
        assert file is not None
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


def check_continues(found: FoundRun, algorithm: str, config: BaseConfig | None, ways: str) -> None:
    """Raise ConfigurationError if a run of this algorithm and config cannot continue the one that was found."""
    env = "?" if config is None else _env_label(config)
    names = {name.rpartition(":")[2] for name in (found.env, env)}  # a class may be named with its module
    is_other_env = "?" not in names and len(names) > 1
    if is_other_env or found.algorithm.lower() not in ("?", algorithm.lower()):
        own = algorithm.upper() + (f" on {env}" if is_other_env else "")
        raise ConfigurationError(
            f"{found.path} holds the run of {found}, which {own} cannot continue. {ways}"
        )


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
