"""Shards: recorded episodes in files that are mapped into memory; Parquet files and Minari datasets as such.

```
 u32       length of the head
 head      msgpack: the header of `EpisodeBatch.to_wire`, the length of each frame, spaces, how actions are scaled
 frames    those of `EpisodeBatch.to_wire`, each at a multiple of 64 bytes of the file
```

A shard is written under another name (``*.shard.part``) and renamed once
it is complete and on disk. Any number of processes may write into a directory while others read it. Nothing in a shard
is pickled, and every size is checked.
"""

from __future__ import annotations

import logging
import os
import struct
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import msgpack  # type: ignore[import-untyped]
import numpy as np

from rlzmq.core import faults
from rlzmq.core.errors import ConfigurationError, ProtocolError
from rlzmq.core.files import RECORD_BYTES, make_directories, map_file, read_records, write_record
from rlzmq.core.imports import import_optional
from rlzmq.core.plain import NotPlainError
from rlzmq.core.spaces import (
    actions_of_env,
    actions_of_module,
    is_scaled,
    leaf_spaces,
    space_from_plain,
    space_to_plain,
)
from rlzmq.core.tree import tree_leaves, tree_map, tree_rows, tree_stack
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch, join_chunks
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = [
    "EpisodeRecorder",
    "OpenedShards",
    "column_form",
    "export_to_minari",
    "find_shards",
    "import_from_minari",
    "open_shards",
    "write_shard",
]

_MAGIC = b"rlzmqep2"
_HEAD_BYTES = struct.Struct("<I")
_START = len(_MAGIC) + RECORD_BYTES + _HEAD_BYTES.size  # of the head
_SHARD = 1
_ALIGNMENT = 64
_SUFFIX, _UNFINISHED, _PARQUET = ".shard", ".shard.part", ".parquet"


@dataclass(slots=True)
class OpenedShards:
    """The shards below one or several directories.

    Attributes:
        shards: One EpisodeBatch per usable shard. Its columns are mapped into memory and read on access; its meta has
            ``normalize_actions``, if known.
        paths: Their files.
        skipped: (file, reason) of the unusable ones.
    """

    shards: list[EpisodeBatch] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    skipped: list[tuple[Path, str]] = field(default_factory=list)


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
    parts: list[Any] = [_HEAD_BYTES.pack(len(head)), head]
    position = _START + len(head)
    for frame in frames:
        padding = -position % _ALIGNMENT
        parts += [bytes(padding), frame.reshape(-1).view(np.uint8).data]
        position += padding + frame.nbytes
    place = Path(directory)
    make_directories(place)
    path = place / f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}{_SUFFIX}"  # sorted by time
    unfinished = path.with_suffix(_UNFINISHED)
    try:
        with unfinished.open("xb", buffering=0) as file:
            file.write(_MAGIC)
            write_record(file, _SHARD, parts)
            os.fsync(file.fileno())
        faults.at("shard.written")
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    return path


def _plain_space(space: gym.Space[Any]) -> object:
    try:
        return space_to_plain(space)
    except NotPlainError:  # a custom space; the columns' shapes are still checked
        return None


# -- reading ------------------------------------------------------------------------------------------


