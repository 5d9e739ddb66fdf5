"""Derivation of all random streams of a run from its seed."""

from __future__ import annotations

import zlib

import numpy as np

__all__ = ["derive_seed"]


def derive_seed(run_seed: int, role: str, index: int = 0, *extra: int) -> int:
    """Return the seed of one random stream, from (run seed, role, index, ...).

    Equal arguments give equal seeds in every process and on every machine. Different arguments give streams that are
    independent for all practical purposes (numpy's ``SeedSequence``).

    Args:
        run_seed: The run's seed, ``config.seed``.
        role: Purpose of the stream, e.g. ``"env"``, ``"policy"``, ``"minibatch"``, ``"module"``.
        index: Index of the process (or env, or rank) within its role, from 0.
        extra: Additional coordinates, e.g. the incarnation of a restarted process.

    Returns:
        An int in [0, 2**31), accepted by Gymnasium, numpy and torch alike.
    """
    words = (run_seed, run_seed >> 32, zlib.crc32(role.encode()), index, *extra)
    # Passed as an array, since numpy converts a list of numbers one by one.
    sequence = np.random.SeedSequence(np.array([int(word) & 0xFFFFFFFF for word in words], np.uint32))
    return int(sequence.generate_state(1, np.uint32)[0]) & 0x7FFFFFFF
