"""Typed headers, ranges, fragments and publications: round trips and refusals."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlzmq.wire import codec
from rlzmq.wire import messages as m
from rlzmq.wire.codec import (
    FOLDED,
    FRAMES_NEEDED,
    PUBLICATION,
    decode,
    encode,
    encode_opaque,
    first_number,
    from_header,
    message,
    to_header,
)
from rlzmq.wire.fragment_message import (
    FragmentRange,
    decode_fragment,
    encode_fragment,
    fragment_from_bytes,
    fragment_to_bytes,
    pack_blobs,
    pack_ranges,
    to_spans,
    unpack_blobs,
    unpack_ranges,
)
from rlzmq.wire.values import unpack_blob

_VALUES = {
    "int": 7,
    "float": 1.5,
    "str": "text",
    "bool": True,
    "tuple[int, ...]": (1, 2),
    "tuple[str, ...]": ("runner-0", "runner-1"),
    "Spans": ((1, 3), (5, 5)),
    "dict[str, int]": {"stale": 3},
    "dict[str, Any]": {"columns": ["obs"]},
    "FragmentId": m.FragmentId("runner", 1, 2),
}


def _example(cls):
    return cls(**{field.name: _VALUES[str(field.type)] for field in dataclasses.fields(cls)})


_CLASSES = sorted(m.MESSAGES.values(), key=lambda cls: cls.__name__)


def test_every_message_has_its_own_kind():
    assert all(cls.kind == kind for kind, cls in m.MESSAGES.items())
    for taken in (m.Hello.kind, PUBLICATION, FOLDED, FRAMES_NEEDED, 128, 0):
        with pytest.raises(ValueError, match=f"kind {taken} of Another: expected a free number"):
            message(taken)(type("Another", (m.WireMessage,), {}))


@pytest.mark.parametrize("kind", [1, 127])
def test_a_message_is_found_by_its_kind_and_never_changes(kind, monkeypatch):
    monkeypatch.setattr(codec, "MESSAGES", {})
    another = message(kind)(type("Another", (m.WireMessage,), {"__annotations__": {"number": int}}))
    assert (codec.MESSAGES, another.kind) == ({kind: another}, kind)
    with pytest.raises(dataclasses.FrozenInstanceError):
        another(3).number = 4
    assert not hasattr(another(3), "__dict__"), "of a million fragments' messages, none has one"


def test_a_brokers_numbers_are_above_a_million_of_the_one_before():
    assert first_number(0) > 0
    assert first_number(6) - first_number(5) == 2**20


@pytest.mark.parametrize("cls", _CLASSES, ids=lambda cls: cls.__name__)
def test_every_message_comes_back(cls):
    message = _example(cls)
    if cls is m.Fragment:
        frames = encode_fragment(message, [np.zeros(3)], None)
    else:
        frames = m.encode_message(message, (b"one", b"two"))
    got, payload = m.decode_message(frames)
    assert got == message
    assert len(payload) == 2


@pytest.mark.parametrize("cls", _CLASSES, ids=lambda cls: cls.__name__)
def test_unknown_missing_and_wrongly_typed_fields_are_refused_by_name(cls):
    header = to_header(_example(cls))
    with pytest.raises(codec.SchemaError, match=f"{cls.__name__}: unknown field 'extra'"):
        from_header(cls, {**header, "extra": 1})
    for name in header:
        with pytest.raises(codec.SchemaError, match=f"{cls.__name__}: field '{name}' is missing"):
            from_header(cls, {key: value for key, value in header.items() if key != name})
        for wrong in (None, [["x"]], -5, object()):
            with pytest.raises(codec.SchemaError, match=rf"{cls.__name__}\.{name}"):
                from_header(cls, {**header, name: wrong})


_IDS = {"lease_id", "leases", "attempt", "attempts", "training_attempts"}


@pytest.mark.parametrize("cls", _CLASSES, ids=lambda cls: cls.__name__)
def test_every_number_that_a_peer_states_is_bounded(cls):
    """A sum of counts never leaves 64 bits; ids count up from a broker's incarnation."""
    header = to_header(_example(cls))
    too_much = {
        "int": lambda most: most + 1,
        "tuple[int, ...]": lambda most: (1, most + 1),
        "Spans": lambda most: ((0, most + 1),),
        "dict[str, int]": lambda most: {"stale": most + 1},
        "FragmentId": lambda most: ("runner", 1, most + 1),
    }
    for field in dataclasses.fields(cls):
        if str(field.type) in too_much:
            value = too_much[str(field.type)](2**63 - 1 if field.name in _IDS else 2**48)
            with pytest.raises(codec.SchemaError, match=field.name):
                from_header(cls, {**header, field.name: value})


