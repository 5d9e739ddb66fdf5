"""Bounds at which a replay stops: ``--until 'policy_loss>1e3'``."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.suggest import did_you_mean

__all__ = ["Bound"]

_BOUND = re.compile(r"\s*([^<>=!\s]+)\s*(<=|>=|<|>)\s*(\S+)\s*")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True)
class Bound:
    """A bound on a metric: ``policy_loss>1e3``, or for one module ``default_policy/policy_loss>1e3``.

    A value that is not finite crosses every bound.
    """

    name: str
    sign: str
    number: float

    @classmethod
    def parse(cls, text: str) -> Bound:
        """Return the bound that a text describes.

        Raises:
            ConfigurationError: The text is not a bound.
        """
        found = _BOUND.fullmatch(text)
        try:
            if found is None:
                raise ValueError
            return cls(found[1], found[2], float(found[3]))
        except ValueError:
            raise ConfigurationError(
                f"{text!r} is not a bound: expected METRIC, one of < <= > >=, and a number, e.g. 'policy_loss>1e3'."
            ) from None

    def check(self, results: Mapping[str, Any]) -> None:
        """Check that an update's results contain the metric.

        Raises:
            ConfigurationError: They do not contain it.
        """
        if self._values(results):
            return
        name = self.name.rpartition("/")[2]
        known = sorted(
            {key for metrics in results.values() for key, value in metrics.items() if _is_number(value)}
        )
        raise ConfigurationError(
            f"an update of this run has no metric {self.name!r}.{did_you_mean(name, known)} It has: {', '.join(known)}"
        )

    def crossed_by(self, results: Mapping[str, Any]) -> str | None:
        """Return where, and with which value, an update's results cross the bound; None if they do not."""
        for where, value in self._values(results).items():
            if not math.isfinite(value) or _COMPARE[self.sign](value, self.number):
                return f"{where}/{self.name.rpartition('/')[2]} = {value:g}"
        return None

    def _values(self, results: Mapping[str, Any]) -> dict[str, float]:
        module_id, _, name = self.name.rpartition("/")
        return {
            where: float(metrics[name])
            for where, metrics in results.items()
            if module_id in ("", where) and _is_number(metrics.get(name))
        }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.generic)
