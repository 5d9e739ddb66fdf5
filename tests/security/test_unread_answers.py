"""Clients with a valid key that ask and never read, or come under ever new names: bounded, counted, trained past."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
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
from tests.security.floods import peak_bytes, unfinished_parts
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
        yield (
            algo,
            JoinFile.read(tmp_path / "join.toml"),
            JoinFile.read(tmp_path / "join.observer.toml"),
            broker,
        )


def _client(context: zmq.Context[Any], join: JoinFile, routing_id: bytes) -> zmq.Socket[bytes]:
    """Takes no more than the system's buffers hold; nobody reads it."""
    client = context.socket(zmq.DEALER)
    client.set(zmq.LINGER, 0)
    client.set(zmq.RCVHWM, 1)
    client.set(zmq.ROUTING_ID, routing_id)
    client.set(zmq.SNDTIMEO, 50)
    keys = join.curve()
    assert keys is not None
    keys.apply(client)
    client.connect(join.addresses["data"])
    return client


def _flood(join: JoinFile, messages: Callable[[int], list[Any]], hello: Hello | None = None) -> int:
    """Send for a while: how many went out."""
    context: zmq.Context[Any] = zmq.Context()
    client = _client(context, join, b"flood")
    num = 0
    try:
        if hello is not None:
            client.send_multipart(encode_message(hello))
        deadline = time.monotonic() + _FLOOD_S
        while time.monotonic() < deadline:
            with contextlib.suppress(zmq.Again):
                client.send_multipart(messages(num))
                num += 1
        return num
    finally:
        client.close(0)
        context.term()


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
    num = _flood(join if role == "runner" else observer, lambda _: frames, hello)
    assert num > 1000
    grown = broker.memory_info().rss - before
    assert grown < 32 * _MIB, f"{num} requests, {grown / _MIB:.0f} MiB more"
    assert_accounted(algo.train())
    if frames is not _SNAPSHOT:  # of these only the newest waits: nothing is over the budget
        assert status_of(observer)["refused"]["overrun"] > 0
    assert algo._async.session.pipeline._broker.num_restarts == 0


@pytest.mark.parametrize("is_one_connection", [True, False])
def test_ever_new_names_are_remembered_up_to_a_number(
    is_one_connection: bool, run: tuple[Any, JoinFile, JoinFile, psutil.Process]
) -> None:
    algo, join, observer, broker = run
    before, restarts = broker.memory_info().rss, algo._async.session.pipeline._broker.num_restarts
    told_before = len(algo._async.session.pipeline._reader._reported)

    def message(number: int) -> list[Any]:
        name = f"flood-{number}-{is_one_connection}"
        return encode_message(Hello("runner", f"{name}@elsewhere", name, num_envs=1, first_unacked=7))

    if is_one_connection:
        assert _flood(join, message) > 1000
    else:
        context: zmq.Context[Any] = zmq.Context()
        clients = []
        deadline = time.monotonic() + _FLOOD_S
        while time.monotonic() < deadline and len(clients) < 200:
            clients.append(_client(context, join, b"flood-%d" % len(clients)))
            clients[-1].send_multipart(message(len(clients)))
        for client in clients:
            client.close(0)
        context.term()
    for _ in range(2):
        assert_accounted(algo.train())
    status = status_of(observer)
    assert len(status["runners"]) <= 2
    assert broker.memory_info().rss - before < 32 * _MIB
    assert algo._async.session.pipeline._broker.num_restarts == restarts
    if is_one_connection:
        assert status["refused"]["identity"] > 100
    assert len(algo._async.session.pipeline._reader._reported) <= told_before + 2


def test_a_flood_ends_at_the_limit_with_its_connection_or_with_the_broker(tmp_path: Path) -> None:
    config = listening(tmp_path, num_env_runners=1).fault_tolerance(broker_memory_limit_bytes=400 * _MIB)
    with config.build() as algo:
        algo.train()
        keeper = algo._async.session.pipeline._broker
        assert unfinished_parts(JoinFile.read(tmp_path / "join.toml"), 450 * _MIB)
        assert_accounted(algo.train())
        assert_accounted(algo.train())
        assert peak_bytes(keeper.handle.pid) < 450 * _MIB
