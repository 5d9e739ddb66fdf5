"""WarmPopen: Python programs in processes that find torch and rlzmq imported, which takes a new interpreter seconds.

One server per test process imports the modules and is then cloned for each program: a process of its own, and a child
of the test's (as of `subprocess`), with its own arguments, directory, variables and files. The fork server of the tests
(`rlzmq.actors.forkserver`) is such a clone; a program's own one is a fork of the program, unless that has started
threads before. Not for tests of imports, of interpreter options or of what a process without torch does.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from os import _exit  # itself: rlzmq explains calls of os._exit
from pathlib import Path
from typing import Any, AnyStr, NoReturn

from rlzmq.actors import forkserver
from rlzmq.actors.forkserver import PRELOAD

__all__ = ["WarmPopen", "run_warm", "with_popen"]

_ROOT = Path(__file__).parents[2]
_MAX_BYTES, _MAX_FDS = 256 * 1024, 8
_FREE_FD = 500  # above those that a test process opens
_ARGS_BYTES = 1000  # of a program's arguments, to be seen in the process table
_CLI = [f"rlzmq.cli.{command}" for command in ("joining", "looking", "main", "servers", "train", "tune")]
# What a command imports when it parses its options, builds an algorithm, and trains.
_LATE = (
    "typeguard",
    "rlzmq.algorithms.algorithm",
    "rlzmq.algorithms.ppo.ppo_learner",
    "rlzmq.telemetry.run_directory",
)
_CLONE_NUMBER = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
_CLONE_PARENT, _CLONE_CHILD_CLEARTID, _CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
_PR_GET_TID_ADDRESS = 40


class WarmPopen(subprocess.Popen[AnyStr]):
    """`subprocess.Popen` of this interpreter with ``-m``, ``-c`` or a script; otherwise the ordinary one."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        (_, _, _, pass_fds, cwd, env, _, _, _, stdin, _, _, stdout, _, stderr, *_) = rest
        is_known = args[1] in ("-m", "-c", "-P") or args[1].endswith(".py")
        if _CLONE_NUMBER is None or args[0] != sys.executable or not is_known:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        standard = (given if given != -1 else own for own, given in enumerate((stdin, stdout, stderr)))
        fds = dict(enumerate(standard)) | {fd: fd for fd in pass_fds}
        order = {
            "args": list(map(str, args[1:])),
            "cwd": str(cwd or os.getcwd()),
            "env": dict(env or os.environ),
            "fds": list(fds),
            "starts_session": rest[20],
        }
        self.pid = _Server.get().start(order, list(fds.values()))
        self._child_created = True
        self._close_pipe_fds(*rest[9:15])  # type: ignore[attr-defined]


def with_popen(popen: Any) -> Any:
    """Return the module `subprocess` with another `Popen`, for a module that uses it."""
    return types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})


def run_warm(*args: str, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python args…`` to its end, as `subprocess.run` does; its output is captured."""
    process: WarmPopen[str]
    command = [sys.executable, *args]
    with WarmPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


class _Server:
    """The process that is cloned, as its owner sees it."""

    _one: _Server | None = None
    _lock = threading.Lock()

    @classmethod
    def get(cls) -> _Server:
        with cls._lock:
            if cls._one is None:
                cls._one = cls()
                atexit.register(cls._one.close)
            return cls._one

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()", str(theirs.fileno()), " " * _ARGS_BYTES],
            pass_fds=[theirs.fileno()], cwd=_ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        theirs.close()

    def start(self, order: dict[str, Any], fds: Sequence[int]) -> int:
        with self._lock:
            socket.send_fds(self._control, [json.dumps(order).encode()], fds)
            return int(self._control.recv(100))

    def close(self) -> None:
        self._control.close()
        self._process.wait()


def _serve(control: socket.socket) -> dict[str, Any]:
    """Clone this process for each order; return an order in the clone that carries it out."""
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MAX_BYTES, _MAX_FDS)
        if not data:
            sys.exit()
        pid = _clone()
        if pid == 0:
            control.close()
            order = dict(json.loads(data))
            aside = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FREE_FD) for fd in fds]
            os.closerange(3, _FREE_FD)
            for number, fd in zip(order.pop("fds"), aside, strict=True):
                os.dup2(fd, number)
                os.close(fd)
            return order
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


def _clone() -> int:
    """Fork a child of this process's parent: as `os.fork`, of a process with a single thread."""
    call = ctypes.PyDLL(None, use_errno=True)
    call.syscall.restype = ctypes.c_long
    tid = ctypes.c_void_p()  # where the C library keeps the thread's number
    call.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(tid))
    flags = _CLONE_PARENT | _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID | signal.SIGCHLD
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(
        call.syscall(
            *map(ctypes.c_long, (_CLONE_NUMBER or 0, flags, 0, 0)),
            # the kernel's last two arguments have another order on arm, where the last one counts
            *((tid, None) if platform.machine() == "x86_64" else (None, tid)),
        )
    )
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "clone")
    return pid


