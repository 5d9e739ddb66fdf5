"""Random programs: SingleAgentEpisode against the reference model, on lists, arrays and views of batches."""

from __future__ import annotations

import pytest

from tests.episodes.episode_programs import Program, SeededSource


@pytest.mark.parametrize("block", range(6))
def test_random_programs_agree_with_the_reference_model(block: int) -> None:
    """300 programs per block, 1,800 in all; a failure's seed is the number in its note."""
    for seed in range(300 * block, 300 * (block + 1)):
        try:
            Program(SeededSource(seed), num_operations=14)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