def open_shards(paths: str | Path | Sequence[str | Path]) -> OpenedShards:
    """Map all shards below one or several directories into memory, in the order of their names.

    Every byte is read once, for the shard's checksum. Files that are torn, altered or of another release are skipped.

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
                    reason = f"a link to {file.readlink()}, which does not exist"
                    opened.skipped.append((file, reason))
                # Otherwise it was renamed or removed in the meantime.
            except (OSError, ProtocolError) as error:
                opened.skipped.append((file, str(error)))
            else:
                opened.paths.append(file)
    if not opened.shards:
        found = "".join(f"\n  {file}: {reason}" for file, reason in opened.skipped[:8])
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
    """Map one shard."""
    if path.suffix == _PARQUET:
        batch = read_parquet(path)
        batch.meta["normalize_actions"] = None
        return batch
    if path.name.endswith(_UNFINISHED):
        raise ProtocolError("unfinished: its writer is still at work, or was killed")
    content = map_file(path)
    magic = bytes(content[: len(_MAGIC)])
    if len(content) >= len(_MAGIC) and magic != _MAGIC:
        raise ProtocolError(f"expected a file that begins with {_MAGIC!r}, got {magic!r}")
    record = next(read_records(content, len(_MAGIC)), None)
    if record is None or record.kind != _SHARD or record.end != len(content):
        raise ProtocolError(
            f"torn or altered: its {len(content)} bytes do not have the checksum they begin with"
        )
    # The checksum was right, so from here on only a writer's mistakes are found.
    try:
        position, frames = _START + _HEAD_BYTES.unpack_from(record.payload)[0], []
        head = msgpack.unpackb(content[_START:position])
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
    """Check that all shards have the same observations, actions and rewards."""
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


_log = logging.getLogger("rlzmq.runners")


class EpisodeRecorder:
    """Joins sampled fragments into whole episodes and writes them as shards of a directory.

    Any number of recorders, in any processes, may write into one directory. If a process is killed, its unwritten
    episodes are lost: finished ones of up to `max_env_steps` env steps, and the unfinished ones. After a write error,
    which is logged once, the recorder stops recording.

    Args:
        directory: Directory of the shards.
        max_env_steps: Number of env steps after which a shard is written.
        writes_unfinished: Whether `close` also writes the episodes that have not ended, as chunks that are not done.
        normalize_actions: See `write_shard`.

    Attributes:
        num_episodes: Number of episodes written.
        num_env_steps: Number of env steps written.

    Raises:
        ConfigurationError: `directory` cannot be created, or is a file.
    """

    num_env_steps: int
    num_episodes: int

    def __init__(
        self,
        directory: str | Path,
        *,
        max_env_steps: int,
        writes_unfinished: bool = False,
        normalize_actions: bool | None = None,
    ) -> None:
        self._directory = Path(directory)
        try:
            make_directories(self._directory)
        except OSError as error:
            raise ConfigurationError(
                f"episodes cannot be recorded in {directory}: {error}. Name a directory in offline_data(output=…) that "
                "every env runner can write to."
            ) from None
        self._max_env_steps = max_env_steps
        self._writes_unfinished = writes_unfinished
        self._normalize_actions = normalize_actions
        self._held: list[EpisodeBatch] = []
        self._num_held = 0
        self._unfinished: dict[str, int] = {}  # episode → steps at the last flush
        self._has_failed = False
        self.num_episodes = self.num_env_steps = 0

    def add(self, batch: EpisodeBatch) -> None:
        """Add a sampled batch; write a shard when there are enough env steps."""
        if self._has_failed or not batch.num_env_steps:
            return
        self._held.append(batch)
        self._num_held += batch.num_env_steps
        if self._num_held >= self._max_env_steps:
            self._flush(is_last=False)

    def close(self) -> None:
        """Write the remaining episodes. Idempotent."""
        if self._held:
            self._flush(is_last=True)

    def _flush(self, *, is_last: bool) -> None:
        batch = join_chunks(EpisodeBatch.concat(self._held))
        is_done = batch.terminated | batch.truncated
        writes = np.ones_like(is_done) if is_last and self._writes_unfinished else is_done
        whole, rest = batch.select(np.flatnonzero(writes)), batch.select(np.flatnonzero(~writes))
        # Every vector step continues all episodes of a runner, so an episode that has not grown was abandoned.
        grown = [
            place
            for place, (id_, length) in enumerate(zip(rest.episode_ids, rest.length.tolist(), strict=True))
            if length > self._unfinished.get(id_, 0)
        ]
        rest = rest.select(np.array(grown, np.int64)).compact()
        self._unfinished = dict(zip(rest.episode_ids, rest.length.tolist(), strict=True))
        self._held, self._num_held = [] if is_last or not grown else [rest], 0
        if len(whole):
            self._write(whole)

    def _write(self, whole: EpisodeBatch) -> None:
        try:
            write_shard(self._directory, whole, normalize_actions=self._normalize_actions)
        except (OSError, ValueError) as error:
            self._has_failed = True
            self._held = []
            _log.error(
                "episodes cannot be recorded in %s: %s. Sampling continues, and nothing more is recorded.",
                self._directory,
                error,
            )
            return
        self.num_episodes += len(whole)
        self.num_env_steps += whole.num_env_steps


_EPISODE = "item"  # the column in which RLlib writes states of episodes
_NEXT_OBS = ("new_obs", "next_obs")
_NEEDED = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS)
_KNOWN = {
    *_NEEDED,
    *_NEXT_OBS,
    "eps_id",
    "agent_id",
    "module_id",
    "t",
    "terminateds",
    "truncateds",
    "dones",
    "infos",
}


def read_parquet(path: Path) -> EpisodeBatch:
    """Return the episodes in a Parquet file.

    Args:
        path: Its rows are RLlib's states of SingleAgentEpisodes (msgpack, in the column ``item``), or steps with the
            columns ``obs``, ``actions``, ``rewards``, and as far as they are there ``eps_id``, ``t``, ``terminateds``,
            ``truncateds``, ``new_obs`` and others of numbers. Where rows are missing between two steps, by their ``t``
            or ``new_obs``, the episode continues as another chunk. Without ``new_obs``, the last step of a chunk is
            left out, and its observation is the final one, unless it is terminated. Nulls are NaN.

    Raises:
        ProtocolError: It holds neither.
        MissingPackageError: PyArrow is not installed.
    """
    parquet = import_optional("pyarrow.parquet", "Parquet data", "rlzmq[offline]")
    try:
        table = parquet.read_table(path)
        names = table.column_names
        if _EPISODE in names:
            rows = table.column(_EPISODE).to_pylist()
            batch = EpisodeBatch.from_episodes(
                [_episode_of(msgpack.unpackb(row, object_hook=_array, strict_map_key=False)) for row in rows]
            )
        elif set(_NEEDED) <= set(names):
            wanted = [name for name in names if name not in ("infos", "agent_id", "module_id")]
            batch = _chunks_of({name: _column(name, table.column(name).to_pylist()) for name in wanted})
        else:
            raise ProtocolError(
                f"expected the column {_EPISODE!r}, or {', '.join(_NEEDED)}; got {', '.join(names)}"
            )
        return batch.select(np.flatnonzero(batch.length))
    except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not recorded episodes: {type(error).__name__}: {error}") from error
    except OSError as error:  # also PyArrow's ArrowInvalid, which is a ValueError
        raise ProtocolError(f"cannot be read: {error}") from error


# -- states of episodes -------------------------------------------------------------------------------


def _array(item: dict[Any, Any]) -> object:
    """Return the array or number of a map in which msgpack-numpy has put it; arrays of objects are refused."""
    if b"nd" not in item:
        return item
    kind = item[b"type"]
    if not isinstance(kind, str) or np.dtype(kind).hasobject:
        raise ValueError("an array of Python objects")
    found = np.frombuffer(item[b"data"], np.dtype(kind))
    return found.reshape(item[b"shape"]) if item[b"nd"] else found[0]


def _episode_of(state: Mapping[str, Any]) -> SingleAgentEpisode:
    """Return the episode of RLlib's state, without lookback parts."""
    outputs = state.get("extra_model_outputs") or {}
    return SingleAgentEpisode(
        state["id_"],
        observations=_items(state["observations"]),
        actions=_items(state["actions"]),
        rewards=_items(state["rewards"]),
        extra_model_outputs={name: _items(buffer) for name, buffer in outputs.items()},
        terminated=bool(state["is_terminated"]),
        truncated=bool(state["is_truncated"]),
        t_started=int(state["t_started"]),
        len_lookback_buffer=0,
    )


