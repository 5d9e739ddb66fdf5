"""Sampling of fragments by a runner, and opening of fragments by a learner, for all processes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.roles.batch_check import BatchCheck
from rlzmq.wire.codec import FragmentId
from rlzmq.wire.fragment_message import decode_fragment

__all__ = ["decode_steps", "num_left_out", "sample_with_metrics", "sorted_by_env", "take_fragment"]

# Far above any real fragment; an external runner may send any number.
_MAX_LEFT_OUT = 2**40

_log = logging.getLogger("rlzmq.runners")


def take_fragment(runner: Any, num_vector_steps: int, max_s: float | None = None) -> Any:
    """Sample a lease and add the metrics and counts for the driver to the batch's meta.

    Returns:
        The runner's EpisodeBatch; its meta holds episode metrics, counts, and the connector delta
        if there is one.
    """
    batch = runner.sample_lease(num_vector_steps, **({} if max_s is None else {"max_s": max_s}))
    batch = _within_lease(runner, batch, num_vector_steps * runner.num_envs)
    delta = runner.get_connector_delta()
    if delta:
        batch.meta["connector_delta"] = delta
    _take_metrics(runner, batch)
    return batch


def _within_lease(runner: Any, batch: Any, num_env_steps: int) -> Any:
    """Return the batch without the steps that `on_sample_end` added beyond the lease."""
    surplus = batch.num_env_steps - num_env_steps
    if surplus <= 0:
        return batch
    _log.warning(
        "Env runner %d: on_sample_end made %d env steps of a lease of %d; the last %d are left out.",
        runner.worker_index, batch.num_env_steps, num_env_steps, surplus,
    )  # fmt: skip
    batch = batch.split(num_env_steps)[0]
    batch.meta["num_env_steps"] = num_env_steps
    return batch


def sorted_by_env(batch: EpisodeBatch, num_envs: int) -> tuple[EpisodeBatch, tuple[int, ...]]:
    """Order a batch's chunks by environment and count the env steps of each.

    Args:
        batch: Batches of several agents, and those without environment indices, are returned unchanged.
        num_envs: Number of environments.

    Returns:
        The batch, and its env steps by environment, or ().
    """
    batch = batch.updated()
    if (
        batch.groups is not None
        or not len(batch)
        or batch.env_index.min() < 0
        or batch.env_index.max() >= num_envs
    ):
        return batch, ()
    order = np.argsort(batch.env_index, kind="stable")
    steps = np.bincount(batch.env_index, weights=batch.length, minlength=num_envs).astype(np.int64)
    return batch.select(order), tuple(steps.tolist())


def sample_with_metrics(runner: Any, options: Mapping[str, Any]) -> Any:
    """Return ``runner.sample(**options)`` with the metrics logged since the last fragment in the batch's meta."""
    batch = runner.sample_batch(**options)
    _take_metrics(runner, batch)
    return batch


def _take_metrics(runner: Any, batch: Any) -> None:
    if custom := runner.take_logged():
        batch.meta["custom_metrics"] = custom


def decode_steps(
    frames: Sequence[Any],
    check: BatchCheck,
    fragment: FragmentId,
    first: int,
    num_steps: int,
) -> EpisodeBatch:
    """Decode and check some env steps of a fragment from a runner, which is not trusted.

    Args:
        frames: Frames of the fragment's message, or of the message of this range.
        check: The check to apply.
        fragment: Id of the fragment.
        first, num_steps: Range of env steps.

    Returns:
        A batch of these steps, in chunk order.

    Raises:
        ProtocolError: It cannot be decoded.
        ValueError: It does not pass the check, or does not have these steps.
    """
    header, arrays, _ = decode_fragment(frames)
    batch = EpisodeBatch.from_wire(header.batch, arrays)
    check.check(batch, fragment)
    # A message of this range alone, or of the whole fragment.
    begin = 0 if header.num_env_steps == num_steps else first
    last = begin + num_steps
    if last > batch.num_env_steps:
        raise ValueError(f"steps {begin}…{last} are wanted of a fragment of {batch.num_env_steps}")
    if (begin, last) != (0, batch.num_env_steps):
        batch = batch.slice_steps(begin, last)
    return batch


def num_left_out(meta: Mapping[str, Any]) -> int:
    """Return the env steps that a runner left out of a fragment as non-finite."""
    num = meta.get("num_env_steps_not_finite", 0)
    return num if type(num) is int and 0 <= num <= _MAX_LEFT_OUT else 0
