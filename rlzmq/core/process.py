"""This process and its machine: identity, last words, stacks on request, memory, ending signals, output, log level.

A process's number is used again soon (there are 32,768 by default), so a signal to a number may reach a process that
has nothing to do with the one that had it. `OpenedProcess` is the only code that sends signals by number, except to
children that this process has not waited for: nobody else gets their numbers.

**Last words**: the reason why a process ended itself, on a channel that nothing else writes to. Child processes write
to the same stderr, even after the process has ended. The parent creates the channel, a file in memory, and reads it
when the process has ended. A process without a channel writes only to stderr. `explain_ends` leaves words where
user code calls `os._exit`.

**Stacks**: the file in memory is named after the process's role. Processes of the same user find it in
``/proc/PID/fd``, so the signal is sent only to processes that handle it. The main thread answers, while the others
stand still. If it does not, a signal handler in C writes the stacks of the process that hangs; of threads that run, it
may read what is no stack, and crash.

**Memory**: the limit is the kernel's (RLIMIT_DATA: private writable memory, used or not). Beyond it, allocations fail
in Python (MemoryError) or in torch. The process then ends with EXIT_OUT_OF_MEMORY, before the machine runs out of
memory, and its supervisor starts another one. By default glibc returns arrays above 32 MB to the system when they are
freed, and those of threads above 64 MB. The next one of the same size then costs a page fault per 4 kB, which takes an
eighth of an update on 1,024 images. Other C libraries (musl, macOS) ignore these settings or lack them.

**Signals that end a run**: its driver alone handles them; the processes that it starts ignore them while it lives.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import io
import json
import logging
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol, Self

from rlzmq.core.errors import ConfigurationError, cut, printable
from rlzmq.core.tracebacks import format_stack, is_of_rlzmq, origin_parts, place_in

__all__ = [
    "ENDING_SIGNALS",
    "EXIT_OUT_OF_MEMORY",
    "QUIET_TRACKER",
    "STACKS_TO_STDERR",
    "LastWords",
    "OpenedProcess",
    "apply_log_level",
    "blocked",
    "boot_id",
    "default_in_forks",
    "end_if_out_of_memory",
    "end_process",
    "explain_ends",
    "find_stack_channel",
    "ignore_ending_signals",
    "keep_freed_memory",
    "leave_words",
    "limit_memory",
    "loopback_interface",
    "make_words_channel",
    "num_usable_cores",
    "open_stack_channel",
    "open_words_channel",
    "outlive_readers",
    "process_space",
    "read_stacks",
    "read_words",
    "share_one_arena",
    "start_mark",
    "unblocked",
]


def boot_id() -> str:
    """Return a text that only this machine has, and only until it starts again.

    Containers on one machine share it.

    Raises:
        OSError: The system has no such text (it is not Linux).
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def process_space() -> str:
    """Return an id of this machine and its process namespace; containers on one machine have different ids."""
    try:
        return f"{boot_id()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return platform.node()


def num_usable_cores() -> int:
    """Return the number of CPU cores that this process may use: its affinity, and its cgroup's quota (version 2)."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    num_cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return num_cores
    return num_cores if quota == "max" else max(1, min(num_cores, int(quota) // int(period)))


def loopback_interface() -> str:
    """Return the name of this machine's loopback interface."""
    return "lo0" if sys.platform == "darwin" else "lo"


def start_mark(pid: int) -> str | None:
    """Return a text that only this process has among all that ever have its number; None if it does not exist.

    It contains the time of its start in hundredths of a second, within which no number comes round again.
    """
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # Field 22 of proc_pid_stat(5), in clock ticks since the machine's start; the second may hold spaces.
    return f"{boot_id()} {status.rpartition(')')[2].split()[19]}"


