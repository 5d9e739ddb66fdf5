"""PopulationBasedTraining (Jaderberg et al. 2017, arXiv:1711.09846)."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rlzmq.config.search_space import Domain, Numeric
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean
from rlzmq.telemetry.metric_paths import Mode, flatten, value_at
from rlzmq.tune.callback import SearchTrial
from rlzmq.tune.config_paths import config_value
from rlzmq.tune.schedulers.base import CONTINUE, PAUSE, Decision, TrialScheduler

__all__ = ["PopulationBasedTraining"]


@dataclasses.dataclass
class PopulationBasedTraining(TrialScheduler):
    """Replaces bad trials with mutated copies of good trials during training.

    After every interval a trial in the bottom quantile of the last scores continues from the checkpoint and the config
    of a random trial in the top quantile, with changed values. If there are fewer slots than trials, the trials take
    turns.

    Args:
        time_attr: Path of the time in results.
        metric: Path of the metric; None: that of TuneConfig.
        mode: "max" or "min"; None: that of TuneConfig.
        perturbation_interval: Time between two comparisons of a trial.
        burn_in_period: Time before the first comparison.
        hyperparam_mutations: The values to change: path (or nested dicts) -> a list of values, a search object such as
            ``tune.loguniform(1e-5, 1e-3)``, or a function that returns a value.
        quantile_fraction: Fraction of the trials that counts as good, and as bad; at most 0.5.
        resample_probability: Probability of drawing a value from the list or search object. Otherwise a value
            of a list moves to a neighbor, and a number is multiplied.
        perturbation_factors: The two factors; products stay within a search object's bounds.
        custom_explore_fn: Called with the changed values by path; returns the values to use.
        log_config: Whether to append a line to ``pbt_global.txt`` in the experiment's directory for each changed trial:
            ``[its name, the copied trial's name, its iteration, that of the checkpoint, old values, new values]``.
        require_attrs: Whether a result without time_attr or metric is an error of its trial.
        synch: Must be False: trials do not wait for each other.
        seed: Seed of the choices; None: a random one.
    """

    time_attr: str = "time_total_s"
    metric: str | None = None
    mode: Mode | None = None
    perturbation_interval: float = 60.0
    burn_in_period: float = 0.0
    hyperparam_mutations: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    quantile_fraction: float = 0.25
    resample_probability: float = 0.25
    perturbation_factors: tuple[float, float] = (1.2, 0.8)
    custom_explore_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    log_config: bool = True
    require_attrs: bool = True
    synch: bool = False
    seed: int | None = None
    starts_all: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.hyperparam_mutations and self.custom_explore_fn is None:
            raise ConfigurationError(
                "PopulationBasedTraining needs hyperparam_mutations or a custom_explore_fn."
            )
        if not 0 < self.quantile_fraction <= 0.5:
            raise ConfigurationError(
                f"PopulationBasedTraining(quantile_fraction={self.quantile_fraction}): expected above 0, at most 0.5."
            )
        if not self.perturbation_interval > 0:
            raise ConfigurationError(
                "PopulationBasedTraining(perturbation_interval=…): expected more than 0."
            )
        if self.synch:
            raise ConfigurationError(
                "PopulationBasedTraining(synch=True) is not supported: trials take turns instead."
            )
        self._mutations = flatten(self.hyperparam_mutations)
        for path, mutation in self._mutations.items():
            if not isinstance(mutation, Domain | list | tuple) and not callable(mutation):
                raise ConfigurationError(
                    f"hyperparam_mutations[{path!r}]={mutation!r}: expected a list, a search object or a function."
                )
        self._rng = np.random.default_rng(self.seed)
        self._trials: list[SearchTrial] = []
        self._scores: dict[str, float] = {}
        self._compared_at: dict[str, float] = {}

    def on_trial_add(self, trial: SearchTrial) -> None:
        """Add a trial to the population."""
        self._trials.append(trial)
        self._compared_at[trial.trial_id] = self.time_of(trial.last_result) or 0.0

    def observe(self, trial_id: str, time: float, score: float) -> None:
        """Record the last score of a resumed trial."""
        self._scores[trial_id] = score

    def on_trial_result(self, trial: SearchTrial, result: Mapping[str, Any]) -> Decision:
        """Return whether the trial continues, saves its state for others, or continues from another's checkpoint."""
        for path in (self.time_attr, str(self.metric)):
            if self.require_attrs and value_at(result, path) is None:
                raise ConfigurationError(
                    f"{type(self).__name__} needs {path!r}, which a result of trial {trial.trial_id} lacks: set "
                    f"require_attrs=False if later ones have it.{did_you_mean(path, flatten(result))}"
                )
        time, score = self.time_of(result), self.score_of(result)
        if time is None or score is None:
            return CONTINUE
        self._scores[trial.trial_id] = score
        if not self.is_due(trial, time):
            return CONTINUE
        self._compared_at[trial.trial_id] = time
        bottom, top = self._quantiles()
        others_wait = any(other.is_waiting for other in self._trials if other is not trial)
        if trial in bottom:
            source = top[int(self._rng.integers(len(top)))]
            self._scores[trial.trial_id] = self._scores[source.trial_id]  # used until its first result
            action = "pause" if others_wait else "continue"
            return Decision(action, exploits=source, changes=self._explore(source))  # type: ignore[arg-type]
        return PAUSE if others_wait else Decision(saves=trial in top)

    def is_due(self, trial: SearchTrial, time: float) -> bool:
        """Return whether the trial is compared with the others at this time."""
        interval = time - self._compared_at[trial.trial_id]
        return time >= self.burn_in_period and interval >= self.perturbation_interval

    def on_trial_end(self, trial: SearchTrial) -> None:
        """Remove the trial from the population."""
        self._scores.pop(trial.trial_id, None)

    def note_exploited(self, trial: SearchTrial, source_result: Mapping[str, Any]) -> None:
        """Record that the trial continues from a checkpoint with this last result."""
        self._compared_at[trial.trial_id] = self.time_of(source_result) or 0.0

    def choose(self, waiting: Sequence[SearchTrial]) -> SearchTrial:
        """Return the trial whose last comparison is the oldest."""
        return min(waiting, key=lambda trial: self._compared_at[trial.trial_id])

    def _quantiles(self) -> tuple[list[SearchTrial], list[SearchTrial]]:
        """Return the worst and the best of the running and waiting trials."""
        ranked = sorted(
            (trial for trial in self._trials if trial.trial_id in self._scores and not trial.is_finished),
            key=lambda trial: self._scores[trial.trial_id],
        )
        if len(ranked) <= 1:
            return [], []
        number = math.ceil(len(ranked) * self.quantile_fraction)
        if number > len(ranked) / 2:
            number = len(ranked) // 2
        return ranked[:number], ranked[-number:]

    def _explore(self, source: SearchTrial) -> dict[str, Any]:
        """Return the source's config values, with mutations."""
        changed = {
            path: self._perturbed(mutation, config_value(source.config, path))
            for path, mutation in self._mutations.items()
        }
        if self.custom_explore_fn is not None:
            changed = dict(self.custom_explore_fn(copy.deepcopy(changed)))
        return changed

    def _perturbed(self, mutation: Any, value: Any) -> Any:
        resamples = self._rng.uniform() < self.resample_probability
        if isinstance(mutation, list | tuple):
            if resamples or value not in mutation:
                return mutation[int(self._rng.integers(len(mutation)))]
            index = list(mutation).index(value) + (1 if self._rng.uniform() < 0.5 else -1)
            return mutation[min(max(index, 0), len(mutation) - 1)]
        if resamples or isinstance(value, bool) or not isinstance(value, int | float):
            if isinstance(mutation, Domain):
                return mutation.sample(self._rng)
            return mutation()
        product = value * self.perturbation_factors[int(self._rng.integers(2))]
        if isinstance(mutation, Numeric):
            return mutation.clip(product)
        return int(product) if isinstance(value, int) else product
