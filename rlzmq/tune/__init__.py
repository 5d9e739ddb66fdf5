"""Tune: searches for good config values, with RLlib's names, on Optuna's storage."""

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
from rlzmq.envs.registry import register_env
from rlzmq.tune.result_grid import Result, ResultGrid, TrialError, TuneError
from rlzmq.tune.schedulers import create_scheduler
from rlzmq.tune.search import create_searcher
from rlzmq.tune.session import (
    Checkpoint,
    Trainable,
    get_checkpoint,
    get_context,
    report,
    with_parameters,
    with_resources,
)
from rlzmq.tune.settings import CheckpointConfig, FailureConfig, RunConfig, TuneConfig
from rlzmq.tune.stoppers import Stopper
from rlzmq.tune.tuner import Tuner, register_trainable
from rlzmq.tune.view import CLIReporter

__all__ = [
    "CLIReporter",
    "Checkpoint",
    "CheckpointConfig",
    "FailureConfig",
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
