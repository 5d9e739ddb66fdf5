"""What happens in a forked child to memory that its parent had mapped."""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Any

_NUM_BYTES = 4096
_READ_AND_WRITE, _PRIVATE_ANONYMOUS = 3, 0x22


def child_unmaps_only_its_own(held: list[Any], addresses: list[int]) -> bool:
    """Whether a child's other memory survives that the child drops objects which its parent made.

    Args:
        held: The only references to the objects.
        addresses: Where they have mapped memory. The child's own goes there if the places are free.
    """
    child = os.fork()
    if child == 0:
        try:
            mmap = ctypes.CDLL(None).mmap
            mmap.restype = ctypes.c_void_p
            mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
            own = [mmap(place, _NUM_BYTES, _READ_AND_WRITE, _PRIVATE_ANONYMOUS, -1, 0) for place in addresses]
            for place in own:
                ctypes.memset(place, 7, _NUM_BYTES)
            held.clear()
            gc.collect()
            os._exit(0 if all(ctypes.string_at(place, 1) == b"\7" for place in own) else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0
