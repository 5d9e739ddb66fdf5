"""The main function of an actor's process: receive settings, construct the instance, serve calls, stop."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import random
import socket
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from rlzmq.actors.host import ActorHost, CallServer, constructed
from rlzmq.actors.loop_thread import new_event_loop
from rlzmq.actors.messages import (
    Answer,
    Call,
    Cancel,
    Shutdown,
    decode_message,
    pack,
    pack_snapshot,
    receive_privately,
)
from rlzmq.core import by_value
from rlzmq.core.addresses import process_directory, set_multiprocessing_directory
from rlzmq.core.errors import ProtocolError
from rlzmq.core.process import (
    QUIET_TRACKER,
    STACKS_TO_STDERR,
    default_in_forks,
    explain_ends,
    open_stack_channel,
    outlive_readers,
    share_one_arena,
)
from rlzmq.net.context import CONTROL, Context, SocketOptions
from rlzmq.net.socket import DrainSocket

__all__ = ["local_options", "run_child"]

_FLUSH_MS = 2000


def local_options(max_message_bytes: int) -> SocketOptions:
    """Return the socket options between an actor system and its children.

    There are no heartbeats: the fork server reports a child's end, and a disconnect while one side is
    stopped in a debugger would lose calls. There is no send limit: outstanding calls bound
    the messages.
    """
    return replace(
        CONTROL,
        max_message_bytes=max_message_bytes,
        send_high_water_mark=0,
        receive_high_water_mark=0,
        linger_ms=_FLUSH_MS,
    )


def run_child(channel: socket.socket, role: str) -> int:
    """Serve the actor in the forked process; return the exit code."""
    default_in_forks()
    explain_ends()
    faulthandler.register(STACKS_TO_STDERR, all_threads=True)
    open_stack_channel(role)
    share_one_arena()
    outlive_readers()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # lines are written even if the process is killed
    random.seed()
    np.random.seed()  # the fork copied the parent's state: children must not share it
    channel.setblocking(False)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        code = runner.run(_Child(channel, role).run())
    logging.shutdown()
    return code


def _adopt(boot: dict[str, Any]) -> None:
    """Take over what the driver has set since it started the fork server."""
    sys.path[:] = boot["sys_path"]
    os.environ.clear()
    os.environ.update(boot["environ"])
    warnings = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = f"{warnings + ',' if warnings else ''}{QUIET_TRACKER}"
    with contextlib.suppress(OSError):
        os.chdir(boot["cwd"])
    set_multiprocessing_directory(process_directory(boot["run_directory"], os.getpid()))


class _Child:
    def __init__(self, channel: socket.socket, role: str) -> None:
        self._channel = channel
        self._role = role
        self._host = ActorHost(role)
        self._calls = CallServer(role, lambda frames: self._socket.send(frames))
        self._over = asyncio.Event()
        self._stop_call_id: int | None = None
        self._exit_code = 0

    async def run(self) -> int:
        settings = await receive_privately(self._channel)
        if settings is None:
            return 0  # the parent gave up
        boot = json.loads(bytes(settings))
        _adopt(boot)
        with Context() as context:
            self._socket = DrainSocket(
                context,
                "DEALER",
                self._on_message,
                options=local_options(boot["max_message_bytes"]),
                routing_id=boot["routing_id"].encode(),
                packs=True,
                name=f"actor {self._role}",
            )
            self._socket.connect(boot["address"])
            reader = asyncio.create_task(self._read_private_pipe(), name="private pipe")
            await self._over.wait()
            reader.cancel()
            await self._finish()
        return self._exit_code

    async def _finish(self) -> None:
        self._calls.cancel_all()
        if self._stop_call_id is None or self._exit_code:
            return  # its owner died, and only an owner ends a role in order: a broker would send its peers home
        try:
            if self._host.instance is not None:
                await self._host.stop()
        except Exception as error:
            self._calls.fail(self._stop_call_id, error)
            self._exit_code = 1
        else:
            self._calls.send(Answer(self._stop_call_id), pack(None, "stop"))

    async def _read_private_pipe(self) -> None:
        """Read the constructor's payload, then functions to apply; stop when the parent closes the pipe."""
        while (data := await receive_privately(self._channel)) is not None:
            call_id = int.from_bytes(data[:8], "little")
            begun = self._apply if call_id else self._construct  # other calls count from 1
            self._calls.begin(call_id, begun(data[8:]))
        self._over.set()

    async def _construct(self, data: memoryview) -> list[Any]:
        try:
            await self._host.construct(lambda: constructed(*by_value.loads(data)))
        except BaseException:
            self._exit_code = 1
            self._over.set()
            raise
        return pack(None, "constructor")

    async def _apply(self, data: memoryview) -> list[Any]:
        def run() -> Any:
            function, args, kwargs = by_value.loads(data)
            return function(self._host.instance, *args, **kwargs)

        packed: list[Any] = await self._host.apply(run, (), {}, lambda result: pack_snapshot(result, "apply"))
        return packed

    def _on_message(self, frames: list[Any]) -> None:
        message, value = decode_message(frames)
        if isinstance(message, Call):
            self._calls.begin(message.call_id, self._host.answer(message.method, *value))
        elif isinstance(message, Cancel):
            self._calls.cancel(message.call_id)
        elif isinstance(message, Shutdown):
            self._stop_call_id = message.call_id
            self._over.set()
        else:
            raise ProtocolError(f"{type(message).__name__} is not for an actor")
