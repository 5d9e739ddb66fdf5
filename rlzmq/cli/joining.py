"""Shared code of the commands that join a run: the join file, the run's config, the exit code."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlzmq.actors.loop_thread import new_event_loop
from rlzmq.cli.interrupt import SignalEchoes, exit_code_of_signal, handled_signals
from rlzmq.cli.main import EXIT_UNREACHABLE
from rlzmq.core.errors import ConfigurationError
from rlzmq.core.trust import CALLER, find_code
from rlzmq.net.keys import JoinFile
from rlzmq.roles.peer_link import digest_of
from rlzmq.roles.remote_peer import fetch_config

if TYPE_CHECKING:
    from rlzmq.algorithms.algorithm_config import AlgorithmConfig

__all__ = [
    "exit_code_of",
    "import_first",
    "make_config",
    "on_signals",
    "read_join_file",
    "run_async",
    "the_runs_config",
]


def read_join_file(path: Path, role: str) -> Any:
    """Read a join file and check that it is for this role.

    Raises:
        ConfigurationError: The file is missing, readable by others, malformed, or for another role.
    """
    join = JoinFile.read(path)
    if join.role != role:
        raise ConfigurationError(f"{path} lets a {join.role} in, not a {role}")
    for name in ("data", "control") if role == "learner" else ("data", "weights"):
        if name not in join.addresses:
            raise ConfigurationError(f"{path}: addresses.{name} is missing")
    return join


async def the_runs_config(join: Any, imports: Sequence[str], *, timeout_s: float) -> tuple[str, Any, str]:
    """Fetch the config of the run; return the run's id, the config and its digest.

    Args:
        join: The JoinFile.
        imports: Modules to import first, e.g. because they register envs.
        timeout_s: Seconds to wait for the broker.

    Raises:
        PeerLostError: No broker answered.
        AuthenticationError: The broker refuses the key.
        ConfigurationError: The config names code that is not installed here.
    """
    import_first(imports)
    run_id, packed = await fetch_config(join, timeout_s=timeout_s)
    return run_id, make_config(packed), digest_of(packed)


def import_first(names: Sequence[str]) -> None:
    """Import the user's modules first, e.g. because they register envs.

    Raises:
        ConfigurationError: A module cannot be imported.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationError(f"--import {name}: {error}") from None


def make_config(packed: object) -> AlgorithmConfig:
    """Build the config from a frame of `driver.join_files.pack_config`.

    Raises:
        ConfigurationError: The config names code that is not installed here.
    """
    from rlzmq.algorithms.algorithm_config import AlgorithmConfig
    from rlzmq.driver.join_files import unpack_config

    name, settings = unpack_config(packed)
    config_class = find_code(name, CALLER)
    if not (isinstance(config_class, type) and issubclass(config_class, AlgorithmConfig)):
        raise ConfigurationError(f"the run's config class {name!r} is not an AlgorithmConfig")
    return config_class.from_state(settings, trust=CALLER)  # whoever joins a run trusts it


def run_async(main: Coroutine[Any, Any, int]) -> int:
    """Run a command's coroutine on a new event loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


@contextmanager
def on_signals(call: Callable[[int], None]) -> Iterator[None]:
    """Call ``call(number)`` on the first signal in the block; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    former = {number: signal.getsignal(number) for number in handled_signals()}
    seen: list[int] = []
    echoes = SignalEchoes()

    def handle(number: int) -> None:
        if echoes.is_echo(number):
            return
        if seen:
            os._exit(exit_code_of_signal(seen[0]))
        seen.append(number)
        call(number)

    for number in former:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number, handler in former.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


def exit_code_of(reason: str, detail: str, signal_number: int) -> int:
    """Return 0 after the run's goodbye, 130 after Ctrl-C, 75 after another signal (restart elsewhere), otherwise 69."""
    if signal_number:
        return exit_code_of_signal(signal_number)
    if reason == "goodbye":
        return 0
    print(f"rlzmq: the broker refuses this peer: {reason}, {detail}", file=sys.stderr)
    return EXIT_UNREACHABLE
