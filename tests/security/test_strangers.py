"""Peers without the right key, that ask for more than theirs gives, or never read; a run's open ports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from rlzmq.core.addresses import split_tcp
from rlzmq.net.keys import JoinFile, KeyPair
from rlzmq.roles.remote_peer import Conversation, Observer
from rlzmq.wire.codec import WireMessage
from rlzmq.wire.messages import (
    ConfigRequest,
    ConnectorState,
    Hello,
    OpenUpdate,
    Rejected,
    Reset,
    SnapshotRequest,
    Status,
    StatusRequest,
    UpdateDone,
    Weights,
    Welcome,
    encode_message,
)
from tests.security.floods import client, peak_bytes, unfinished_parts
from tests.security.strangers import KINDS, knock, wrong_keys
from tests.support.runs import assert_accounted, listening, until

Run = tuple[Any, JoinFile, JoinFile]
"""A run that listens, the join file of its runners and that of its observers."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    tmp_path = tmp_path_factory.mktemp("run")
    with listening(tmp_path, num_env_runners=1).build() as algo:
        yield algo, JoinFile.read(tmp_path / "join.toml"), JoinFile.read(tmp_path / "join.observer.toml")


def status_of(observer: JoinFile) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        async with Observer(observer.addresses["data"], observer) as looking:
            return await looking.status()

    return asyncio.run(ask())


def num_turned_away(status: dict[str, Any]) -> int:
    door = status["connections"]
    return int(door["opened"] - door["let_in"])


@pytest.mark.parametrize("kind", list(KINDS))
def test_strangers_learn_nothing_and_training_goes_on(kind: str, run: Run) -> None:
    algo, join, observer = run
    before = num_turned_away(status_of(observer))
    with ThreadPoolExecutor() as doors:  # a silent one is let stand for seconds at each
        all_heard = doors.map(lambda address: knock(*split_tcp(address), kind), join.addresses.values())
    for heard in all_heard:
        assert len(heard) < 256, "no more than a greeting and an error"
    result = algo.train()
    assert_accounted(result)
    until(lambda: num_turned_away(status_of(observer)) >= before + len(join.addresses))


@pytest.mark.parametrize("knows_server", [True, False])
def test_unknown_and_missing_keys_are_refused_and_counted(knows_server: bool, run: Run) -> None:
    algo, join, observer = run
    before = status_of(observer)["connections"]
    assert not wrong_keys(join.addresses["data"], join.server_public_key if knows_server else None)
    assert not wrong_keys(join.addresses["data"], KeyPair.generate().public), "of another server"
    algo.train()
    after = status_of(observer)["connections"]
    if knows_server:
        assert after["refused_keys"]["unknown key"] > before["refused_keys"].get("unknown key", 0)
    else:
        num_before = sum(before["failed_handshakes"].values())
        until(lambda: sum(status_of(observer)["connections"]["failed_handshakes"].values()) > num_before)


async def _answers(
    join: JoinFile, hello: Hello, messages: list[tuple[WireMessage, tuple[Any, ...]]]
) -> list[Any]:
    answers = []
    async with Conversation(join.addresses["data"], join) as conversation:
        await conversation.ask(hello, Welcome, timeout_s=10)
        for message, payload in messages:
            conversation._socket.send(encode_message(message, payload))
            async with asyncio.timeout(10):
                while not isinstance((answer := (await conversation._received.get())[0]), Rejected):
                    pass
            answers.append(answer)
    return answers


def test_a_runners_key_gives_a_runners_rights_only(run: Run) -> None:
    algo, join, observer = run
    before = status_of(observer)
    hello = Hello("runner", "runner-x@elsewhere", "u1", num_envs=1)
    forbidden: list[tuple[WireMessage, tuple[Any, ...]]] = [
        (Weights(10**6, 10**6), (b"x" * 100,)),
        (OpenUpdate(0, 1, 1, 0), ()),
        (ConnectorState(10**6), (b"x",)),
        (Reset(10**6, 0), ()),
        (UpdateDone(0, 0, 0, 0, True, 1), (b"", b"", b"")),
    ]
    answers = asyncio.run(_answers(join, hello, forbidden))
    assert [answer.reason for answer in answers] == ["role"] * len(forbidden)
    result = algo.train()
    assert_accounted(result)
    after = status_of(observer)
    assert after["refused"]["role"] == before["refused"].get("role", 0) + len(forbidden)
    assert after["weights"][1] < 10**6


