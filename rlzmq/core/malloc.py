"""Settings of the C library's allocator for processes that allocate the same large arrays again and again.

By default glibc returns arrays above 32 MB to the system when they are freed, and those of threads above 64 MB. The
next one of the same size then costs a page fault per 4 kB, which takes an eighth of an update on 1,024 images. Other C
libraries (musl, macOS) ignore these settings or lack them.
"""

from __future__ import annotations

import ctypes

__all__ = ["keep_freed_memory", "share_one_arena"]

# names of mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_NEVER = 2**31 - 1


def share_one_arena() -> None:
    """Make all threads of this process allocate from one heap. Call it before the first thread starts.

    Threads' own heaps cannot hold arrays above 64 MB, and each keeps its free memory to itself.
    """
    _set(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Keep freed arrays of any size for the next allocation, instead of returning them to the system.

    The process then stays as large as it ever was.
    """
    _set(_M_MMAP_THRESHOLD, _NEVER)
    _set(_M_TRIM_THRESHOLD, _NEVER)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
