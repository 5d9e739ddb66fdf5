"""Search algorithms, under Ray Tune's names; and a trial's config with the values that they choose."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlzmq.config.base_config import BaseConfig
from rlzmq.config.search_space import (
    Categorical,
    Function,
    GridSearch,
    Numeric,
    SearchObject,
    find_search_objects,
    replace_values,
)
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.imports import import_optional
from rlzmq.core.synonyms import did_you_mean
from rlzmq.core.update_plan import derive_seed
from rlzmq.telemetry.runs import Mode

__all__ = [
    "BasicVariantGenerator",
    "ConcurrencyLimiter",
    "OptunaSearch",
    "Searcher",
    "TrialConfig",
    "config_value",
    "create_searcher",
    "draw",
    "labels_of",
    "load_optuna",
    "random_trial",
    "resolve",
    "suggest",
    "value_of",
]


class Searcher:
    """Base class of the search algorithms.

    A trial's values are chosen in two steps: `fixed` returns the values that depend only on the trial's index. The
    study's sampler chooses the others when the trial starts.

    Attributes:
        points_to_evaluate: Values of the first trials by path; a missing path gets a random or suggested value.
        max_concurrent: Maximum number of trials at the same time; 0: no limit.
        seed: Seed of all choices; None: a random one.
        metric, mode: The metric by which values are chosen; None: those of TuneConfig.
    """

    points_to_evaluate: Sequence[Mapping[str, Any]]
    max_concurrent: int
    seed: int | None
    metric: str | None = None
    mode: Mode | None = None

    def make_sampler(self, seed: int) -> Any:
        """Return the Optuna sampler."""
        raise NotImplementedError

    def fixed(self, space: Mapping[str, SearchObject], index: int, seed: int) -> dict[str, Any]:
        """Return the parameters of trial `index` that are chosen in advance, in Optuna's form."""
        grids = {path: item for path, item in space.items() if isinstance(item, GridSearch)}
        points = list(itertools.product(*(labels_of(grid.values) for grid in grids.values())))
        chosen = dict(zip(grids, points[index % len(points)], strict=True))
        if index < len(self.points_to_evaluate):
            for path, value in self.points_to_evaluate[index].items():
                if path not in space:
                    raise ConfigurationError(
                        f"points_to_evaluate: the search space has no {path!r}.{did_you_mean(path, space)}"
                    )
                chosen[path] = _parameter(path, space[path], value)
        return chosen


@dataclass
class BasicVariantGenerator(Searcher):
    """Grid search and random values.

    Args:
        points_to_evaluate: Values of the first trials by path, e.g. ``[{"lr": 0.001}]``.
        max_concurrent: Maximum number of trials at the same time; 0: no limit.
        random_state: Seed of the random values; None: a random one.
    """

    points_to_evaluate: Sequence[Mapping[str, Any]] = field(default_factory=list)
    max_concurrent: int = 0
    random_state: int | None = None

    def __post_init__(self) -> None:
        self.points_to_evaluate = self.points_to_evaluate or []
        self.seed: int | None = self.random_state

    def make_sampler(self, seed: int) -> Any:
        """Return None: all values are chosen in advance."""
        return None

    def fixed(self, space: Mapping[str, SearchObject], index: int, seed: int) -> dict[str, Any]:
        """Return all parameters of trial `index`, in Optuna's form; the same for the same seed."""
        chosen = super().fixed(space, index, seed)
        trial = random_trial(derive_seed(seed, "search", index))
        for path, item in space.items():
            if not isinstance(item, Function):
                draw(path, item, lambda path, item: chosen.setdefault(path, suggest(trial, path, item)))
        return chosen


def ConcurrencyLimiter(searcher: Searcher, max_concurrent: int) -> Searcher:
    """Return a search algorithm with a limit on the number of trials at the same time.

    Args:
        searcher: The search algorithm.
        max_concurrent: The limit.
    """
    limited = copy.copy(searcher)
    limited.max_concurrent = max_concurrent
    return limited


def labels_of(values: Sequence[Any]) -> list[Any]:
    """Return the labels of these values in the study: the values themselves if the study can store them."""
    is_plain = all(value is None or type(value) in (bool, int, float, str) for value in values)
    if is_plain and len(set(values)) == len(values):
        return list(values)
    return [f"{number}: {value!r}"[:80] for number, value in enumerate(values)]


def random_trial(seed: int) -> Any:
    """Return a trial of Optuna that suggests random values."""
    optuna = load_optuna()
    return optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed % 2**32)).ask()


def suggest(trial: Any, path: str, item: SearchObject) -> object:
    """Return what a trial of Optuna suggests, in Optuna's form; see `value_of`."""
    if isinstance(item, Categorical | GridSearch):
        return trial.suggest_categorical(path, labels_of(item.values))
    assert isinstance(item, Numeric)
    if item.scale == "normal":
        return trial.suggest_float(path, 0.0, 1.0)
    is_log = item.scale == "log"
    if item.is_int and not (is_log and item.step > 1):
        step = 1 if is_log else int(item.step)
        return trial.suggest_int(path, int(item.lower), int(item.upper), step=step, log=is_log)
    return trial.suggest_float(
        path, item.lower, item.upper, step=None if is_log else item.step or None, log=is_log
    )


