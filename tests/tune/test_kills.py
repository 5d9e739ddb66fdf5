"""The whole of `scripts/tune_kills.py`: real trials, random moments, exact results."""

from __future__ import annotations

import pytest

from scripts.tune_kills import main


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_eight_trials_with_two_killed_and_the_driver_killed_have_the_results_of_a_search_left_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0, capfd.readouterr().out
