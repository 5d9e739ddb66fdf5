"""Text from peers and files: nothing in it acts on a terminal, and nothing of it is without end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlzmq.actors.messages import pack_error, unpack_error
from rlzmq.cli.inspect import show_checkpoints
from rlzmq.core.checkpoint import write_checkpoint
from rlzmq.core.printable import MAX_ERROR_BYTES, cut, printable
from rlzmq.core.synonyms import did_you_mean
from rlzmq.wire.codec import FragmentId, pack_header
from rlzmq.wire.fragment_message import FragmentRange, pack_ranges, unpack_ranges
from rlzmq.wire.messages import Goodbye, Hello, decode_message, encode_message

HOSTILE = "runner\x1b]0;owned\x07\x1b[2J\r\nrun finished\u202e\x9b\x7f"


def test_a_long_name_is_not_compared_as_a_whole() -> None:
    assert did_you_mean("trian" * 10_000_000, ["train"]) == " Valid: train."
    assert did_you_mean("trian", ["train"]) == " Did you mean 'train'?"


def test_every_character_that_a_terminal_acts_on_becomes_an_escape() -> None:
    assert printable("env Größe 漢字") == "env Größe 漢字"
    assert printable(HOSTILE) == (r"runner\x1b]0;owned\x07\x1b[2J\r\nrun finished\u202e\x9b\x7f")
    assert printable("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"
    assert all(printable(chr(code)).isprintable() for code in (*range(32), *range(127, 160), 0x2028, 0xD800))


def test_no_name_and_no_detail_of_a_message_is_raw() -> None:
    message, _ = decode_message(encode_message(Hello("runner", HOSTILE, HOSTILE, dropped={HOSTILE: 1})))
    assert isinstance(message, Hello)
    assert all(text.isprintable() for text in (message.name, message.uuid, *message.dropped))
    goodbye, _ = decode_message(encode_message(Goodbye(HOSTILE)))
    assert str(goodbye).isprintable()
    ranges = [FragmentRange(FragmentId("\x1b[2J", 1, 0), 0, 1)]
    assert unpack_ranges(pack_ranges(ranges))[0].fragment.runner == r"\x1b[2J"


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


def test_what_is_cut_says_how_much() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("abcd", 3) == "abc … (1 more characters)"


def test_a_checkpoints_facts_are_shown_without_their_escapes(tmp_path, capsys) -> None:
    write_checkpoint(tmp_path / "c", {"one\x1b[2J": {"x": 1}}, about={"algorithm": HOSTILE, "score": HOSTILE})
    show_checkpoints(tmp_path / "c")
    out = capsys.readouterr().out
    assert "owned" in out
    assert out.replace("\n", "").isprintable()


def test_output_is_not_kept_where_python_is_told_to_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers do with PYTHONUNBUFFERED."""
    code = "import os, rlzmq.core.process as o; o.outlive_readers(); print('seen'); os._exit(0)"
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    assert (
        subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout == b"seen\n"
    )
