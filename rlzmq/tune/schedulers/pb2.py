"""PB2: population-based training with values chosen by a bandit (Parker-Holder et al. 2020, arXiv:2002.02518)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rlzmq.config.search_space import uniform
from rlzmq.core.errors import ConfigurationError
from rlzmq.telemetry.metric_paths import flatten
from rlzmq.tune.callback import SearchTrial
from rlzmq.tune.config_paths import config_value
from rlzmq.tune.schedulers.base import Decision
from rlzmq.tune.schedulers.pbt import PopulationBasedTraining

__all__ = ["PB2"]

_Array = npt.NDArray[np.float64]

_FEWEST = 4  # intervals before the model is used
_MOST = 100  # newest intervals that it is fitted to: a fit takes about 30 ms
_NUM_CANDIDATES = 1000
_LENGTHS = (0.1, 0.2, 0.5, 1.0, 2.0)  # in units of the bounds
_FORGETTING = (0.0, 0.1, 0.3)  # per interval
_NOISE = (1e-3, 1e-2, 1e-1)  # share of the variance


@dataclasses.dataclass
class PB2(PopulationBasedTraining):
    """Population-based training that learns which values make trials better, instead of changing them at random.

    A Gaussian process, which forgets old intervals, predicts how much the metric grows in an interval from the values
    and the metric before it. A bad trial continues from a good one's checkpoint with the values whose upper confidence
    bound is the largest. It needs fewer trials than PopulationBasedTraining; values are numbers within bounds.

    Args:
        hyperparam_bounds: The values to change: path (or nested dicts) -> (lower, upper).
        time_attr, metric, mode, perturbation_interval, burn_in_period, quantile_fraction, custom_explore_fn, seed: As
            in PopulationBasedTraining, whose hyperparam_mutations, resample_probability and perturbation_factors have
            no effect.
    """

    hyperparam_bounds: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self._bounds: dict[str, Sequence[float]] = flatten(self.hyperparam_bounds)
        for path, bounds in self._bounds.items():
            if not isinstance(bounds, list | tuple) or len(bounds) != 2 or not bounds[0] < bounds[1]:
                raise ConfigurationError(f"hyperparam_bounds[{path!r}]={bounds!r}: expected (lower, upper).")
        if not self._bounds:
            raise ConfigurationError("PB2 needs hyperparam_bounds, e.g. {'lr': (1e-5, 1e-3)}.")
        self.hyperparam_mutations = {path: uniform(*bounds) for path, bounds in self._bounds.items()}
        super().__post_init__()
        self._before: dict[str, tuple[float, float]] = {}  # time and score at the begin of a trial's interval
        self._intervals: list[
            tuple[float, ...]
        ] = []  # time, score before, values in units of the bounds, growth

    def on_trial_result(self, trial: SearchTrial, result: Mapping[str, Any]) -> Decision:
        """Record what an interval's values were worth; see PopulationBasedTraining."""
        time, score = self.time_of(result), self.score_of(result)
        if time is not None and score is not None and self.is_due(trial, time):
            if trial.trial_id in self._before:
                since, before = self._before[trial.trial_id]
                growth = (score - before) / max(time - since, 1e-9)
                self._intervals.append((time, before, *self._units(trial), growth))
            self._before[trial.trial_id] = time, score
        return super().on_trial_result(trial, result)

    def note_exploited(self, trial: SearchTrial, source_result: Mapping[str, Any]) -> None:
        """Record that the trial continues from a checkpoint with this last result."""
        super().note_exploited(trial, source_result)
        time, score = self.time_of(source_result), self.score_of(source_result)
        if time is not None and score is not None:
            self._before[trial.trial_id] = time, score

    def _explore(self, source: SearchTrial) -> dict[str, Any]:
        chosen = self._rng.uniform(size=len(self._bounds))
        if len(self._intervals) >= _FEWEST:
            chosen = self._best_candidate(source)
        changed: dict[str, Any] = {}
        for unit, (path, (lower, upper)) in zip(chosen, self._bounds.items(), strict=True):
            value = lower + float(unit) * (upper - lower)
            changed[path] = round(value) if isinstance(config_value(source.config, path), int) else value
        return changed if self.custom_explore_fn is None else dict(self.custom_explore_fn(changed))

    def _best_candidate(self, source: SearchTrial) -> _Array:
        """Return the candidate with the largest upper confidence bound, in units of the bounds."""
        rows = np.array(self._intervals[-_MOST:])
        times, scores, growth = rows[:, 0] / self.perturbation_interval, rows[:, 1], _standard(rows[:, -1])
        score = self._scores[source.trial_id]
        running = [self._units(trial) for trial in self._trials if not trial.is_finished]
        candidates = self._rng.uniform(size=(_NUM_CANDIDATES, len(self._bounds)))
        scale = max(float(np.ptp(scores)), 1e-9)
        points = np.column_stack([scores / scale, rows[:, 2:-1]])
        # What the others run now tells nothing so far, but will: it makes only the variance smaller.
        others = np.column_stack([np.full(len(running), score / scale), running])
        asked = np.column_stack([np.full(_NUM_CANDIDATES, score / scale), candidates])
        age = np.concatenate([times.max() - times, np.zeros(len(running))])
        everything = np.concatenate([points, others])
        near = {length: _kernel(points, points, length) for length in _LENGTHS}
        common = {forgetting: _faded(times, forgetting) for forgetting in _FORGETTING}
        length, forgetting, noise = max(
            itertools.product(_LENGTHS, _FORGETTING, _NOISE),
            key=lambda setting: _likelihood(near[setting[0]] * common[setting[1]], growth, setting[2]),
        )
        seen = len(points)
        cross = _kernel(asked, everything, length) * (1.0 - forgetting) ** (age / 2)
        whole = _kernel(everything, everything, length) * _faded(age, forgetting) + noise * np.eye(
            len(everything)
        )
        mean = cross[:, :seen] @ np.linalg.solve(whole[:seen, :seen], growth)
        variance = 1.0 - np.einsum("ij,ji->i", cross, np.linalg.solve(whole, cross.T))
        width = math.sqrt(0.2 + max(0.0, math.log(0.4 * seen)))
        return np.asarray(candidates[np.argmax(mean + width * np.sqrt(np.maximum(variance, 0.0)))])

    def _units(self, trial: SearchTrial) -> list[float]:
        """Return the trial's values as positions between their bounds: 0 to 1."""
        return [
            (config_value(trial.config, path) - lower) / (upper - lower)
            for path, (lower, upper) in self._bounds.items()
        ]


def _standard(values: _Array) -> _Array:
    return np.asarray((values - values.mean()) / max(float(values.std()), 1e-9))


def _kernel(a: _Array, b: _Array, length: float) -> _Array:
    """Return the similarity of each point of `a`, ``[N, D]``, to each of `b`, ``[M, D]``: ``[N, M]``, 0 to 1."""
    return np.asarray(np.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1) / length**2))


def _faded(times: _Array, forgetting: float) -> _Array:
    """Return how much two intervals have in common, by the time between them: ``[N, N]``, 0 to 1."""
    return np.asarray((1.0 - forgetting) ** (np.abs(times[:, None] - times[None]) / 2))


def _likelihood(kernel: _Array, growth: _Array, noise: float) -> float:
    """Return the logarithm of the marginal likelihood of the observed growth, without its constant part."""
    whole = kernel + noise * np.eye(len(kernel))
    root = np.linalg.cholesky(whole)
    return float(-0.5 * growth @ np.linalg.solve(whole, growth) - np.log(np.diag(root)).sum())
