"""AddStatesFromEpisodesToBatch: adds the ``state_in`` column of stateful modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlzmq.connectors.batching import BatchedNdArray
from rlzmq.connectors.connector_v2 import ConnectorV2, batch_key
from rlzmq.connectors.rl_modules import initial_state, is_stateful, max_seq_len, stateful_module_for_key
from rlzmq.connectors.torch_piece import Batch, Memory, TorchPiece
from rlzmq.core.tree import tree_map, tree_stack
from rlzmq.episodes.columns import Columns

__all__ = ["AddStatesFromEpisodesToBatch"]


class AddStatesFromEpisodesToBatch(ConnectorV2):
    """Adds ``state_in``: a tree without time axis, per episode or on the learner per sequence.

    In env runners it is the last ``state_out``, or the module's initial state in a new episode. On the learner it is
    the state before each sequence's first step. Before a chunk's first step that is, in this order: the state stored
    with the chunk (``episode.initial_state``), the last ``state_out`` of the lookback, or the module's initial state
    for chunks that begin their episode.

    Args:
        input_observation_space, input_action_space: See ConnectorV2.
        as_learner_connector: Whether to add the states of training sequences.
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
        self, *, rl_module: Any = None, batch: dict[str, Any], episodes: Sequence[Any], **kwargs: Any
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
            key = batch_key(episode)
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

    def to_torch(self, *, rl_module: Any, agent_id: Any) -> TorchPiece:
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


def _state_after(episode: Any, module: Any) -> Any:
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
