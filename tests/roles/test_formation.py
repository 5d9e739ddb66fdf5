"""One attempt to form the learner group, its supervisor and where ranks meet; ranks without processes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from rlzmq.actors.process_state import ExitStatus
from rlzmq.core import patience
from rlzmq.core.errors import PeerLostError
from rlzmq.driver.formation import LearnerFormation, form_group
from rlzmq.driver.join_files import at_host
from rlzmq.driver.supervision import Place, Supervisor
from rlzmq.roles.learner_role import guarded_connections, interface_for
from tests.support.runs import until_async


class FakeRank:
    """Answers as it is told; `rejoin` waits until the test says what comes of it."""

    pid = -1
    why_killed = ""

    def __init__(self, place: int) -> None:
        self.name = f"learner-{place}"
        self.exited: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.rejoined: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.was_called_off = False

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        if method != "rejoin":
            return 0
        try:
            return await self.rejoined
        except asyncio.CancelledError:
            self.was_called_off = True
            raise

    async def set_state(self, state: Any) -> None:
        if state.pop() == "kills":
            self.die()
            raise PeerLostError("it died")

    def die(self) -> None:
        self.exited.set_result(ExitStatus(None, 9))

    @property
    def is_ending(self) -> bool:
        return self.exited.done()

    def kill_hanging(self, why: str) -> None:
        self.kill(why)

    def kill(self, why: str = "") -> None:
        if not self.exited.done():
            self.why_killed = why
            self.die()


async def test_who_does_not_answer_in_time_is_ended_and_the_others_called_off() -> None:
    ranks = [FakeRank(place) for place in range(2)]
    ranks[0].rejoined.set_result(0)
    with pytest.raises(PeerLostError, match="learner-1 did not answer"):
        await form_group(ranks, "store", 1, deadline_s=0.01)
    assert ranks[1].was_called_off
    assert [rank.is_ending for rank in ranks] == [False, True]


def formation(form: Callable[[list[FakeRank]], None]) -> LearnerFormation:
    config = SimpleNamespace(restart_failed_learners=True, min_learners=1)

    async def spawn(place: Place) -> FakeRank:
        return FakeRank(place.index)

    async def try_to_form(handles: list[FakeRank], registers: bool = True) -> None:
        form(handles)
        await asyncio.sleep(0.001)

    supervisor = Supervisor(spawn, setting="restart_failed_learners", is_on=True, may_go_on=True)
    return LearnerFormation(config, supervisor, try_to_form)


async def test_ranks_that_live_and_never_come_together_end_the_run_with_the_reason() -> None:
    attempts = []

    def form(handles: list[FakeRank]) -> None:
        attempts.append(len(handles))
        raise PeerLostError("connect timeout [10.0.0.7]:4711")

    group = formation(form)
    with pytest.raises(PeerLostError, match="5 attempts in a row"):
        await group.begin(2)
    assert attempts == [2] * 5
    await group.stop()


async def test_a_replacement_that_always_dies_while_forming_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def form(handles: list[FakeRank]) -> None:
        deaths.extend(rank for rank in handles if rank.name == "learner-1")
        if deaths and deaths[-1] in handles:
            deaths[-1].die()
            raise PeerLostError("a peer died")

    monkeypatch.setattr(patience, "FIRST_DELAY_S", 1e-4)
    deaths: list[FakeRank] = []
    group = formation(form)
    async with asyncio.timeout(10):
        await group.begin(2)
    assert [rank.name for rank in group.handles] == ["learner-0"]
    assert len(deaths) == 11
    await group.stop()


async def test_a_replacement_that_dies_while_it_loads_the_last_copy_is_replaced_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "FIRST_DELAY_S", 1e-4)
    group = formation(lambda handles: None)
    await group.begin(1)
    first, group.last_resort, group.is_untouched = group.handles[0], ["loads", "kills"], False
    first.die()
    await until_async(lambda: group.failed.done() or (bool(group.handles) and group.handles != [first]))
    await group.wait_formed()
    assert group.last_resort == []
    assert (group.num_rollbacks, group._supervisor.num_restarts) == (1, 2)
    await group.stop()


async def test_a_replacement_that_dies_when_it_has_joined_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_DELAY_S", 1e-4)
    joined: list[FakeRank] = []

    def form(handles: list[FakeRank]) -> None:
        joined.extend(new for new in handles if new.name == "learner-1" and new not in joined)
        if len(joined) == 2:
            joined[1].kill()

    group = formation(form)
    await group.begin(2)
    joined[0].die()
    await until_async(lambda: bool(group._ready()))
    await group.admit()
    await until_async(lambda: joined[1] not in group.handles)
    await group.stop()


def _keepalive(connection: socket.socket) -> tuple[int, int]:
    return (
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    )


def test_connections_made_within_are_guarded_and_others_left_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as before:
            unix, other = socket.socketpair()
            with guarded_connections():
                within = socket.create_connection(address)
            with unix, other, within:
                assert _keepalive(within) == (1, 3000)
                assert _keepalive(before)[0] == 0
                within.sendall(b"still open")
                accepted = [server.accept()[0] for _ in range(2)]
                assert accepted[1].recv(10) == b"still open"
                for connection in accepted:
                    connection.close()


def test_the_interface_is_the_one_on_the_way_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    places = "/tmp/store", "tcp://127.0.0.1:1", at_host("tcp://127.0.0.1:1", "::1")
    assert [interface_for(place) for place in places] == ["lo"] * 3
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and psutil.net_if_stats()[name].isup:
                # What this machine sends to its own address goes through loopback, and has that address as its source.
                assert interface_for(f"tcp://{entry.address}:1") == name
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert interface_for("tcp://127.0.0.1:1") is None
