"""One attempt to form the learner group, and what its supervisor makes of it; ranks without processes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlzmq.actors.exit_status import ExitStatus
from rlzmq.core.errors import PeerLostError
from rlzmq.driver.learner_supervision import LearnerSupervisor
from rlzmq.protocol.supervision import RestartPolicy
from rlzmq.roles.learner.formation import form_group


class FakeRank:
    """Answers as it is told; `rejoin` waits until the test says what comes of it."""

    pid = -1

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

    def die(self) -> None:
        self.exited.set_result(ExitStatus(None, 9))

    async def kill_hanging(self) -> None:
        self.die()

    def kill(self) -> None:
        if not self.exited.done():
            self.die()


async def never_hangs(handle: Any, what: str, *, is_certain: bool) -> bool:
    return False


async def test_the_first_death_calls_off_all_others() -> None:
    ranks = [FakeRank(place) for place in range(3)]
    ranks[1].rejoined.set_exception(PeerLostError("learner-1 was killed"))
    with pytest.raises(PeerLostError, match="learner-1 was killed"):
        async with asyncio.timeout(5):
            await form_group(ranks, "store", 1, end_if_hanging=never_hangs, deadline_s=60)
    assert [rank.was_called_off for rank in ranks] == [True, False, True]


async def test_an_error_of_the_users_comes_before_its_consequences() -> None:
    ranks = [FakeRank(place) for place in range(2)]
    ranks[0].rejoined.set_exception(PeerLostError("peer closed"))
    ranks[1].rejoined.set_exception(KeyError("mine"))
    with pytest.raises(KeyError, match="mine"):
        await form_group(ranks, "store", 1, end_if_hanging=never_hangs, deadline_s=60)


@pytest.mark.parametrize("is_certain", [False, True])
async def test_who_hangs_is_ended_and_the_others_called_off(
    is_certain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlzmq.roles.learner.formation._LOOK_EVERY_S", 0.01)
    ranks = [FakeRank(place) for place in range(2)]
    asked = []

    async def end_if_hanging(handle: Any, what: str, *, is_certain: bool) -> bool:
        asked.append((handle.name, is_certain))
        return handle.name == "learner-1"

    with pytest.raises(PeerLostError, match="learner-1 hung while the learner group was formed"):
        await form_group(
            ranks, "store", 1, end_if_hanging=end_if_hanging, deadline_s=0.0 if is_certain else 60.0
        )
    assert sorted(asked) == [("learner-0", is_certain), ("learner-1", is_certain)]
    assert all(rank.was_called_off for rank in ranks)


def supervisor(
    form: Callable[[list[FakeRank]], None], **settings: Any
) -> tuple[LearnerSupervisor, list[FakeRank]]:
    config = SimpleNamespace(
        restart_failed_learners=True, min_learners=1, learner_timeout_s=60.0, num_gpus_per_learner=0
    )
    for name, value in settings.items():
        setattr(config, name, value)

    async def spawn(place: int, incarnation: int) -> FakeRank:
        return FakeRank(place)

    async def try_to_form(handles: list[FakeRank], registers: bool = True) -> None:
        form(handles)

    handles: list[FakeRank] = []
    return LearnerSupervisor(config, handles, spawn, try_to_form), handles


async def test_ranks_that_live_and_never_come_together_end_the_run_with_the_reason() -> None:
    attempts = []

    def form(handles: list[FakeRank]) -> None:
        attempts.append(len(handles))
        raise PeerLostError("connect timeout [10.0.0.7]:4711")

    group, _ = supervisor(form)
    with pytest.raises(
        PeerLostError, match=r"5 attempts in a row.*connect timeout \[10.0.0.7\]:4711.*GLOO_SOCKET_IFNAME"
    ):
        await group.begin(2)
    assert attempts == [2] * 5
    await group.stop()


@pytest.mark.parametrize("doomed", [[0], [1], [0, 1]])
async def test_who_dies_in_the_first_forming_is_replaced_in_it(doomed: list[int]) -> None:
    first = True

    def form(handles: list[FakeRank]) -> None:
        nonlocal first
        if first:
            first = False
            for rank in doomed:
                handles[rank].die()
            raise PeerLostError("a peer died")

    group, handles = supervisor(form)
    async with asyncio.timeout(10):
        await group.begin(2)
    assert len(handles) == 2
    assert not any(rank.exited.done() for rank in handles)
    assert group.num_rollbacks == 0
    assert group.num_restarts == len(doomed)
    await group.stop()


async def test_a_replacement_that_always_dies_while_forming_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def form(handles: list[FakeRank]) -> None:
        deaths.extend(rank for rank in handles if rank.name == "learner-1")
        if deaths and deaths[-1] in handles:
            deaths[-1].die()
            raise PeerLostError("a peer died")

    policy = RestartPolicy(max_restarts=5, window_s=math.inf, first_delay_s=1e-3, max_delay_s=1e-3)
    monkeypatch.setattr("rlzmq.driver.learner_supervision._POLICY", policy)
    deaths: list[FakeRank] = []
    group, handles = supervisor(form)
    async with asyncio.timeout(10):
        await group.begin(2)
    assert [rank.name for rank in handles] == ["learner-0"]
    assert len(deaths) == 6
    await group.stop()


class StoppedRank(FakeRank):
    """Its process was stopped by a signal, until it is continued."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.pid = 4711 + place
        self.is_stopped = True

    def send_signal(self, number: int) -> None:
        asyncio.get_running_loop().call_later(0.05, setattr, self, "is_stopped", False)


@pytest.mark.parametrize("num_stopped", [1, 2])
async def test_of_stopped_ranks_the_last_one_is_continued(
    num_stopped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [StoppedRank(place) for place in range(num_stopped)]

    def stopped(pid: int) -> bool:
        return any(rank.pid == pid and rank.is_stopped for rank in ranks)

    monkeypatch.setattr("rlzmq.driver.process_health.is_stopped", stopped)
    monkeypatch.setattr("rlzmq.driver.learner_supervision.is_stopped", stopped)
    group, handles = supervisor(lambda handles: None)
    await group.begin(2)
    handles[1].die()
    handles[:num_stopped] = ranks
    ended = await asyncio.gather(*(group.end_if_hanging(rank, "a test") for rank in ranks))
    assert sum(ended) == num_stopped - 1
    assert [rank.exited.done() for rank in ranks] == ended
    (spared,) = [rank for rank in ranks if not rank.exited.done()]
    assert not spared.is_stopped
    await group.stop()