def draw(path: str, item: SearchObject, parameter_of: Callable[[str, SearchObject], Any]) -> Any:
    """Return a value of a search object; those inside of the value are drawn, too.

    Args:
        path: Its path.
        item: The search object.
        parameter_of: Returns a parameter in Optuna's form.

    Raises:
        ConfigurationError: A grid or a function is inside of the value.
    """
    value, values = value_of(item, parameter_of(path, item)), {}
    for name, inner in find_search_objects(value).items():
        if isinstance(inner, GridSearch | Function):
            raise ConfigurationError(
                f"{path}={item!r}: expected values, or search objects such as tune.uniform(0, 1), inside of it, got "
                f"{inner!r}. Give it a key of its own beside {path!r}."
            )
        values[name] = draw(f"{path}/{name}", inner, parameter_of)
    return replace_values(value, values) if values else value


def value_of(item: SearchObject, parameter: Any) -> object:
    """Return the value of a parameter in Optuna's form."""
    if isinstance(item, Numeric):
        return item.value_at(parameter)
    assert isinstance(item, Categorical | GridSearch)
    return item.values[labels_of(item.values).index(parameter)]


def _parameter(path: str, item: SearchObject, value: Any) -> object:
    if isinstance(item, Numeric):
        return item.coordinate_of(value)
    if isinstance(item, Categorical | GridSearch) and value in item.values:
        return labels_of(item.values)[item.values.index(value)]
    raise ConfigurationError(f"points_to_evaluate: {value!r} is not a value of {path}={item!r}.")


def load_optuna() -> Any:
    """Return the module `optuna`, with its logging limited to warnings.

    Raises:
        MissingPackageError: Optuna is not installed.
    """
    optuna = import_optional("optuna", "Tune", "rlzmq[tune]")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@dataclass
class OptunaSearch(Searcher):
    """Values suggested by an Optuna sampler; needs a metric and its mode, here or in TuneConfig.

    Args:
        sampler: An Optuna sampler, or the name of one in ``optuna.samplers``, which gets the seed; None: "TPESampler".
        points_to_evaluate: Values of the first trials by path, e.g. ``[{"lr": 0.001}]``.
        seed: Seed of a sampler given by name; None: a random one.
        max_concurrent: Maximum number of trials at the same time; 0: no limit.
        metric: Path of the metric; None: that of TuneConfig.
        mode: "max" or "min"; None: that of TuneConfig.
    """

    sampler: Any = None
    points_to_evaluate: Sequence[Mapping[str, Any]] = field(default_factory=list)
    seed: int | None = None
    max_concurrent: int = 0
    metric: str | None = None
    mode: Mode | None = None

    def make_sampler(self, seed: int) -> Any:
        """Return the Optuna sampler.

        Raises:
            ConfigurationError: Optuna has no sampler of this name.
        """
        if self.sampler is not None and not isinstance(self.sampler, str):
            return self.sampler
        name = self.sampler or "TPESampler"
        samplers = load_optuna().samplers
        if not name.endswith("Sampler") or not hasattr(samplers, name):
            known = [each for each in dir(samplers) if each.endswith("Sampler")]
            raise ConfigurationError(f"OptunaSearch: no sampler {name!r}.{did_you_mean(name, known)}")
        return getattr(samplers, name)(seed=seed)


_SEARCHERS: dict[str, Callable[..., Searcher]] = {
    "random": BasicVariantGenerator,
    "variant_generator": BasicVariantGenerator,
    "optuna": OptunaSearch,
}


def create_searcher(search_alg: str, **settings: object) -> Searcher:
    """Return a search algorithm by name: "random" or "optuna".

    Raises:
        ConfigurationError: There is no such algorithm.
    """
    if search_alg not in _SEARCHERS:
        raise ConfigurationError(f"No search algorithm {search_alg!r}.{did_you_mean(search_alg, _SEARCHERS)}")
    return _SEARCHERS[search_alg](**settings)


TrialConfig = BaseConfig | dict[str, Any]
"""A trial's config: an algorithm's config, or a dict."""


def config_value(config: TrialConfig, path: str) -> Any:
    """Return the value at a path such as ``"lr"`` or ``"env_config/size"``.

    Raises:
        ConfigurationError: The config has no such path.
    """
    value: Any = config
    for key in path.split("/"):
        try:
            if isinstance(value, list | tuple):
                value = value[int(key)]
            else:
                value = value[key] if isinstance(value, Mapping | BaseConfig) else getattr(value, key)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError):
            raise ConfigurationError(f"The trial's config has no {path!r}.") from None
    return value


def resolve(
    param_space: TrialConfig, space: Mapping[str, SearchObject], chosen: Mapping[str, Any], seed: int
) -> TrialConfig:
    """Return a trial's config: `param_space` with a value in place of each search object.

    Args:
        param_space: A config or dict with search objects.
        space: Its search objects by path.
        chosen: The values of all search objects by path, except those that are functions.
        seed: Seed of Python's and numpy's global generators while functions are called.

    Raises:
        ConfigurationError: A value is invalid for its setting.
    """
    config: TrialConfig = replace_values(param_space, chosen)
    states = random.getstate(), np.random.get_state()
    try:
        random.seed(seed)
        np.random.seed(seed)
        for path, item in space.items():
            if isinstance(item, Function):
                spec = SimpleNamespace(
                    config=config if isinstance(config, BaseConfig) else _AttributeDict(config)
                )
                config = replace_values(config, {path: item.value_of(spec)})
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    return config


class _AttributeDict(dict[str, Any]):
    """A dict whose items are attributes as well, at every depth."""

    def __getattr__(self, name: str) -> Any:
        try:
            value = self[name]
        except KeyError:
            raise AttributeError(name) from None
        return _AttributeDict(value) if type(value) is dict else value
