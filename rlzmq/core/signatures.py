"""Users' functions and classes: what they take, whether a method overrides one, and whether any run calls it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.synonyms import did_you_mean

__all__ = ["TellsUncalled", "check_takes", "override", "place_of_code"]


def check_takes(
    function: Callable[..., Any], what: str, *by_position: str, by_name: Sequence[str] = ()
) -> None:
    """Check that a user's function can be called with the arguments that it will get.

    Args:
        function: The function; one without a readable signature (e.g. written in C) is not checked.
        what: What the user set it as, e.g. ``"config.policy_mapping_fn"``, for the message.
        by_position: Names of the positional arguments.
        by_name: Names of the keyword arguments.

    Raises:
        ConfigurationError: It cannot; the text has the expected and the actual signature, and where the function is.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*by_position, **dict.fromkeys(by_name))
    except TypeError as error:
        named = ["*", *by_name] if by_name else []
        expected = ", ".join([*by_position, *named, "**kwargs"])
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise ConfigurationError(
            f"{what}: expected a function of ({expected}), got {name}{signature}{place_of_code(function)}: {error}."
        ) from None


def place_of_code(function: Any) -> str:
    """Return `` (FILE:LINE)`` of the definition of a function, method or partial; "" of other callables."""
    code = getattr(inspect.unwrap(getattr(function, "func", function)), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


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

    def __init_subclass__(cls, **kwargs: object) -> None:
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
