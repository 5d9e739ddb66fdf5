"""Schedulers, under Ray Tune's names: pruners of Optuna, and populations."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from rlzmq.config.search_space import Categorical, Domain, Function, Numeric, uniform
from rlzmq.config.settings import Setting, settings_of
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean
from rlzmq.telemetry.runs import Mode, check_mode, flatten, number_at, value_at
from rlzmq.tune.search import Searcher, config_value, load_optuna, random_trial, suggest, value_of
from rlzmq.tune.stopper import missing_metrics

if TYPE_CHECKING:
    from rlzmq.tune.trial import Trial

__all__ = [
    "CONTINUE",
    "PAUSE",
    "PB2",
    "ASHAScheduler",
    "AsyncHyperBandScheduler",
    "Decision",
    "FIFOScheduler",
    "HyperBandScheduler",
    "MedianStoppingRule",
    "PopulationBasedTraining",
    "TrialScheduler",
    "create_scheduler",
]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a trial does next.

    Attributes:
        action: "continue", "pause" (its state is saved, and others run first) or "stop".
        saves: Whether its state is saved now.
        exploits: The trial whose newest checkpoint it continues from; None: it keeps its own state.
        changes: New values of its config by path; only with `exploits`.
    """

    action: Literal["continue", "pause", "stop"] = "continue"
    saves: bool = False
    exploits: Trial | None = None
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)


CONTINUE = Decision()
PAUSE = Decision("pause", saves=True)
STOP = Decision("stop")


@dataclasses.dataclass
class TrialScheduler:
    """Base class of the schedulers.

    A scheduler ends trials by its pruner, which sees the results of all drivers' trials in the study, or decides about
    this driver's trials in `on_trial_result`.

    Attributes:
        time_attr: Path of the time in results, e.g. "training_iteration".
        metric: Path of the metric; None: that of TuneConfig.
        mode: Whether the metric should be large ("max") or small ("min"); None: that of TuneConfig.
        starts_all: Whether all trials are started, in turns, before any is far ahead.
        ends_trials: Whether the scheduler ends every trial by its own rule.
    """

    time_attr: str = "training_iteration"
    metric: str | None = None
    mode: Mode | None = None
    starts_all: ClassVar[bool] = False
    ends_trials: ClassVar[bool] = False

    def set_search_properties(self, metric: str | None, mode: Mode | None) -> None:
        """Use the metric and mode of TuneConfig.

        Raises:
            ConfigurationError: Both TuneConfig and the scheduler set one of them, or neither does, or a mode is
                unknown.
        """
        self.metric, self.mode = metric_and_mode(self, metric, mode)
        if self.metric is None or self.mode is None:
            raise ConfigurationError(
                f"{type(self).__name__} compares trials: set TuneConfig(metric=…, mode='max' or 'min')."
            )

    def on_trial_add(self, trial: Trial) -> None:
        """Register a new or resumed trial."""

    def make_pruner(self) -> Any:
        """Return the Optuna pruner that ends trials; None: none does."""
        return None

    def on_trial_pruned(self, trial: Trial) -> Decision:
        """Return what a trial does that the pruner would end."""
        return STOP

    def on_trial_result(self, trial: Trial, result: Mapping[str, Any]) -> Decision:
        """Return the decision about a trial after this result."""
        return CONTINUE

    def on_trial_end(self, trial: Trial) -> None:
        """Record that a trial has ended."""

    def choose(self, waiting: Sequence[Trial]) -> Trial:
        """Return the trial to run next."""
        return waiting[0]

    def time_of(self, result: Mapping[str, Any]) -> float | None:
        """Return the time of a result; None if the result lacks it."""
        return number_at(result, self.time_attr)

    def score_of(self, result: Mapping[str, Any]) -> float | None:
        """Return the metric of a result, negated if small values are good; None if the result lacks it.

        NaN and infinity are the worst score, -inf.
        """
        value = None if self.metric is None else value_at(result, self.metric)
        if not isinstance(value, int | float):
            return None
        if not math.isfinite(value):
            return -math.inf
        return -value if self.mode == "min" else value


