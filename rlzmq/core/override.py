"""override: a decorator that checks that a method overrides a base class's method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rlzmq.core.suggest import did_you_mean

__all__ = ["override"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def override(parent_cls: type) -> Callable[[_Method], _Method]:
    """Mark a method as overriding one of `parent_cls`. A misspelt name is detected when the class is defined.

    Example::

        class MyLearner(PPOLearner):
            @override(Learner)
            def compute_loss_for_module(self, *, module_id, config, batch, fwd_out): ...

    Raises:
        NameError: `parent_cls` has no such method.
    """

    def check(method: _Method) -> _Method:
        plain: Any = getattr(method, "fget", method)  # a property's function has the name
        name = str(plain.__name__)
        if not hasattr(parent_cls, name):
            raise NameError(
                f"@override({parent_cls.__name__}): {parent_cls.__name__} has no method {name!r}."
                + did_you_mean(name, [known for known in dir(parent_cls) if not known.startswith("__")])
            )
        return method

    return check
