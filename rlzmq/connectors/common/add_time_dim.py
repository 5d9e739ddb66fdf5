"""AddTimeDimToBatchAndZeroPad: builds sequences for stateful modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlzmq.connectors.batching import BatchedNdArray, batch_items
from rlzmq.connectors.connector_v2 import ConnectorV2, batch_key
from rlzmq.connectors.rl_modules import is_stateful, max_seq_len, stateful_module_for_key
from rlzmq.connectors.torch_piece import Batch, Memory, TorchPiece
from rlzmq.core.tree import num_items, tree_map
from rlzmq.episodes.columns import Columns

__all__ = ["SINGLE_TIME_RANK_FLAG", "AddTimeDimToBatchAndZeroPad", "num_sequences", "split_and_zero_pad"]

SINGLE_TIME_RANK_FLAG = "_added_single_ts_time_rank"
"""Key in shared_data: whether RemoveSingleTsTimeRankFromBatch has a time axis to remove."""

_UNTOUCHED = (Columns.INFOS, Columns.STATE_IN, Columns.SEQ_LENS)


class AddTimeDimToBatchAndZeroPad(ConnectorV2):
    """Adds a time axis to the data of stateful modules. Other modules' data is unchanged.

    In env runners every item ``[...]`` becomes ``[1, ...]``. On the learner the steps of each chunk become
    ``ceil(len / max_seq_len)`` sequences ``[max_seq_len, ...]``, the last one padded with zeros on the right. Two
    columns are added: ``seq_lens`` (number of real steps in a sequence) and, unless it exists already, ``loss_mask``
    (False in the padding). Two chunks never share a sequence.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        as_learner_connector: Whether to build training sequences.
    """

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        as_learner_connector: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self._as_learner_connector = as_learner_connector

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: A column does not have one item per step, or a stateful module has no max_seq_len.
        """
        if not is_stateful(rl_module):
            return batch
        if self._as_learner_connector:
            self._add_sequences(rl_module, batch, episodes)
            return batch
        for name, column in batch.items():
            if name in _UNTOUCHED:
                continue
            for key, items in column.items() if isinstance(column, dict) else [(None, column)]:
                if stateful_module_for_key(rl_module, key) is not None:
                    items[:] = [tree_map(lambda leaf: np.asarray(leaf)[None], item) for item in items]
        if shared_data is not None:
            shared_data[SINGLE_TIME_RANK_FLAG] = True
        return batch

    def _add_sequences(self, rl_module: Any, batch: dict[str, Any], episodes: Sequence[Any]) -> None:
        lengths: dict[Any, list[int]] = {}
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            if len(episode):
                lengths.setdefault(batch_key(episode), []).append(len(episode))
        seq_lens_by_key = {}
        for key, key_lengths in lengths.items():
            module = stateful_module_for_key(rl_module, key)
            if module is not None:
                seq_lens_by_key[key] = max_seq_len(module, key), key_lengths

        if Columns.LOSS_MASK not in batch:
            mask: dict[Any, list[Any]] = batch.setdefault(Columns.LOSS_MASK, {})
            for key, (_, key_lengths) in seq_lens_by_key.items():
                mask[key] = [BatchedNdArray(np.ones(sum(key_lengths), np.bool_))]
        for name, column in batch.items():
            if name in _UNTOUCHED:
                continue
            if isinstance(column, list):
                all_lengths = [
                    length for _, key_lengths in seq_lens_by_key.values() for length in key_lengths
                ]
                longest = next(iter(seq_lens_by_key.values()))[0]
                column[:] = [_sequences(column, all_lengths, longest, name, None)]
                continue
            for key in column:
                if key in seq_lens_by_key:
                    longest, key_lengths = seq_lens_by_key[key]
                    column[key] = [_sequences(column[key], key_lengths, longest, name, key)]
        seq_lens = batch.setdefault(Columns.SEQ_LENS, {})
        for key, (longest, key_lengths) in seq_lens_by_key.items():
            seq_lens[key] = [BatchedNdArray(_sequence_lengths(key_lengths, longest))]

    def to_torch(self, *, rl_module: Any, agent_id: Any) -> TorchPiece:
        """See ConnectorV2."""
        if not is_stateful(rl_module):
            return TorchPiece()

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            return {
                name: column if name in _UNTOUCHED else tree_map(lambda leaf: leaf.unsqueeze(1), column)
                for name, column in batch.items()
            }, memory

        return TorchPiece(forward=forward)


def _sequences(
    items: list[Any], lengths: Sequence[int], longest: int, column: str, key: tuple[Any, ...] | None
) -> Any:
    """Return all sequences of a key as one tree of BatchedNdArrays ``[num_sequences, longest, ...]``."""
    rows = batch_items(items)
    if num_items(rows) != sum(lengths):
        raise ValueError(
            f"column {column!r}, key {key}: expected one item per step, {sum(lengths)} (chunks of "
            f"{list(lengths)[:8]} steps), got {num_items(rows)}."
        )
    return tree_map(lambda leaf: BatchedNdArray(split_and_zero_pad(leaf, lengths, longest)), rows)


def split_and_zero_pad(rows: npt.NDArray[Any], lengths: Iterable[int], max_seq_len: int) -> npt.NDArray[Any]:
    """Cut the rows of several chunks into sequences of equal length, padded with zeros.

    Args:
        rows: ``[sum(lengths), ...]``, one chunk after the other.
        lengths: Number of steps of each chunk.
        max_seq_len: Number of steps of each sequence.

    Returns:
        ``[num_sequences, max_seq_len, ...]``; a chunk's last sequence is padded on the right.
    """
    lengths = np.asarray(list(lengths), np.int64)
    num_rows = -(-lengths // max_seq_len)
    # The position of each step if the sequences of all chunks are concatenated.
    shift = np.cumsum(num_rows * max_seq_len - lengths) - (num_rows * max_seq_len - lengths)
    targets = np.arange(len(rows)) + np.repeat(shift, lengths)
    padded = np.zeros((int(num_rows.sum()) * max_seq_len, *rows.shape[1:]), rows.dtype)
    padded[targets] = rows
    return padded.reshape(-1, max_seq_len, *rows.shape[1:])


def num_sequences(length: int, max_seq_len: int) -> int:
    """Return the number of sequences that a chunk of `length` steps is cut into."""
    return -(-length // max_seq_len)


def _sequence_lengths(lengths: Sequence[int], max_seq_len: int) -> npt.NDArray[np.int64]:
    """Return the number of real steps in each sequence, int64[num_sequences]."""
    return np.concatenate(
        [np.minimum(length - np.arange(0, length, max_seq_len), max_seq_len) for length in lengths]
    ).astype(np.int64)