def metric_and_mode(
    owner: TrialScheduler | Searcher, metric: str | None, mode: Mode | None
) -> tuple[str | None, Mode | None]:
    """Return the metric and the mode of a scheduler or search algorithm, or else those of TuneConfig.

    Raises:
        ConfigurationError: Both set one of them, and differ; or a mode is unknown.
    """
    name = type(owner).__name__
    check_mode(owner.mode, name)
    for own, given, setting in ((owner.metric, metric, "metric"), (owner.mode, mode, "mode")):
        if own is not None and given is not None and own != given:
            raise ConfigurationError(
                f"{setting} is {own!r} in {name} and {given!r} elsewhere in TuneConfig: set it in one of them only."
            )
    return owner.metric or metric, owner.mode or mode


@dataclasses.dataclass
class FIFOScheduler(TrialScheduler):
    """Lets every trial run until its stop criterion."""

    def set_search_properties(self, metric: str | None, mode: Mode | None) -> None:
        """Use the metric and mode of TuneConfig; both may be missing."""
        check_mode(mode, "TuneConfig")
        self.metric: str | None = metric
        self.mode: Mode | None = mode


@dataclasses.dataclass
class ASHAScheduler(TrialScheduler):
    """Ends trials that are not among the best when they reach a rung: Optuna's SuccessiveHalvingPruner.

    Rungs are at the times ``grace_period * reduction_factor**k`` below `max_t`. At a rung a trial ends if its score is
    not among the best ``1/reduction_factor`` of those that trials had there so far; the first trial continues.

    Source: Li et al. 2018, arXiv:1810.05934.

    Args:
        time_attr: Path of the time in results.
        metric: Path of the metric; None: that of TuneConfig.
        mode: "max" or "min"; None: that of TuneConfig.
        max_t: Time at which every trial ends.
        grace_period: Time before which no trial ends.
        reduction_factor: About one in `reduction_factor` trials passes a rung.
        brackets: More than 1: all of Hyperband's brackets, whose rungs begin at ``grace_period *
            reduction_factor**s`` (HyperbandPruner).
        stop_last_trials: Whether trials end at `max_t`.
    """

    max_t: float = 100
    grace_period: float = 1
    reduction_factor: float = 4
    brackets: int = 1
    stop_last_trials: bool = True
    ends_trials: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for is_wrong, name, expected in (
            (not 0 < self.grace_period <= self.max_t, "grace_period", "above 0 and at most max_t"),
            (not self.reduction_factor >= 2, "reduction_factor", "2 or more"),
            (self.brackets < 1, "brackets", "1 or more"),
        ):
            if is_wrong:
                raise ConfigurationError(f"ASHAScheduler({name}={getattr(self, name)}): expected {expected}.")

    def make_pruner(self) -> Any:
        """Return Optuna's SuccessiveHalvingPruner, or its HyperbandPruner if there are several brackets."""
        pruners = load_optuna().pruners
        least, factor = max(math.ceil(self.grace_period), 1), self.reduction_factor
        if self.brackets == 1:
            return pruners.SuccessiveHalvingPruner(min_resource=least, reduction_factor=factor)
        return pruners.HyperbandPruner(least, max(math.ceil(self.max_t), least), reduction_factor=factor)

    def on_trial_result(self, trial: Trial, result: Mapping[str, Any]) -> Decision:
        """Return STOP at `max_t`."""
        time = self.time_of(result)
        return STOP if self.stop_last_trials and time is not None and time >= self.max_t else CONTINUE


AsyncHyperBandScheduler = ASHAScheduler


