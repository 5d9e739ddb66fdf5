"""OptunaSearch: chooses the values of new trials with Optuna's samplers, from the results of earlier trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.extras import import_optional
from rlzmq.core.suggest import did_you_mean
from rlzmq.tune.search.base import Searcher

__all__ = ["OptunaSearch", "load_optuna"]


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
    """Values suggested by an Optuna sampler; needs `TuneConfig(metric=…, mode=…)`.

    Args:
        sampler: An Optuna sampler, or the name of one in ``optuna.samplers``, which gets the seed; None: "TPESampler".
        points_to_evaluate: Values of the first trials by path, e.g. ``[{"lr": 0.001}]``.
        seed: Seed of a sampler given by name; None: a random one.
        max_concurrent: Maximum number of trials at the same time; 0: no limit.
    """

    sampler: Any = None
    points_to_evaluate: Sequence[Mapping[str, Any]] = field(default_factory=list)
    seed: int | None = None
    max_concurrent: int = 0

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