def test_unknown_kinds_are_refused():
    with pytest.raises(codec.SchemaError, match="kind 200"):
        m.decode_message(encode_opaque(200, {}))


def test_only_fragments_declare_arrays():
    with pytest.raises(codec.SchemaError, match="not expected"):
        m.decode_message(encode(m.Pause.kind, {}, []))
    header = to_header(_example(m.Fragment))
    with pytest.raises(codec.SchemaError, match="missing"):
        m.decode_message(encode_opaque(m.Fragment.kind, header, [b""]))


def test_a_fragments_frames_are_checked_without_making_arrays():
    frames = encode_fragment(_example(m.Fragment), [np.zeros((4, 3), np.float32)], {"return": 1.5})
    with pytest.raises(codec.ArrayMismatchError, match="needs 48 bytes, its frame has 47"):
        m.decode_message([frames[0], bytes(47), frames[2]])
    fragment, arrays, meta = decode_fragment(frames)
    assert fragment == _example(m.Fragment)
    assert arrays[0].shape == (4, 3)
    assert unpack_blob(meta) == {"return": 1.5}


def test_a_quarantined_fragment_can_be_read_again():
    frames = encode_fragment(_example(m.Fragment), [np.arange(5)], {"a": 1})
    content = fragment_to_bytes(frames)
    fragment, arrays, _ = decode_fragment(fragment_from_bytes(content))
    assert fragment == _example(m.Fragment)
    np.testing.assert_array_equal(arrays[0], np.arange(5))
    for torn in (content[:-1], content[3:], b"", content + b"x"):
        with pytest.raises(codec.WireError):
            fragment_from_bytes(torn)


def test_no_other_message_is_a_fragment():
    with pytest.raises(codec.SchemaError):
        decode_fragment(m.encode_message(m.Pause()))
    with pytest.raises(codec.WireError):
        decode_fragment(encode(m.Fragment.kind, {}, []))


_ids = st.builds(
    m.FragmentId, st.text(alphabet="abcé-0", min_size=1, max_size=6), st.integers(0, 9), st.integers(0, 2**40)
)
_ranges = st.lists(st.builds(FragmentRange, _ids, st.integers(0, 2**40), st.integers(0, 2**40)), max_size=10)


@given(_ranges)
def test_ranges_come_back(ranges):
    assert unpack_ranges(pack_ranges(ranges)) == ranges


@given(st.lists(st.binary(max_size=10), max_size=6))
def test_blobs_come_back(blobs):
    assert [bytes(blob) for blob in unpack_blobs(pack_blobs(blobs))] == blobs


@given(st.sets(st.integers(0, 60)))
def test_spans_hold_exactly_the_numbers(numbers):
    spans = to_spans(numbers)
    assert [n for first, last in spans for n in range(first, last + 1)] == sorted(numbers)
    assert all(later[0] > earlier[1] + 1 for earlier, later in itertools.pairwise(spans))


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"a"],
        [b"a", b"x" * 39],
        [b"a", np.array([[1, 0, 0, 0, 0]]).tobytes()],
        [b"\xff", b"\0" * 40],
        [b"a", np.array([[0, 0, -1, 0, 0]]).tobytes()],
    ],
)
def test_damaged_ranges_are_refused(frames):
    with pytest.raises(codec.WireError):
        unpack_ranges(frames)


def test_decode_of_a_message_with_arrays_gives_the_typed_header():
    message = decode(encode_fragment(_example(m.Fragment), [], None))
    assert from_header(m.Fragment, message.header) == _example(m.Fragment)
