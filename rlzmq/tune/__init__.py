"""Tune: searches for good config values, with Ray Tune's names, on Optuna's storage."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from rlzmq.config.search_space import (
    choice,
    grid_search,
    lograndint,
    loguniform,
    qlograndint,
    qloguniform,
    qrandint,
    qrandn,
    quniform,
    randint,
    randn,
    sample_from,
    uniform,
)
from rlzmq.core.errors import ConfigurationError
from rlzmq.envs.registry import register_env
from rlzmq.tune.result_grid import Result, ResultGrid, TrialError, TuneError
from rlzmq.tune.schedulers import create_scheduler
from rlzmq.tune.search import create_searcher
from rlzmq.tune.settings import (
    Callback,
    FailureConfig,
    LoggerCallback,
    RunConfig,
    TuneConfig,
)
from rlzmq.tune.stopper import Stopper
from rlzmq.tune.trial import CheckpointConfig
from rlzmq.tune.trial_api import (
    Checkpoint,
    PlacementGroupFactory,
    Trainable,
    get_checkpoint,
    get_context,
    report,
    with_parameters,
    with_resources,
)
from rlzmq.tune.tuner import CLIReporter, Tuner, register_trainable

__all__ = [
    "CLIReporter",
    "Callback",
    "Checkpoint",
    "CheckpointConfig",
    "FailureConfig",
    "LoggerCallback",
    "PlacementGroupFactory",
    "Result",
    "ResultGrid",
    "RunConfig",
    "Stopper",
    "Trainable",
    "TrialError",
    "TuneConfig",
    "TuneError",
    "Tuner",
    "choice",
    "create_scheduler",
    "create_searcher",
    "get_checkpoint",
    "get_context",
    "grid_search",
    "lograndint",
    "loguniform",
    "qlograndint",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "register_env",
    "register_trainable",
    "report",
    "sample_from",
    "uniform",
    "with_parameters",
    "with_resources",
]

_INSTEAD = {
    **dict.fromkeys(("run", "run_experiments"), "tune.Tuner(trainable, param_space=…, run_config=…).fit()"),
    "ExperimentAnalysis": "the ResultGrid that Tuner.fit() returns",
    "SyncConfig": "RunConfig(storage_path=…), a directory",
    "JupyterNotebookReporter": "CLIReporter",
    "ProgressReporter": "CLIReporter, or a tune.Callback",
}
_TRACKERS = {
    "WandbLoggerCallback": "RunConfig(log='wandb')",
    "MLflowLoggerCallback": "RunConfig(log='mlflow')",
    "NoopLogger": "nothing: leave it out",
}


def _tracker(name: str) -> Callable[..., NoReturn]:
    """Return what a tracker of Ray's is here: scripts import it, and most do not make one."""

    def refuse(*args: object, **settings: object) -> NoReturn:
        raise ConfigurationError(f"{name}(…) is Ray's. Instead: {_TRACKERS[name]}.")

    return refuse


if not TYPE_CHECKING:  # a name that is not there is an error to a type checker, too

    def __getattr__(name: str) -> object:
        if name in ("logger", "registry", "result"):  # modules of Ray's; the registry imports torch
            return importlib.import_module(f"rlzmq.tune.{name}")
        if name in _TRACKERS:
            return _tracker(name)
        instead = f" Instead: {_INSTEAD[name]}." if name in _INSTEAD else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{instead}")
