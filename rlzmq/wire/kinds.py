"""Message kinds of the data plane and the base class of the messages."""

from __future__ import annotations

import enum
from typing import ClassVar, TypeAlias

__all__ = ["Kind", "Spans", "WireMessage", "first_number"]

Spans: TypeAlias = tuple[tuple[int, int], ...]


class Kind(enum.IntEnum):
    """The second byte of a message."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    GOODBYE = 4
    BROKER_BEAT = 5
    RUNNER_STATE = 6
    LEARNER_STATE = 7
    DRIVER_STATE = 8
    LEASE = 16
    LEASE_RETURNED = 17
    FRAGMENT = 18
    ACCEPTED = 19
    COMMITTED = 20
    REJECTED = 21
    SHARD_PLAN = 32
    SHARD = 33
    SHARD_READY = 34
    SHARD_REFUSED = 35
    TRAIN = 36
    UPDATE_DONE = 37
    UPDATE_COMMITTED = 38
    WEIGHTS = 48
    SNAPSHOT_REQUEST = 49
    SNAPSHOT = 50
    PUBLICATION = 51  # on PUB only, see rlzmq.protocol.weights
    CONNECTOR_STATE = 52
    OPEN_UPDATE = 64
    UPDATE_REPORT = 65
    PROGRESS = 66
    NOTICE = 67
    PAUSE = 68
    RESUME = 69
    RESET = 70
    CONFIG = 71
    CONFIG_REQUEST = 72
    STATUS_REQUEST = 73
    STATUS = 74


# Attempts and lease ids never repeat across restarts of the broker: the bits above these hold its
# incarnation, which must increase (e.g. milliseconds of its start).
_COUNTER_BITS = 20


def first_number(broker_incarnation: int) -> int:
    """Return the first attempt number and lease id of a broker incarnation (< 2**42)."""
    return (broker_incarnation << _COUNTER_BITS) + 1


class WireMessage:
    """Base of the message dataclasses."""

    __slots__ = ()
    kind: ClassVar[Kind]
