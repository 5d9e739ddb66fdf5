"""Default pieces: they add observations, the episodes' columns, time axis and states, batch items, and make tensors."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from rlzmq.connectors.batching import BatchedNdArray, batch_items
from rlzmq.connectors.common.agent_to_module_mapping import (
    MAP_STRUCTURE,
    initial_state,
    is_multi_rl_module,
    is_stateful,
    max_seq_len,
    stateful_module_for_key,
)
from rlzmq.connectors.connector_v2 import (
    LAST_STAGE,
    Batch,
    ConnectorV2,
    Memory,
    TorchPiece,
    unchanged_on_tensors,
)
from rlzmq.connectors.observation_pieces import AgentPiece
from rlzmq.connectors.rows import TrainRows
from rlzmq.core.tree import num_items, tree_map, tree_rows, tree_stack, tree_zeros_like
from rlzmq.episodes.batch_columns import ragged_arange
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.episode_columns import located
from rlzmq.episodes.step_values import as_rewards

__all__ = [
    "OBSERVATION_READERS",
    "SINGLE_TIME_RANK_FLAG",
    "AddColumnsFromEpisodesToTrainBatch",
    "AddInfosFromEpisodesToTrainBatch",
    "AddNextObservationsFromEpisodesToTrainBatch",
    "AddObservationsFromEpisodesToBatch",
    "AddOneTsToEpisodesAndTruncate",
    "AddStatesFromEpisodesToBatch",
    "AddTimeDimToBatchAndZeroPad",
    "BatchIndividualItems",
    "NumpyToTensor",
    "split_and_zero_pad",
    "states_are_known",
    "to_tensor",
]


OBSERVATION_READERS = "observation_readers"
"""Key in shared_data of a learner pipeline: pieces whose `observations_of` other pieces must use."""


class _StepsPiece(ConnectorV2):
    """Base class of pieces that add something for each episode's last observation, or on the learner for all steps."""

    step_columns: ClassVar[tuple[str, ...] | None] = ()

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        as_learner_connector: bool = False,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self._as_learner_connector = as_learner_connector


class AddObservationsFromEpisodesToBatch(_StepsPiece):
    """Adds each episode's last observation, or on the learner the observations of all its steps.

    Does nothing if an earlier piece has added observations.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        as_learner_connector: Whether to add the observations of all steps (without the final one).
    """

    stage: ClassVar[int] = 2
    to_torch = unchanged_on_tensors

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2."""
        if Columns.OBS in batch:
            return batch
        if not self._as_learner_connector:
            items: dict[Any, list[Any]] = {}
            for episode in self.single_agent_episode_iterator(episodes):
                items.setdefault(episode.batch_key, []).append(episode.get_observations(-1))
            if items:
                batch[Columns.OBS] = items
            return batch
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            if num_steps := len(episode):
                observations = episode.get_observations(slice(0, num_steps))
                self.add_n_batch_items(batch, Columns.OBS, observations, num_steps, episode)
        return batch

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`."""
        if Columns.OBS not in rows.columns:
            rows.columns[Columns.OBS] = rows.observations_at(rows.observations)


SINGLE_TIME_RANK_FLAG = "_added_single_ts_time_rank"
"""Key in shared_data: whether RemoveSingleTsTimeRankFromBatch has a time axis to remove."""

_UNTOUCHED = (Columns.INFOS, Columns.STATE_IN, Columns.SEQ_LENS)