class _ForkedServer(subprocess.Popen[bytes]):
    """The program's fork server: a fork of the program, which has the modules."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if threading.active_count() > 1:
            super()._execute_child(args, *rest)  # type: ignore[misc]
            return
        pass_fds, env = rest[3], rest[5]
        self.pid = os.fork()
        if self.pid == 0:
            _become_fork_server(args, sorted(pass_fds), env)
        self._child_created = True
        self._close_pipe_fds(*rest[9:15])  # type: ignore[attr-defined]


def _become_fork_server(args: Any, fds: list[int], env: dict[str, str]) -> NoReturn:
    try:
        forkserver.subprocess = subprocess  # type: ignore[attr-defined]
        os.setsid()
        os.environ.update(env)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for before, after in zip([2, *fds], [*fds, os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(before + 1, after)
        main = importlib.import_module("rlzmq.actors.fork_main").main
        control, driver, _, *preload = args[args.index("-c") + 2 :]
        main(int(control), int(driver), preload)
    finally:
        os._exit(70)


def _show(args: list[str], env: dict[str, str]) -> None:
    """Write arguments and variables, short ones first, where the process table reads them (``/proc/PID``)."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    texts = ([sys.executable, *args], sorted((f"{name}={value}" for name, value in env.items()), key=len))
    for begin, end, words in zip(fields[45:49:2], fields[46:49:2], texts, strict=True):
        room = int(end) - int(begin)
        line = "".join(f"{word}\0" for word in words).encode()[: room - 1]
        ctypes.memmove(int(begin), line.ljust(room, b"\0"), room)


def _run(args: list[str], cwd: str, env: dict[str, str], starts_session: bool) -> None:
    """Run a program as ``python args…``; end as it ends."""
    if starts_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    _show(args, env)
    of_user = filter(None, env.get("PYTHONPATH", "").split(":"))
    if args[0] == "-P":
        sys.path[:1] = of_user
        args = args[1:]
    else:
        is_script = args[0] not in ("-m", "-c")
        place = os.path.dirname(os.path.abspath(args[0])) if is_script else "" if args[0] == "-c" else cwd
        sys.path[:1] = [place, *of_user]
        forkserver.subprocess = with_popen(_ForkedServer)  # type: ignore[attr-defined]
    if args[0] == "-m":
        sys.argv[1:] = args[2:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        return
    script = sys.modules["__main__"] = types.ModuleType("__main__")
    if args[0] == "-c":
        sys.argv[:] = ["-c", *args[2:]]
        code = compile(args[1], "<string>", "exec")
    else:
        sys.argv[:] = args
        script.__file__ = os.path.abspath(args[0])
        code = compile(Path(args[0]).read_text(), script.__file__, "exec")
    exec(code, script.__dict__)


def serve() -> None:
    """Import the modules and serve orders; in a clone, run its program."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the fork server of the tests starts with signals blocked
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the tests and the programs
    for name in (*PRELOAD, *_CLI, *_LATE):
        with contextlib.suppress(ModuleNotFoundError):  # of an extra
            importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    gc.collect()
    gc.freeze()
    order = _serve(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _run(**order)
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        _end(ended.code or 0)
    _end(0)


def _end(code: int) -> None:
    """End as Python does, but keep what the server imported: freeing it would copy it first, in a third of a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    vars(sys.modules["__main__"]).clear()
    gc.collect()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # Python says what it says of a reader that has gone
    _exit(code & 0xFF)
