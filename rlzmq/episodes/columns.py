"""Names of the columns and of the chunk table that episodes, batches and modules exchange; positions in them."""

from __future__ import annotations

import numpy as np

__all__ = [
    "DEFAULT_AGENT_ID",
    "DEFAULT_MODULE_ID",
    "Columns",
    "chosen_positions",
    "default_agent_to_module_mapping_fn",
    "ragged_arange",
    "steps_window",
]

DEFAULT_AGENT_ID = "default_agent"
DEFAULT_MODULE_ID = "default_policy"


def default_agent_to_module_mapping_fn(agent_id: object, episode: object, **kwargs: object) -> str:
    """Map every agent to the default module."""
    return DEFAULT_MODULE_ID


class Columns:
    """Column names, spelled as in RLlib. Plain strings: ``Columns.OBS == "obs"``.

    Columns added by modules or connectors need no entry here; any string works.
    """

    OBS = "obs"
    INFOS = "infos"
    ACTIONS = "actions"
    ACTIONS_FOR_ENV = "actions_for_env"
    REWARDS = "rewards"
    TERMINATEDS = "terminateds"
    TRUNCATEDS = "truncateds"
    NEXT_OBS = "new_obs"
    EPS_ID = "eps_id"
    AGENT_ID = "agent_id"
    MODULE_ID = "module_id"
    SEQ_LENS = "seq_lens"
    T = "t"
    STATE_IN = "state_in"
    NEXT_STATE_IN = "next_state_in"
    STATE_OUT = "state_out"
    NEXT_STATE_OUT = "next_state_out"
    EMBEDDINGS = "embeddings"
    ACTION_DIST_INPUTS = "action_dist_inputs"
    ACTION_PROB = "action_prob"
    ACTION_LOGP = "action_logp"
    VF_PREDS = "vf_preds"
    VALUES_BOOTSTRAPPED = "values_bootstrapped"
    ADVANTAGES = "advantages"
    VALUE_TARGETS = "value_targets"
    INTRINSIC_REWARDS = "intrinsic_rewards"
    LOSS_MASK = "loss_mask"
    RETURNS_TO_GO = "returns_to_go"
    WEIGHTS_VERSION = "weights_seq_no"


def chosen_positions(chosen: object, num: int) -> np.ndarray:
    """Convert positions (negative ones count from the end) or a bool mask to int64 positions in ``0 … num-1``.

    Raises:
        IndexError: A position does not exist or a mask has the wrong length.
    """
    chosen = np.asarray(chosen)
    if chosen.dtype != np.bool_:
        chosen = chosen.astype(np.int64, copy=False)
    positions: np.ndarray = np.arange(num, dtype=np.int64)[chosen]
    return positions


def ragged_arange(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ``[starts[0], starts[0]+1, …, starts[1], starts[1]+1, …]``, with ``counts[i]`` numbers from each start.

    Args:
        starts: int64 [C].
        counts: int64 [C], from 0.

    Returns:
        int64 [counts.sum()].
    """
    if len(starts) == 1:
        start = int(starts[0])
        return np.arange(start, start + int(counts[0]), dtype=np.int64)
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    if total == len(ends) and counts.all():
        return starts.astype(np.int64)
    numbers: np.ndarray = np.arange(total, dtype=np.int64)
    numbers += (starts - (ends - counts)).repeat(counts)
    return numbers


def steps_window(length: np.ndarray, begin: int, end: int) -> tuple[int, int, int, int]:
    """Return the chunks that contain the steps ``begin…end-1`` of all chunks in order, and the steps to cut off.

    Chunks without steps belong to the window that ends at (or begins before) their position. With ``begin == 0``,
    leading ones are included, too.

    Args:
        length: int64 [C], steps per chunk.
        begin, end: ``0 <= begin <= end <= length.sum()``.

    Returns:
        (first chunk, one past the last chunk, steps cut off the first one's front, steps cut off the last
        one's end).
    """
    ends = np.cumsum(length)
    total = int(ends[-1]) if len(ends) else 0
    first = int(np.searchsorted(ends, begin, "right")) if begin else 0
    if end == total:
        stop = len(ends)
    elif end == 0:
        stop = 0
    else:
        # The chunk of step `end` is the first one that is not completely included; it may be included in part.
        stop = int(np.searchsorted(ends, end, "right"))
        if int(ends[stop] - length[stop]) < end:
            stop += 1
    stop = max(stop, first)
    if begin == end and begin not in (0, total):
        return first, first, 0, 0
    if first == stop:
        return first, stop, 0, 0
    front = max(0, begin - int(ends[first] - length[first]))
    back = max(0, int(ends[stop - 1]) - end)
    return first, stop, front, back