class OpenedProcess:
    """A running process, whatever becomes of its number. A context manager.

    Args:
        pid: Its number.
        mark: Its `start_mark`, read when the number was known to be its own; None: the process that has the number now.

    Raises:
        ProcessLookupError: It has ended, even if another process has its number.
    """

    def __init__(self, pid: int, mark: str | None = None) -> None:
        self.pid = pid
        try:
            self._fd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT):
                raise
            raise ProcessLookupError(f"{pid} is the number of a thread") from None
        # The mark is read after opening: if the number changes hands in between, the opened process has ended.
        if mark is not None and start_mark(pid) != mark:
            self.close()
            raise ProcessLookupError(f"the process with number {pid} has ended")

    def send_signal(self, number: int) -> None:
        """Send a signal to this process.

        Raises:
            ProcessLookupError: It has ended.
            PermissionError: It belongs to another user.
        """
        signal.pidfd_send_signal(self._fd, number)

    def close(self) -> None:
        """Release the process, which continues. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_MAX_TEXT_BYTES = 4 * 1024
_MAX_TRACEBACK_BYTES = 16 * 1024
_MAX_BYTES = 256 * 1024
_LINES = "\n\t"


@dataclass(frozen=True, slots=True)
class LastWords:
    """Why a process ended itself.

    Attributes:
        kind: Type of the exception that ended it; "" if there was none.
        text: The exception's text, or the reason.
        traceback_text: The frames that raised it and its causes, or the stack at the end; may be "".
    """

    kind: str
    text: str
    traceback_text: str = ""

    @classmethod
    def of(cls, error: BaseException) -> LastWords:
        """Return the words for an exception that ends the process."""
        try:
            text = str(error)
        except Exception:
            text = "(the exception's own __str__ raised)"
        return cls(type(error).__name__, text, "".join(origin_parts(error)))

    @property
    def summary(self) -> str:
        """Return the type and the first line of the text."""
        return ": ".join(part for part in (self.kind, self.text.partition("\n")[0]) if part)

    def __str__(self) -> str:
        """Return the traceback, then type and text."""
        last = ": ".join(part for part in (self.kind, self.text) if part)
        return f"{self.traceback_text.rstrip()}\n{last}" if self.traceback_text else last


_words_lock = threading.Lock()
_words_channel: tuple[int, int] | None = None  # its descriptor, and the pid of its process


def make_words_channel() -> int:
    """Return the descriptor of a new channel. Executed processes do not inherit it."""
    return os.memfd_create("rlzmq-last-words", os.MFD_CLOEXEC)


def open_words_channel(fd: int) -> None:
    """Use this as the channel of this process."""
    global _words_channel
    _words_channel = (fd, os.getpid())


def leave_words(words: LastWords) -> None:
    """Write the last words of this process. Only the first ones count. A fork of the process has no channel."""
    with _words_lock:
        if _words_channel is None or _words_channel[1] != os.getpid() or os.fstat(_words_channel[0]).st_size:
            return
        short = LastWords(
            words.kind,
            cut(words.text, _MAX_TEXT_BYTES),
            words.traceback_text.encode(errors="replace")[-_MAX_TRACEBACK_BYTES:].decode(errors="ignore"),
        )
        with contextlib.suppress(OSError):
            os.pwrite(_words_channel[0], json.dumps(asdict(short)).encode(), 0)


def end_process(exit_code: int, words: LastWords) -> NoReturn:
    """Write last words, print them to stderr, and end this process at once, from any thread."""
    try:
        leave_words(words)
        print(words.text, file=sys.__stderr__, flush=True)
    finally:
        os._exit(exit_code)


def explain_ends() -> None:
    """Show where code that is not rlzmq's ends this process with `os._exit`, or by a fault such as SIGSEGV."""
    faulthandler.enable(all_threads=False)
    pid, exit_now = os.getpid(), os._exit

    def explained_exit(status: int) -> NoReturn:
        stack = traceback.extract_stack(sys._getframe(1))
        if os.getpid() == pid and not is_of_rlzmq(stack[-1]):
            text = f"os._exit({status}) was called at {place_in(stack)}"
            if _words_channel is None:
                print(f"rlzmq: {text}", file=sys.__stderr__, flush=True)
            leave_words(LastWords(SystemExit.__name__, text, format_stack(stack)))
        exit_now(status)

    os._exit = explained_exit


