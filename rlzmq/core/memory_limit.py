"""Memory limit of a role's process, which ends with an error before the machine runs out of memory.

The limit is the kernel's (RLIMIT_DATA: private writable memory, used or not). Beyond it, allocations fail in Python
(MemoryError) or in torch. The process then ends with EXIT_OUT_OF_MEMORY, and its supervisor starts another one.
"""

from __future__ import annotations

import resource
from pathlib import Path

from rlzmq.core.errors import ConfigurationError
from rlzmq.core.last_words import LastWords, end_process
from rlzmq.core.tracebacks import origin_parts

__all__ = ["EXIT_OUT_OF_MEMORY", "end_if_out_of_memory", "limit_memory"]

EXIT_OUT_OF_MEMORY = 71

_TORCH_MARKS = ("can't allocate memory", "not enough memory")


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
    """End this process if the error is a failed allocation under its limit; otherwise return.

    Args:
        error: The error raised by a job of the role.
        role: Name of the role, for the message on stderr.
    """
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
