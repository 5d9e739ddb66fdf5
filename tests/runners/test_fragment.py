"""Chunks found from flags equal those of a step-by-step walk."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlzmq.runners.rows_sampler import find_chunks


def walk(terminated: Any, truncated: Any, starts_with_reset: Any) -> list[tuple[Any, ...]]:
    """(env, first step, length, terminated, truncated, continues), one step after the other."""
    num_steps, num_envs = terminated.shape
    finished, open_chunks = [], []
    first = [1 if reset else 0 for reset in starts_with_reset]
    continues = [not reset for reset in starts_with_reset]
    for step in range(num_steps):
        for env in range(num_envs):
            if terminated[step, env] or truncated[step, env]:
                length = step + 1 - first[env]
                if length > 0:
                    flags = bool(terminated[step, env]), bool(truncated[step, env])
                    finished.append((env, first[env], length, *flags, continues[env]))
                first[env], continues[env] = step + 2, False
    for env in range(num_envs):
        if num_steps - first[env] > 0:
            open_chunks.append((env, first[env], num_steps - first[env], False, False, continues[env]))
    return finished + open_chunks


@st.composite
def flags(draw: Any) -> tuple[Any, Any, Any]:
    num_steps, num_envs = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    starts = np.array(draw(st.lists(st.booleans(), min_size=num_envs, max_size=num_envs)))
    kinds = np.array(
        draw(st.lists(st.integers(0, 5), min_size=num_steps * num_envs, max_size=num_steps * num_envs))
    ).reshape(num_steps, num_envs)
    resetting = starts.copy()
    for row in kinds:
        row[resetting] = 0  # no episode ends on its reset
        resetting = (row == 1) | (row == 2)
    return kinds == 1, kinds == 2, starts


@given(flags())
@settings(max_examples=300, deadline=None)
def test_chunks_are_those_of_a_walk_through_the_steps(case: tuple[Any, Any, Any]) -> None:
    table = find_chunks(*case)
    rows = zip(
        table.env_index.tolist(),
        table.first_step.tolist(),
        table.length.tolist(),
        table.terminated.tolist(),
        table.truncated.tolist(),
        table.continues.tolist(),
        strict=True,
    )
    expected = walk(*case)
    assert list(rows) == expected
    assert table.num_finished == sum(row[3] or row[4] for row in expected)
