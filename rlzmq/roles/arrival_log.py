"""The arrival log: a record of the fragments that a learner trained, in order, from which training can be replayed.

```
 an update begins ─► UPDATE: its fragments, and the state before it, unless that is the one after the update before
 it has ended     ─► TRAINED: a digest of all weights
```

Each learner process writes one file of records, ``NNNNNN.arrivals``, numbered in the order of creation, whose first
record is the HEAD.

Records are written on the learner's thread, before the weights of the update are sent to anyone. So a killed process
leaves no gap in the surviving lineage, and at most one update without its digest. Files are not synced: a power
failure may lose the end of the log.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from rlzmq.config.base_config import BaseConfig
from rlzmq.core import faults
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.files import lock_file, make_directories, map_file, read_records, write_record
from rlzmq.core.trust import is_signed, signature_of
from rlzmq.roles.peer_link import package_version
from rlzmq.wire.codec import Buffer, FragmentId, WireError
from rlzmq.wire.messages import Shard
from rlzmq.wire.payloads import FragmentRange, pack_blob, unpack_blob

if TYPE_CHECKING:
    from rlzmq.learners.learner import Learner

__all__ = [
    "ArrivalFile",
    "ArrivalLog",
    "RecordedUpdate",
    "WeightsDigest",
    "digest_weights",
    "first_difference",
    "read_arrivals",
]

_log = logging.getLogger("rlzmq.driver")

_MAGIC = b"rlzmq arrivals 2\n"
_HEAD, _UPDATE, _TRAINED = range(1, 4)
_PATTERN = "*.arrivals"
_LENGTH = struct.Struct("<Q")
# Settings that only sampling needs; a replay need not import their code.
_OF_SAMPLING = frozenset(
    {"env", "env_config", "wrappers", "env_to_module_connector", "module_to_env_connector", "callbacks_class",
     "callbacks_hooks", "evaluation_config", "custom_evaluation_function", "record_dir"}
)  # fmt: skip
_NUM_SUMS = 16

WeightsDigest: TypeAlias = dict[str, list[Any]]
"""``module/parameter`` → SHA-256 of its dtype, shape and every bit of its values; and the sums of every 16th value,
beginning at each of the first 16, from which the size of a difference is estimated."""


def digest_weights(modules: Mapping[str, Mapping[str, Any]]) -> WeightsDigest:
    """Return the digest of ``Learner.get_state("rl_module")["rl_module"]``."""
    digest = {}
    for module_id, weights in modules.items():
        for name, value in weights.items():
            array = np.ascontiguousarray(value)
            sha = hashlib.sha256(f"{array.dtype.str}|{array.shape}|".encode())
            sha.update(array.reshape(-1).view(np.uint8).data)
            digest[f"{module_id}/{name}"] = [sha.digest(), _sums(array)]
    return digest


def first_difference(one: WeightsDigest, other: WeightsDigest) -> str | None:
    """Return a description of the first parameter that differs; None if all bits are equal."""
    for name in {**one, **other}:
        if name not in one or name not in other:
            return f"{name} is only in one of them"
        (sha, sums), (other_sha, other_sums) = one[name], other[name]
        if sha != other_sha:
            apart, size = np.linalg.norm(sums - other_sums), np.linalg.norm(sums)
            return f"{name} differs, by about {apart:.3g} (its sums of every 16th value have the norm {size:.6g})"
    return None


def _sums(array: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    flat = array.reshape(-1)
    whole = len(flat) - len(flat) % _NUM_SUMS
    sums = flat[:whole].reshape(-1, _NUM_SUMS).sum(axis=0, dtype=np.float64)
    sums[: len(flat) - whole] += flat[whole:]
    return sums  # type: ignore[no-any-return]


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
        where = f"config.record_dir={str(directory)!r}"
        try:
            make_directories(self._directory, mode=0o700)
            self._lock = lock_file(self._directory / "lock")
        except BlockingIOError:
            raise ConfigurationError(
                f"{where} is in use by another run. Give each run its own directory."
            ) from None
        except OSError as error:
            raise ConfigurationError(f"{where} cannot be used: {error}.") from None
        self._file: BinaryIO | None = None
        self._has_state = False
        self._has_ended = False

    def state_is_due(self) -> None:
        """Record the whole state before the next update: it was replaced by other means than an update."""
        self._has_state = False

    def begin_update(
        self,
        learner: Learner,
        shards: Sequence[tuple[Shard, Sequence[Buffer]]],
        timesteps: Mapping[str, int] | None,
    ) -> None:
        """Record an update before the learner trains these shards, in this order."""
        if self._has_ended:
            return
        with self._until_full(learner):
            state: Buffer = b""
            if not self._has_state:
                state = pack_blob(
                    {**learner.get_state(not_components="source"), **learner.get_state("source")}
                )
            parts, ranges = [state], []
            for shard, frames in shards:
                ranges.append([*shard.fragment, shard.first, shard.num_steps, len(frames)])
                parts += frames
            sizes = np.array([memoryview(part).nbytes for part in parts])
            head = pack_blob(
                {
                    "version": learner.weights_seq_no,
                    "timesteps": timesteps,
                    "ranges": ranges,
                    "sizes": sizes,
                }
            )
            self._write(learner, _UPDATE, [_LENGTH.pack(len(head)), head, *parts])
            self._has_state = True

    def end_update(self, learner: Learner) -> None:
        """Record the digest of the weights after the update."""
        if self._has_ended:
            return
        with self._until_full(learner):
            digest = digest_weights(learner.get_state("rl_module")["rl_module"])
            self._write(learner, _TRAINED, [pack_blob(digest)])
            faults.at("arrivals.trained")

    def close(self) -> None:
        """Close the file and unlock the directory. Idempotent."""
        self._has_ended = True
        if self._file is not None:
            self._file.close()
        self._lock.release()

    @contextlib.contextmanager
    def _until_full(self, learner: Learner) -> Iterator[None]:
        """End the log if the block cannot write."""
        try:
            yield
        except (OSError, TypeError, ValueError) as error:
            self._has_ended = True
            _log.error(
                "the arrival log in %s cannot be written: %s. Training continues; a replay ends at weights version %d.",
                self._directory, error, learner.weights_seq_no,
            )  # fmt: skip

    def _write(self, learner: Learner, kind: int, parts: Sequence[Buffer]) -> None:
        if self._file is None:
            self._file = self._open(learner)
        write_record(self._file, kind, parts)

    def _open(self, learner: Learner) -> BinaryIO:
        import torch

        numbers = [int(path.stem) for path in self._directory.glob(_PATTERN) if path.stem.isdigit()]
        path = self._directory / f"{max(numbers, default=0) + 1:06d}{_PATTERN[1:]}"
        file = open(path, "xb", buffering=0, opener=partial(os.open, mode=0o600))  # noqa: SIM115 (closed with the log)
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


@dataclass(slots=True)
class RecordedUpdate:
    """One recorded update.

    Attributes:
        version: Version of the resulting weights, 1 more than before the update.
        shards: Trained ranges, in the order of the batch, each with its message as the learner received it.
        timesteps: The lifetime counters that schedules follow; None: the learner's own.
        digest: Digest of the resulting weights; None: the process ended during the update.
    """

    version: int
    shards: list[tuple[FragmentRange, list[memoryview]]]
    timesteps: dict[str, int] | None
    _state: memoryview
    digest: WeightsDigest | None = None

    @property
    def has_state(self) -> bool:
        """Whether the learner's state before the update is recorded: it is not the one after the update before."""
        return bool(self._state)

    def load_state(self) -> dict[str, Any]:
        """Return the recorded state for `Learner.set_state`, with arrays that may be written to."""
        state: dict[str, Any] = unpack_blob(bytearray(self._state))
        return state

    @classmethod
    def from_record(cls, payload: memoryview) -> RecordedUpdate:
        """Return the update of an UPDATE record."""
        end = _LENGTH.size + _LENGTH.unpack_from(payload)[0]
        head = unpack_blob(payload[_LENGTH.size : end])
        parts = []
        for size in head["sizes"].tolist():
            parts.append(payload[end : end + size])
            end += size
        state, *frames = parts
        shards = []
        for *fragment, first, num_steps, num_frames in head["ranges"]:
            shards.append((FragmentRange(FragmentId(*fragment), first, num_steps), frames[:num_frames]))
            del frames[:num_frames]
        return cls(head["version"] + 1, shards, head["timesteps"], state)


@dataclass(slots=True)
class ArrivalFile:
    """The log of one learner process.

    Attributes:
        path: Path of the file.
        head: Run, versions, config and spaces.
        is_mine: Whether the head carries this user's signature.
        updates: Updates in order.
        torn_at: Position of an incomplete record; None: the file is complete.
    """

    path: Path
    head: dict[str, Any]
    is_mine: bool = False
    updates: list[RecordedUpdate] = field(default_factory=list)
    torn_at: int | None = None


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
            if kind == _HEAD:
                record = unpack_blob(payload)
                file.head = unpack_blob(record["head"])
                file.is_mine = is_signed("arrival log", bytes(record["head"]), record["signature"])
            elif kind == _UPDATE:
                file.updates.append(RecordedUpdate.from_record(payload))
            else:
                file.updates[-1].digest = unpack_blob(payload)
    except (WireError, LookupError, TypeError, ValueError, struct.error) as error:  # its checksum was right
        raise ConfigurationError(f"{path} is not an arrival log of this release: {error!r}.") from error
    if end < len(content):
        file.torn_at = end
    return file if file.updates else None
