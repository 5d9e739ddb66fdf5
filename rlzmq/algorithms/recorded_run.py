"""RecordedRun: repeats a recorded run's learner updates in one process, without environments.

    arrival log ─► the surviving lineage ─► a learner with the recorded state ─► the same updates, digests compared

The weights follow from the initial state, the fragments, their cuts and order, the lifetime counters for schedules, and
the seed. The log contains all of these. Data that a learner's batch source keeps between updates (APPO's circular
buffer) is not in checkpoints, so such a run is repeated from the start of its learner process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlzmq.algorithms.stored_config import Given, StoredConfig
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.checkpoint import open_checkpoint, read_part, write_checkpoint
from rlzmq.core.errors import CheckpointError, ConfigurationError
from rlzmq.core.run_dir import checkpoints_at
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.learners.batches import BatchSource, FreshBatch
from rlzmq.learners.learner import Learner
from rlzmq.roles.arrival_log import (
    ArrivalFile,
    RecordedUpdate,
    digest_weights,
    first_difference,
    read_arrivals,
)
from rlzmq.roles.learner_link import BatchCheck, decode_steps
from rlzmq.roles.learner_role import make_learner
from rlzmq.wire.payloads import pack_blob, unpack_blob

__all__ = ["Mismatch", "RecordedRun", "RepeatedUpdate", "learner_of", "load_update"]


_UPDATE = "update"
_CONFIG = "config"


def load_update(
    path: str | Path, *, config: BaseConfig | None = None, trust: Collection[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """Return a learner before an update, and the update's data: ``learner.update(**update)`` repeats it.

    Args:
        path: A directory written by `RecordedRun.save`.
        config: Replaces the stored config, which lacks code; None: the stored one.
        trust: Packages whose code somebody else's directory may name.

    Returns:
        (The learner, ``{"episodes": a list of EpisodeBatches, "timesteps": counters}``).

    Raises:
        CheckpointError: The directory is incomplete, altered or not a stored update, or its config contains code.
    """
    stored = open_checkpoint(path)
    components = stored.components
    if _UPDATE not in components:
        raise CheckpointError(
            f"{path} holds no update: expected a directory that `rlzmq replay` wrote for a debugger."
        )
    update = components[_UPDATE]
    stored_config = StoredConfig(components[_CONFIG], str(path), stored.is_mine)
    config = stored_config.config_to("resume", Given(config, trust))
    learner = learner_of(config, unpack_blob(update["spaces"]))
    learner.set_state(read_part(path, Learner.checkpoint_name))
    learner.source = _GivenBatches([len(batch) for batch in update["batches"]])
    episodes = [
        EpisodeBatch.from_wire(header, arrays) for batch in update["batches"] for header, arrays in batch
    ]
    return learner, {"episodes": episodes, "timesteps": update["timesteps"]}


def learner_of(config: BaseConfig, spaces: Mapping[str, Any]) -> Any:
    """Return a built learner, without creating an environment.

    Args:
        config: The run's config.
        spaces: Module id → (observation space, action space).
    """
    of_modules = {module_id: tuple(two) for module_id, two in spaces.items()}
    return make_learner(config, config.get_multi_rl_module_spec(spaces=of_modules))


class _GivenBatches(FreshBatch):
    """A source that splits the episodes of an update into its original batches.

    Args:
        sizes: Number of EpisodeBatches in each batch. If the total differs, all form one batch.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self._sizes = sizes
        self._given: list[list[Any]] = []

    def add(self, episodes: Any) -> None:
        left = list(episodes)
        sizes = self._sizes if sum(self._sizes) == len(left) else [len(left)]
        self._given = [[left.pop(0) for _ in range(size)] for size in sizes]

    def plan_batches(self, num_fresh: int, rank: int, num_ranks: int) -> int:
        return len(self._given)

    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        yield from self._given[:num_batches]


class Mismatch(Exception):
    """The weights after an update differ from the recorded ones; the text names the parameter."""


@dataclass
class RepeatedUpdate:
    """An update that is being or has been repeated.

    Attributes:
        version: Version of the weights after the update.
        state: The learner's state before it.
        timesteps: The lifetime counters for schedules; None: the learner's counters.
        batches: The batches that it trains, in order; filled during the update.
        results: The return value of `Learner.update`; {} before the update.
        is_compared: Whether the resulting weights were compared with their digest. There is no digest if the process
            ended before it was recorded.
    """

    version: int
    state: dict[str, Any]
    timesteps: dict[str, int] | None
    batches: list[Any] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    is_compared: bool = False


