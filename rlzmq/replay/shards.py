"""Shards: recorded episodes in files that are mapped into memory.

```
 8 bytes   "rlzmqep1"
 u32       CRC-32 of all that follows
 u32       length of the head
 u64       length of the file
 head      msgpack: the header of `EpisodeBatch.to_wire`, the length of each frame, spaces, how actions are scaled
 frames    those of `EpisodeBatch.to_wire`, each at a multiple of 64 bytes
```

A shard is written under another name (``*.shard.part``) and renamed once it is complete and on disk. Any number of
processes may write into a directory while others read it. Nothing in a shard is pickled, and every size is checked.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

from rlzmq.core import faults
from rlzmq.core.errors import ConfigurationError, ProtocolError
from rlzmq.core.files import make_directories
from rlzmq.core.plain import NotPlainError
from rlzmq.core.space_plain import space_from_plain, space_to_plain
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.episode_joining import join_chunks
from rlzmq.replay.parquet_data import read_parquet

__all__ = ["OpenedShards", "SkippedShard", "column_form", "find_shards", "open_shards", "write_shard"]

_MAGIC = b"rlzmqep1"
_PREFIX = struct.Struct("<8sIIQ")
_FIRST_CHECKED = 12  # the CRC covers the bytes from here on
_ALIGNMENT = 64
_SUFFIX, _UNFINISHED, _PARQUET = ".shard", ".shard.part", ".parquet"


@dataclass(frozen=True, slots=True)
class SkippedShard:
    """A file that is not used.

    Attributes:
        path: Path of the file.
        reason: Why it cannot be used.
    """

    path: Path
    reason: str


@dataclass(slots=True)
class OpenedShards:
    """The shards below one or several directories.

    Attributes:
        shards: One EpisodeBatch per usable shard. Its columns are mapped into memory and read on access; its meta has
            ``normalize_actions``, if known.
        paths: Their files.
        skipped: The unusable files.
    """

    shards: list[EpisodeBatch] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    skipped: list[SkippedShard] = field(default_factory=list)


# -- writing ------------------------------------------------------------------------------------------


def write_shard(directory: str | Path, episodes: Any, *, normalize_actions: bool | None = None) -> Path:
    """Write episodes as a new shard of a directory.

    Args:
        directory: Created if missing; other processes may write into it at the same time.
        episodes: An EpisodeBatch, or SingleAgentEpisodes. Chunks of the same episode are joined. Infos, custom data and
            lookback parts are left out.
        normalize_actions: Whether bounded Box actions are in [-1, 1], the range of modules, instead of the space's
            bounds; None: unknown.

    Returns:
        Path of the new file.

    Raises:
        ValueError: There are no steps, or a column cannot be written (objects).
        OSError: The file cannot be written.
    """
    batch = episodes if isinstance(episodes, EpisodeBatch) else EpisodeBatch.from_episodes(episodes)
    batch = join_chunks(batch)
    if not len(batch):
        raise ValueError(f"write_shard to {directory}: expected at least one step, got none.")
    header, frames = batch.to_wire()
    head = msgpack.packb(
        {
            "batch": header,
            "frames": [frame.nbytes for frame in frames],
            "observation_space": _plain_space(batch.observation_space),
            "action_space": _plain_space(batch.action_space),
            "normalize_actions": normalize_actions,
        }
    )
    parts: list[Any] = [head]
    position = _PREFIX.size + len(head)
    for frame in frames:
        padding = -position % _ALIGNMENT
        parts += [bytes(padding), frame.reshape(-1).view(np.uint8).data]
        position += padding + frame.nbytes
    prefix = _PREFIX.pack(_MAGIC, 0, len(head), position)
    crc = zlib.crc32(prefix[_FIRST_CHECKED:])
    for part in parts:
        crc = zlib.crc32(part, crc)
    place = Path(directory)
    make_directories(place)
    path = place / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}{_SUFFIX}"  # sorted by time
    unfinished = path.with_suffix(_UNFINISHED)
    try:
        with unfinished.open("xb") as file:
            file.write(_PREFIX.pack(_MAGIC, crc, len(head), position))
            faults.at("shard.begun")
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        faults.at("shard.written")
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    return path


def _plain_space(space: Any) -> Any:
    try:
        return space_to_plain(space)
    except NotPlainError:  # a custom space; the columns' shapes are still checked
        return None


# -- reading ------------------------------------------------------------------------------------------


def open_shards(paths: str | Path | Sequence[str | Path]) -> OpenedShards:
    """Map all shards below one or several directories into memory, in the order of their names.

    Every byte is read once and compared with the shard's CRC. Files that are torn, altered or of another release are
    skipped.

    Args:
        paths: A directory with shards or Parquet files (see `read_parquet`) at any depth, one file, or a list of these.

    Raises:
        ConfigurationError: A path does not exist, no shard is usable, or their columns do not fit together.
    """
    opened = OpenedShards()
    for path in [paths] if isinstance(paths, str | Path) else paths:
        place = Path(path)
        if not place.exists():
            raise ConfigurationError(
                f"offline data: {place} does not exist. Name the directory that offline_data(output=…) or "
                "`rlzmq record` has written."
            )
        for file in find_shards(place):
            try:
                opened.shards.append(_open(file))
            except FileNotFoundError:
                if file.is_symlink():
                    opened.skipped.append(
                        SkippedShard(file, f"a link to {file.readlink()}, which does not exist")
                    )
                # Otherwise it was renamed or removed in the meantime.
            except (OSError, ProtocolError) as error:
                opened.skipped.append(SkippedShard(file, str(error)))
            else:
                opened.paths.append(file)
    if not opened.shards:
        found = "".join(f"\n  {shard.path}: {shard.reason}" for shard in opened.skipped[:8])
        raise ConfigurationError(
            f"offline data: expected shards (*{_SUFFIX}) below {paths}, got "
            + (f"{len(opened.skipped)} of which none is usable:{found}" if found else "none")
            + "\nRecord episodes with offline_data(output=…) or `rlzmq record`, or write your own with "
            "rlzmq.replay.write_shard."
        )
    _check_fit(opened)
    return opened


def find_shards(place: Path) -> list[Path]:
    """Return the files of all shards below a directory, complete or not, by name; a file is returned itself."""
    if place.is_file():
        return [place]
    return sorted(file for end in (_SUFFIX, _UNFINISHED, _PARQUET) for file in place.rglob(f"*{end}"))


def _open(path: Path) -> EpisodeBatch:
    """Map one shard.

    Raises:
        ProtocolError: The file is torn, altered, or not of this release.
    """
    if path.suffix == _PARQUET:
        batch = read_parquet(path)
        batch.meta["normalize_actions"] = None
        return batch
    if path.name.endswith(_UNFINISHED):
        raise ProtocolError("unfinished: its writer is still at work, or was killed")
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes < _PREFIX.size:
            raise ProtocolError(f"torn: {num_bytes} bytes, fewer than the {_PREFIX.size} it begins with")
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    magic, crc, head_bytes, file_bytes = _PREFIX.unpack_from(content)
    if magic != _MAGIC:
        raise ProtocolError(f"expected a file that begins with {_MAGIC!r}, got {magic!r}")
    if file_bytes != num_bytes:
        raise ProtocolError(f"torn or altered: expected {file_bytes} bytes, got {num_bytes}")
    actual = zlib.crc32(content[_FIRST_CHECKED:])
    if actual != crc:
        raise ProtocolError(f"altered: expected the CRC-32 {crc:08x}, got {actual:08x}")
    # The checksum was right, so from here on only a writer's mistakes are found.
    try:
        head = msgpack.unpackb(content[_PREFIX.size : _PREFIX.size + head_bytes])
        position, frames = _PREFIX.size + head_bytes, []
        for size in head["frames"]:
            position += -position % _ALIGNMENT
            frames.append(content[position : position + size])
            position += size
        batch = EpisodeBatch.from_wire(
            head["batch"],
            frames,
            observation_space=space_from_plain(head["observation_space"]),
            action_space=space_from_plain(head["action_space"]),
        )
        batch.meta["normalize_actions"] = head["normalize_actions"]
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not a shard of this release: {type(error).__name__}: {error}") from error
    return batch


def _check_fit(opened: OpenedShards) -> None:
    """Check that all shards have the same observations, actions and rewards.

    Raises:
        ConfigurationError: They differ; the text names the file, the column, and both forms.
    """
    first = opened.shards[0]
    for shard, path in zip(opened.shards, opened.paths, strict=True):
        for name in (Columns.OBS, Columns.ACTIONS, Columns.REWARDS):
            expected, actual = column_form(first.columns[name]), column_form(shard.columns[name])
            if expected != actual:
                raise ConfigurationError(
                    f"offline data, column {name!r}: expected {expected} as in {opened.paths[0]}, got {actual} in "
                    f"{path}. Record each environment and module into its own directory."
                )


def column_form(column: Any) -> Any:
    """Return a column's dtype and shape per step, as text; for a tree, the same tree of texts."""
    if isinstance(column, dict):
        return {key: column_form(part) for key, part in column.items()}
    if isinstance(column, tuple):
        return tuple(column_form(part) for part in column)
    return f"{column.dtype} {tuple(column.shape[1:])}"