class AddTimeDimToBatchAndZeroPad(_StepsPiece):
    """Adds a time axis to the data of stateful modules. Other modules' data is unchanged.

    In env runners every item ``[...]`` becomes ``[1, ...]``. On the learner the steps of each chunk become
    ``ceil(len / max_seq_len)`` sequences ``[max_seq_len, ...]``, the last one padded on the right with zeros (actions:
    with the chunk's last action). Two columns are added: ``seq_lens`` (number of real steps in a sequence) and, unless
    it exists already, ``loss_mask`` (False in the padding). Two chunks never share a sequence.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        as_learner_connector: Whether to build training sequences.
    """

    stage: ClassVar[int] = 3

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
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

    def _add_sequences(self, rl_module: object, batch: dict[str, Any], episodes: Sequence[Any]) -> None:
        lengths: dict[Any, list[int]] = {}
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            if len(episode):
                lengths.setdefault(episode.batch_key, []).append(len(episode))
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

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`."""
        if not rows.module.is_stateful():
            return
        longest, columns = max_seq_len(rows.module), rows.columns
        if Columns.LOSS_MASK not in columns:
            columns[Columns.LOSS_MASK] = np.ones(len(rows), np.bool_)
        for name in columns.keys() - _UNTOUCHED:
            columns[name] = tree_map(
                lambda leaf, name=name: split_and_zero_pad(leaf, rows.lengths, longest, name), columns[name]
            )
        columns[Columns.SEQ_LENS] = _sequence_lengths(rows.lengths.tolist(), longest)

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
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
) -> object:
    """Return all sequences of a key as one tree of BatchedNdArrays ``[num_sequences, longest, ...]``."""
    rows = batch_items(items)
    if num_items(rows) != sum(lengths):
        raise ValueError(
            f"column {column!r}, key {key}: expected one item per step, {sum(lengths)} (chunks of "
            f"{list(lengths)[:8]} steps), got {num_items(rows)}."
        )
    return tree_map(lambda leaf: BatchedNdArray(split_and_zero_pad(leaf, lengths, longest, column)), rows)


def split_and_zero_pad(
    rows: npt.NDArray[Any], lengths: Iterable[int], max_seq_len: int, column: str = ""
) -> npt.NDArray[Any]:
    """Cut the rows of several chunks into sequences of equal length, padded with zeros (actions: the chunk's last).

    Args:
        rows: ``[sum(lengths), ...]``, one chunk after the other.
        lengths: Number of steps of each chunk.
        max_seq_len: Number of steps of each sequence.
        column: Name of the rows' column.

    Returns:
        ``[num_sequences, max_seq_len, ...]``; a chunk's last sequence is padded on the right.
    """
    lengths = np.asarray(list(lengths), np.int64)
    num_rows = -(-lengths // max_seq_len)
    # The position of each step if the sequences of all chunks are concatenated.
    shift = np.cumsum(num_rows * max_seq_len - lengths) - (num_rows * max_seq_len - lengths)
    targets = np.arange(len(rows)) + np.repeat(shift, lengths)
    padded = np.zeros((int(num_rows.sum()) * max_seq_len, *rows.shape[1:]), rows.dtype)
    if column == Columns.ACTIONS:  # Discrete(3, start=1) has no 0
        padded[:] = rows[np.repeat(np.cumsum(lengths) - 1, num_rows * max_seq_len)]
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


class AddStatesFromEpisodesToBatch(_StepsPiece):
    """Adds ``state_in``: a tree without time axis, per episode or on the learner per sequence.

    In env runners it is the last ``state_out``, or the module's initial state in a new episode. On the learner it is
    the state before each sequence's first step. Before a chunk's first step that is, in this order: the state stored
    with the chunk (``episode.initial_state``), the last ``state_out`` of the lookback, or the module's initial state
    for chunks that begin their episode.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        as_learner_connector: Whether to add the states of training sequences.
    """

    stage: ClassVar[int] = 4

    def __call__(
        self, *, rl_module: Any = None, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object
    ) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: The state before a chunk's first step is unknown.
        """
        if Columns.STATE_IN in batch or not is_stateful(rl_module):
            return batch
        for episode in self.single_agent_episode_iterator(
            episodes, agents_that_stepped_only=not self._as_learner_connector
        ):
            key = episode.batch_key
            module = stateful_module_for_key(rl_module, key)
            if module is None:
                continue
            if not self._as_learner_connector:
                self.add_batch_item(batch, Columns.STATE_IN, _state_after(episode, module), episode)
            elif len(episode):
                self._add_sequence_states(batch, episode, module, max_seq_len(module, key))
        return batch

    def _add_sequence_states(self, batch: dict[str, Any], episode: Any, module: Any, length: int) -> None:
        num_sequences = -(-len(episode) // length)
        state_out = episode.get_extra_model_outputs(Columns.STATE_OUT)
        if isinstance(state_out, list):
            state_out = tree_stack(state_out)

        def before_each(first: Any, after: Any) -> Any:
            rows = np.empty((num_sequences, *after.shape[1:]), after.dtype)
            rows[0] = first
            rows[1:] = after[length - 1 : -1 : length][: num_sequences - 1]
            return BatchedNdArray(rows)

        states = tree_map(before_each, state_before_chunk(episode, module), state_out)
        self.add_n_batch_items(batch, Columns.STATE_IN, states, num_sequences, episode)

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`, for chunks of which `states_are_known`."""
        module, episodes = rows.module, rows.episodes
        if Columns.STATE_IN in rows.columns or not module.is_stateful():
            return
        longest = max_seq_len(module)
        num_sequences = -(-rows.lengths // longest)
        chunks = np.repeat(np.arange(len(episodes), dtype=np.int64), num_sequences)
        steps = ragged_arange(np.zeros_like(num_sequences), num_sequences) * longest
        stored, is_stored = episodes.initial_state, steps == 0
        if stored is None:
            stored, is_stored = initial_state(module), is_stored & (episodes.lookback[chunks] == 0)
        # A slot before the first one is never used, as its row is overwritten.
        before = np.maximum(episodes.start[chunks] + steps - 1, 0)

        def states(state_out: Any, stored: Any) -> Any:
            rows = state_out[before]
            rows[is_stored] = stored
            return rows

        rows.columns[Columns.STATE_IN] = tree_map(states, episodes.columns[Columns.STATE_OUT], stored)

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2. The memory is the module's state."""
        if not is_stateful(rl_module):
            return TorchPiece()

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            return {**batch, Columns.STATE_IN: memory["module"]}, memory

        def remember(batch: Batch, memory: Memory) -> Memory:
            return {"module": batch[Columns.STATE_OUT]}

        return TorchPiece(
            forward=forward, initial_memory={"module": initial_state(rl_module)}, remember=remember
        )


