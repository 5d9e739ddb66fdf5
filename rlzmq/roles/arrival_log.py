"""The arrival log: a record of the fragments that a learner trained, in order, from which training can be replayed.

```
 first update, or the state was replaced ─► STATE
 an update begins ─► FRAGMENT (each once), UPDATE        it has ended ─► TRAINED, with a digest of all weights
```

Each learner process writes one `FragmentLog`, ``NNNNNN.arrivals``, numbered in the order of creation, whose first
record is the HEAD.

Records are written on the learner's thread, before the weights of the update are sent to anyone. So a killed process
leaves no gap in the surviving lineage, and at most one update without its digest. Files are not synced: a power
failure may lose the end of the log.
"""

from __future__ import annotations

import hashlib
import logging
import os
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from rlzmq.config.base_config import BaseConfig
from rlzmq.core import faults
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import FileLock, lock_file, make_directories, map_file, read_records, write_record
from rlzmq.core.trust import is_signed, signature_of
from rlzmq.roles.peer_link import package_version
from rlzmq.wire.codec import Buffer, FragmentId, WireError
from rlzmq.wire.messages import Shard
from rlzmq.wire.payloads import FragmentRange, pack_blob, unpack_blob

__all__ = [
    "ArrivalFile",
    "ArrivalLog",
    "RecordedState",
    "RecordedUpdate",
    "WeightsDigest",
    "digest_weights",
    "read_arrivals",
]

_log = logging.getLogger("rlzmq.driver")

_MAGIC = b"rlzmq arrivals 1\n"
_HEAD, _STATE, _FRAGMENT, _UPDATE, _TRAINED = range(1, 6)
_PATTERN = "*.arrivals"
_COUNT = struct.Struct("<I")
# A fragment may be split among consecutive updates; one that was forgotten is written again.
_MAX_REMEMBERED = 4096
# Settings that only sampling needs; a replay need not import their code.
_OF_SAMPLING = frozenset(
    {"env", "env_config", "wrappers", "env_to_module_connector", "module_to_env_connector", "callbacks_class",
     "callbacks_hooks", "evaluation_config", "custom_evaluation_function", "record_dir"}
)  # fmt: skip
_NUM_SUMS = 16


