"""The codec: what goes in comes out, and nothing else gets through."""

from __future__ import annotations

import random

import msgpack
import numpy as np
import pytest
import torch  # noqa: F401  (imported by the first decoded tensor: not the decoder's time)
from codec_fuzz import FuzzReport, delivered, fuzz
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlzmq.wire import codec
from rlzmq.wire.codec import (
    MAX_ARRAYS,
    MAX_HEADER_BYTES,
    WIRE_VERSION,
    decode,
    encode,
)

_plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="<"),
    hnp.unsigned_integer_dtypes(endianness="<"),
    hnp.floating_dtypes(endianness="<", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="<", sizes=(64, 128)),
    hnp.datetime64_dtypes(endianness="<"),
    hnp.timedelta64_dtypes(endianness="<"),
    hnp.byte_string_dtypes(min_len=1, max_len=8),
    hnp.unicode_string_dtypes(endianness="<", min_len=1, max_len=8),
)
_arrays = _dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)


@given(
    kind=st.integers(0, 255),
    header=st.dictionaries(st.text(max_size=8), _plain, max_size=4),
    arrays=st.lists(_arrays, max_size=4),
)
def test_every_message_comes_back_as_it_was(kind, header, arrays):
    message = decode(delivered(encode(kind, header, arrays)))
    assert (message.kind, message.header) == (kind, header)
    assert len(message.arrays) == len(arrays)
    for got, given_array in zip(message.arrays, arrays, strict=True):
        assert got.dtype == given_array.dtype
        assert got.shape == given_array.shape
        assert got.tobytes() == given_array.tobytes()


def test_contiguous_arrays_are_not_copied():
    array = np.zeros((100, 100), np.float32)
    frames = encode(1, {}, [array])
    assert frames[1] is array
    assert np.shares_memory(decode(frames).arrays[0], array)


def test_other_layouts_arrive_in_c_order_and_little_endian():
    arrays = [np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.arange(4, dtype=">i4"), np.arange(9)[::2]]
    got = decode(delivered(encode(1, {}, arrays))).arrays
    for one, other in zip(got, arrays, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype.byteorder in "=|<"


def test_another_version_is_refused_with_both_versions_named():
    frames = delivered(encode(1, {}))
    with pytest.raises(codec.UnknownVersionError, match=rf"version 77 .* version {WIRE_VERSION}") as caught:
        decode([bytes([77]) + frames[0][1:]])
    assert caught.value.reason == "version"


@pytest.mark.parametrize(
    "dtype",
    [
        *("O", "V8", "f16", "i4,f4", "Q;import os", ">f8", "<f8 "),
        *("<U0", "|S", "|S-1", "|S٣", "<S3", "|U3", f"|S{(1 << 20) + 1}", f"<U{(1 << 18) + 1}"),
        *("<M8[5D]", "<M8[xs]", "<M8[ns", "<M8[ns)"),
    ],
)
def test_dtypes_outside_the_whitelist_are_refused(dtype):
    first = bytes([WIRE_VERSION, 1]) + msgpack.packb([{}, [[dtype, 1]]])
    with pytest.raises(codec.UnsupportedDtypeError, match="whitelist"):
        decode([first, b"\0" * 16])


@pytest.mark.parametrize(
    "shape",
    [[2**62, 2**62], [4], [2, 2, 2], [0], [2**62, 0, 2**62], [-1], [1.0], [True], ["8"], [[1]], [None]],
)
def test_shapes_that_do_not_fit_their_bytes_are_refused(shape):
    first = bytes([WIRE_VERSION, 1]) + msgpack.packb([{}, [["<f8", *shape]]])
    with pytest.raises((codec.ArrayMismatchError, codec.MalformedFrameError)):
        decode([first, b"\0" * 8])


@pytest.mark.parametrize(
    ("frames", "error"),
    [
        ([], codec.MalformedFrameError),
        ([b""], codec.MalformedFrameError),
        ([bytes([WIRE_VERSION, 1]) + msgpack.packb({"a": 1})], codec.MalformedFrameError),
        ([bytes([WIRE_VERSION, 1]) + msgpack.packb([{}, []]) + b"x"], codec.MalformedFrameError),
        ([bytes([WIRE_VERSION, 1]) + msgpack.packb([{1: 2}, []])], codec.MalformedFrameError),
        (
            [bytes([WIRE_VERSION, 1]) + msgpack.packb([{"t": msgpack.ExtType(5, b"x")}, []])],
            codec.MalformedFrameError,
        ),
        ([bytes([WIRE_VERSION, 1]) + msgpack.packb([{}, []]), b"extra"], codec.ArrayMismatchError),
        ([bytes([WIRE_VERSION, 1]) + msgpack.packb([{}, [["<f8", 1]]])], codec.ArrayMismatchError),
        ([bytes([WIRE_VERSION, 1]) + b"\xc1" * (MAX_HEADER_BYTES + 1)], codec.BoundExceededError),
        ([b"\x01\x01"] * (MAX_ARRAYS + 3), codec.BoundExceededError),
        ([np.zeros((4, 4))[:, 1]], codec.MalformedFrameError),
    ],
)
def test_what_is_no_message_is_refused(frames, error):
    with pytest.raises(error):
        decode(frames)


def test_nesting_is_bounded():
    deep: object = 1
    for _ in range(80):
        deep = [deep]
    with pytest.raises(codec.BoundExceededError, match="64 deep"):
        decode([bytes([WIRE_VERSION, 1]) + msgpack.packb([{"a": deep}, []])])
    for opener in (b"\x91", b"\x81\xa1a"):
        with pytest.raises(codec.WireError):
            decode([bytes([WIRE_VERSION, 1]) + opener * 20_000])


def test_mutated_messages_are_refused_or_decoded_but_never_crash():
    report: FuzzReport = fuzz(num_mutations=8_000, rng=random.Random(0))
    assert report.num_mutations == 8_000
    assert report.crashes == []
    assert report.num_refused > 4_000
    assert report.num_decoded > 40
    assert report.worst_ms < 200  # a loaded machine; scripts/fuzz_codec.py prints the real figure
