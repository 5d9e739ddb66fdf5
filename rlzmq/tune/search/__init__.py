"""Search algorithms, under RLlib's names."""

from collections.abc import Callable

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean
from rlzmq.tune.search.algorithms import BasicVariantGenerator, ConcurrencyLimiter, OptunaSearch, Searcher

__all__ = ["BasicVariantGenerator", "ConcurrencyLimiter", "OptunaSearch", "Searcher", "create_searcher"]

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
