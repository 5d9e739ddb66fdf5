"""Typed headers, ranges and fragments: round trips, refusals, and bounds to the last one that passes."""

from __future__ import annotations

import dataclasses
import itertools

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlzmq.wire import codec
from rlzmq.wire import messages as m
from rlzmq.wire import payloads as ranges_module
from rlzmq.wire.codec import (
    MAX_ARRAYS,
    MAX_HEADER_BYTES,
    WIRE_VERSION,
    BoundExceededError,
    FragmentId,
    MalformedFrameError,
    SchemaError,
    decode,
    decode_spec,
    encode,
    encode_opaque,
    first_number,
    from_header,
    pack_header,
    to_header,
    unpack_header,
)
from rlzmq.wire.payloads import (
    FragmentRange,
    decode_fragment,
    encode_fragment,
    fragment_from_bytes,
    fragment_to_bytes,
    pack_blobs,
    pack_ranges,
    to_spans,
    unpack_blob,
    unpack_blobs,
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


# ------------------------------------------------------------------ fields of headers

_FIELDS = {
    "int": ("weights_version", [-1, 0, 2**48], [-2, 2**48 + 1, True, 1.0, "1"]),
    "id": ("lease_id", [-1, 0, 2**63 - 1], [-2, 2**63, True, 1.0]),
    "float": ("timeout_s", [0, 0.0, 1.5, 9.9e14], [-0.1, 1e15, float("nan"), float("inf"), True, "1"]),
    "bool": ("exact", [True, False], [0, 1, "x"]),
    "spans": (
        "accepted",
        [(), [], [[0, 0]], ((1, 2), (5, 2**48))],
        [((2, 1),), ((-1, 1),), ((1,),), (1,), ((1, 2, 3),), {}, ((0, 2**48 + 1),)],
    ),
}
_LEASE = m.Lease(1, 2, 3, 4, 5, True, 6, 7.0)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, good, _ in _FIELDS.values() for value in good]
)
def test_what_a_field_may_be(name, value):
    got = getattr(from_header(m.Lease, {**to_header(_LEASE), name: value}), name)
    assert got == (tuple(map(tuple, value)) if name == "accepted" else value)
    assert type(got) is (float if name == "timeout_s" else type(getattr(_LEASE, name)))


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, _, bad in _FIELDS.values() for value in bad]
)
def test_what_a_field_may_not_be(name, value):
    with pytest.raises(SchemaError, match=rf"Lease\.{name}: does not accept this"):
        from_header(m.Lease, {**to_header(_LEASE), name: value})


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


@pytest.mark.parametrize("value", [("r", 1), ("r", 1, 2, 3), ("r", -2, 0), (1, 1, 1), 5])
def test_a_fragment_id_has_three_parts(value):
    refused = m.ShardRefused(0, 0, 0, FragmentId("r", 1, 2), "", "")
    assert from_header(m.ShardRefused, to_header(refused)) == refused
    with pytest.raises(SchemaError, match=r"ShardRefused\.fragment"):
        from_header(m.ShardRefused, {**to_header(refused), "fragment": value})


# ------------------------------------------------------------------ frames


def _first(header: object = None, specs: object = None, kind: int = 1) -> bytes:
    return bytes([WIRE_VERSION, kind]) + msgpack.packb([header or {}, specs])


def test_as_many_frames_as_may_be_and_one_more():
    arrays = [np.zeros(1, np.uint8)] * MAX_ARRAYS
    assert len(decode(encode(1, {}, arrays)).arrays) == MAX_ARRAYS
    opaque = [b"x"] * (MAX_ARRAYS + 1)
    assert len(decode(encode_opaque(1, {}, opaque)).frames) == MAX_ARRAYS + 1
    with pytest.raises(BoundExceededError, match=f"at most {MAX_ARRAYS} arrays, got {MAX_ARRAYS + 1}"):
        encode(1, {}, [*arrays, arrays[0]])
    with pytest.raises(BoundExceededError, match=f"at most {MAX_ARRAYS + 1} frames, got {MAX_ARRAYS + 2}"):
        encode_opaque(1, {}, [*opaque, b"x"])
    with pytest.raises(BoundExceededError, match=f"at most {MAX_ARRAYS + 2} frames, got {MAX_ARRAYS + 3}"):
        decode([_first(), *opaque, b"x"])


def test_a_header_is_as_large_as_may_be_or_refused_by_sender_and_receiver():
    text = "x" * (MAX_HEADER_BYTES - 3)
    packed = pack_header(text)
    assert len(packed) == MAX_HEADER_BYTES
    assert unpack_header(packed) == text
    with pytest.raises(BoundExceededError, match=f"this one has {MAX_HEADER_BYTES + 1}"):
        pack_header(text + "x")
    with pytest.raises(BoundExceededError, match=f"got {MAX_HEADER_BYTES + 1}"):
        unpack_header(msgpack.packb(text + "x"))


def test_containers_are_bounded():
    assert unpack_header(msgpack.packb([0] * (16 * 1024))) == [0] * (16 * 1024)
    many = {str(number): 0 for number in range(4 * 1024)}
    assert unpack_header(msgpack.packb(many)) == many
    for value in ([0] * (16 * 1024 + 1), {**many, "x": 0}):
        with pytest.raises(MalformedFrameError, match="not valid msgpack"):
            unpack_header(msgpack.packb(value))


# ------------------------------------------------------------------ arrays


def test_as_many_dimensions_as_may_be_and_one_more():
    assert decode_spec(["|u1", *[1] * 32], 0)[1] == (1,) * 32
    with pytest.raises(BoundExceededError, match="at most 32 dimensions, got 33"):
        decode_spec(["|u1", *[1] * 33], 0)
    array = np.zeros([1] * 32, np.uint8)
    assert decode(encode(1, {}, [array])).arrays[0].shape == array.shape
    with pytest.raises(BoundExceededError, match="array 0 has 33 dimensions, at most 32 travel"):
        encode(1, {}, [np.zeros([1] * 33, np.uint8)])


# ------------------------------------------------------------------ ranges


def test_as_many_ranges_as_may_be_and_one_more(monkeypatch):
    monkeypatch.setattr(ranges_module, "_MAX_RANGES", 3)
    items = [FragmentRange(FragmentId("a", 1, seq), 0, 1) for seq in range(4)]
    assert unpack_ranges(pack_ranges(items[:3])) == items[:3]
    with pytest.raises(BoundExceededError, match="at most 3 ranges, got 4"):
        unpack_ranges(pack_ranges(items))
    assert len(unpack_blobs(pack_blobs([b"x"] * 3))) == 3
    with pytest.raises(MalformedFrameError, match="8 bytes each, got 32 bytes"):
        unpack_blobs(pack_blobs([b"x"] * 4))
