"""The learner connector's default pieces as one pass over whole columns of an EpisodeBatch.

The results are bitwise equal to those of the per-episode protocol, at the cost of one gather per column. With an
estimator (GAE, V-trace) every chunk has one extra, masked row to bootstrap from, as in the protocol;
`rlzmq.learners.train_batch` drops these rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlzmq.connectors.common.add_time_dim import split_and_zero_pad
from rlzmq.connectors.common.numpy_to_tensor import to_tensor
from rlzmq.connectors.learner.whole_batch_estimator import FORWARD_OUTPUTS
from rlzmq.connectors.rl_modules import initial_state, max_seq_len
from rlzmq.core.tree import tree_leaves, tree_map, tree_rows
from rlzmq.episodes.columns import DEFAULT_MODULE_ID, Columns, ragged_arange
from rlzmq.episodes.episode_batch import EpisodeBatch

if TYPE_CHECKING:
    from rlzmq.connectors.learner.whole_batch_estimator import WholeBatchEstimator
    from rlzmq.connectors.plans import LearnerPlan
    from rlzmq.replay.step_store import Transitions

__all__ = ["fused_columns", "transition_columns"]

# On a GPU, the estimator's forward pass is split into blocks of this many bytes of observations.
_BLOCK_BYTES = 256 * 2**20

# Of these, a contiguous array of one's own becomes a tensor as it is.
_TENSORS_OF = {np.dtype(name) for name in ("bool", "uint8", "int32", "int64", "float32")}

_NOT_GATHERED = (Columns.OBS, Columns.STATE_OUT, Columns.STATE_IN, Columns.INFOS)


def fused_columns(
    learner_connector: Any,
    module: Any,
    episodes: EpisodeBatch,
    device: torch.device,
    *,
    keeps_forward: bool = False,
) -> dict[str, dict[str, Any]] | None:
    """Return the train batch for episodes on columns: module id → column → CPU tensor ``[rows, ...]``.

    Args:
        learner_connector: The pipeline.
        module: The MultiRLModule.
        episodes: The chunks.
        device: Device of the module.
        keeps_forward: Whether to add the column `FORWARD_OUTPUTS` where the estimator computes them. (Only on the CPU,
            for stateless modules.)

    Returns:
        The train batch; None if a piece of the pipeline, or the data, requires the per-episode protocol.
    """
    plan = _plan_of(learner_connector)
    if plan is None or plan.multi_agent != (episodes.groups is not None):
        return None
    if episodes.groups is None:
        parts = {DEFAULT_MODULE_ID: None if episodes.agent_ids is not None else episodes}
    else:
        parts = {module_id: _chunks_of(episodes, module_id) for module_id in episodes.get_module_ids()}
    result: dict[str, dict[str, Any]] = {}
    for module_id, chunks in parts.items():
        if module_id not in module:
            continue
        columns = (
            None
            if chunks is None
            else _module_columns(plan, module_id, module[module_id], chunks, device, keeps_forward)
        )
        if columns is None:
            return None
        if columns:
            result[module_id] = columns
    return result


def transition_columns(learner_connector: Any, module: Any, drawn: Transitions) -> dict[str, Any] | None:
    """Return the default module's columns for transitions of a replay buffer: what `fused_columns` makes of them.

    Returns:
        Column → CPU tensor ``[rows, ...]``; None if a piece of the pipeline, or the module, needs the episodes.
    """
    plan = _plan_of(learner_connector)
    if plan is None or not plan.is_default or DEFAULT_MODULE_ID not in module:
        return None
    if module[DEFAULT_MODULE_ID].is_stateful():
        return None
    return {
        name: torch.from_numpy(column)
        if type(column) is np.ndarray and column.dtype in _TENSORS_OF
        else tree_map(to_tensor, column)
        for name, column in drawn.rows(next_observations=plan.next_observations).items()
    }


def _plan_of(learner_connector: Any) -> LearnerPlan | None:
    plan: LearnerPlan | None = getattr(learner_connector, "columnar_plan", lambda: None)()
    return plan


def _chunks_of(episodes: EpisodeBatch, module_id: str) -> EpisodeBatch | None:
    """Return the chunks of a module's agents, episode by episode; None if their columns differ."""
    parts, keys = [], []
    for group in episodes.agent_batches:
        mine = group.select(group.is_of(module_id))
        if len(mine):
            parts.append(mine)
            keys.append((mine.order, mine.episode))
    if any(part.columns.keys() != parts[0].columns.keys() for part in parts):
        return None
    batch = parts[0] if len(parts) == 1 else EpisodeBatch.concat(parts)
    order = np.lexsort([np.concatenate(part) for part in zip(*keys, strict=True)])
    return batch.select(order)


