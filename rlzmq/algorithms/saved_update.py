"""A single update stored for debugging: the learner's state before it, and its batches."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlzmq.algorithms.stored_config import Given, revive_config
from rlzmq.config.base_config import BaseConfig
from rlzmq.core.checkpoint import open_checkpoint, write_checkpoint
from rlzmq.core.checkpointable import read_part
from rlzmq.core.errors import CheckpointError
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_batch import MultiAgentEpisodeBatch
from rlzmq.learners.learner import Learner
from rlzmq.learners.sources import FreshBatch
from rlzmq.roles.learner.learner_role import make_learner
from rlzmq.wire.values import pack_blob, unpack_blob

__all__ = ["learner_of", "load_update", "save_update"]

_UPDATE = "update"
_CONFIG = "config"


def save_update(
    path: str | Path,
    *,
    config: Mapping[str, Any],
    spaces: Mapping[str, Any],
    state: Mapping[str, Any],
    timesteps: Mapping[str, int] | None,
    batches: Sequence[Any],
) -> Path:
    """Write an update as a checkpoint and return its absolute path.

    Args:
        path: The checkpoint's directory. An existing one is replaced.
        config: `AlgorithmConfig.to_stored` of the learner's config.
        spaces: Module id → (observation space, action space).
        state: The learner's state before the update.
        timesteps: The lifetime counters for schedules.
        batches: The batches that the update trains, in order, each an EpisodeBatch or a list of them.
    """
    listed = [list(batch) if type(batch) is list else [batch] for batch in batches]
    update = {
        "timesteps": timesteps,
        "spaces": np.frombuffer(pack_blob(dict(spaces)), np.uint8),
        "is_multi_agent": any(isinstance(one, MultiAgentEpisodeBatch) for batch in listed for one in batch),
        "batches": [[list(one.to_wire()) for one in batch] for batch in listed],
    }
    components = {Learner.checkpoint_name: state, _CONFIG: config, _UPDATE: update}
    return write_checkpoint(path, components, about={"part": _UPDATE})


def load_update(
    path: str | Path, *, config: BaseConfig | None = None, trust: Collection[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """Return a learner before an update, and the update's data: ``learner.update(**update)`` repeats it.

    Args:
        path: A directory written by `save_update`.
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
    config = revive_config(components[_CONFIG], str(path), Given(config, trust), is_mine=stored.is_mine)
    learner = learner_of(config, unpack_blob(update["spaces"]))
    learner.set_state(read_part(path, Learner.checkpoint_name))
    learner.source = _GivenBatches([len(batch) for batch in update["batches"]])
    kind: Any = MultiAgentEpisodeBatch if update["is_multi_agent"] else EpisodeBatch
    episodes = [kind.from_wire(header, arrays) for batch in update["batches"] for header, arrays in batch]
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

    def plan_batches(self, num_fresh: int, num_ranks: int) -> int:
        return len(self._given)

    def batches(self, num_batches: int, rng: np.random.Generator) -> Iterator[Any]:
        yield from self._given[:num_batches]
