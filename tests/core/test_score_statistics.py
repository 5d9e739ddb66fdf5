"""The interquartile mean and the bootstrap interval, against numbers worked out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from rlzmq.core.score_statistics import bootstrap_interval, interquartile_mean, mean


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([5.0], 5.0),
        ([1.0, 9.0, 2.0], 4.0),  # 3 // 4 = 0 are left out
        ([100.0, 1.0, 3.0, -100.0], 2.0),
        ([8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 700.0], 4.5),  # 3, 4, 5, 6
        ([0.0, 1.0, 2.0, 3.0, 400.0], 2.0),  # one at each end
    ],
)
def test_the_interquartile_mean_is_that_of_the_middle_half(scores: list[float], expected: float) -> None:
    assert interquartile_mean(scores) == expected
    assert interquartile_mean(np.stack([scores, scores]), axis=1).tolist() == [expected] * 2


def test_the_interval_has_the_quantiles_of_all_resamples() -> None:
    """Of three scores there are 27 resamples; their means are known exactly."""
    scores = [0.0, 3.0, 9.0]
    means = sorted(sum(resample) / 3 for resample in itertools.product(scores, repeat=3))
    low, high = bootstrap_interval(scores, mean, confidence=0.8, num_resamples=20_000)
    assert (low, high) == (means[2], means[24]) == (1.0, 7.0)
    assert bootstrap_interval(scores, mean, confidence=0.95) == (0.0, 9.0), "1 of 27 is all 0, 1 all 9"


def test_curves_are_resampled_as_a_whole_and_one_score_has_no_interval() -> None:
    runs = np.array([[0.0, 10.0], [1.0, 20.0], [2.0, 30.0]])
    low, high = bootstrap_interval(runs)
    assert low.tolist() == [0.0, 10.0]
    assert high.tolist() == [2.0, 30.0]
    assert all(math.isnan(end) for end in bootstrap_interval([3.0]))
    assert np.isnan(bootstrap_interval(runs[:1])[0]).tolist() == [True, True]


def test_scores_are_resampled_among_those_of_their_stratum() -> None:
    """Each task's own two scores give its mean ±1 with probability 1/4 each: 0 or 20 never counts twice as often."""
    scores, strata = [-1.0, 9.0, 1.0, 11.0], ["a", "b", "a", "b"]
    low, high = bootstrap_interval(scores, strata=strata, confidence=0.95)
    assert (low, high) == (4.0, 6.0)  # both tasks at their lower, or at their higher score: 1 of 16 each
    assert bootstrap_interval(scores, confidence=0.95)[0] < 2.0  # without strata: all four from task a
    assert bootstrap_interval(scores, strata=[7, 7, 7, 7]) == bootstrap_interval(scores)
