"""A slow cable: a router of raw frames in user space, with a rate, a delay, losses and a queue, between two interfaces.

    python slow_path.py PORT OTHER --mbit 10 --delay 0.025 --loss 0.01 --queue 1000

Runs in the namespace of the switch; prints "ready" and forwards until it is killed.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import fcntl
import heapq
import random
import select
import socket
import struct
import time
from typing import Any

_ETH_P_ALL, _SIOCETHTOOL = 3, 0x8946
_OFF = {"txcsum": 0x17, "sg": 0x19, "tso": 0x1F, "gso": 0x24, "gro": 0x2C}  # ETHTOOL_S… (linux/ethtool.h)
_OUTGOING = 4


def whole_packets(interface: str) -> None:
    """Let an interface hand over packets as they are on a cable: of its MTU, with checksums."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in _OFF.values():
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(control, _SIOCETHTOOL, request)


def _raw(interface: str) -> socket.socket:
    raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    raw.bind((interface, 0))
    number = socket.if_nametoindex(interface)
    raw.setsockopt(263, 1, struct.pack("iHH8s", number, 1, 0, b""))  # SOL_PACKET, ADD_MEMBERSHIP, PROMISC
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    raw.setblocking(False)
    return raw


def forward(options: argparse.Namespace) -> None:
    """Forward frames both ways; each direction has its own rate and queue."""
    rng = random.Random(options.seed)
    ends = [_raw(options.port), _raw(options.other)]
    free_at, due, count = [0.0, 0.0], [], 0
    queued = [0, 0]
    waiting: list[Any] = due
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, to, frame = heapq.heappop(waiting)
            queued[to] -= 1
            with contextlib.suppress(OSError):
                ends[to].send(frame)
        timeout_s = min(0.5, max(0.0, waiting[0][0] - now)) if waiting else 0.5
        for end in select.select(ends, [], [], timeout_s)[0]:
            to = 1 - ends.index(end)
            for _ in range(64):
                try:
                    frame, address = end.recvfrom(65536)
                except BlockingIOError:
                    break
                if address[2] == _OUTGOING or rng.random() < options.loss or queued[to] >= options.queue:
                    continue
                now = time.monotonic()
                free_at[to] = max(now, free_at[to]) + 8 * len(frame) / (options.mbit * 1e6)
                queued[to] += 1
                count += 1
                heapq.heappush(waiting, (free_at[to] + options.delay, count, to, frame))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port")
    parser.add_argument("other")
    parser.add_argument("--mbit", type=float, default=10.0)
    parser.add_argument("--delay", type=float, default=0.025)
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--queue", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--whole-packets", action="store_true", help="only set up the interface PORT, and end"
    )
    parsed = parser.parse_args()
    if parsed.whole_packets:
        whole_packets(parsed.port)
    else:
        forward(parsed)
