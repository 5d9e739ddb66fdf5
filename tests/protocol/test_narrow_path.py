"""A path that loses large messages is recognized by what is repeated without one in between."""

from __future__ import annotations

from rlzmq.protocol.peer_core import Retries


def test_the_tries_of_one_peer_in_a_row_are_counted_and_reported_once() -> None:
    retries = Retries(3)
    assert [retries.try_again("a") for _ in range(5)] == [False, False, True, False, False]
    assert not retries.try_again("b")


def test_a_large_message_begins_the_count_again() -> None:
    retries = Retries(2)
    retries.try_again("a")
    retries.passed("a")
    assert not retries.try_again("a")
