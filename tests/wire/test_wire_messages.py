"""Typed headers, ranges and fragments: round trips, refusals, and bounds to the last one that passes."""

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
    SchemaError,
    encode,
    encode_opaque,
    from_header,
    to_header,
)
from rlzmq.wire.payloads import (
    decode_fragment,
    encode_fragment,
    join_frames,
    split_frames,
    to_spans,
    unpack_blob,
    unpack_ranges,
)

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
        m.decode_message(encode(m.BrokerBeat.kind, {}, []))
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


def test_joined_frames_are_bounded_before_any_is_made():
    with pytest.raises(codec.BoundExceededError, match="at most 1025 joined frames, got 1026"):
        unpack_blob(join_frames([b""] * 1026))
    with pytest.raises(codec.BoundExceededError, match="at most 1000000 joined frames"):
        split_frames((10**6 + 1).to_bytes(8, "little") + bytes(8 * (10**6 + 1)))


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
        [b"a", np.array([[1, 0, 0, 0, 0]]).tobytes()],
        [b"a", np.array([[0, 0, -1, 0, 0]]).tobytes()],
    ],
)
def test_damaged_ranges_are_refused(frames):
    with pytest.raises(codec.WireError):
        unpack_ranges(frames)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("weights_version", value) for value in (-2, 2**48 + 1, True, 1.0, "1")),
        *(("timeout_s", value) for value in (-0.1, 1e15, float("nan"), float("inf"), True)),
        *(("accepted", value) for value in (((2, 1),), ((-1, 1),), ((1,),), {})),
        ("exact", 1),
    ],
)
def test_what_a_field_may_not_be(name, value):
    header = to_header(m.Lease(1, 3, 4, 5, True, 6, 7.0))
    with pytest.raises(SchemaError, match=rf"Lease\.{name}: does not accept this"):
        from_header(m.Lease, {**header, name: value})


@pytest.mark.parametrize(
    ("detail", "is_good"), [("", True), ("x" * 4096, True), ("x" * 4097, False), (b"x", False)]
)
def test_texts_are_short(detail, is_good):
    header = {"seq": 1, "reason": "r", "detail": detail}
    if is_good:
        assert from_header(m.Rejected, header) == m.Rejected(1, "r", detail)
    else:
        with pytest.raises(SchemaError, match=r"Rejected\.detail"):
            from_header(m.Rejected, header)


def test_control_characters_in_texts_are_made_visible():
    got = from_header(m.Rejected, {"seq": 1, "reason": "r", "detail": "a\x1b[31mb"})
    assert "\x1b" not in got.detail
