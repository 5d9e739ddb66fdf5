"""Peers without the right key, and peers that ask for more than their key gives: refused, counted, trained past."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rlzmq.core.addresses import split_tcp
from rlzmq.net.keys import JoinFile, KeyPair
from rlzmq.roles.remote_peer import Conversation, Observer
from rlzmq.wire.codec import WireMessage
from rlzmq.wire.messages import (
    ConnectorState,
    Hello,
    OpenUpdate,
    Rejected,
    Reset,
    Status,
    StatusRequest,
    UpdateDone,
    Weights,
    Welcome,
    encode_message,
)
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
        (UpdateDone(0, 0, 0, 0, 1, True, 1), (b"", b"", b"")),
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
