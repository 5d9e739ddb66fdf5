"""Clients with a valid key that ask and never read: bounded, counted, trained past."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from rlzmq.net.keys import JoinFile
from rlzmq.wire.messages import (
    ConfigRequest,
    Hello,
    SnapshotRequest,
    StatusRequest,
    encode_message,
)
from tests.security.floods import client, peak_bytes, unfinished_parts
from tests.security.test_strangers import status_of
from tests.support.runs import assert_accounted, listening

_FLOOD_S = 1.5
_MIB = 1 << 20


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, JoinFile, JoinFile, psutil.Process]]:
    tmp_path = tmp_path_factory.mktemp("run")
    config = listening(tmp_path, num_env_runners=1).rl_module(model_config={"fcnet_hiddens": [400, 400]})
    with config.build() as algo:
        algo.train()
        broker = psutil.Process(algo._async.session.pipeline._broker.handle.pid)
        joins = (JoinFile.read(tmp_path / name) for name in ("join.toml", "join.observer.toml"))
        yield algo, *joins, broker


def _flood(join: JoinFile, frames: list[Any], hello: Hello | None) -> int:
    """Ask for a while and read nothing, so that no more is taken than the system's buffers hold: how many went out."""
    num = 0
    with client(join, b"flood", receive_high_water_mark=1) as own:
        own.set(zmq.SNDTIMEO, 50)
        if hello is not None:
            own.send_multipart(encode_message(hello))
        deadline = time.monotonic() + _FLOOD_S
        while time.monotonic() < deadline:
            with contextlib.suppress(zmq.Again):
                own.send_multipart(frames)
                num += 1
    return num


_RUNNER = Hello("runner", "flood@elsewhere", "flood", num_envs=1)
_OBSERVER = Hello("observer", "flood", "flood")
_CONFIG = encode_message(ConfigRequest())
_SNAPSHOT = encode_message(SnapshotRequest(-1, -1))
_STATUS = encode_message(StatusRequest())


@pytest.mark.parametrize(
    ("role", "hello", "frames"),
    [
        ("observer", None, _CONFIG),
        ("observer", _OBSERVER, _STATUS),
        ("runner", _RUNNER, _SNAPSHOT),
    ],
    ids=["config without hello", "status", "snapshots"],
)
def test_who_asks_and_never_reads_takes_a_bounded_memory(
    role: str,
    hello: Hello | None,
    frames: list[Any],
    run: tuple[Any, JoinFile, JoinFile, psutil.Process],
) -> None:
    algo, join, observer, broker = run
    before = broker.memory_info().rss
    num = _flood(join if role == "runner" else observer, frames, hello)
    assert num > 1000
    grown = broker.memory_info().rss - before
    assert grown < 32 * _MIB, f"{num} requests, {grown / _MIB:.0f} MiB more"
    assert_accounted(algo.train())
    if frames is not _SNAPSHOT:  # of these only the newest waits: nothing is over the budget
        assert status_of(observer)["refused"]["overrun"] > 0
    assert algo._async.session.fault_tolerance()["num_broker_restarts"] == 0


def test_a_flood_ends_at_the_limit_with_its_connection_or_with_the_broker(tmp_path: Path) -> None:
    config = listening(tmp_path, num_env_runners=1).fault_tolerance(broker_memory_limit_bytes=400 * _MIB)
    with config.build() as algo:
        algo.train()
        keeper = algo._async.session.pipeline._broker
        assert unfinished_parts(JoinFile.read(tmp_path / "join.toml"), 450 * _MIB)
        assert_accounted(algo.train())
        assert_accounted(algo.train())
        assert peak_bytes(keeper.handle.pid) < 450 * _MIB
