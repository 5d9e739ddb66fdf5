"""The ``rlzmq`` command: find the sub-command and import only what it needs."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import select
import sys
from collections.abc import Sequence
from typing import Any

from rlzmq.cli.interrupt import EXIT_INTERRUPTED, EXIT_RESUMABLE, Interrupt
from rlzmq.cli.parsing import OptionsExit
from rlzmq.core.errors import (
    AuthenticationError,
    CheckpointError,
    ConfigurationError,
    Interrupted,
    PeerLostError,
    RlzmqError,
    cut,
    printable,
)
from rlzmq.core.imports import hidden_modules
from rlzmq.core.synonyms import did_you_mean, instead_of_command
from rlzmq.core.tracebacks import (
    FULL,
    format_error,
    is_of_user,
    origin_parts,
    place_of,
    run_error,
    shows_all_frames,
)
from rlzmq.core.version import __version__

__all__ = [
    "COMMANDS",
    "EXIT_CONFIG",
    "EXIT_INTERNAL",
    "EXIT_INTERRUPTED",
    "EXIT_RESUMABLE",
    "EXIT_UNREACHABLE",
    "EXIT_USAGE",
    "find_modules_here",
    "function_of",
    "main",
]

_SUMMARY_CHARS = 300
_LINES = "\n\t"  # an error's text may have several
# The place cannot be written: no bug of rlzmq's.
_CANNOT_STORE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EISDIR)
EXIT_USAGE = 2
EXIT_UNREACHABLE = 69
EXIT_INTERNAL = 70
EXIT_CONFIG = 78
_EXIT_NO_READER = 141  # as if ended by SIGPIPE

_VERBOSE = "\n\n  --verbose  with any command: show errors with all frames, not only the user's"

# Module and summary; the function has the command's name.
COMMANDS = {
    "demo": ("train", "see it learn CartPole, in a broker, two runners and two learners"),
    "train": ("train", "train an algorithm: rlzmq train ppo --env CartPole-v1"),
    "tune": ("tune", "search for good settings: rlzmq tune ppo --env ENV --lr 1e-4..1e-2:log"),
    "runner": ("joining", "sample for a run, from any machine: rlzmq runner --join FILE"),
    "learner": ("joining", "a learner rank for a run, from any machine: rlzmq learner --join FILE"),
    "top": ("looking", "watch a run: rlzmq top [FILE or directory]"),
    "dashboard": ("servers", "watch runs in a browser: rlzmq dashboard [RUN…]"),
    "stacks": ("looking", "what every process of a run is doing: rlzmq stacks RUN"),
    "doctor": ("doctor", "check this machine before a run"),
    "presets": ("runs", "list settings that are known to learn: rlzmq presets [ALGORITHM] [NAME]"),
    "replay": (
        "replay",
        "repeat a recorded run's learner, or train a quarantined fragment: rlzmq replay RUN",
    ),
    "check-env": ("inspect", "check an environment: rlzmq check-env ENV"),
    "inspect": (
        "inspect",
        "a run's data flow (rlzmq inspect ppo --env ENV), its checkpoints, or recorded episodes",
    ),
    "ckpt": ("runs", "check checkpoints, or compare two: rlzmq ckpt ls RUN, rlzmq ckpt diff A B"),
    "launch": ("launch", "logs and end of a run that --on started: rlzmq launch logs|stop RUN"),
    "scale": ("launch", "runners or learners of a living run: rlzmq scale RUN --env-runners 40"),
    "record": ("policies", "record a checkpoint's episodes: rlzmq record CHECKPOINT --output DIR"),
    "evaluate": ("policies", "evaluate a checkpoint: rlzmq evaluate RUN_OR_CHECKPOINT"),
    "runs": ("runs", "list, compare or remove runs: rlzmq runs [list|compare|clean] [RUN…]"),
    "plot": ("runs", "plot learning curves over seeds: rlzmq plot RUN… -o curve.png"),
    "export": ("policies", "write a policy as an ONNX or .pt2 file: rlzmq export RUN_OR_CHECKPOINT"),
    "serve": ("servers", "answer requests for a policy's actions: rlzmq serve RUN_OR_CHECKPOINT"),
    "completion": ("completion", "completion for bash and zsh: source <(rlzmq completion bash)"),
}
_GROUPS = {
    "train and look": "demo train tune presets evaluate record runs plot dashboard top",
    "deploy": "export serve",
    "several machines": "launch scale runner learner",
    "debug": "check-env doctor inspect ckpt stacks replay completion",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Without the program's name; None: the process's own.

    Returns:
        The exit code: 0 done, 2 usage, 69 peers unreachable, 70 internal error, 75 ended by SIGTERM, SIGHUP or SIGUSR1
        (a run can be resumed), 78 configuration error, 130 Ctrl-C, 141 the reader of the output has ended.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # For an encoding without all characters, and for files that get both outputs in their order.
        with contextlib.suppress(OSError):  # a pipe in place of a file
            sys.stdout.reconfigure(errors="replace", line_buffering=True)
    try:
        code = _main(arguments)
        print(end="", flush=True)  # nothing if the output was closed from the start
        return code
    except BrokenPipeError:
        if not _has_no_reader():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in its buffer
        return _EXIT_NO_READER


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if given else EXIT_USAGE
    if given[0] == "--version":
        print(f"rlzmq {__version__}")
        return 0
    if given[0] not in COMMANDS:
        instead = instead_of_command(given[0])
        hint = f" Instead: {instead}." if instead else did_you_mean(given[0], COMMANDS)
        print(f"rlzmq: no command {given[0]!r}.{hint}", file=sys.stderr)
        return EXIT_USAGE
    find_modules_here()
    if "--verbose" in given:
        os.environ[FULL] = "full"  # inherited by the run's processes
        at = given.index("--verbose")
        has_level = given[at + 1 : at + 2] in (["0"], ["1"], ["2"])  # of another library
        del given[at : at + 1 + has_level]
    return _guarded(given[0], given[1:])


def find_modules_here() -> None:
    """Add the current directory to the import path, as ``python -m`` does, for the user's envs and modules.

    Processes started from here inherit the path.
    """
    try:
        here = os.getcwd()
    except OSError:  # the directory was removed
        return
    if here not in sys.path:
        sys.path.insert(0, here)


def _guarded(command: str, arguments: list[str]) -> int:
    """Run a command; turn an exception into one clear message and an exit code."""
    try:
        with Interrupt(drain_s={}) as interrupt:
            return _interruptible(command, arguments, interrupt)
    except (ConfigurationError, CheckpointError) as error:
        print(f"rlzmq: {printable(str(error), keep=_LINES)}", file=sys.stderr)
        return EXIT_CONFIG
    except (PeerLostError, AuthenticationError) as error:
        _print_with_notes(error)
        return EXIT_UNREACHABLE
    except BaseException as error:
        if isinstance(error, OptionsExit):
            return error.code if isinstance(error.code, int) else EXIT_USAGE
        if isinstance(error, OSError) and error.errno in _CANNOT_STORE and not is_of_user(error):
            _print_with_notes(error)
            return EXIT_INTERNAL
        if isinstance(error, BrokenPipeError) and _has_no_reader():
            raise
        _print_failure(run_error(error))
        return EXIT_INTERNAL


def _interruptible(command: str, arguments: list[str], interrupt: Interrupt) -> int:
    """Run a command; a signal raises Interrupted in it, unless it handles signals itself."""
    try:
        run = function_of(command)
        interrupt.ends_at_once, interrupt.on_first = False, interrupt.raise_now
        return int(run(arguments))
    except Interrupted:
        print("rlzmq: interrupted", file=sys.stderr)
        return interrupt.exit_code or EXIT_INTERRUPTED


def function_of(command: str) -> Any:
    """Import and return a command's function."""
    module = importlib.import_module(f"rlzmq.cli.{COMMANDS[command][0]}")
    return getattr(module, command.replace("-", "_"))


