"""Random programs: SingleAgentEpisode against the reference model, on lists, arrays and views of batches."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.episodes.episode_programs import Program, SeededSource


@pytest.mark.parametrize("block", range(10))
def test_random_programs_agree_with_the_reference_model(block: int) -> None:
    """300 programs per block, 3,000 in all; a failure's seed is the number in its note."""
    for seed in range(300 * block, 300 * (block + 1)):
        try:
            Program(SeededSource(seed), num_operations=14)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


class _DrawnSource:
    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(1, 12))
def test_drawn_programs_agree_with_the_reference_model(data: st.DataObject, num_operations: int) -> None:
    """The same programs with choices that hypothesis can shrink to a short counterexample."""
    Program(_DrawnSource(data), num_operations)