def _module_columns(
    plan: LearnerPlan,
    module_id: str,
    module: Any,
    episodes: EpisodeBatch,
    device: torch.device,
    keeps_forward: bool,
) -> dict[str, Any] | None:
    if not episodes.length.all():
        episodes = episodes.select(np.flatnonzero(episodes.length))
    if len(episodes) == 0:
        return {}
    module = module.unwrapped()
    if module.is_stateful() and Columns.STATE_OUT not in episodes.columns:
        return None
    rows = _Rows(episodes, plan.add_one_ts)
    columns = _gathered(episodes, plan, rows)
    if module.is_stateful():
        longest = max_seq_len(module)
        states = _states(episodes, module, rows, longest)
        if states is None:
            return None
        columns = _as_sequences(columns, rows, longest)
        columns[Columns.STATE_IN] = states
    tensors = {
        name: column if name == Columns.INFOS else tree_map(to_tensor, column)
        for name, column in columns.items()
    }
    if plan.estimator is not None and hasattr(module, "compute_values"):
        keeps_forward = keeps_forward and device.type == "cpu" and not module.is_stateful()
        outputs, fwd_out = _evaluate(plan.estimator, module, tensors, device, keeps_forward)
        plan.estimator.add_estimates(tensors, outputs, rows.lengths, module_id)
        if keeps_forward and _are_rows(fwd_out, len(rows)):
            tensors[FORWARD_OUTPUTS] = fwd_out
    return tensors


class _Rows:
    """Source of each row: chunk by chunk, with an extra row after each chunk if `add_one_ts`.

    Attributes:
        lengths: int64[C], number of rows of each chunk.
        chunks: int64[N], chunk of each row.
        observations: int64[N], observation slot of each row.
        steps: int64[N], step slot of each row; an extra row repeats its chunk's last step.
        extra: int64[C], indices of the extra rows; empty without `add_one_ts`.
        last: int64[C], row of each chunk's last real step.
    """

    def __init__(self, episodes: EpisodeBatch, add_one_ts: bool) -> None:
        self.lengths = episodes.length + int(add_one_ts)
        self.chunks = np.arange(len(episodes), dtype=np.int64).repeat(self.lengths)
        self.observations = ragged_arange(episodes.start, self.lengths)
        ends = self.lengths.cumsum()
        self.extra = ends - 1 if add_one_ts else ends[:0]
        self.last = ends - 1 - int(add_one_ts)
        self.steps = self.observations.copy()
        self.steps[self.extra] -= 1

    def __len__(self) -> int:
        return len(self.steps)


def _gathered(episodes: EpisodeBatch, plan: LearnerPlan, rows: _Rows) -> dict[str, Any]:
    columns: dict[str, Any] = {
        name: tree_rows(column, rows.steps)
        for name, column in episodes.columns.items()
        if name not in _NOT_GATHERED
    }
    columns[Columns.OBS] = plan.observations(episodes, rows.observations, rows.chunks)
    terminated, truncated = episodes.terminated, episodes.truncated
    if plan.add_one_ts:
        columns[Columns.REWARDS][rows.extra] = 0
        truncated = truncated | ~terminated
    for name, flags in ((Columns.TERMINATEDS, terminated), (Columns.TRUNCATEDS, truncated)):
        column = np.zeros(len(rows), np.bool_)
        column[rows.last] = flags
        columns[name] = column
    added = plan.extra_columns(episodes)
    if plan.add_one_ts or added:
        real = np.ones(len(rows), np.bool_)
        real[rows.extra] = False
    if plan.add_one_ts:
        columns[Columns.LOSS_MASK] = real
    if plan.next_observations:
        following = rows.observations + 1
        if plan.add_one_ts:
            following[rows.extra] -= 1
        columns[Columns.NEXT_OBS] = plan.observations(episodes, following, rows.chunks)
    if plan.infos:
        columns[Columns.INFOS] = [episodes.infos.get(slot, {}) for slot in rows.observations.tolist()]
    for name, values in added.items():
        columns[name] = tree_map(lambda leaf: _spread(leaf, real), values)
    return columns