def states_are_known(episodes: EpisodeBatch) -> bool:
    """Return whether each chunk tells the state before its first step; see AddStatesFromEpisodesToBatch."""
    if Columns.STATE_OUT not in episodes.columns:
        return False
    return episodes.initial_state is not None or bool(
        ((episodes.lookback > 0) | (episodes.t_started == 0)).all()
    )


def _state_after(episode: Any, module: Any) -> object:
    """Return the state from which the module acts on the episode's last observation."""
    state_out = episode.extra_model_outputs.get(Columns.STATE_OUT)
    if state_out is not None and state_out.len_incl_lookback():
        return state_out.get(-1)
    if len(episode) == 0:
        stored = getattr(episode, "initial_state", None)
        if stored is not None:
            return stored
    # Steps without module outputs (random actions) do not change the module's state.
    return initial_state(module)


def state_before_chunk(episode: Any, module: Any) -> Any:
    """Return the module's state before the first step of a chunk; see AddStatesFromEpisodesToBatch.

    Raises:
        ValueError: The state is unknown.
    """
    stored = getattr(episode, "initial_state", None)
    if stored is not None:
        return stored
    state_out = episode.extra_model_outputs.get(Columns.STATE_OUT)
    if state_out is not None and state_out.lookback:
        return state_out.get(-1, neg_index_as_lookback=True)
    if episode.t_started == 0:
        return initial_state(module)
    raise ValueError(
        f"episode {episode.id_!r}{f', agent {episode.agent_id!r}' if episode.agent_id is not None else ''}: "
        f"the chunk starts at t={episode.t_started} and holds no {Columns.STATE_OUT!r} from before, so the "
        "module's state at its first step is unknown. Cut chunks with a lookback of at least one step "
        "(config.env_runners(episode_lookback_horizon=1))."
    )


