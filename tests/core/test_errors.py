"""Decoders of a peer's bytes refuse, whatever happens in them."""

from __future__ import annotations

import pytest

from rlzmq.core.errors import ProtocolError
from rlzmq.wire.codec import MalformedFrameError, SchemaError, wire_decoder


@wire_decoder
def decode(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    "error", [IndexError("secret bytes"), RecursionError(), BufferError(), AssertionError()]
)
def test_an_error_that_a_decoder_did_not_mean_is_a_refusal(error: Exception) -> None:
    with pytest.raises(MalformedFrameError) as caught:
        decode(error)
    assert str(caught.value) == f"the bytes cannot be decoded ({type(error).__name__})"
    assert caught.value.__cause__ is error


def test_refusals_keep_their_kind_or_their_text() -> None:
    with pytest.raises(SchemaError, match="as it is"):
        decode(SchemaError("as it is"))
    with pytest.raises(MalformedFrameError, match="another layer's"):  # which has no reason code
        decode(ProtocolError("another layer's"))


def test_a_process_without_memory_refuses_nothing() -> None:
    with pytest.raises(MemoryError):
        decode(MemoryError())