def _items(buffer: Mapping[str, Any]) -> list[Any]:
    data, lookback = buffer["data"], int(buffer["lookback"])
    if isinstance(data, list):
        return data[lookback:]
    return [tree_rows(data, row) for row in range(lookback, len(tree_leaves(data)[0]))]


# -- rows of steps ------------------------------------------------------------------------------------


def _column(name: str, values: list[Any]) -> Any:
    """Return a column as an array, or a tree of arrays; a tensor of Ray's is a map of data and shape."""
    try:
        if values and isinstance(values[0], dict):
            if values[0].keys() == {"data", "shape"}:
                return np.stack([np.asarray(value["data"]).reshape(value["shape"]) for value in values])
            return tree_stack(values)
        column = np.asarray(values)
        if column.dtype.kind in "fO":  # of objects if there are nulls, as which pandas writes NaN
            column = column.astype(np.float32)
        return column
    except (ValueError, TypeError) as error:
        raise ValueError(f"column {name!r}: {error}") from None


def _chunks_of(columns: dict[str, Any]) -> EpisodeBatch:
    """Return rows of steps as chunks, which end with an episode, and where the rows of steps between are missing."""
    num = len(columns[Columns.REWARDS])
    ids, t, none = columns.get("eps_id"), columns.get("t"), np.zeros(num, bool)
    order = np.arange(num)
    if ids is not None:
        _, first, of_row = np.unique(ids, return_index=True, return_inverse=True)
        order = np.lexsort((order if t is None else t, first[of_row]))
    rows = {name: tree_rows(column, order) for name, column in columns.items()}
    terminated = rows.get("terminateds", rows.get("dones", none)).astype(bool)
    truncated = rows.get("truncateds", none).astype(bool)
    obs, following = rows[Columns.OBS], next((rows[name] for name in _NEXT_OBS if name in rows), None)
    ends = terminated | truncated
    ends[-1:] = True
    if ids is not None:
        ends[:-1] |= rows["eps_id"][1:] != rows["eps_id"][:-1]
    if t is not None:
        twice = np.flatnonzero(~ends[:-1] & (rows["t"][1:] == rows["t"][:-1]))
        if len(twice):
            raise ValueError(
                f"column 't': expected one row per step of each 'eps_id', got several of {rows['t'][twice[0]]}"
            )
        ends[:-1] |= rows["t"][1:] != rows["t"][:-1] + 1
    if following is not None:
        for now, after in zip(tree_leaves(obs), tree_leaves(following), strict=True):
            differs = (now[1:] != after[:-1]) & ~(np.isnan(now[1:]) & np.isnan(after[:-1]))
            ends[:-1] |= differs.any(tuple(range(1, differs.ndim)))
    # Each chunk has a further slot for the observation after its last step. Where that is not known, the step itself is
    # left out; after a terminal step it is of no effect.
    is_whole, last = terminated | (following is not None), np.flatnonzero(ends)
    length = np.diff(last, prepend=-1) - ~is_whole[last]
    slots = np.repeat(np.arange(num), 1 + (ends & is_whole))
    names = [name for name in rows if name in _NEEDED or name not in _KNOWN]
    batch_columns = {name: tree_rows(rows[name], slots) for name in names}
    start = np.cumsum(length + 1) - length - 1
    if following is not None:
        for leaf, after in zip(tree_leaves(batch_columns[Columns.OBS]), tree_leaves(following), strict=True):
            leaf[start + length] = after[last]
    return EpisodeBatch(
        batch_columns,
        start=start,
        length=length,
        t_started=None if t is None else rows["t"][last - length + is_whole[last]],
        terminated=terminated[last],
        truncated=truncated[last],
        episode_ids=[str(number) for number in (last if ids is None else rows["eps_id"][last]).tolist()],
    )


