"""Mutates valid messages and opens what comes out as its receiver does: refused, or decoded, but never a crash."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import msgpack  # type: ignore[import-untyped]
import numpy as np

from rlzmq import PPOConfig
from rlzmq.core.errors import ProtocolError
from rlzmq.driver.driver_link import MetaCheck
from rlzmq.episodes.episode_batch import EpisodeBatch
from rlzmq.episodes.multi_agent_episode import MultiAgentEpisode
from rlzmq.episodes.single_agent_episode import SingleAgentEpisode
from rlzmq.net.socket import pack_frames, sizes_of, unpack_frames
from rlzmq.roles.learner_link import BatchCheck, form_of
from rlzmq.wire import messages as m
from rlzmq.wire.codec import decode, encode, new_publication_buffer, open_publication, seal_publication
from rlzmq.wire.payloads import (
    FragmentRange,
    decode_fragment,
    encode_fragment,
    join_frames,
    pack_blob,
    pack_ranges,
    pack_value,
    split_frames,
    unpack_blob,
    unpack_ranges,
    unpack_value,
)


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


def delivered(frames: list[Any]) -> list[bytes]:
    """As a socket delivers them."""
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
    fragment = m.Fragment("runner-uuid", 1, 7, 3, 400, 1, 2, {"columns": ["obs"], "lengths": [1] * 10})
    arrays = [np.zeros((8, 51, 4), np.float32), np.arange(8), np.array(["ab", "c"]), np.zeros((0, 3))]
    ranges = [FragmentRange(m.FragmentId(f"runner-{i}", 1, i), 0, 10) for i in range(5)]
    buffer = new_publication_buffer(1000)
    seal_publication(buffer, run_id="run", generation=1, version=2, layout_digest="ab" * 32)
    typed = [
        m.Hello("runner", "runner-0", "uuid", num_envs=8),
        m.Lease(3, 50, 1, 2, False, -1, 30.0, ((1, 3),)),
        m.RunnerState(0, ((1, 2),), (7, 8), True, -1, 10),
        m.Committed(1, 5, ((7, 9),)),
        m.OpenUpdate(3, 500, 2, 3),
        m.Progress(2, -1, -1),
        m.LearnerState(1, 5, (5,), (7,), (2,), (1,), 9),
        m.Shard(1, 2, 3, 1, 0, m.FragmentId("runner", 1, 2), 0, 50),
    ]
    packed = [b"header", b"column" * 9, bytes(9000)], [b"another", b""]
    cases: list[tuple[list[bytes], Decoder]] = [
        (delivered(encode(5, {"call": "step"}, pack_value(value))), lambda f: unpack_value(decode(f).arrays)),
        ([pack_blob(value)], lambda f: unpack_blob(f[0])),
        (delivered(encode_fragment(fragment, arrays, {"return": 1.0})), decode_fragment),
        (delivered(encode_fragment(fragment, arrays, {"return": 1.0})), m.decode_message),
        (delivered(pack_ranges(ranges)), unpack_ranges),
        ([join_frames([b"abc", b"", b"x" * 50])], lambda f: split_frames(f[0])),
        ([buffer.tobytes()], lambda f: open_publication(f[0])),
        (pack_frames([(frames, sizes_of(frames)) for frames in packed]), unpack_frames),
    ]
    cases += fragment_cases()
    for message in typed:
        cases.append((delivered(m.encode_message(message, (b"payload",))), m.decode_message))
    for frames, decoder in cases:
        decoder(frames)
    return cases


def fragment_cases() -> list[tuple[list[bytes], Decoder]]:
    """Whole fragments of one agent and of several, opened as a learner opens them, and what runners say of them."""
    single = EpisodeBatch.from_episodes([_episode(5), _episode(3)])
    single.initial_state = {"h": np.zeros((2, 3), np.float32)}
    single.infos = {1: {"x": 1, "nested": {"array": np.arange(3), "tuple": (1, "a")}}, 4: {"text": "info"}}
    single.custom_data = {0: {"note": [1.5, None]}}
    metrics = {"returns": [1.0], "lengths": [5], "durations_s": [0.1]}
    single.meta = {"num_env_steps": 8, "episode_metrics": metrics, "worker_index": 1}
    episode = MultiAgentEpisode(agent_to_module_mapping_fn=lambda agent_id, _: f"of_{agent_id}")
    episode.add_env_reset(observations={"a": 0, 1: 1}, infos={"a": {"x": 1}})
    for _ in range(3):
        episode.add_env_step({"a": 0, 1: 1}, {"a": 1, 1: 0}, {"a": 1.0, 1: 0.5}, {"a": {"y": [1]}})
    several = EpisodeBatch.from_episodes([episode])
    return [*_of_batch(single), *_of_batch(several)]


def _episode(length: int) -> SingleAgentEpisode:
    episode = SingleAgentEpisode()
    observation = {"box": np.zeros(2, np.float32), "choice": 1, "pair": (np.zeros((2, 2), np.uint8), 0.5)}
    episode.add_env_reset(observation)
    for _ in range(length):
        outputs = {"logits": np.zeros(2, np.float32), "state_out": {"h": np.zeros(3, np.float32)}}
        episode.add_env_step(observation, 1, 1.0, extra_model_outputs=outputs)
    return episode


def _of_batch(batch: Any) -> list[tuple[list[bytes], Decoder]]:
    header, arrays = batch.to_wire()
    fragment = m.Fragment("uuid", 1, 5, 9, batch.num_env_steps, 0, 3, header)
    frames = delivered(encode_fragment(fragment, arrays, batch.meta))
    check = BatchCheck()
    check.expect({"default_policy": gym.spaces.Discrete(2), "of_a": gym.spaces.Discrete(2)})

    def open_whole(damaged: list[bytes]) -> None:
        header, arrays, _ = decode_fragment(damaged)
        opened = type(batch).from_wire(header.batch, arrays)
        assert len(opened.get_returns()) == len(opened)
        half = opened.slice_steps(opened.num_env_steps // 2, opened.num_env_steps)
        for episode in (*opened, *half):
            episode.validate()
            episode.get_infos()
        try:
            check.check(opened)
            form_of(opened)
        except ValueError as error:
            raise ProtocolError(str(error)) from None

    def open_meta(damaged: list[bytes]) -> None:
        blob = decode_fragment(damaged)[2]
        try:
            metas.open(blob, is_trusted=False)
        except ValueError as error:
            raise ProtocolError(str(error)) from None

    config = PPOConfig().environment("CartPole-v1").networking(listen="tcp://127.0.0.1:0")
    space = config.single_spaces()
    metas = MetaCheck(config, {"__env_single__": space, "__env__": space})
    return [*[(frames, open_whole)] * 3, (frames, open_meta)]


_INTERESTING = bytes.fromhex("00 01 7f 80 8f 90 9f c0 c1 c4 c7 c9 cf d3 db dd df ff")


_VALUES: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, math.nan, math.inf, 1e308),
    *(
        "",
        "x" * 300,
        "obs",
        "rewards",
        "<f4",
        "|O",
        "|S1",
        "<M8[ns]",
        b"",
        b"\xff" * 9,
        [],
        {},
        [[]],
        [None, None],
    ),
    *(
        {"__tuple__": [1]},
        {"__int__": "9" * 999},
        {"__dict__": [[1, 2]]},
        {"__dict__": []},
        {"__array__": [0]},
    ),
    *(
        {"__array__": ["<f4", [0, 2**40], b""]},
        {"__scalar__": ["<f8", [], b"\xff" * 8]},
        {"__numbers__": [0]},
    ),
]


def mutate_header(frames: list[bytes], rng: random.Random) -> list[bytes]:
    """One or two values of a msgpack map, which one of the frames is, replaced, moved, doubled or left out."""
    frames = list(frames)
    found = [place for place in range(min(len(frames), 12)) if _unpacked(frames, place) is not None]
    if not found:
        return mutate(frames, rng)
    place = rng.choice(found)
    prefix, tree = _unpacked(frames, place)
    for _ in range(rng.choice([1, 1, 2])):
        nodes = list(_nodes(tree))
        holder, key = rng.choice(nodes)
        kind = rng.randrange(4)
        if kind == 0 and isinstance(holder, list):
            holder.insert(key, holder[key])
        elif kind == 1:
            del holder[key]
        elif kind == 2:
            other, other_key = rng.choice(nodes)
            holder[key] = copy.deepcopy(other[other_key])
        else:
            holder[key] = copy.deepcopy(rng.choice(_VALUES))
        if not tree:
            break
    frames[place] = prefix + msgpack.packb(tree)
    return frames


def _unpacked(frames: list[bytes], place: int) -> tuple[bytes, Any] | None:
    prefix = frames[place][:2] if place == 0 else b""
    with contextlib.suppress(Exception):
        tree = msgpack.unpackb(frames[place][len(prefix) :], strict_map_key=False)
        if isinstance(tree, list | dict) and tree:
            return prefix, tree
    return None


def _nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, item in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(item, list | dict):
            yield from _nodes(item)


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
        damaged = mutate_header(frames, rng) if rng.random() < 0.4 else mutate(frames, rng)
        report.num_mutations += 1
        start = time.thread_time()
        try:
            decoder(damaged)
        except ProtocolError as error:
            if str(error).startswith("the bytes cannot be decoded"):  # a case that a decoder overlooks
                report.crashes.append(f"{error.__cause__!r}: {damaged!r}"[:500])
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