class RecordedRun:
    """Repeats the updates in an arrival log that led to the final weights (its lineage).

    Args:
        path: A run directory (with ``arrivals/``), or a run's ``config.record_dir``.
        config: Replaces the recorded config, which lacks code without an importable name; None: the recorded one.
        trust: Packages whose code somebody else's log may name.

    Attributes:
        notes: Remarks on the log: truncated files, restored states, missing updates.
        began_at: Descriptions of the states from which the last call of `updates` started.
        current: The update that is being repeated, or the last one.

    Raises:
        ConfigurationError: There is no arrival log, or no update in it.
    """

    def __init__(
        self, path: str | Path, *, config: BaseConfig | None = None, trust: Collection[str] = ()
    ) -> None:
        path = Path(path)
        is_run = (path / "arrivals").is_dir()
        self._config, self._trust = config, trust
        self._files = read_arrivals(path / "arrivals" if is_run else path)
        self._checkpoints = (path if is_run else path.parent) / "checkpoints"
        self.notes: list[str] = []
        self.began_at: list[str] = []
        self.current: RepeatedUpdate | None = None
        self._head: dict[str, Any] = {}  # head of its file
        self._lineage = self._find_lineage()
        if not self._lineage:
            raise ConfigurationError(f"the arrival log in {path} holds no update.")

    @property
    def versions(self) -> list[int]:
        """The updates of the lineage, by the version of the weights after each; the first one of a run is 1."""
        return sorted(self._lineage)

    def _find_lineage(self) -> dict[int, tuple[ArrivalFile, int]]:
        """Return version → (file, index of its update) for the updates that no later one has replaced."""
        lineage: dict[int, tuple[ArrivalFile, int]] = {}
        for file in self._files:
            if file.torn_at is not None:
                self.notes.append(
                    f"{file.path} is cut off at byte {file.torn_at}, where a record is incomplete: its process was "
                    "killed while it wrote, or the file was altered"
                )
            for index, update in enumerate(file.updates):
                if update.has_state and lineage:
                    self._note_state(lineage, update)
                for version in [version for version in lineage if version >= update.version]:
                    del lineage[version]
                lineage[update.version] = file, index
        return lineage

    def _note_state(self, lineage: Mapping[int, tuple[ArrivalFile, int]], update: RecordedUpdate) -> None:
        """Add notes on how the state before an update relates to the updates before it."""
        newest, version = max(lineage), update.version - 1
        if newest > version:
            self.notes.append(
                f"the run went back to weights version {version}: updates {version + 1} to {newest} are void"
            )
        elif newest < version:
            self.notes.append(
                f"updates {newest + 1} to {version} are not in the log, which continues with the state after them"
            )
        if version in lineage and _difference(_at(lineage[version]), update.load_state()):
            self.notes.append(
                f"at version {version} the learner received other weights than those after update {version}"
            )

    # -- repeating -----------------------------------------------------------------------------

    def updates(self, first: int | None = None, last: int | None = None) -> Iterator[RepeatedUpdate]:
        """Repeat updates of the lineage, and compare the weights after each one with their digest.

        Args:
            first, last: Versions; None: the first and the last one of the lineage.

        Yields:
            Each update from `first` to `last`. Earlier updates are repeated if needed, but not yielded.

        Raises:
            Mismatch: The weights differ.
            ConfigurationError: The log has none of these updates, or this process cannot repeat them.
            CheckpointError: The recorded config holds code; see `stored_config`.
            Exception: Raised by user code in an update.
        """
        known = self.versions
        first, last = known[0] if first is None else first, known[-1] if last is None else last
        wanted = [version for version in known if first <= version <= last]
        if not wanted:
            raise ConfigurationError(
                f"expected updates between {known[0]} and {known[-1]}, which are in the log, got {first} to {last}."
            )
        self.began_at = []
        for file in self._files:
            mine = [version for version in wanted if self._lineage[version][0] is file]
            if mine:
                yield from self._updates_of(file, mine)

    def _updates_of(self, file: ArrivalFile, wanted: Sequence[int]) -> Iterator[RepeatedUpdate]:
        """Repeat these updates of one learner process, and the earlier ones that they depend on."""
        stored = StoredConfig(file.head["config"], str(file.path), file.is_mine)
        config = stored.config_to("resume", Given(self._config, self._trust))
        self._head = file.head
        learner = learner_of(config, file.head["spaces"])
        start, state = self._start(file, wanted[0], keeps_data=learner.source.keeps_data)
        _tap(learner.source, lambda batch: self.current.batches.append(batch) if self.current else None)
        for index, step in enumerate(file.updates[start:], start):
            if index > start and step.has_state:
                state = step.load_state()
            if state is not None:
                _set_state(learner, state, file)
                state = None
            batches = [
                decode_steps(frames, BatchCheck(), steps.first, steps.num_steps)
                for steps, frames in step.shards
            ]
            self.current = update = RepeatedUpdate(
                step.version, learner.get_state(not_components="source"), step.timesteps
            )
            update.results = learner.update(episodes=batches, timesteps=step.timesteps)
            if step.digest is not None:
                if difference := _difference(step, learner.get_state("rl_module")):
                    raise Mismatch(
                        f"update {step.version}: the weights are not those that were recorded: {difference}."
                    )
                update.is_compared = True
            if self._lineage.get(step.version) == (file, index) and step.version in wanted:
                yield update
                if step.version == wanted[-1]:
                    return

    def _start(
        self, file: ArrivalFile, version: int, *, keeps_data: bool
    ) -> tuple[int, dict[str, Any] | None]:
        """Return (index of the first update to repeat for an update, the learner's state before it)."""
        until = self._lineage[version][1]
        states = [index for index, update in enumerate(file.updates[: until + 1]) if update.has_state]
        if not states:
            raise ConfigurationError(
                f"{file.path} has no state before update {version}: the file was altered."
            )
        index = states[0] if keeps_data else states[-1]
        recorded = file.updates[index]
        if not keeps_data:
            for path in checkpoints_at(self._checkpoints):
                found = self._state_of(path)
                at = found["weights_seq_no"] if found else -1
                if found and recorded.version <= at < version and self._is_of_lineage(file, at, found):
                    self.began_at.append(f"the checkpoint {path}, after update {at}")
                    return self._lineage[at][1] + 1, found
        self.began_at.append(f"the state that {file.path.name} holds, after update {recorded.version - 1}")
        return index, recorded.load_state()

    def _state_of(self, path: Path) -> dict[str, Any] | None:
        """Return the learner's state in a checkpoint; None if it cannot be read."""
        try:
            state: dict[str, Any] = read_part(path, Learner.checkpoint_name)
        except CheckpointError as error:
            self.notes.append(f"skipped the checkpoint {path}: {error}")
            return None
        return state

    def _is_of_lineage(self, file: ArrivalFile, version: int, state: Mapping[str, Any]) -> bool:
        """Return whether an update in this file produced this state."""
        if version not in self._lineage or self._lineage[version][0] is not file:
            return False
        update = _at(self._lineage[version])
        return update.digest is not None and _difference(update, state) is None

    # -- for a debugger ------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write the current update for `load_update`: the learner's state before it, and its batches.

        Args:
            path: The checkpoint's directory. An existing one is replaced.
        """
        current = self.current
        assert current is not None
        listed = [list(batch) if type(batch) is list else [batch] for batch in current.batches]
        update = {
            "timesteps": current.timesteps,
            "spaces": np.frombuffer(pack_blob(dict(self._head["spaces"])), np.uint8),
            "batches": [[list(one.to_wire()) for one in batch] for batch in listed],
        }
        config = self._head["config"] if self._config is None else self._config.to_stored()
        components = {Learner.checkpoint_name: current.state, _CONFIG: config, _UPDATE: update}
        return write_checkpoint(path, components, about={"part": _UPDATE})


def _tap(source: BatchSource, drawn: Callable[[Any], None]) -> None:
    """Call `drawn` with each batch that a source yields."""
    draw = source.batches

    def batches(num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        for batch in draw(num_batches, rng):
            drawn(batch)
            yield batch

    source.batches = batches  # type: ignore[method-assign]


def _set_state(learner: Learner, state: Mapping[str, Any], file: ArrivalFile) -> None:
    """Restore a recorded state of the learner."""
    recorded, mine = set(state["rl_module"]), set(learner.module.keys())
    if recorded != mine:
        raise ConfigurationError(
            f"{file.path.name} continues with the modules {sorted(recorded)} after update {state['weights_seq_no']}, "
            f"the config has {sorted(mine)}: modules were added or removed during the run, and such a run is "
            f"replayed only up to that point: --updates 1..{state['weights_seq_no']}."
        )
    learner.set_state(state)


def _difference(update: RecordedUpdate, state: Mapping[str, Any]) -> str | None:
    """Return how a learner's state differs from the recorded digest after an update; None: it does not, or has none."""
    recorded = update.digest
    return None if recorded is None else first_difference(recorded, digest_weights(state["rl_module"]))


def _at(place: tuple[ArrivalFile, int]) -> RecordedUpdate:
    file, index = place
    return file.updates[index]