def _has_no_reader() -> bool:
    """Return whether the reader of the output has ended: ``rlzmq top | head``."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)  # errors only
    return bool(output.poll(0))


def _print_failure(error: BaseException) -> None:
    """Print the user's frames, then the error, once."""
    text = str(error)
    is_one_line = "\n" not in text
    place = f" ({place_of(error)})" if is_of_user(error) and not isinstance(error, RlzmqError) else ""
    hidden = hidden_modules(error.__traceback__)
    where = "".join(origin_parts(error)) if is_one_line else format_error(error)
    if where := where.rstrip("\n"):
        print(printable(where, keep=_LINES), file=sys.stderr)
    for line in hidden:
        print(line, file=sys.stderr)
    if not is_one_line:
        text = cut(text.partition("\n")[0], _SUMMARY_CHARS)
    place += "" if shows_all_frames() else " (--verbose shows all frames)"
    print(printable(f"rlzmq: ended by {type(error).__name__}{text and ': '}{text}{place}"), file=sys.stderr)


def _print_with_notes(error: BaseException) -> None:
    for text in (f"rlzmq: {error}", *getattr(error, "__notes__", ())):
        print(printable(text, keep=_LINES), file=sys.stderr)


def _usage() -> str:
    text = "usage: rlzmq COMMAND …   (rlzmq COMMAND --help: the options)"
    for title, names in _GROUPS.items():
        lines = [f"  {name:<10} {COMMANDS[name][1]}" for name in names.split()]
        text += "\n\n" + "\n".join([f"{title}:", *lines])
    return text + _VERBOSE