@dataclasses.dataclass
class HyperBandScheduler(ASHAScheduler):
    """ASHA with all of Hyperband's brackets that fit below `max_t` (arXiv:1603.06560): Optuna's HyperbandPruner.

    Unlike Ray's class of this name, no trial waits for others at a rung: it is compared with those that came there
    before it.

    Args:
        time_attr: Path of the time in results.
        metric: Path of the metric; None: that of TuneConfig.
        mode: "max" or "min"; None: that of TuneConfig.
        max_t: Time at which every trial ends.
        reduction_factor: About one in `reduction_factor` trials passes a rung.
        stop_last_trials: Whether trials end at `max_t`.
    """

    time_attr: str = "time_total_s"
    max_t: float = 81
    reduction_factor: float = 3
    grace_period: float = dataclasses.field(default=1, init=False)
    brackets: int = dataclasses.field(default=2, init=False)


@dataclasses.dataclass
class MedianStoppingRule(TrialScheduler):
    """Ends a trial whose best score is below the median of the others' mean scores up to the same time.

    Source: Golovin et al. 2017, "Google Vizier", section 3.2.1.

    Args:
        time_attr: Path of the time in results.
        metric: Path of the metric; None: that of TuneConfig.
        mode: "max" or "min"; None: that of TuneConfig.
        grace_period: Time before which no trial ends; earlier results do not count.
        min_samples_required: How many other trials must have reached the time.
        hard_stop: Whether such trials end; otherwise they pause until the others have ended.
    """

    time_attr: str = "time_total_s"
    grace_period: float = 60.0
    min_samples_required: int = 3
    hard_stop: bool = True

    def __post_init__(self) -> None:
        self._paused: set[str] = set()

    def make_pruner(self) -> Any:
        """Return an Optuna pruner; unlike Optuna's MedianPruner, it counts running trials, too."""
        rule = self
        sign = -1.0 if self.mode == "min" else 1.0

        def score(value: float) -> float:
            return -math.inf if math.isnan(value) else sign * value

        class MedianOfMeans(load_optuna().pruners.BasePruner):  # type: ignore[misc]
            def prune(self, study: Any, trial: Any) -> bool:
                now = trial.last_step
                if now is None or now < rule.grace_period:
                    return False
                means = []
                for other in study.get_trials(deepcopy=False):
                    past = other.intermediate_values.items()
                    scores = [score(value) for at, value in past if rule.grace_period <= at <= now]
                    if scores and other.number != trial.number and other.last_step >= now:
                        means.append(statistics.fmean(scores))
                best = max(map(score, trial.intermediate_values.values()))
                return len(means) >= rule.min_samples_required and best < statistics.median(means)

        return MedianOfMeans()

    def on_trial_pruned(self, trial: Trial) -> Decision:
        """Return STOP; without `hard_stop` PAUSE, once."""
        if self.hard_stop:
            return STOP
        if trial.trial_id in self._paused:
            return CONTINUE
        self._paused.add(trial.trial_id)
        return PAUSE


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
        perturbation_factors: The two factors; products stay within the bounds of the search object, or else of the
            setting.
        custom_explore_fn: Called with the changed values by path; returns the values to use.
        log_config: Whether to append a line to ``pbt_global.txt`` in the experiment's directory for each changed trial:
            ``[its name, the copied trial's name, its iteration, that of the checkpoint, old values, new values]``.
        require_attrs: Whether a result without time_attr or metric is an error of its trial, unless it may follow: of
            evaluations, and before the first ended episode or update.
        synch: Must be False: trials do not wait for each other.
        seed: Seed of the choices; None: a random one.
    """

    time_attr: str = "time_total_s"
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
        self._trials: list[Trial] = []
        self._scores: dict[str, float] = {}
        self._compared_at: dict[str, float] = {}

    def on_trial_add(self, trial: Trial) -> None:
        """Add a trial to the population."""
        self._trials.append(trial)
        self._compared_at[trial.trial_id] = self.time_of(trial.last_result) or 0.0
        if (score := self.score_of(trial.last_result)) is not None:
            self._scores[trial.trial_id] = score

    def on_trial_result(self, trial: Trial, result: Mapping[str, Any]) -> Decision:
        """Return whether the trial continues, saves its state for others, or continues from another's checkpoint."""
        for path in (self.time_attr, str(self.metric)):
            if self.require_attrs and missing_metrics("", [path], result)[0]:
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
            changes = self._changes(source)
            if self.custom_explore_fn is not None:
                changes = dict(self.custom_explore_fn(copy.deepcopy(changes)))
            return Decision(action, exploits=source, changes=changes)  # type: ignore[arg-type]
        return PAUSE if others_wait else Decision(saves=trial in top)

    def is_due(self, trial: Trial, time: float) -> bool:
        """Return whether the trial is compared with the others at this time."""
        interval = time - self._compared_at[trial.trial_id]
        return time >= self.burn_in_period and interval >= self.perturbation_interval

    def on_trial_end(self, trial: Trial) -> None:
        """Remove the trial from the population."""
        self._scores.pop(trial.trial_id, None)

    def note_exploited(self, trial: Trial, source_result: Mapping[str, Any]) -> None:
        """Record that the trial continues from a checkpoint with this last result."""
        self._compared_at[trial.trial_id] = self.time_of(source_result) or 0.0

    def choose(self, waiting: Sequence[Trial]) -> Trial:
        """Return the trial whose last comparison is the oldest."""
        return min(waiting, key=lambda trial: self._compared_at[trial.trial_id])

    def _quantiles(self) -> tuple[list[Trial], list[Trial]]:
        """Return the worst and the best of the running and waiting trials."""
        ranked = sorted(
            (trial for trial in self._trials if trial.trial_id in self._scores and not trial.is_finished),
            key=lambda trial: self._scores[trial.trial_id],
        )
        number = min(math.ceil(len(ranked) * self.quantile_fraction), len(ranked) // 2)
        return ranked[:number], ranked[len(ranked) - number :]

    def _changes(self, source: Trial) -> dict[str, Any]:
        """Return new values by path, from the source's."""
        settings = settings_of(type(source.config))
        return {
            path: self._perturbed(mutation, config_value(source.config, path), settings.get(path))
            for path, mutation in self._mutations.items()
        }

    def _perturbed(self, mutation: Any, value: Any, setting: Setting | None) -> object:
        resamples = self._rng.uniform() < self.resample_probability
        if isinstance(mutation, list | tuple):
            if resamples or value not in mutation:
                return mutation[int(self._rng.integers(len(mutation)))]
            index = list(mutation).index(value) + (1 if self._rng.uniform() < 0.5 else -1)
            return mutation[min(max(index, 0), len(mutation) - 1)]
        if resamples or isinstance(value, bool) or not isinstance(value, int | float):
            if isinstance(mutation, Function):
                return mutation.value_of(None)
            if isinstance(mutation, Categorical | Numeric):
                trial = random_trial(int(self._rng.integers(2**32)))
                return value_of(mutation, suggest(trial, "value", mutation))
            return mutation()
        product = value * self.perturbation_factors[int(self._rng.integers(2))]
        if isinstance(mutation, Numeric):
            return mutation.clip(product)
        product = int(product) if isinstance(value, int) else product
        return product if setting is None else setting.nearest(product)


_FEWEST = 4  # intervals before they tell which values are good
_NEWEST = 30  # intervals that count: what was good earlier need not be good now


@dataclasses.dataclass
class PB2(PopulationBasedTraining):
    """Population-based training that learns which values make trials better, instead of changing them at random.

    Optuna's TPESampler, which sees the newest intervals of all trials, suggests values with which the metric grows
    fast. A bad trial continues from a good one's checkpoint with them. It needs fewer trials than
    PopulationBasedTraining; values are numbers within bounds.

    Args:
        hyperparam_bounds: The values to change: path (or nested dicts) -> (lower, upper).
        time_attr, metric, mode, perturbation_interval, burn_in_period, quantile_fraction, custom_explore_fn, seed: As
            in PopulationBasedTraining, whose hyperparam_mutations, resample_probability and perturbation_factors have
            no effect.
    """

    hyperparam_bounds: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        bounds = flatten(self.hyperparam_bounds)
        for path, pair in bounds.items():
            if not isinstance(pair, list | tuple) or len(pair) != 2 or not pair[0] < pair[1]:
                raise ConfigurationError(f"hyperparam_bounds[{path!r}]={pair!r}: expected (lower, upper).")
        if not bounds:
            raise ConfigurationError("PB2 needs hyperparam_bounds, e.g. {'lr': (1e-5, 1e-3)}.")
        self.hyperparam_mutations: Mapping[str, Any] = {path: uniform(*pair) for path, pair in bounds.items()}
        super().__post_init__()
        self._before: dict[str, tuple[float, float]] = {}  # time and score at the begin of a trial's interval
        self._intervals: deque[tuple[dict[str, float], float]] = deque(maxlen=_NEWEST)  # values, growth

    def on_trial_result(self, trial: Trial, result: Mapping[str, Any]) -> Decision:
        """Record what an interval's values were worth; see PopulationBasedTraining."""
        time, score = self.time_of(result), self.score_of(result)
        if time is not None and score is not None and self.is_due(trial, time):
            since, before = self._before.get(trial.trial_id, (0.0, -math.inf))
            if before > -math.inf:
                values = {
                    path: bounds.clip(config_value(trial.config, path))
                    for path, bounds in self._mutations.items()
                }
                self._intervals.append((values, (score - before) / max(time - since, 1e-9)))
            self._before[trial.trial_id] = time, score
        return super().on_trial_result(trial, result)

    def note_exploited(self, trial: Trial, source_result: Mapping[str, Any]) -> None:
        """Record that the trial continues from a checkpoint with this last result."""
        super().note_exploited(trial, source_result)
        time, score = self.time_of(source_result), self.score_of(source_result)
        if time is not None and score is not None:
            self._before[trial.trial_id] = time, score

    def _changes(self, source: Trial) -> dict[str, Any]:
        optuna = load_optuna()
        ranges = {
            path: optuna.distributions.FloatDistribution(bounds.lower, bounds.upper)
            for path, bounds in self._mutations.items()
        }
        seed = int(self._rng.integers(2**31))
        study = optuna.create_study(
            direction="maximize", sampler=optuna.samplers.TPESampler(n_startup_trials=_FEWEST, seed=seed)
        )
        study.add_trials(
            [
                optuna.create_trial(params=values, distributions=ranges, value=growth)
                for values, growth in self._intervals
            ]
        )
        return {
            path: round(value) if isinstance(config_value(source.config, path), int) else value
            for path, value in study.ask(ranges).params.items()
        }


_SCHEDULERS: dict[str, Callable[..., TrialScheduler]] = {
    "fifo": FIFOScheduler,
    "asha": ASHAScheduler,
    "async_hyperband": ASHAScheduler,
    "asynchyperband": ASHAScheduler,
    "hyperband": HyperBandScheduler,
    "median_stopping_rule": MedianStoppingRule,
    "medianstopping": MedianStoppingRule,
    "pbt": PopulationBasedTraining,
    "pb2": PB2,
}


if not TYPE_CHECKING:  # a name that is not there is an error to a type checker, too

    def __getattr__(name: str) -> object:
        instead = (
            " Instead: tune.with_resources(…): a trial's cores are fixed."
            if name == "ResourceChangingScheduler"
            else ""
        )
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}.{instead or did_you_mean(name, __all__)}"
        )


def create_scheduler(scheduler: str, **settings: object) -> TrialScheduler:
    """Return a scheduler by name: "fifo", "asha", "hyperband", "median_stopping_rule", "pbt" or "pb2".

    Raises:
        ConfigurationError: There is no such scheduler, or it has no such setting.
    """
    if scheduler not in _SCHEDULERS:
        raise ConfigurationError(f"No scheduler {scheduler!r}.{did_you_mean(scheduler, _SCHEDULERS)}")
    try:
        return _SCHEDULERS[scheduler](**settings)
    except TypeError as error:
        raise ConfigurationError(f"{scheduler}: {error}.") from None
