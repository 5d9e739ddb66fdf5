"""Shards: an EpisodeBatch in memory-mapped files.

```
 DIR/shard.json                    table of episodes, columns of the files, SHA-256 of the files
 DIR/obs.npy, actions.npy, …       one array per leaf of a column
```

Nothing in a shard is pickled. A shard is complete when its ``shard.json`` is there: it is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from rlzmq.core.errors import ConfigurationError
from rlzmq.episodes.episode_batch import EpisodeBatch

__all__ = ["open_shards", "write_shard"]

_TABLE_FILE = "shard.json"
_FORMAT = 1


def write_shard(path: str | Path, episodes: Any) -> Path:
    """Write episodes as one shard.

    Args:
        path: A directory that does not exist yet or is empty.
        episodes: An EpisodeBatch, or SingleAgentEpisodes. Infos, custom data and lookback parts are omitted.

    Returns:
        The directory.

    Raises:
        ConfigurationError: The directory is not empty, or a column is not an array or a tree of dicts.
    """
    directory = Path(path)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ConfigurationError(f"write_shard: {directory} is not empty; give each shard a directory.")
    batch = episodes.updated() if isinstance(episodes, EpisodeBatch) else EpisodeBatch.from_episodes(episodes)
    batch = batch.select(np.flatnonzero(batch.length))
    batch.lookback[:] = 0
    batch = batch.compact()
    files: dict[str, str] = {}
    columns = {name: _write_column(directory, name, column, files) for name, column in batch.columns.items()}
    table = {
        "format": _FORMAT,
        "num_env_steps": batch.num_env_steps,
        "columns": columns,
        "files": files,
        "length": batch.length.tolist(),
        "t_started": batch.t_started.tolist(),
        "terminated": batch.terminated.tolist(),
        "truncated": batch.truncated.tolist(),
        "episode_ids": batch.episode_ids,
    }
    temporary = directory / f"{_TABLE_FILE}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(table, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(directory / _TABLE_FILE)
    return directory


def _write_column(directory: Path, name: str, column: Any, files: dict[str, str]) -> Any:
    """Write the leaves of a column, and return their file names in the same structure."""
    if isinstance(column, dict):
        return {key: _write_column(directory, f"{name}.{key}", part, files) for key, part in column.items()}
    if not isinstance(column, np.ndarray):
        raise ConfigurationError(
            f"write_shard, column {name!r}: expected an array or dicts of arrays, got {type(column).__name__}."
        )
    file = f"{len(files):03d}-{''.join(c if c.isalnum() or c in '._-' else '_' for c in name)}.npy"
    np.save(directory / file, column, allow_pickle=False)
    files[file] = _digest(directory / file)
    return file


def open_shards(path: str | Path, *, verify: bool = False) -> list[EpisodeBatch]:
    """Map all shards below a directory into memory, in the order of their paths.

    Args:
        path: A shard's directory, or one with shards at any depth.
        verify: Whether to read every file and compare its SHA-256.

    Returns:
        One EpisodeBatch per shard; its columns are memory maps, read on access.

    Raises:
        ConfigurationError: There is no shard, or one is incomplete or altered.
    """
    tables = sorted(Path(path).rglob(_TABLE_FILE))
    if not tables:
        raise ConfigurationError(
            f"offline data: expected shards (directories with a {_TABLE_FILE}) below {path}, found none. "
            "Write them with rlzmq.replay.write_shard."
        )
    return [_open_shard(table.parent, verify) for table in tables]


def _open_shard(directory: Path, verify: bool) -> EpisodeBatch:
    try:
        table = json.loads((directory / _TABLE_FILE).read_text(encoding="utf-8"))
        if table["format"] != _FORMAT:
            raise ValueError(f"expected format {_FORMAT}, got {table['format']!r}")
        for file, digest in table["files"].items() if verify else ():
            if _digest(directory / file) != digest:
                raise ValueError(f"{file} is not what was written")
        length = np.asarray(table["length"], np.int64)
        batch = EpisodeBatch(
            {name: _open_column(directory, column) for name, column in table["columns"].items()},
            start=np.cumsum(length + 1) - length - 1,
            length=length,
            t_started=table["t_started"],
            terminated=table["terminated"],
            truncated=table["truncated"],
            episode_ids=[str(episode_id) for episode_id in table["episode_ids"]],
        )
        batch.validate()
        if batch.num_env_steps != table["num_env_steps"]:
            raise ValueError(f"expected {table['num_env_steps']} env steps, got {batch.num_env_steps}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"offline data, shard {directory}: {type(error).__name__}: {error}. Write it again, or remove it."
        ) from error
    return batch


def _open_column(directory: Path, column: Any) -> Any:
    if isinstance(column, dict):
        return {key: _open_column(directory, part) for key, part in column.items()}
    if Path(column).name != column:
        raise ValueError(f"{column!r} is not a file of this shard")
    return np.lib.format.open_memmap(directory / column, mode="r")  # never reads objects


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
