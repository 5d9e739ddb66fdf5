"""Recorded data in Parquet files: RLlib's rows of whole episodes, and one row per step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgpack  # type: ignore[import-untyped]
import numpy as np

from rlzmq.core.errors import ProtocolError
from rlzmq.core.imports import import_optional
from rlzmq.core.tree import tree_rows, tree_stack
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode

__all__ = ["read_parquet"]

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
            ``truncateds``, ``new_obs`` and others of numbers. Without ``new_obs``, the observation of an episode's last
            step that is not terminated is the final one.

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
            episodes = [
                _episode_of(msgpack.unpackb(row, object_hook=_array, strict_map_key=False)) for row in rows
            ]
        elif set(_NEEDED) <= set(names):
            wanted = [name for name in names if name not in ("infos", "agent_id", "module_id")]
            episodes = _episodes_of({name: _column(table.column(name).to_pylist()) for name in wanted})
        else:
            raise ProtocolError(
                f"expected the column {_EPISODE!r}, or {', '.join(_NEEDED)}; got {', '.join(names)}"
            )
        return EpisodeBatch.from_episodes([episode for episode in episodes if len(episode)])
    except (ValueError, KeyError, TypeError, AttributeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"not recorded episodes: {type(error).__name__}: {error}") from error
    except OSError as error:  # also PyArrow's ArrowInvalid, which is a ValueError
        raise ProtocolError(f"cannot be read: {error}") from error


# -- states of episodes -------------------------------------------------------------------------------


def _array(item: dict[Any, Any]) -> Any:
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
    length = len(next(iter(_leaves(data))))
    return [tree_rows(data, row) for row in range(lookback, length)]


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return [leaf for part in tree.values() for leaf in _leaves(part)]
    return [leaf for part in tree for leaf in _leaves(part)] if isinstance(tree, tuple) else [tree]


# -- rows of steps ------------------------------------------------------------------------------------


def _column(values: list[Any]) -> Any:
    """Return a column as an array, or a tree of arrays; a tensor of Ray's is a map of data and shape."""
    if values and isinstance(values[0], dict):
        if values[0].keys() == {"data", "shape"}:
            return np.stack([np.asarray(value["data"]).reshape(value["shape"]) for value in values])
        return tree_stack(values)
    column = np.asarray(values)
    if column.dtype.kind == "f":
        column = column.astype(np.float32)
    return column


def _episodes_of(columns: dict[str, Any]) -> list[SingleAgentEpisode]:
    num = len(columns[Columns.REWARDS])
    none = np.zeros(num, bool)
    terminated = np.asarray(columns.get("terminateds", columns.get("dones", none)), bool)
    truncated = np.asarray(columns.get("truncateds", none), bool)
    if "eps_id" in columns:
        _, first, of_row = np.unique(columns["eps_id"], return_index=True, return_inverse=True)
        order = np.lexsort((columns.get("t", np.arange(num)), first[of_row]))
        ends = np.flatnonzero(np.diff(of_row[order])) + 1
    else:
        order, ends = np.arange(num), np.flatnonzero((terminated | truncated)[:-1]) + 1
    found = []
    for rows in np.split(order, ends):
        found.append(_episode_of_rows(columns, rows, bool(terminated[rows[-1]]), bool(truncated[rows[-1]])))
    return found


def _episode_of_rows(
    columns: dict[str, Any], rows: Any, terminated: bool, truncated: bool
) -> SingleAgentEpisode:
    last = rows[-1]
    following = next((columns[name] for name in _NEXT_OBS if name in columns), None)
    observations = [tree_rows(columns[Columns.OBS], row) for row in rows]
    if following is not None:
        observations.append(tree_rows(following, last))
    elif terminated:
        observations.append(observations[-1])  # of no effect: its value is not used
    else:
        rows = rows[:-1]
    return SingleAgentEpisode(
        None if "eps_id" not in columns else str(columns["eps_id"][last]),
        observations=observations,
        actions=[tree_rows(columns[Columns.ACTIONS], row) for row in rows],
        rewards=[float(columns[Columns.REWARDS][row]) for row in rows],
        extra_model_outputs={
            name: [tree_rows(column, row) for row in rows]
            for name, column in columns.items()
            if name not in _KNOWN
        },
        terminated=terminated,
        truncated=truncated,
        t_started=int(columns["t"][rows[0]]) if "t" in columns and len(rows) else 0,
        len_lookback_buffer=0,
    )