@dataclass(frozen=True, slots=True)
class WeightsDigest:
    """A digest of all weights and buffers of a learner.

    Attributes:
        hashes: ``module/parameter`` → SHA-256 of its dtype, shape and every bit of its values.
        sums: ``module/parameter`` → sums of every 16th value, beginning at each of the first 16, from which the
            size of a difference is estimated.
    """

    hashes: dict[str, bytes]
    sums: dict[str, npt.NDArray[np.float64]]

    def first_difference(self, other: WeightsDigest) -> str | None:
        """Return a description of the first parameter that differs; None if all bits are equal."""
        for name in [*self.hashes, *(name for name in other.hashes if name not in self.hashes)]:
            if name not in self.hashes or name not in other.hashes:
                return f"{name} is only in one of them"
            if self.hashes[name] != other.hashes[name]:
                apart = float(np.linalg.norm(self.sums[name] - other.sums[name]))
                size = float(np.linalg.norm(self.sums[name]))
                return f"{name} differs, by about {apart:.3g} (its sums of every 16th value have the norm {size:.6g})"
        return None

    def to_plain(self) -> dict[str, Any]:
        """Return plain values for a record."""
        return {
            "names": list(self.hashes),
            "hashes": b"".join(self.hashes.values()),
            "sums": np.array(list(self.sums.values())).reshape(len(self.sums), _NUM_SUMS),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> WeightsDigest:
        """Return the digest from a record's plain values."""
        names, hashes = plain["names"], plain["hashes"]
        return cls(
            {name: hashes[32 * index : 32 * index + 32] for index, name in enumerate(names)},
            dict(zip(names, plain["sums"], strict=True)),
        )


def digest_weights(modules: Mapping[str, Mapping[str, Any]]) -> WeightsDigest:
    """Return the digest of ``Learner.get_state("rl_module")["rl_module"]``."""
    hashes, sums = {}, {}
    for module_id, weights in modules.items():
        for name, value in weights.items():
            array = np.ascontiguousarray(value)
            digest = hashlib.sha256(f"{array.dtype.str}|{array.shape}|".encode())
            digest.update(array.reshape(-1).view(np.uint8).data)
            key = f"{module_id}/{name}"
            hashes[key], sums[key] = digest.digest(), _sums(array)
    return WeightsDigest(hashes, sums)


def _sums(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    flat = array.reshape(-1)
    whole = len(flat) - len(flat) % _NUM_SUMS
    sums = flat[:whole].reshape(-1, _NUM_SUMS).sum(axis=0, dtype=np.float64)
    sums[: len(flat) - whole] += flat[whole:]
    return sums  # type: ignore[no-any-return]


# ---------------------------------------------------------------------- writing


class ArrivalLog:
    """Writer of one learner process's log. All methods but `state_is_due` are called on the learner's thread.

    After a write error, which is logged once, training continues without recording.

    Args:
        directory: Created if necessary, for this user only.
        run_id: Id of the run.
        config: The learner's config.

    Raises:
        ConfigurationError: The directory cannot be used, or another run uses it.
    """

    def __init__(self, directory: str | Path, run_id: str, config: BaseConfig) -> None:
        self._directory = Path(directory)
        self._run_id = run_id
        self._config = config
        self._lock = _lock_directory(self._directory, "record_dir")
        self._file: BinaryIO | None = None
        self._has_state = False
        self._has_ended = False
        self._written: OrderedDict[str, None] = OrderedDict()

    def state_is_due(self) -> None:
        """Record the whole state before the next update: it was replaced by other means than an update."""
        self._has_state = False

    def begin_update(
        self,
        learner: Any,
        shards: Sequence[tuple[Shard, Sequence[Buffer]]],
        timesteps: Mapping[str, int] | None,
    ) -> None:
        """Record an update before the learner trains these shards, in this order."""
        if self._has_ended:
            return
        try:
            if self._file is None:
                self._file = self._open(learner)
            if not self._has_state:
                state = {**learner.get_state(not_components="source"), **learner.get_state("source")}
                self._write(_STATE, [pack_blob({"version": learner.weights_seq_no, "state": state})])
                self._has_state = True
            for shard, frames in shards:
                self._write_fragment(shard, frames)
            ranges = [[*shard.fragment, shard.first, shard.num_steps] for shard, _ in shards]
            update = {"version": learner.weights_seq_no, "timesteps": timesteps}
            self._write(_UPDATE, [pack_blob({**update, "ranges": ranges})])
        except (OSError, TypeError, ValueError) as error:
            self._give_up(error, learner)

    def end_update(self, learner: Any) -> None:
        """Record the digest of the weights after the update."""
        if self._has_ended:
            return
        try:
            digest = digest_weights(learner.get_state("rl_module")["rl_module"])
            self._write(_TRAINED, [pack_blob(digest.to_plain())])
            faults.at("arrivals.trained")
        except (OSError, TypeError, ValueError) as error:
            self._give_up(error, learner)

    def close(self) -> None:
        """Close the file and unlock the directory. Idempotent."""
        self._has_ended = True
        if self._file is not None:
            self._file.close()
        self._lock.release()

    def _give_up(self, error: Exception, learner: Any) -> None:
        self._has_ended = True
        _log.error(
            "the arrival log in %s cannot be written: %s. Training continues; a replay ends at weights version %d.",
            self._directory, error, learner.weights_seq_no,
        )  # fmt: skip

    def _open(self, learner: Any) -> BinaryIO:
        import torch

        numbers = [int(path.stem) for path in self._directory.glob(_PATTERN) if path.stem.isdigit()]
        file = _create_file(self._directory / f"{max(numbers, default=0) + 1:06d}{_PATTERN[1:]}", is_new=True)
        file.write(_MAGIC)
        head = {
            "run_id": self._run_id,
            "rlzmq": package_version(),
            "torch": str(torch.__version__),
            "config": self._config.to_stored(without=_OF_SAMPLING),
            "spaces": {
                module_id: [module.observation_space, module.action_space]
                for module_id, module in learner.module.items()
            },
        }
        packed = bytes(pack_blob(head))
        signature = signature_of("arrival log", packed)
        write_record(file, _HEAD, [pack_blob({"head": packed, "signature": signature})])
        return file

    def _write(self, kind: int, parts: Sequence[Buffer]) -> None:
        assert self._file is not None
        write_record(self._file, kind, parts)

    def _write_fragment(self, shard: Shard, frames: Sequence[Buffer]) -> None:
        name = _name_of(FragmentRange(shard.fragment, shard.first, shard.num_steps))
        if name in self._written:
            return
        sizes = [memoryview(frame).nbytes for frame in frames]
        encoded = name.encode()
        head = struct.pack(f"<II{len(sizes)}q", len(encoded), len(sizes), *sizes)
        self._write(_FRAGMENT, [head, encoded, *frames])
        self._written[name] = None
        while len(self._written) > _MAX_REMEMBERED:
            self._written.popitem(last=False)


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class RecordedState:
    """A learner's whole state before the next update of its file.

    Attributes:
        version: Weights version.
    """

    version: int
    _payload: memoryview

    def load(self) -> dict[str, Any]:
        """Return the state for `Learner.set_state`."""
        # Arrays that may be written to.
        state: dict[str, Any] = unpack_blob(bytearray(self._payload))["state"]
        return state


@dataclass(slots=True)
class RecordedUpdate:
    """One recorded update.

    Attributes:
        version: Version of the resulting weights, 1 more than before the update.
        ranges: Trained ranges, in the order of the batch.
        timesteps: The lifetime counters that schedules follow; None: the learner's own.
    """

    version: int
    ranges: list[FragmentRange]
    timesteps: dict[str, int] | None
    _trained: memoryview | None = None

    @property
    def digest(self) -> WeightsDigest | None:
        """Digest of the resulting weights; None: the process ended during the update."""
        return None if self._trained is None else WeightsDigest.from_plain(unpack_blob(self._trained))


@dataclass(slots=True)
class ArrivalFile:
    """The log of one learner process.

    Attributes:
        path: Path of the file.
        head: Run, versions, config and spaces.
        is_mine: Whether the head carries this user's signature.
        steps: States and updates, in order.
        torn_at: Position of an incomplete record; None: the file is complete.
    """

    path: Path
    head: dict[str, Any]
    is_mine: bool = False
    steps: list[RecordedState | RecordedUpdate] = field(default_factory=list)
    torn_at: int | None = None
    _fragments: dict[str, memoryview] = field(default_factory=dict)

    def frames(self, steps: FragmentRange) -> list[memoryview]:
        """Return the message with these steps, as the learner received it."""
        payload = self._fragments[_name_of(steps)]
        name_bytes, num_frames = struct.unpack_from("<II", payload)
        sizes = struct.unpack_from(f"<{num_frames}q", payload, 2 * _COUNT.size)
        end = 2 * _COUNT.size + 8 * num_frames + name_bytes
        frames = []
        for size in sizes:
            frames.append(payload[end : end + size])
            end += size
        return frames


def _name_of(steps: FragmentRange) -> str:
    """Return the name of a record: a fragment may be received in several parts."""
    return f"{steps.fragment}:{steps.first}+{steps.num_steps}"


def read_arrivals(directory: str | Path) -> list[ArrivalFile]:
    """Return the files of an arrival log, in the order of creation, without incomplete records.

    Raises:
        ConfigurationError: There is no log, or another release wrote it.
    """
    paths = sorted(Path(directory).glob(_PATTERN))
    if not paths:
        raise ConfigurationError(
            f"{directory} contains no arrival log (NNNNNN.arrivals): record one with config.debugging(record_dir=…) or "
            "rlzmq train --record."
        )
    return [file for path in paths if (file := _read(path)) is not None]


def _read(path: Path) -> ArrivalFile | None:
    """Read one file; return None if it ended before its first update."""
    content = map_file(path)
    if bytes(content[: len(_MAGIC)]) != _MAGIC:
        if len(content) < len(_MAGIC) and _MAGIC.startswith(bytes(content)):
            return None
        raise ConfigurationError(
            f"{path} is not an arrival log of this release: it does not begin with {_MAGIC!r}."
        )
    file, end = ArrivalFile(path, {}), len(_MAGIC)
    try:
        for kind, payload, next_one in read_records(content, end):
            end = next_one
            _take(file, kind, payload)
    except (WireError, KeyError, TypeError, struct.error) as error:  # its checksum was right
        raise ConfigurationError(f"{path} is not an arrival log of this release: {error!r}.") from error
    if end < len(content):
        file.torn_at = end
    return file if file.steps else None


def _take(file: ArrivalFile, kind: int, payload: memoryview) -> None:
    if kind == _HEAD:
        record = unpack_blob(payload)
        file.head = unpack_blob(record["head"])
        file.is_mine = is_signed("arrival log", bytes(record["head"]), record["signature"])
    elif kind == _STATE:
        file.steps.append(RecordedState(unpack_blob(payload)["version"], payload))
    elif kind == _FRAGMENT:
        (name_bytes, num_frames) = struct.unpack_from("<II", payload)
        start = 2 * _COUNT.size + 8 * num_frames
        file._fragments[bytes(payload[start : start + name_bytes]).decode()] = payload
    elif kind == _UPDATE:
        record = unpack_blob(payload)
        ranges = [
            FragmentRange(FragmentId(*fragment), first, num) for *fragment, first, num in record["ranges"]
        ]
        file.steps.append(RecordedUpdate(record["version"] + 1, ranges, record["timesteps"]))
    elif kind == _TRAINED:
        update = file.steps[-1]
        assert isinstance(update, RecordedUpdate)
        update._trained = payload


# -- records ------------------------------------------------------------------------------------------


def _lock_directory(directory: Path, setting: str) -> FileLock:
    """Create a directory for this user only, and lock it.

    Raises:
        ConfigurationError: The directory cannot be used, or another run uses it.
    """
    try:
        make_directories(directory, mode=0o700)
        return lock_file(directory / "lock")
    except BlockingIOError:
        raise ConfigurationError(
            f"config.{setting}={str(directory)!r} is in use by another run. Give each run its own directory."
        ) from None
    except OSError as error:
        raise ConfigurationError(f"config.{setting}={str(directory)!r} cannot be used: {error}.") from None


def _create_file(path: Path, *, is_new: bool = False) -> BinaryIO:
    """Open an empty file for records, unbuffered and for this user only.

    Raises:
        FileExistsError: The file exists and `is_new` is True.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if is_new else os.O_TRUNC)
    return os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0)
