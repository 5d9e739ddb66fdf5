"""Joining the chunks of episodes that were sampled in several fragments."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlzmq.core.tree import tree_map
from rlzmq.episodes.batch_columns import ID_LISTS, ragged_arange
from rlzmq.episodes.columns import Columns
from rlzmq.episodes.episode_batch import EpisodeBatch

__all__ = ["concat_joined", "join_chunks"]


def concat_joined(batches: list[EpisodeBatch]) -> EpisodeBatch:
    """Return all chunks of several batches, those that continue each other under the same weights as one.

    Args:
        batches: The batches, in the order in which each runner sampled them. The version of the weights is read from
            their column ``weights_seq_no``; without it, all are of one version.
    """
    batch = EpisodeBatch.concat(batches)
    versions = batch.columns.get(Columns.WEIGHTS_VERSION)
    key = np.zeros(len(batch), np.int64) if versions is None else versions[batch.start]
    return _joined(batch, key, keeps_all=True)


def join_chunks(batch: EpisodeBatch) -> EpisodeBatch:
    """Return a batch on new columns in which consecutive chunks of an episode are joined into one chunk.

    Episodes are in the order of their first chunks. A chunk that continues no other chunk is kept alone. Lookback
    parts, infos, custom data, durations and chunks without steps are left out.
    """
    return _joined(batch.updated(), np.zeros(len(batch), np.int64), keeps_all=False)


def _joined(batch: EpisodeBatch, key: NDArray[np.int64], *, keeps_all: bool) -> EpisodeBatch:
    """Join chunks with one key. With `keeps_all`, a batch in which nothing continues is returned as it is."""
    steps = np.flatnonzero(batch.length)
    places: dict[str, int] = {}
    episode = np.array(
        [places.setdefault(batch.episode_ids[c], len(places)) for c in steps.tolist()], np.int64
    )
    order = np.lexsort((batch.t_started[steps], episode))
    chosen, episode = steps[order], episode[order]
    ends = batch.t_started + batch.length
    continues = np.zeros(len(chosen), np.bool_)
    continues[1:] = (
        (episode[1:] == episode[:-1])
        & (key[chosen[1:]] == key[chosen[:-1]])
        & (batch.t_started[chosen[1:]] == ends[chosen[:-1]])
        & ~(batch.terminated | batch.truncated)[chosen[:-1]]
    )
    if keeps_all and not continues.any():
        return batch
    batch = batch.select(chosen)
    firsts = np.flatnonzero(~continues)
    lasts = np.append(firsts[1:] - 1, len(batch) - 1)[: len(firsts)]
    length = np.add.reduceat(batch.length, firsts) if len(firsts) else batch.length
    lookback = batch.lookback[firsts] if keeps_all else np.zeros(len(firsts), np.int64)
    begins, counts = batch.start.copy(), batch.length.copy()
    begins[firsts] -= lookback
    counts[firsts] += lookback
    counts[lasts] += 1  # the final observation
    slots = ragged_arange(begins, counts)
    whole = lookback + length + 1
    infos: dict[int, dict[str, Any]] = {}
    if keeps_all and batch.infos:
        infos = {place: batch.infos[slot] for place, slot in enumerate(slots.tolist()) if slot in batch.infos}
    return EpisodeBatch(
        {
            name: tree_map(lambda leaf: leaf.take(slots, axis=0), column)
            for name, column in batch.columns.items()
        },
        start=np.cumsum(whole) - whole + lookback,
        length=length,
        lookback=lookback,
        t_started=batch.t_started[firsts],
        terminated=batch.terminated[lasts],
        truncated=batch.truncated[lasts],
        env_index=batch.env_index[lasts],
        episode_ids=[batch.episode_ids[first] for first in firsts.tolist()],
        initial_state=None
        if batch.initial_state is None
        else tree_map(lambda leaf: leaf[firsts], batch.initial_state),
        infos=infos,
        observation_space=batch.observation_space,
        action_space=batch.action_space,
        **(_belongings(batch, firsts) if keeps_all else {}),
    )


def _belongings(batch: EpisodeBatch, firsts: NDArray[np.int64]) -> dict[str, Any]:
    """Return the custom data, durations and ids of joined chunks, which begin at `firsts`."""
    whose = np.repeat(np.arange(len(firsts)), np.diff(np.append(firsts, len(batch))))
    custom_data: dict[int, dict[str, Any]] = {}
    for chunk, data in batch.custom_data.items():
        custom_data.setdefault(int(whose[chunk]), {}).update(data)
    ids = {name: getattr(batch, name) for name in ID_LISTS if name != "episode_ids"}
    return {
        "custom_data": custom_data,
        "duration_s": None if batch.duration_s is None else np.add.reduceat(batch.duration_s, firsts),
        **{
            name: None if values is None else [values[first] for first in firsts.tolist()]
            for name, values in ids.items()
        },
    }