class BatchIndividualItems(AgentPiece):
    """Converts every column's items to one tree of arrays ``[B, ...]``. Infos become one list.

    Single-agent data is stored under ``"default_policy"`` if `rl_module` is a MultiRLModule.
    For the arguments see `AgentPiece`.
    """

    stage: ClassVar[int] = 6
    to_torch = unchanged_on_tensors
    step_columns: ClassVar[tuple[str, ...] | None] = ()

    def __call__(
        self,
        *,
        rl_module: Any = None,
        batch: dict[str, Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: Items of a column differ in shape or structure; the text names the column.
        """
        if self.of_agents:
            return {
                module_id: (
                    {name: _batched(name, data) for name, data in columns.items()}
                    if isinstance(columns, dict)
                    else _batched(module_id, columns)
                )
                for module_id, columns in batch.items()
            }
        if shared_data is not None and isinstance(batch.get(Columns.OBS), dict):
            by_key = batch[Columns.OBS]
            if all(isinstance(key, tuple) for key in by_key):
                shared_data[MAP_STRUCTURE] = [key[0] for key, items in by_key.items() for _ in items]
        if not is_multi_rl_module(rl_module):
            return {name: _batched(name, data) for name, data in batch.items()}
        by_module: dict[str, Any] = {DEFAULT_MODULE_ID: {}}
        for name, data in batch.items():
            if name in rl_module and isinstance(data, dict):
                by_module.setdefault(name, {}).update(
                    {col: _batched(col, part) for col, part in data.items()}
                )
            else:
                by_module[DEFAULT_MODULE_ID][name] = _batched(name, data)
        return by_module


def _batched(name: str, data: object) -> object:
    """Return one column, batched. Data that is batched already is unchanged."""
    if isinstance(data, dict) and data and all(isinstance(key, tuple) for key in data):
        data = [item for items in data.values() for item in items]
    elif isinstance(data, dict) and not data:
        data = []
    if not isinstance(data, list) or name == Columns.INFOS or not data:
        return data
    try:
        return batch_items(data)
    except ValueError as error:
        raise ValueError(f"column {name!r}: {error}") from None


class NumpyToTensor(ConnectorV2):
    """Converts all arrays of the batch, at any depth, to tensors. Infos remain lists.

    float64 becomes float32; other dtypes are unchanged.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        as_learner_connector: Whether the piece builds train batches, which may contain only numbers.
        pin_memory: Whether to put CPU tensors into pinned memory.
        device: Torch device; None: CPU.
    """

    stage: ClassVar[int] = LAST_STAGE
    step_columns: ClassVar[tuple[str, ...] | None] = ()

    def __init__(
        self,
        input_observation_space: Any = None,
        input_action_space: Any = None,
        *,
        as_learner_connector: bool = False,
        pin_memory: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__(input_observation_space, input_action_space)
        self.as_learner_connector = as_learner_connector
        self.pin_memory = pin_memory
        self.device = device

    def __call__(self, *, batch: dict[str, Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: A learner's batch has strings or Python objects in a column.
        """
        return {name: self._convert(name, data, self.device, self.pin_memory) for name, data in batch.items()}

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`. The tensors stay on the CPU; minibatches are moved."""
        for name, column in rows.columns.items():
            rows.columns[name] = self._convert(name, column)

    def _convert(self, name: str, data: object, device: object = None, pin_memory: bool = False) -> object:
        if isinstance(data, dict):
            return {key: self._convert(key, part, device, pin_memory) for key, part in data.items()}
        if isinstance(data, tuple):
            return tuple(self._convert(name, part, device, pin_memory) for part in data)
        tensor = to_tensor(data, device, pin_memory=pin_memory)  # lists, of infos, stay what they are
        if self.as_learner_connector and isinstance(tensor, np.ndarray) and tensor.size:
            raise ValueError(
                f"column {name!r}: expected numbers to learn from, got {type(tensor.flat[0]).__name__} "
                f"{tensor.flat[0]!r:.80}. Turn it into numbers, or leave it out, in a learner connector piece."
            )
        return tensor

    def to_torch(self, *, rl_module: Any, agent_id: Hashable) -> TorchPiece:
        """See ConnectorV2. float64 becomes float32."""
        import torch

        def single(leaf: Any) -> Any:
            return leaf.to(torch.float32) if leaf.dtype is torch.float64 else leaf

        def forward(batch: Batch, memory: Memory) -> tuple[Batch, Memory]:
            return {name: tree_map(single, column) for name, column in batch.items()}, memory

        return TorchPiece(forward=forward)


def to_tensor(leaf: Any, device: Any = None, *, pin_memory: bool = False) -> Any:
    """Convert an array to a tensor (sharing memory if possible); return anything else unchanged."""
    import torch

    if isinstance(leaf, (np.ndarray, np.generic)):
        array = leaf if type(leaf) is np.ndarray else np.asarray(leaf).view(np.ndarray)
        if array.dtype.kind not in "biufc":
            return leaf
        flags = array.flags
        if not flags.carray and (not flags.writeable or min(array.strides) < 0):
            array = array.copy()
        tensor = torch.from_numpy(array)
        if tensor.dtype is torch.float64:
            # Numbers that are too large become infinity, which the learner notices in the loss.
            tensor = tensor.float()
    elif isinstance(leaf, torch.Tensor):
        tensor = leaf
    else:
        return leaf
    if pin_memory and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor if device is None else tensor.to(device)


_OF_OTHER_PIECES = (Columns.OBS, Columns.STATE_OUT, Columns.STATE_IN, Columns.INFOS)


class AddColumnsFromEpisodesToTrainBatch(ConnectorV2):
    """Adds ``actions``, ``rewards``, ``terminateds``, ``truncateds`` and all extra model outputs.

    Each column has one item per step. ``state_out`` is left to AddStatesFromEpisodesToBatch. Columns that an earlier
    piece has added are unchanged.
    """

    stage: ClassVar[int] = 2
    step_columns: ClassVar[tuple[str, ...] | None] = ()

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2.

        Raises:
            ValueError: A reward is not a single number.
        """
        skipped = {*batch, Columns.STATE_IN, Columns.STATE_OUT}
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            num_steps = len(episode)
            if not num_steps:
                continue
            steps = slice(0, num_steps)
            if Columns.ACTIONS not in skipped:
                self.add_n_batch_items(batch, Columns.ACTIONS, episode.get_actions(steps), num_steps, episode)
            if Columns.REWARDS not in skipped:
                try:
                    rewards = as_rewards(episode.get_rewards(steps))
                except ValueError as error:
                    raise located(error, f"Episode {episode.id_!r}", Columns.REWARDS) from None
                self.add_n_batch_items(batch, Columns.REWARDS, rewards, num_steps, episode)
            for column, is_end in (
                (Columns.TERMINATEDS, episode.is_terminated),
                (Columns.TRUNCATEDS, episode.is_truncated),
            ):
                if column not in skipped:
                    ends = [False] * (num_steps - 1) + [bool(is_end)]
                    self.add_n_batch_items(batch, column, ends, num_steps, episode)
            for column in episode.extra_model_outputs:
                if column not in skipped:
                    values = episode.get_extra_model_outputs(column, steps)
                    self.add_n_batch_items(batch, column, values, num_steps, episode)
        return batch

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`. Extra rows repeat their chunk's last step, with reward 0."""
        episodes, columns = rows.episodes, rows.columns
        for name, column in episodes.columns.items():
            if name not in columns and name not in _OF_OTHER_PIECES:
                columns[name] = tree_rows(column, rows.steps)
                if name == Columns.REWARDS:
                    columns[name][rows.extra] = 0
        for name, flags in (
            (Columns.TERMINATEDS, episodes.terminated),
            (Columns.TRUNCATEDS, episodes.truncated),
        ):
            if name not in columns:
                columns[name] = rows.at_ends(flags)


class AddNextObservationsFromEpisodesToTrainBatch(ConnectorV2):
    """Adds the observation after each step, frame-stacked if ``obs`` is."""

    stage: ClassVar[int] = 2
    step_columns: ClassVar[tuple[str, ...] | None] = (Columns.NEXT_OBS,)

    def __call__(
        self,
        *,
        batch: dict[str, Any],
        episodes: Sequence[Any],
        shared_data: dict[str, Any] | None = None,
        **kwargs: object,
    ) -> dict[str, Any]:
        """See ConnectorV2."""
        if Columns.NEXT_OBS in batch:
            return batch
        readers = (shared_data or {}).get(OBSERVATION_READERS)
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            num_steps = len(episode)
            if not num_steps:
                continue
            if readers:
                following = readers[-1].observations_of(episode, 1, num_steps + 1)
            else:
                following = episode.get_observations(slice(1, num_steps + 1))
            self.add_n_batch_items(batch, Columns.NEXT_OBS, following, num_steps, episode)
        return batch

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`."""
        if Columns.NEXT_OBS not in rows.columns:
            rows.columns[Columns.NEXT_OBS] = rows.observations_at(rows.steps + 1)


class AddInfosFromEpisodesToTrainBatch(ConnectorV2):
    """Adds the info dict of every step's observation. Infos are neither batched nor padded."""

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2."""
        if Columns.INFOS in batch:
            return batch
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            num_steps = len(episode)
            if num_steps:
                infos = list(episode.get_infos(slice(0, num_steps)))
                self.add_n_batch_items(batch, Columns.INFOS, infos, num_steps, episode)
        return batch

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`."""
        infos = rows.episodes.infos
        rows.columns[Columns.INFOS] = [infos.get(slot, {}) for slot in rows.observations.tolist()]


class AddOneTsToEpisodesAndTruncate(ConnectorV2):
    """Extends every chunk by one step, so that its final observation gets a row in the train batch.

    The extra step repeats the last observation, action and extra model outputs, with reward 0. The columns
    ``loss_mask`` (False at that step), ``terminateds`` and ``truncateds`` (True at most at the last real step) are
    added. A chunk that is not done is marked as truncated. Chunks without steps are unchanged.

    The pipeline's last piece (`WholeBatchEstimator`) bootstraps from the extra row's value: `ChunkRows.bootstrap_C`.

    The given episodes are extended in place (ids are kept). In a LearnerConnectorPipeline these are private copies, so
    the caller's episodes do not change.
    """

    stage: ClassVar[int] = 0

    def __call__(self, *, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: object) -> dict[str, Any]:
        """See ConnectorV2."""
        for episode in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            num_steps = len(episode)
            if not num_steps:
                continue
            if not episode.is_done:
                episode.is_truncated = True
            before = [False] * (num_steps - 1)
            columns = (
                (Columns.LOSS_MASK, [True] * num_steps + [False]),
                (Columns.TERMINATEDS, [*before, bool(episode.is_terminated), False]),
                (Columns.TRUNCATEDS, [*before, bool(episode.is_truncated), False]),
            )
            for column, flags in columns:
                self.add_n_batch_items(batch, column, flags, num_steps + 1, episode)
            _extend_by_one_step(episode)
        return batch

    def train_rows(self, rows: TrainRows) -> None:
        """Row form of `__call__`."""
        rows.lay_out(1)
        terminated, truncated = rows.episodes.terminated, rows.episodes.truncated
        rows.columns[Columns.LOSS_MASK] = rows.is_real
        rows.columns[Columns.TERMINATEDS] = rows.at_ends(terminated)
        rows.columns[Columns.TRUNCATEDS] = rows.at_ends(truncated | ~terminated)


def _extend_by_one_step(episode: Any) -> None:
    episode.observations.append(episode.observations.get(-1))
    episode.infos.append(episode.infos.get(-1))
    episode.actions.append(episode.actions.get(-1))
    episode.rewards.append(tree_zeros_like(episode.rewards.get(-1)) if episode.is_numpy else 0.0)
    for values in episode.extra_model_outputs.values():
        values.append(values.get(-1))
    episode.t += 1