def read_words(fd: int) -> LastWords | None:
    """Return the last words in the channel of an ended process; None if it left none."""
    data = os.pread(fd, _MAX_BYTES, 0)
    try:
        found = json.loads(data)
        return LastWords(*(printable(str(found[name]), keep=_LINES) for name in LastWords.__slots__))
    except (ValueError, KeyError, TypeError):
        return None  # the process was killed during the write, or wrote something else


STACKS_TO_STDERR = signal.SIGRTMIN + 1
"""Makes an actor's process that hangs write its stacks to stderr, by the handler in C."""

_ASK, _INSIST = signal.SIGUSR2, signal.SIGRTMIN
_ANSWER_S = 1.0
_PREFIX = "/memfd:rlzmq-stacks:"
_LOOK_S = 0.02
_NUM_QUIET_LOOKS = 5  # number of reads without new text that end the stacks
_MAX_WAIT_S = 4.0

_stack_channel: tuple[int, int] | None = None  # its descriptor, and the pid of its process


def open_stack_channel(role: str) -> None:
    """Allow other processes to read the stacks of this one.

    Args:
        role: Name of the process, e.g. ``"runner-0"``.
    """
    global _stack_channel
    if _stack_channel is not None and _stack_channel[1] == os.getpid():
        return
    signal.signal(_ASK, _write_stacks)  # before others find the file
    fd = os.memfd_create(f"rlzmq-stacks:{role[:200]}", os.MFD_CLOEXEC)
    _stack_channel = (fd, os.getpid())
    faulthandler.register(_INSIST, file=fd, all_threads=True)


def find_stack_channel(pid: int) -> tuple[str, Path] | None:
    """Return the role and file of a process's channel; None if it has none, has ended, or belongs to another user."""
    try:
        found = [(os.readlink(entry.path), Path(entry.path)) for entry in list(os.scandir(f"/proc/{pid}/fd"))]
    except OSError:
        return None
    for target, path in found:
        if target.startswith(_PREFIX):
            return target.removeprefix(_PREFIX).removesuffix(" (deleted)"), path
    return None


def read_stacks(pid: int, channel: Path) -> str:
    """Make a process write the stacks of its threads, and return them; "" if it does not answer.

    Raises:
        OSError: The process has ended.
    """
    with OpenedProcess(pid) as process, open(channel, "rb") as file:
        if not os.readlink(channel).startswith(_PREFIX):  # another process has its number
            raise ProcessLookupError(f"{channel} is no channel of stacks")
        begin = size = os.fstat(file.fileno()).st_size
        process.send_signal(_ASK)
        num_quiet, begun_at, insists = 0, time.monotonic(), False
        while num_quiet < _NUM_QUIET_LOOKS and (waited_s := time.monotonic() - begun_at) < _MAX_WAIT_S:
            if size == begin and waited_s > _ANSWER_S and not insists:
                insists = True
                process.send_signal(_INSIST)
            time.sleep(_LOOK_S)
            before, size = size, os.fstat(file.fileno()).st_size
            num_quiet = num_quiet + 1 if size == before > begin else 0
        file.seek(begin)
        return file.read().decode(errors="replace")


def _write_stacks(number: int, frame: FrameType | None) -> None:
    if _stack_channel is not None:
        faulthandler.dump_traceback(_stack_channel[0], all_threads=True)


with contextlib.suppress(ModuleNotFoundError):  # not on Windows, where no role has a limit
    import resource


