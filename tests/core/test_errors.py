"""Decoders of a peer's bytes refuse, whatever happens in them; their texts end, and do not act on a terminal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlzmq.actors.messages import pack_error, unpack_error
from rlzmq.core.errors import MAX_ERROR_BYTES, ProtocolError, printable
from rlzmq.wire.codec import MalformedFrameError, SchemaError, pack_header, wire_decoder

HOSTILE = "runner\x1b]0;owned\x07\x1b[2J\r\nrun finished\u202e\x9b\x7f"


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


def test_every_character_that_a_terminal_acts_on_becomes_an_escape() -> None:
    assert printable("env Größe 漢字") == "env Größe 漢字"
    assert printable(HOSTILE) == (r"runner\x1b]0;owned\x07\x1b[2J\r\nrun finished\u202e\x9b\x7f")
    assert printable("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"
    assert all(printable(chr(code)).isprintable() for code in (*range(32), *range(127, 160), 0x2028, 0xD800))


@pytest.mark.parametrize("char", ["x", "漢", "\U0001f600"])
def test_the_text_of_a_remote_error_is_cut_and_written_once(char: str) -> None:
    def fail_in_the_users_code() -> None:
        raise ValueError(char * 10_000_000)

    try:
        fail_in_the_users_code()
    except ValueError as error:
        packed = pack_error(error, "runner-0")
    pack_header({"call_id": 1, "error": packed})  # travels
    arrived = unpack_error(packed)
    shown = str(arrived) + "".join(arrived.__notes__)
    assert len(str(arrived)) <= MAX_ERROR_BYTES + 100
    assert len(shown) - len(str(arrived)) < 3000
    assert "fail_in_the_users_code" in shown, "the frames are not what was cut"
    assert str(arrived).endswith("more characters)")
    assert shown.count("more characters)") == 1


def test_a_remote_error_cannot_act_on_the_terminal() -> None:
    packed = pack_error(KeyError(HOSTILE), HOSTILE) | {"host": HOSTILE, "traceback": HOSTILE}
    for is_known in (True, False):
        arrived = unpack_error(packed | {"is_known": is_known, "type": HOSTILE})
        for text in (*map(str, arrived.args), *arrived.__notes__):
            assert set(text) & set("\x1b\x07\r\x9b\u202e") == set()


def test_code_that_calls_os_exit_is_named_and_keeps_its_exit_code() -> None:
    code = "import os, rlzmq.core.process as o\no.explain_ends()\ndef ends():\n    os._exit(3)\nends()"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (3, "rlzmq: os._exit(3) was called at <string>:4 in ends\n")


def test_output_is_not_kept_where_python_is_told_to_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers do with PYTHONUNBUFFERED."""
    code = "import os, rlzmq.core.process as o; o.outlive_readers(); print('seen'); os._exit(0)"
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"seen\n"
    )
