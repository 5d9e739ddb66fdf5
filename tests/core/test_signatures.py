"""help() and editors show what the constructors of the public classes take."""

from __future__ import annotations

import inspect

import pytest

import rlzmq
from rlzmq import ConnectorV2

CLASSES = {
    name: value
    for name in rlzmq.__all__
    if inspect.isclass(value := getattr(rlzmq, name))
    and "__init__" in {attribute for base in value.__mro__[:-1] for attribute in vars(base)}
    and not issubclass(value, BaseException)
}


@pytest.mark.parametrize("name", CLASSES)
def test_the_signature_of_a_public_class_is_that_of_its_constructor(name: str) -> None:
    kind = CLASSES[name]
    expected = list(inspect.signature(kind.__init__).parameters.values())[1:]
    assert list(inspect.signature(kind).parameters.values()) == expected
    assert [str(parameter) for parameter in expected] != ["*args", "**kwargs"]


def test_a_piece_is_called_with_its_own_arguments() -> None:
    class Piece(ConnectorV2):
        def __init__(self, *, scale: float = 1.0) -> None:
            super().__init__()
            self.scale = scale

        def __call__(self, *, rl_module, batch, episodes, **kwargs):  # type: ignore[no-untyped-def]
            return batch

    assert str(inspect.signature(Piece)) == "(*, scale: 'float' = 1.0) -> 'None'"
    assert list(inspect.signature(Piece()).parameters) == ["rl_module", "batch", "episodes", "kwargs"]
