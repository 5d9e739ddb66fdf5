"""Bounds of what may come by the wire, to the last one that passes and the first that does not."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from rlzmq.protocol.weights import (
    PUBLICATION_PREFIX_BYTES,
    PUBLICATION_TOPIC,
    new_publication_buffer,
    open_publication,
    seal_publication,
)
from rlzmq.wire import fragment_message as ranges_module
from rlzmq.wire import messages as m
from rlzmq.wire.codec import (
    MAX_ARRAYS,
    MAX_HEADER_BYTES,
    WIRE_VERSION,
    ArrayMismatchError,
    BoundExceededError,
    FragmentId,
    MalformedFrameError,
    SchemaError,
    UnsupportedDtypeError,
    WireError,
    decode,
    decode_spec,
    encode,
    encode_opaque,
    from_header,
    kind_of,
    pack_header,
    to_header,
    unpack_header,
)
from rlzmq.wire.fragment_message import FragmentRange, pack_blobs, pack_ranges, unpack_blobs, unpack_ranges

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


@pytest.mark.parametrize(("kind", "is_good"), [(-1, False), (0, True), (255, True), (256, False)])
def test_a_kind_is_one_byte(kind, is_good):
    if is_good:
        assert kind_of(encode_opaque(kind, {})) == decode(encode(kind, {})).kind == kind
    else:
        with pytest.raises(ValueError, match=f"one byte, got {kind}"):
            encode(kind, {})


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


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("|S1", "|S1"),
        (f"|S{1 << 20}", f"|S{1 << 20}"),
        (f"<U{1 << 18}", f"<U{1 << 18}"),
        (f"|S{(1 << 20) + 1}", None),
        (f"<U{(1 << 18) + 1}", None),
        ("|S0", None),
        ("|S", None),
        ("|S-1", None),
        ("|S٣", None),
        ("<S3", None),
        ("|U3", None),
        ("<U00000000000003", "<U3"),
        ("<U000000000000003", None),
        ("<M8[ns]", "<M8[ns]"),
        ("<m8[Y]", "<m8[Y]"),
        ("<M8[xs]", None),
        ("<M8[ns", None),
        ("<M8[ns)", None),
        (">M8[ns]", None),
        ("<f8 ", None),
    ],
)
def test_dtypes_are_spelled_exactly(text, dtype):
    if dtype is None:
        with pytest.raises(UnsupportedDtypeError, match="not in the whitelist"):
            decode_spec([text, 1], 0)
    else:
        assert decode_spec([text, 2, 0], 3) == (np.dtype(dtype), (2, 0))


def test_as_many_dimensions_as_may_be_and_one_more():
    assert decode_spec(["|u1", *[1] * 32], 0)[1] == (1,) * 32
    with pytest.raises(BoundExceededError, match="at most 32 dimensions, got 33"):
        decode_spec(["|u1", *[1] * 33], 0)
    array = np.zeros([1] * 32, np.uint8)
    assert decode(encode(1, {}, [array])).arrays[0].shape == array.shape
    with pytest.raises(BoundExceededError, match="array 0 has 33 dimensions, at most 32 travel"):
        encode(1, {}, [np.zeros([1] * 33, np.uint8)])


@pytest.mark.parametrize(("num_bytes", "is_shared"), [(8191, False), (8192, True)])
def test_small_arrays_are_copied_out_of_what_came(num_bytes, is_shared):
    frame = np.zeros(num_bytes, np.uint8)
    (got,) = decode([_first(specs=[["|u1", num_bytes]]), frame]).arrays
    assert np.shares_memory(got, frame) is is_shared


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


def test_a_table_of_ranges_names_runners_that_are_there():
    row = np.array([[1, 2, 3, 4, 5]], "<i8").tobytes()
    assert unpack_ranges([b"a\nb", row]) == [FragmentRange(FragmentId("b", 2, 3), 4, 5)]
    with pytest.raises(MalformedFrameError, match="unknown runner"):
        unpack_ranges([b"a", row])
    with pytest.raises(ArrayMismatchError, match="40 bytes per row, got 41"):
        unpack_ranges([b"a\nb", row + b"x"])


# ------------------------------------------------------------------ publications


def _publication(num_bytes: int = 8, **fields) -> np.ndarray:
    buffer = new_publication_buffer(num_bytes)
    buffer[PUBLICATION_PREFIX_BYTES:] = 7
    values = {"run_id": "run", "generation": 1, "version": 2, "layout_digest": "layout", **fields}
    seal_publication(buffer, **values)
    return buffer


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (0, WIRE_VERSION + 1, f"wire version {WIRE_VERSION + 1}, this side speaks {WIRE_VERSION}"),
        (1, 1, "wrong kind or header length"),
        (3, 0xFF, "wrong kind or header length"),
    ],
)
def test_a_publication_says_what_it_is(at, value, says):
    frame = bytearray(_publication().tobytes())
    assert frame[:2] == PUBLICATION_TOPIC
    frame[at] = value
    with pytest.raises(WireError, match=says):
        open_publication(bytes(frame))


def test_a_publications_header_fills_its_prefix_or_is_refused():
    def num_bytes(frame: np.ndarray) -> int:
        return int.from_bytes(bytes(frame[2:4]), "little")

    longest = "x" * (300 + 508 - num_bytes(_publication(run_id="x" * 300)))
    assert num_bytes(_publication(run_id=longest)) == 508
    assert open_publication(_publication(run_id=longest))[0].run_id == longest
    with pytest.raises(BoundExceededError, match="at most 508 bytes, got 509"):
        _publication(run_id=longest + "x")


def test_a_publication_is_no_shorter_than_its_prefix():
    with pytest.raises(MalformedFrameError, match="at least 512 bytes, got 511"):
        open_publication(_publication(0)[:511].copy())
    frame = bytearray(_publication(0))
    packed = msgpack.packb([1])
    frame[2:4] = len(packed).to_bytes(2, "little")
    frame[4 : 4 + len(packed)] = packed
    with pytest.raises(MalformedFrameError, match="header is a map"):
        open_publication(bytes(frame))
