"""Signatures of users' functions and classes: checks of what they take, and classes that show theirs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rlzmq.core.errors import ConfigurationError

__all__ = ["SignatureOfInit", "check_takes", "place_of_code"]


class SignatureOfInit(type):
    """Metaclass base whose classes show the arguments of their ``__init__`` in ``help()`` and editors.

    Without it, `inspect.signature` of a class returns that of its metaclass's ``__call__``.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature of ``__init__`` without self."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


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