def _spread(values: NDArray[Any], real: NDArray[np.bool_]) -> NDArray[Any]:
    """Return values of real rows at their positions, with zeros in the extra rows."""
    spread = np.zeros((len(real), *values.shape[1:]), values.dtype)
    spread[real] = values
    return spread


def _as_sequences(columns: Mapping[str, Any], rows: _Rows, longest: int) -> dict[str, Any]:
    sequences = {
        name: column
        if name == Columns.INFOS
        else tree_map(lambda leaf: split_and_zero_pad(leaf, rows.lengths, longest), column)
        for name, column in columns.items()
    }
    steps = ragged_arange(np.zeros_like(rows.lengths), -(-rows.lengths // longest)) * longest
    lengths = np.repeat(rows.lengths, -(-rows.lengths // longest))
    sequences[Columns.SEQ_LENS] = np.minimum(lengths - steps, longest)
    if Columns.LOSS_MASK not in sequences:
        sequences[Columns.LOSS_MASK] = split_and_zero_pad(np.ones(len(rows), np.bool_), rows.lengths, longest)
    return sequences


def _states(episodes: EpisodeBatch, module: Any, rows: _Rows, longest: int) -> Any:
    """Return the state before each sequence's first step, ``[num_sequences, ...]``; None if one is unknown."""
    num_sequences = -(-rows.lengths // longest)
    chunks = np.repeat(np.arange(len(episodes), dtype=np.int64), num_sequences)
    steps = ragged_arange(np.zeros_like(num_sequences), num_sequences) * longest
    is_first = steps == 0
    begin = module_begin = None
    if episodes.initial_state is None:
        has_before = episodes.lookback > 0
        if not (has_before | (episodes.t_started == 0)).all():
            return None
        module_begin = initial_state(module)
        begin = has_before[chunks] | ~is_first
    before = episodes.start[chunks] + steps - 1

    def rows_of(state_out: Any, stored: Any) -> Any:
        # a slot before the first column slot is never used: its row is overwritten below
        states = state_out[np.maximum(before, 0)]
        if begin is None:
            states[is_first] = stored
        else:
            states[~begin] = stored
        return states

    stored = episodes.initial_state if begin is None else module_begin
    return tree_map(rows_of, episodes.columns[Columns.STATE_OUT], stored)


def _evaluate(
    estimator: WholeBatchEstimator,
    module: Any,
    columns: dict[str, Any],
    device: torch.device,
    keeps_graph: bool,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the module's outputs that the estimator needs, for all rows, on the CPU; and those of `forward_train`.

    The latter are those of the last block of rows; on the CPU there is only one. They have their graph if
    `keeps_graph`. Columns that the module sets in its batch (an action mask taken out of the observations) replace
    those in `columns`, as they do in the pipeline.
    """
    num_rows = int(tree_leaves(columns[Columns.OBS])[0].shape[0])
    if device.type == "cpu":
        per_block = num_rows
    else:
        bytes_per_row = sum(
            leaf[0].numel() * leaf.element_size() for leaf in tree_leaves(columns[Columns.OBS])
        )
        per_block = max(1, _BLOCK_BYTES // max(1, bytes_per_row))
    parts = []
    rewritten: list[dict[str, Any]] = []
    fwd_out: dict[str, Any] = {}
    with torch.no_grad():
        for begin in range(0, num_rows, per_block):
            block = {
                name: tree_map(lambda leaf, at=slice(begin, begin + per_block): leaf[at].to(device), column)
                for name, column in columns.items()
                if name != Columns.INFOS
            }
            given = dict(block)
            if estimator.uses_forward_train:
                with torch.set_grad_enabled(keeps_graph):
                    fwd_out = module.forward_train(block)
            outputs = estimator.evaluate(module, block, fwd_out)
            parts.append({name: out.cpu() for name, out in outputs.items()})
            rewritten.append(
                {name: column for name, column in block.items() if column is not given.get(name)}
            )
    for name in rewritten[0] if rewritten else ():
        columns[name] = tree_map(
            lambda *leaves: torch.cat([leaf.cpu() for leaf in leaves]), *(block[name] for block in rewritten)
        )
    if len(parts) == 1:
        return parts[0], fwd_out
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, fwd_out


def _are_rows(outputs: dict[str, Any], num_rows: int) -> bool:
    """Return whether there are outputs, all of them tensors with a row for each of the batch's."""
    leaves = tree_leaves(outputs)
    return bool(leaves) and all(isinstance(leaf, Tensor) and leaf.shape[:1] == (num_rows,) for leaf in leaves)