@pytest.mark.parametrize(
    "hello",
    [
        Hello("learner", "learner-0", "u2", generation=10**6, rank=0, num_ranks=1),
        Hello("driver", "driver", "u3"),
        Hello("runner", "runner-0", "u4", num_envs=1, incarnation=10**6),  # a local runner's name
    ],
)
def test_a_runners_key_opens_no_other_door(hello: Hello, run: Run) -> None:
    algo, join, observer = run
    before = status_of(observer)

    async def ask() -> bool:
        async with Conversation(join.addresses["data"], join) as conversation:
            try:
                await conversation.ask(hello, Welcome, timeout_s=0.7)
            except ConnectionError:
                return False
            return True

    assert not asyncio.run(ask())
    assert_accounted(algo.train())
    after = status_of(observer)
    assert after["refused"]["key"] > before["refused"].get("key", 0)
    assert len(after["learners"]) == len(before["learners"])
    assert "runner-0" in [runner["name"] for runner in after["runners"]]


def test_garbage_under_a_valid_key_is_refused_and_counted(run: Run) -> None:
    algo, join, observer = run

    async def speak() -> None:
        async with Conversation(join.addresses["data"], join) as conversation:
            await conversation.ask(Hello("runner", "runner-y@z", "u5", num_envs=1), Welcome, timeout_s=10)
            for frames in ([b""], [b"\x01"], [b"\xff" * 70_000], [b"\x01\x12\xc1"], [b"\x01"] * 2000):
                conversation._socket.send(frames)
            await conversation.ask(StatusRequest(), Status, timeout_s=10)  # answered after all of that

    before = sum(status_of(observer)["refused"].values())
    asyncio.run(speak())
    assert_accounted(algo.train())
    assert sum(status_of(observer)["refused"].values()) >= before + 5


_FLOOD_S = 1.5
_MIB = 1 << 20


@pytest.fixture(scope="module")
def large_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Any, JoinFile, JoinFile, psutil.Process]]:
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


_SNAPSHOT = encode_message(SnapshotRequest(-1, -1))


@pytest.mark.parametrize(
    ("role", "hello", "frames"),
    [
        ("observer", None, encode_message(ConfigRequest())),
        pytest.param(
            "observer",
            Hello("observer", "flood", "flood"),
            encode_message(StatusRequest()),
            marks=pytest.mark.slow,
        ),
        ("runner", Hello("runner", "flood@elsewhere", "flood", num_envs=1), _SNAPSHOT),
    ],
    ids=["config without hello", "status", "snapshots"],
)
def test_who_asks_and_never_reads_takes_a_bounded_memory(
    role: str,
    hello: Hello | None,
    frames: list[Any],
    large_run: tuple[Any, JoinFile, JoinFile, psutil.Process],
) -> None:
    algo, join, observer, broker = large_run
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


def listeners() -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which this process or a descendant listens."""
    family = [psutil.Process(os.getpid()), *psutil.Process(os.getpid()).children(recursive=True)]
    found = set()
    for process in family:
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN:
                found.add((connection.laddr.ip, connection.laddr.port))
    return found


@pytest.mark.parametrize(("num_learners", "listens"), [(1, False), (2, False), (0, True)])
def test_a_run_opens_what_it_needs(num_learners: int, listens: bool, tmp_path: Path) -> None:
    """Nothing for one learner, loopback's ports for two, and the two keyed ones where asked."""
    where = {} if listens else {"listen": None, "join_file": None}
    config = listening(tmp_path, num_env_runners=1, batch=120, **where)
    others = listeners()  # of the run that strangers talk to
    with config.learners(num_learners=num_learners).build() as algo:
        algo.train()
        found = listeners() - others
        keeper: Any = algo._async.session.pipeline._broker
        asked = {address.rpartition(":")[2] for address in keeper.remote_addresses.values()}
    assert {address for address, _ in found} <= {"127.0.0.1", "::1"}
    assert num_learners != 1 or not found
    assert not listens or {str(port) for _, port in found} == asked