# -- Minari -------------------------------------------------------------------------------------------


def import_from_minari(
    dataset: Any, directory: str | Path, *, normalize_actions: bool = True, max_env_steps: int = 100_000
) -> int:
    """Write all episodes of a Minari dataset as shards.

    Args:
        dataset: A MinariDataset, or the id of one that is installed (``minari download``), e.g. "D4RL/door/human-v2".
        directory: Directory of the shards.
        normalize_actions: Scale bounded Box actions to [-1, 1], the range of modules with
            ``config.normalize_actions`` (the default).
        max_env_steps: Env steps after which a shard is written.

    Returns:
        Number of episodes.

    Raises:
        ImportError: Minari is not installed (``pip install 'rlzmq[minari]'``).
        ConfigurationError: The dataset holds no episode.
    """
    if isinstance(dataset, str):
        dataset = _minari().load_dataset(dataset)
    spaces = dataset.observation_space, dataset.action_space
    held: list[EpisodeBatch] = []
    num_episodes = num_held = 0
    for episode in dataset.iterate_episodes():
        batch = _batch_of(episode, spaces, normalize_actions)
        if not batch.num_env_steps:
            continue
        held.append(batch)
        num_episodes, num_held = num_episodes + 1, num_held + batch.num_env_steps
        if num_held >= max_env_steps:
            write_shard(directory, EpisodeBatch.concat(held), normalize_actions=normalize_actions)
            held, num_held = [], 0
    if held:
        write_shard(directory, EpisodeBatch.concat(held), normalize_actions=normalize_actions)
    if not num_episodes:
        raise ConfigurationError(f"Minari dataset {dataset.id!r}: expected at least one episode, got none.")
    return num_episodes


