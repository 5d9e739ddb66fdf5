"""Joining the chunks of episodes that were sampled in several fragments."""

from __future__ import annotations

import numpy as np

from rlzmq.core.tree import tree_map
from rlzmq.episodes.batch_columns import ragged_arange
from rlzmq.episodes.episode_batch import EpisodeBatch

__all__ = ["join_chunks"]


def join_chunks(batch: EpisodeBatch) -> EpisodeBatch:
    """Return a batch on new columns in which consecutive chunks of an episode are joined into one chunk.

    Episodes are in the order of their first chunks. A chunk that continues no other chunk is kept alone. Lookback
    parts, infos, custom data, durations and chunks without steps are left out.
    """
    batch = batch.updated()
    batch = batch.select(np.flatnonzero(batch.length))
    places: dict[str, int] = {}
    episode = np.array([places.setdefault(id_, len(places)) for id_ in batch.episode_ids], np.int64)
    order = np.lexsort((batch.t_started, episode))
    batch, episode = batch.select(order), episode[order]
    continues = np.zeros(len(batch), np.bool_)
    continues[1:] = (
        (episode[1:] == episode[:-1])
        & (batch.t_started[1:] == (batch.t_started + batch.length)[:-1])
        & ~(batch.terminated | batch.truncated)[:-1]
    )
    firsts = np.flatnonzero(~continues)
    lasts = np.append(firsts[1:] - 1, len(batch) - 1)[: len(firsts)]
    length = np.add.reduceat(batch.length, firsts) if len(firsts) else batch.length
    counts = batch.length.copy()
    counts[lasts] += 1  # the final observation
    slots = ragged_arange(batch.start, counts)
    return EpisodeBatch(
        {
            name: tree_map(lambda leaf: leaf.take(slots, axis=0), column)
            for name, column in batch.columns.items()
        },
        start=np.cumsum(length + 1) - length - 1,
        length=length,
        t_started=batch.t_started[firsts],
        terminated=batch.terminated[lasts],
        truncated=batch.truncated[lasts],
        env_index=batch.env_index[lasts],
        episode_ids=[batch.episode_ids[first] for first in firsts.tolist()],
        initial_state=None
        if batch.initial_state is None
        else tree_map(lambda leaf: leaf[firsts], batch.initial_state),
        observation_space=batch.observation_space,
        action_space=batch.action_space,
    )
