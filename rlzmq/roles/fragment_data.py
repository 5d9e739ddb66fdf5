"""Episodes out of a runner, and into a learner: the same few steps in the driver's process and in others."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.learners.unusable import ORIGIN
from rlzmq.roles.learner.batch_check import BatchCheck
from rlzmq.wire.fragment_message import decode_fragment
from rlzmq.wire.schema import FragmentId

__all__ = ["by_env", "num_left_out", "open_fragment", "open_steps", "sample_with_metrics", "take_fragment"]

# Far above any real fragment: a runner from outside may say what it likes.
_MAX_LEFT_OUT = 2**40

_log = logging.getLogger("rlzmq.runners")


def take_fragment(runner: Any, num_vector_steps: int, max_s: float | None = None) -> Any:
    """Sample a lease and put what the driver must learn of it into the batch's meta.

    Args:
        runner: An EnvRunner.
        num_vector_steps: The lease.
        max_s: See `EnvRunner.sample_lease`.

    Returns:
        The runner's EpisodeBatch; its meta holds episode metrics, counts, and the connector delta
        where a piece has one.
    """
    batch = runner.sample_lease(num_vector_steps, **({} if max_s is None else {"max_s": max_s}))
    batch = _within_lease(runner, batch, num_vector_steps * runner.num_envs)
    delta = runner.get_connector_delta()
    if delta:
        batch.meta["connector_delta"] = delta
    _take_metrics(runner, batch)
    return batch


def _within_lease(runner: Any, batch: Any, num_env_steps: int) -> Any:
    """The batch without what `on_sample_end` has put in beyond the lease, which nobody has asked for."""
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


def by_env(batch: Any, num_envs: int) -> tuple[Any, tuple[int, ...]]:
    """A batch with its chunks in order of environments, and the env steps of each.

    Args:
        batch: Multi-agent ones stay as they are, and so do those whose chunks are of no environment.
        num_envs: How many environments there are.

    Returns:
        The batch; its env steps by environment, or ().
    """
    env_index = getattr(batch, "env_index", None)
    if not isinstance(batch, EpisodeBatch) or env_index is None:
        return batch, ()
    batch = batch.updated()
    if not len(batch) or batch.env_index.min() < 0 or batch.env_index.max() >= num_envs:
        return batch, ()
    order = np.argsort(batch.env_index, kind="stable")
    steps = np.bincount(batch.env_index, weights=batch.length, minlength=num_envs).astype(np.int64)
    return batch.select(order), tuple(steps.tolist())


def sample_with_metrics(runner: Any, options: Mapping[str, Any]) -> Any:
    """``runner.sample(**options)``; what callbacks logged since the last fragment is in the batch's meta."""
    batch = runner.sample(**options)
    _take_metrics(runner, batch)
    return batch


def _take_metrics(runner: Any, batch: Any) -> None:
    custom = runner.metrics.reduce(compile=False) if len(runner.metrics) else None
    if custom:
        batch.meta["custom_metrics"] = custom


def open_fragment(
    frames: Sequence[Any], check: BatchCheck, *, is_multi_agent: bool, source: Any = None
) -> Any:
    """The batch in a runner's FRAGMENT message, of which nothing is believed.

    Args:
        frames: The message.
        check: What it has to pass.
        is_multi_agent: Whether its episodes are multi-agent.
        source: See `BatchCheck.check`.

    Raises:
        ProtocolError: It cannot be decoded.
        ValueError: It does not pass the check.
    """
    header, arrays, _ = decode_fragment(frames)
    batch_class: Any
    if is_multi_agent:
        from rlzmq.episodes.multi_agent_batch import MultiAgentEpisodeBatch as batch_class
    else:
        from rlzmq.episodes.episode_batch import EpisodeBatch as batch_class
    batch = batch_class.from_wire(header.batch, arrays)
    check.check(batch, source)
    return batch


def open_steps(
    frames: Sequence[Any],
    check: BatchCheck,
    fragment: FragmentId,
    first: int,
    num_steps: int,
    *,
    is_multi_agent: bool,
) -> Any:
    """The batch of some env steps of a fragment, in chunk order, which knows where it comes from.

    Args:
        frames, check, is_multi_agent: As of `open_fragment`.
        fragment: Its id.
        first, num_steps: Which env steps.

    Raises:
        ProtocolError: It cannot be decoded.
        ValueError: It does not pass the check, or does not have these steps.
    """
    batch = open_fragment(frames, check, is_multi_agent=is_multi_agent, source=fragment)
    last = first + num_steps
    if last > batch.num_env_steps:
        raise ValueError(f"steps {first}…{last} are wanted of a fragment of {batch.num_env_steps}")
    if (first, last) != (0, batch.num_env_steps):
        batch = batch.slice_steps(first, last)
    batch.meta[ORIGIN] = (*fragment, first)
    return batch


def num_left_out(meta: Mapping[str, Any]) -> int:
    """Env steps that a runner sampled and left out of a fragment, since no loss could use them."""
    num = meta.get("num_env_steps_not_finite", 0)
    return num if type(num) is int and 0 <= num <= _MAX_LEFT_OUT else 0