def export_to_minari(paths: str | Path | Sequence[str | Path], dataset_id: str, **options: object) -> Any:
    """Create a Minari dataset from recorded episodes, with actions in the environment's range.

    Args:
        paths: See `open_shards`.
        dataset_id: Id of the new dataset, e.g. "cartpole/ppo-v0".
        options: Further arguments of ``minari.create_dataset_from_buffers``: env, algorithm_name, author, ….

    Returns:
        The MinariDataset.

    Raises:
        ImportError: Minari is not installed (``pip install 'rlzmq[minari]'``).
        ConfigurationError: No shard is usable, the shards lack their spaces or the range of their actions, or `env` has
            other actions.
    """
    minari = _minari()
    shards = open_shards(paths).shards
    spaces = shards[0].observation_space, shards[0].action_space
    if None in spaces:
        raise ConfigurationError(
            f"export to Minari: the shards below {paths} were written without spaces. Give the episodes "
            "observation_space and action_space before write_shard."
        )
    for shard in shards:
        if shard.meta["normalize_actions"] is None and _is_changed(spaces[1]):
            raise ConfigurationError(
                f"export to Minari: shards below {paths} do not say whether their actions are in [-1, 1] or within "
                f"the bounds of {spaces[1]}. Write them with write_shard(…, normalize_actions=True), or False."
            )
    actions = _action_space_of(options.get("env"))
    if actions not in (None, spaces[1]):
        raise ConfigurationError(
            f"export to Minari: expected env with the recorded episodes' actions {spaces[1]}, got {options['env']} "
            f"with {actions}. Name the environment that they were recorded in."
        )
    return minari.create_dataset_from_buffers(
        dataset_id,
        buffer=list(_buffers(shards)),
        **{"observation_space": spaces[0], "action_space": spaces[1], "jpeg_encoding": False, **options},
    )


def _action_space_of(env: Any) -> object:
    """Return the action space of ``env`` of ``minari.create_dataset_from_buffers``: an env, a spec, an id or None."""
    if env is None or isinstance(env, gym.Env):
        return env and env.action_space
    made = gym.make(env)
    made.close()
    return made.action_space


def _is_changed(space: gym.Space[Any]) -> bool:
    """Return whether actions of a module differ from those of the space."""
    bounded = filter(is_scaled, leaf_spaces(space))
    return not all((leaf.low == -1.0).all() and (leaf.high == 1.0).all() for leaf in bounded)


def _minari() -> Any:
    return import_optional("minari", "A Minari dataset", "rlzmq[minari]")


def _batch_of(episode: Any, spaces: tuple[Any, Any], normalize_actions: bool) -> EpisodeBatch:
    """Return one Minari episode as a batch of one chunk."""
    num = len(episode.rewards)

    def padded(leaf: object) -> np.ndarray:
        """Return the leaf with an extra slot for the final observation, which has no step."""
        array = np.asarray(leaf)
        return np.concatenate([array, array[-1:]])

    actions = actions_of_module(spaces[1], episode.actions, scales=normalize_actions)
    columns = {
        Columns.OBS: tree_map(np.asarray, episode.observations),
        Columns.ACTIONS: tree_map(padded, actions),
        Columns.REWARDS: padded(np.asarray(episode.rewards, np.float32)),
    }
    terminated = bool(num and episode.terminations[-1])
    return EpisodeBatch(
        columns,
        start=[0],
        length=[num],
        terminated=[terminated],
        truncated=[not terminated and bool(num and episode.truncations[-1])],
        observation_space=spaces[0],
        action_space=spaces[1],
    )


def _buffers(shards: Sequence[EpisodeBatch]) -> Iterator[Any]:
    from minari.data_collector import EpisodeBuffer

    number = 0
    for shard in shards:
        for start, length, terminated, truncated in zip(
            shard.start.tolist(), shard.length.tolist(), shard.terminated, shard.truncated, strict=True
        ):
            steps = slice(start, start + length)
            actions = tree_map(lambda leaf, at=steps: np.array(leaf[at]), shard.columns[Columns.ACTIONS])
            scales = bool(shard.meta["normalize_actions"])
            actions = actions_of_env(shard.action_space, actions, scales=scales)
            last = np.arange(length) == length - 1
            yield EpisodeBuffer(
                id=number,
                observations=tree_map(
                    lambda leaf, at=slice(start, start + length + 1): np.array(leaf[at]),
                    shard.columns[Columns.OBS],
                ),
                actions=actions,
                rewards=shard.columns[Columns.REWARDS][steps].tolist(),
                terminations=(last & terminated).tolist(),
                # In Minari all episodes end, so an unfinished one is truncated here.
                truncations=(last & (truncated or not terminated)).tolist(),
            )
            number += 1
