"""Memory of a role's process: its limit, beyond which the process ends, and settings of the C library's allocator.

The limit is the kernel's (RLIMIT_DATA: private writable memory, used or not). Beyond it, allocations fail in Python
(MemoryError) or in torch. The process then ends with EXIT_OUT_OF_MEMORY, before the machine runs out of memory, and
its supervisor starts another one.

By default glibc returns arrays above 32 MB to the system when they are freed, and those of threads above 64 MB. The
next one of the same size then costs a page fault per 4 kB, which takes an eighth of an update on 1,024 images. Other C
libraries (musl, macOS) ignore these settings or lack them.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.last_words import LastWords, end_process
from rlzmq.core.tracebacks import origin_parts

with contextlib.suppress(ModuleNotFoundError):  # not on Windows, where no role has a limit
    import resource

__all__ = [
    "EXIT_OUT_OF_MEMORY",
    "end_if_out_of_memory",
    "keep_freed_memory",
    "limit_memory",
    "share_one_arena",
]

EXIT_OUT_OF_MEMORY = 71

_TORCH_MARKS = ("can't allocate memory", "not enough memory")

# names of mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_NEVER = 2**31 - 1


def limit_memory(num_bytes: int | None, setting: str) -> None:
    """Limit the memory of this process; None: no limit.

    Args:
        num_bytes: Limit of private writable memory, including the current usage.
        setting: Name of the setting, for the error message.

    Raises:
        ConfigurationError: The process already uses more.
    """
    if num_bytes is None:
        return
    held = _private_bytes()
    if held >= num_bytes:
        raise ConfigurationError(
            f"{setting}={num_bytes}: expected more than the {held} bytes that the process needs to start."
        )
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))


def end_if_out_of_memory(error: BaseException | None, role: str) -> None:
    """End this process if the error is a failed allocation under its limit; otherwise return."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if error is None or limit == resource.RLIM_INFINITY:
        return
    is_torchs = isinstance(error, RuntimeError) and any(mark in str(error) for mark in _TORCH_MARKS)
    if isinstance(error, MemoryError) or is_torchs:
        text = f"OOM: {role} has outgrown its limit of {limit} bytes: {error}"
        end_process(EXIT_OUT_OF_MEMORY, LastWords("", text, "".join(origin_parts(error))))


def _private_bytes() -> int:
    """Return this process's private writable memory in bytes, as counted by the kernel."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


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
