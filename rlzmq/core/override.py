"""Overridden methods: a decorator that checks that there is one, and warnings about those that no run calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from rlzmq.core.suggest import did_you_mean

__all__ = ["TellsUncalled", "override"]

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


_OF_CHECKPOINTS = dict.fromkeys(
    ("get_checkpointable_components", "get_ctor_args_and_kwargs", "get_metadata"),
    "checkpoints hold what get_state() returns, and config and classes describe the rest",
)


class TellsUncalled:
    """Base class that warns when a subclass of a user's overrides a method that RLlib calls and no run here does."""

    _not_called: ClassVar[Mapping[str, str]] = {}
    """Name of the method -> what to do instead."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls).keys() if cls.__module__.partition(".")[0] != "rlzmq" else ()
        not_called = {**_OF_CHECKPOINTS, **cls._not_called}
        for name in sorted(not_called.keys() & own):
            logging.getLogger("rlzmq").warning(
                "%s.%s: no run calls this method of RLlib's; instead: %s.",
                cls.__name__,
                name,
                not_called[name],
            )
