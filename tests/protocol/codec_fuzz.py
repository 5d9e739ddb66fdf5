"""Mutates valid messages and decodes what comes out: refused, or decoded, but never a crash."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlzmq.core.errors import ProtocolError
from rlzmq.protocol import messages as m
from rlzmq.protocol.codec import decode, encode
from rlzmq.protocol.fragments import decode_fragment, encode_fragment
from rlzmq.protocol.ranges import FragmentRange, pack_blobs, pack_ranges, unpack_blobs, unpack_ranges
from rlzmq.protocol.values import pack_blob, pack_value, unpack_blob, unpack_value
from rlzmq.protocol.weights import new_publication_buffer, open_publication, seal_publication


@dataclass
class FuzzReport:
    """What a fuzzing run saw."""

    num_mutations: int = 0
    num_refused: int = 0
    num_decoded: int = 0
    worst_ms: float = 0.0
    crashes: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


Decoder = Callable[[list[bytes]], Any]


def _wire(frames: list[Any]) -> list[bytes]:
    return [bytes(memoryview(frame).cast("B")) if memoryview(frame).nbytes else b"" for frame in frames]


def corpus() -> list[tuple[list[bytes], Decoder]]:
    """Valid messages of every shape, each with the decoder that its receiver uses."""
    value = {
        "a": [1, 2.5, None, True, "text", b"bytes", (1, (2,))],
        3: np.arange(5),
        "scalar": np.float32(3),
        "big": 2**100,
        "floats": [float(i) for i in range(100)],
        "large": np.zeros((40, 40)),
    }
    fragment = m.Fragment("runner-uuid", 1, 7, 3, 400, 1, 2, -1, {"columns": ["obs"], "lengths": [1] * 10})
    arrays = [np.zeros((8, 51, 4), np.float32), np.arange(8), np.array(["ab", "c"]), np.zeros((0, 3))]
    ranges = [FragmentRange(m.FragmentId(f"runner-{i}", 1, i), 0, 10) for i in range(5)]
    buffer = new_publication_buffer(1000)
    seal_publication(buffer, run_id="run", generation=1, version=2, layout_digest="ab" * 32)
    typed = [
        m.Hello("runner", "runner-0", "uuid", num_envs=8),
        m.Lease(3, -1, 50, 1, 2, False, -1, 30.0, ((1, 3),)),
        m.RunnerState(0, 5, ((1, 2),), (7, 8), True, 1, 2, -1, 10, 400),
        m.Committed(1, 5, ((7, 9),)),
        m.OpenUpdate(3, 500, 2, 3),
        m.Progress(1, 2, -1, -1, 0, 0, 2, 2, 5, {"sampled": 5}, {"stale": 1}),
        m.LearnerState(1, 5, (5,), (7,), (2,), (1,), 9),
        m.Shard(1, 2, 3, 1, 0, m.FragmentId("runner", 1, 2), 0, 50),
    ]
    cases: list[tuple[list[bytes], Decoder]] = [
        (_wire(encode(5, {"call": "step"}, pack_value(value))), lambda f: unpack_value(decode(f).arrays)),
        ([pack_blob(value)], lambda f: unpack_blob(f[0])),
        (_wire(encode_fragment(fragment, arrays, {"return": 1.0})), decode_fragment),
        (_wire(encode_fragment(fragment, arrays, {"return": 1.0})), m.decode_message),
        (_wire(pack_ranges(ranges)), unpack_ranges),
        (_wire(pack_blobs([b"abc", b"", b"x" * 50])), unpack_blobs),
        ([buffer.tobytes()], lambda f: open_publication(f[0])),
    ]
    for message in typed:
        cases.append((_wire(m.encode_message(message, (b"payload",))), m.decode_message))
    for frames, decoder in cases:
        decoder(frames)
    return cases


_INTERESTING = [
    0x00,
    0x01,
    0x7F,
    0x80,
    0x8F,
    0x90,
    0x9F,
    0xC0,
    0xC1,
    0xC4,
    0xC7,
    0xC9,
    0xCF,
    0xD3,
    0xDB,
    0xDD,
    0xDF,
    0xFF,
]


def mutate(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """One to four small damages to a copy of the frames."""
    frames = list(frames)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        kind = rng.randrange(9)
        if not frames or kind == 0:
            frames.insert(rng.randrange(len(frames) + 1), rng.randbytes(rng.randrange(64)))
            continue
        index = 0 if rng.random() < 0.6 else rng.randrange(len(frames))
        data = bytearray(frames[index])
        at = rng.randrange(len(data)) if data else 0
        if kind == 1 and len(frames) > 1:
            del frames[index]
            continue
        if kind == 2:
            frames.insert(index, frames[rng.randrange(len(frames))])
            continue
        if kind == 3:
            data = data[: rng.randrange(len(data) + 1)]
        elif kind == 4:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 5 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 6 and data:
            data[at] = rng.choice(_INTERESTING)
        elif kind == 7 and data:
            end = min(len(data), at + rng.randrange(1, 9))
            data[at:end] = rng.randbytes(end - at)
        elif data:
            source = rng.randrange(len(data))
            data[at : at + 4] = data[source : source + 4]
        frames[index] = bytes(data)
    return frames


def fuzz(num_mutations: int, rng: random.Random) -> FuzzReport:
    """Decodes so many mutated messages; anything but a ProtocolError is a crash."""
    report = FuzzReport()
    cases = corpus()
    for _ in range(num_mutations):
        frames, decoder = cases[rng.randrange(len(cases))]
        damaged = mutate(frames, rng)
        report.num_mutations += 1
        start = time.thread_time()
        try:
            decoder(damaged)
        except ProtocolError as error:
            report.num_refused += 1
            report.reasons[getattr(error, "reason", "other")] += 1
        except Exception as error:
            report.crashes.append(f"{type(error).__name__}: {error}: {damaged!r}"[:500])
        else:
            report.num_decoded += 1
        took_s = time.thread_time() - start
        if 1000 * took_s > report.worst_ms:
            # What these bytes cost, not the garbage collection that was due just then.
            took_s = min(took_s, *(_seconds(decoder, damaged) for _ in range(3)))
            report.worst_ms = max(report.worst_ms, 1000 * took_s)
    return report


def _seconds(decoder: Decoder, frames: list[bytes]) -> float:
    start = time.thread_time()
    with contextlib.suppress(Exception):
        decoder(frames)
    return time.thread_time() - start
