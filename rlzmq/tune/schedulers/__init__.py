"""Schedulers, under RLlib's names."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean
from rlzmq.tune.schedulers.base import FIFOScheduler, TrialScheduler
from rlzmq.tune.schedulers.early_stopping import (
    ASHAScheduler,
    AsyncHyperBandScheduler,
    HyperBandScheduler,
    MedianStoppingRule,
)
from rlzmq.tune.schedulers.pb2 import PB2
from rlzmq.tune.schedulers.pbt import PopulationBasedTraining

__all__ = [
    "PB2",
    "ASHAScheduler",
    "AsyncHyperBandScheduler",
    "FIFOScheduler",
    "HyperBandScheduler",
    "MedianStoppingRule",
    "PopulationBasedTraining",
    "TrialScheduler",
    "create_scheduler",
]

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
            " A trial's cores are fixed: tune.with_resources(…)."
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
