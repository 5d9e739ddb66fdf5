"""BatchColumns: the columns and the chunk table of an `EpisodeBatch`."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.tree import tree_leaves
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns, ragged_arange

__all__ = ["AGENT_LISTS", "ID_LISTS", "TABLE", "BatchColumns", "IntArray"]

IntArray = NDArray[np.int64]

# The parts of the chunk table: arrays [C], and lists of C ids (or None). Without its last letter, a name
# of AGENT_LISTS is the attribute of an episode.
TABLE = ("start", "length", "lookback", "t_started", "terminated", "truncated", "env_index")
AGENT_LISTS = ("agent_ids", "module_ids", "multi_agent_episode_ids")
ID_LISTS = ("episode_ids", *AGENT_LISTS)

_BASE_COLUMNS = (Columns.OBS, Columns.ACTIONS, Columns.REWARDS)


class BatchColumns(list[Any]):
    """Data of an `EpisodeBatch`, whose docstring documents the arguments."""

    __slots__ = (
        "_is_ordinary",
        "_tracked",
        "action_space",
        "agent_ids",
        "agent_to_module_mapping_fn",
        "columns",
        "custom_data",
        "duration_s",
        "env_index",
        "env_ts",
        "episode",
        "episode_ids",
        "groups",
        "infos",
        "initial_state",
        "leftovers",
        "length",
        "lookback",
        "meta",
        "module_ids",
        "multi_agent_episode_ids",
        "observation_space",
        "order",
        "start",
        "t_started",
        "terminated",
        "truncated",
    )

    _is_ordinary: bool
    _tracked: dict[int, Any]

    def __init__(
        self,
        columns: dict[str, Any],
        *,
        length: Any,
        start: Any = None,
        lookback: Any = None,
        t_started: Any = None,
        terminated: Any = None,
        truncated: Any = None,
        env_index: Any = None,
        episode_ids: list[str] | None = None,
        agent_ids: list[Any] | None = None,
        module_ids: list[Any] | None = None,
        multi_agent_episode_ids: list[Any] | None = None,
        initial_state: Any = None,
        infos: dict[int, dict[str, Any]] | None = None,
        custom_data: dict[int, dict[str, Any]] | None = None,
        duration_s: Any = None,
        observation_space: Any = None,
        action_space: Any = None,
        meta: dict[str, Any] | None = None,
        groups: list[Any] | None = None,
        episode: Any = None,
        order: Any = None,
        env_ts: Any = None,
        leftovers: dict[int, dict[str, Any]] | None = None,
        agent_to_module_mapping_fn: Callable[..., str] | None = None,
    ) -> None:
        self.columns: dict[str, Any] = columns
        self.length: IntArray = np.asarray(length, np.int64)
        num_chunks = len(self.length)

        def per_chunk(values: Any, dtype: Any, default: Any) -> np.ndarray:
            return np.full(num_chunks, default, dtype) if values is None else np.asarray(values, dtype)

        self.start: IntArray = per_chunk(start, np.int64, 0)
        self.lookback: IntArray = per_chunk(lookback, np.int64, 0)
        self.t_started: IntArray = per_chunk(t_started, np.int64, 0)
        self.terminated: NDArray[np.bool_] = per_chunk(terminated, np.bool_, False)
        self.truncated: NDArray[np.bool_] = per_chunk(truncated, np.bool_, False)
        self.env_index: IntArray = per_chunk(env_index, np.int64, -1)
        self.duration_s: NDArray[np.float64] | None = (
            None if duration_s is None else np.asarray(duration_s, np.float64)
        )
        self.episode_ids: list[str] = (
            [uuid.uuid4().hex for _ in range(num_chunks)] if episode_ids is None else episode_ids
        )
        self.agent_ids: list[Any] | None = agent_ids
        self.module_ids: list[Any] | None = module_ids
        self.multi_agent_episode_ids: list[Any] | None = multi_agent_episode_ids
        self.initial_state: Any = initial_state
        self.infos: dict[int, dict[str, Any]] = {} if infos is None else infos
        self.custom_data: dict[int, dict[str, Any]] = {} if custom_data is None else custom_data
        self.observation_space: Any = observation_space
        self.action_space: Any = action_space
        self.meta: dict[str, Any] = {} if meta is None else meta
        self.groups: list[Any] | None = groups
        self.episode: IntArray | None = None if episode is None else np.asarray(episode, np.int64)
        self.order: IntArray | None = None if order is None else np.asarray(order, np.int64)
        self.env_ts: IntArray | None = None if env_ts is None else np.asarray(env_ts, np.int64)
        self.leftovers: dict[int, dict[str, Any]] = {} if leftovers is None else leftovers
        self.agent_to_module_mapping_fn = agent_to_module_mapping_fn
        self._is_ordinary = False
        self._tracked = {}
        of_chunks = (
            self.start, self.length, self.lookback, self.t_started, self.terminated, self.truncated,
            self.env_index, self.duration_s, self.episode_ids, agent_ids, module_ids, multi_agent_episode_ids,
            self.episode, self.order,
        )  # fmt: skip
        given = [values for values in of_chunks if values is not None]
        if list(map(len, given)).count(num_chunks) != len(given):
            raise self._differing_lengths()

    def _differing_lengths(self) -> ValueError:
        num_chunks = len(self.start)
        name, num = next(
            (name, len(values))
            for name in (*TABLE, "duration_s", *ID_LISTS, "episode", "order")
            if (values := getattr(self, name)) is not None and len(values) != num_chunks
        )
        return ValueError(f"EpisodeBatch.{name}: expected {num_chunks} values, one per chunk, got {num}.")

    # -- facts ----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of chunks."""
        return list.__len__(self) if self._is_ordinary else len(self.start)

    @property
    def agent_batches(self) -> list[Any]:
        """The batches with columns: this one or, of several agents, its groups."""
        return [self] if self.groups is None else self.groups

    @property
    def links(self) -> tuple[IntArray, IntArray, IntArray]:
        """A group's `episode`, `order` and `env_ts`."""
        if self.episode is None or self.order is None or self.env_ts is None:
            raise ValueError("expected a group of agents' chunks, got a batch of whole episodes.")
        return self.episode, self.order, self.env_ts

    @property
    def num_slots(self) -> int:
        """First dimension of all columns."""
        leaves = tree_leaves(self.columns.get(Columns.OBS, ()))
        return len(leaves[0]) if leaves else 0

    @property
    def num_bytes(self) -> int:
        """Size of all columns in bytes."""
        return sum(leaf.nbytes for batch in self.agent_batches for leaf in tree_leaves(batch.columns))

    @property
    def extra_names(self) -> list[str]:
        """Names of the extra model outputs among the columns."""
        return [name for name in self.columns if name not in _BASE_COLUMNS]

    def get_module_ids(self) -> list[str]:
        """Return the ids of the modules with steps in this batch, sorted."""
        return sorted(self.agent_steps_by("module_ids"))

    def is_of(self, module_id: str) -> NDArray[np.bool_]:
        """Return which chunks belong to a module's agents, bool [C]; without module ids, to the default module's."""
        ids = self.module_ids
        if ids is None:
            return np.full(len(self), module_id == DEFAULT_MODULE_ID)
        return np.array([own == module_id for own in ids], np.bool_)

    def agent_steps_by(self, which: str) -> dict[Any, int]:
        """Return completed steps by agent id (``which="agent_ids"``) or module id (``"module_ids"``)."""
        counts: dict[Any, int] = {}
        for batch in self.agent_batches:
            keys = getattr(batch, which)
            if keys is None:
                keys = [DEFAULT_MODULE_ID if which == "module_ids" else None] * len(batch)
            for key, num in zip(keys, batch.length.tolist(), strict=True):
                if num:
                    counts[key] = counts.get(key, 0) + num
        return counts

    def step_slots(self) -> np.ndarray:
        """Return the slot of every step, one chunk after the other, int64 [num_env_steps]."""
        return ragged_arange(self.start, self.length)

    def step_chunks(self) -> np.ndarray:
        """Return the chunk of every step in the order of `step_slots`, int64 [num_env_steps]."""
        return np.arange(len(self.start), dtype=np.int64).repeat(self.length)

    def validate(self) -> None:
        """Check that every chunk is within the columns, and that all columns have the same number of slots.

        Raises:
            ValueError: A check failed; the text names the column or chunk, the expected and the actual bounds.
        """
        if self.groups is not None:
            for group in self.groups:
                group.validate()
            return
        num_slots = self.num_slots
        for name in _BASE_COLUMNS:
            if name not in self.columns:
                raise ValueError(f"EpisodeBatch: expected a column {name!r}, got {list(self.columns)}.")
        for name, column in self.columns.items():
            for leaf in tree_leaves(column):
                if np.ndim(leaf) == 0 or len(leaf) != num_slots:
                    raise ValueError(
                        f"EpisodeBatch, column {name!r}: expected {num_slots} slots, got shape "
                        f"{np.shape(leaf)}."
                    )
        if len(self) == 0:
            return
        inside = (
            (self.length >= 0)
            & (self.length < num_slots)
            & (self.lookback >= 0)
            & (self.start < num_slots)
            & (self.start >= self.lookback)
            & (self.start < num_slots - self.length)
        )
        if not inside.all():
            c = int(np.argmin(inside))
            raise ValueError(
                f"EpisodeBatch, chunk {c}: expected slots within 0…{num_slots - 1}, got start "
                f"{self.start[c]}, length {self.length[c]}, lookback {self.lookback[c]}."
            )
        for leaf in tree_leaves(self.initial_state if self.initial_state is not None else ()):
            if len(leaf) != len(self):
                raise ValueError(
                    f"EpisodeBatch.initial_state: expected {len(self)} rows, got shape {np.shape(leaf)}."
                )

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in BatchColumns.__slots__ if not name.startswith("_")}