EXIT_OUT_OF_MEMORY = 71
QUIET_TRACKER = "ignore:resource_tracker:UserWarning"
"""multiprocessing's tracker outlives a killed process and removes what it left: that is no news to the user."""

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
    status = Path("/proc/self/status").read_text().splitlines()  # the kernel's count, in kB
    held = sum(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
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


def share_one_arena() -> None:
    """Make all threads of this process allocate from one heap. Call it before the first thread starts.

    Threads' own heaps cannot hold arrays above 64 MB, and each keeps its free memory to itself.
    """
    _set_malloc_option(_M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Keep freed arrays of any size for the next allocation, instead of returning them to the system.

    The process then stays as large as it ever was.
    """
    _set_malloc_option(_M_MMAP_THRESHOLD, _NEVER)
    _set_malloc_option(_M_TRIM_THRESHOLD, _NEVER)


def _set_malloc_option(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""What a person, a closed terminal, systemd, Kubernetes and Slurm send, often to all processes of a run."""


_signal_masks = threading.local()  # of threads that fork


def blocked() -> contextlib.AbstractContextManager[None]:
    """Block these signals in this thread, so that processes started in the block begin with them blocked."""
    return _masked(signal.SIG_BLOCK)


def unblocked() -> contextlib.AbstractContextManager[None]:
    """Let these signals through to this thread again, in a part of a block of `blocked`."""
    return _masked(signal.SIG_UNBLOCK)


@contextlib.contextmanager
def _masked(how: int) -> Iterator[None]:
    before = signal.pthread_sigmask(how, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ending_signals() -> None:
    """Ignore them in this process and its forks, and unblock them; not in programs that it starts and may terminate."""
    for number in ENDING_SIGNALS:
        signal.signal(number, _ignore_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)


def default_in_forks() -> None:
    """Give the forks of this process the default again: those of `multiprocessing`, for `Process.terminate`."""
    # Blocked meanwhile: what arrives before the child has the default again would be ignored.
    os.register_at_fork(
        before=_block_signals, after_in_parent=_restore_signals, after_in_child=_default_signals
    )


def _default_signals() -> None:
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is _ignore_signal:
            signal.signal(number, signal.SIG_DFL)
    _restore_signals()


def _block_signals() -> None:
    _signal_masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)


def _restore_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _signal_masks.before)


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    # A handler, because programs inherit SIG_IGN.
    pass


def outlive_readers(on_broken_pipe: Callable[[], None] = lambda: None) -> None:
    """Drop what is written to stdout and stderr once their terminal or reader is gone, instead of raising OSError.

    Args:
        on_broken_pipe: Called when the reader of a pipe is found to be gone, e.g. ``tee`` after Ctrl-C.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue  # closed from the start, or replaced by somebody
        stream.flush()
        raw = _Outliving(stream.fileno(), on_broken_pipe)
        buffer = io.BufferedWriter(raw)
        outliving = io.TextIOWrapper(
            buffer,
            stream.encoding,
            stream.errors,
            # With PYTHONUNBUFFERED a stream has no line buffering, since nothing is kept.
            line_buffering=stream.line_buffering or stream.write_through,
        )
        setattr(sys, name, outliving)


class _Outliving(io.FileIO):
    def __init__(self, fd: int, on_broken_pipe: Callable[[], None]) -> None:
        super().__init__(fd, "w", closefd=False)
        self._on_broken_pipe = on_broken_pipe

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self.fileno())
            if error.errno == errno.EPIPE:
                self._on_broken_pipe()
            return len(data)


class _HasLogLevel(Protocol):
    def given(self) -> dict[str, Any]: ...


def apply_log_level(config: _HasLogLevel) -> None:
    """Set the level of the ``rlzmq`` loggers to ``config.log_level``, if the user has set it.

    If the process has no logging handlers, add one that writes to stderr.
    """
    given = config.given() if hasattr(config, "given") else {}
    if "log_level" not in given:
        return
    logger = logging.getLogger("rlzmq")
    logger.setLevel(given["log_level"])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
