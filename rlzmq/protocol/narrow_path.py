"""Detection of network paths that let small messages pass and lose large ones. Pure."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["LARGE_BYTES", "NARROW_PATH", "Retries"]

LARGE_BYTES = 1200
"""A message of this size shows that full packets pass, or nearly full ones."""

NARROW_PATH = (
    "connections open and small messages pass, but large ones are lost, again and again. Probably the path drops full "
    "packets because its MTU is smaller than that of the network interface (VPNs, tunnels, overlays). Look with "
    "ping -M do -s 1400 HOST; try a smaller MTU (ip link set dev NAME mtu 1280) on both machines, or let ICMP "
    "'fragmentation needed' pass"
)

_MAX_KEYS = 4096


class Retries:
    """Counts what peers repeat because no large message gets through.

    Args:
        limit: Number of tries in a row that are too many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: OrderedDict[object, int] = OrderedDict()

    def try_again(self, key: object) -> bool:
        """Count one try of a peer; return True at the one that is too many."""
        self._counts[key] = count = self._counts.pop(key, 0) + 1
        if len(self._counts) > _MAX_KEYS:
            self._counts.popitem(last=False)
        return count == self._limit

    def passed(self, key: object) -> None:
        """Record that a large message of this peer has arrived."""
        self._counts.pop(key, None)
