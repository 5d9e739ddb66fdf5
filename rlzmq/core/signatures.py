"""SignatureOfInit: keeps the signature of a class readable when its metaclass changes how it is called."""

from __future__ import annotations

import inspect

__all__ = ["SignatureOfInit"]


class SignatureOfInit(type):
    """Metaclass base whose classes show the arguments of their ``__init__`` in ``help()`` and editors.

    Without it, `inspect.signature` of a class returns that of its metaclass's ``__call__``.
    """

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature of ``__init__`` without self."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])
