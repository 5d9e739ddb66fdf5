"""``rlzmq serve``: answer requests for actions with a checkpoint's policy."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlzmq.cli.checkpoint_options import PolicyOptions, place_of, policy_arguments, unknown_ids_explained
from rlzmq.cli.joining import on_signals, run_async
from rlzmq.cli.main import EXIT_INTERRUPTED
from rlzmq.cli.parsing import parse
from rlzmq.cli.token_file import token_in
from rlzmq.core.errors import ConfigurationError

__all__ = ["ServeOptions", "run"]


@dataclass
class ServeOptions(PolicyOptions):
    """Options of ``rlzmq serve``."""

    port: int = 8000
    """Port to listen on; 0: any free one (default: 8000)."""
    host: str = "127.0.0.1"
    """Address to listen on (default: 127.0.0.1)."""
    token_file: Path | None = None
    """File of the bearer token, mode 0600; written if there is none (default: serve.token in the run
    directory)."""
    allow_host: list[str] = field(default_factory=list)
    """Additional name of this server in the Host header of requests, e.g. a proxy's; repeatable (default: none)."""
    insecure: bool = False
    """Serve HTTP on another address than loopback although it is not encrypted (default: False)."""
    max_body: int = 4 << 20
    """Largest request, in bytes (default: 4194304)."""
    max_batch_size: int = 256
    """Most observations in one forward pass (default: 256)."""
    batch_wait: float = 1.0
    """Milliseconds that an idle server waits for more requests before it computes (default: 1)."""
    reload_interval: float = 2.0
    """Seconds between two looks for a newer checkpoint of the run; 0: never (default: 2)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq serve``; return the exit code."""
    options = parse(
        ServeOptions,
        arguments,
        usage="rlzmq serve RUN_OR_CHECKPOINT [options]",
        description="Answer requests for actions with a checkpoint's policy, and with newer ones of its run.",
    )
    for name in ("max_body", "max_batch_size"):
        if getattr(options, name) < 1:
            raise ConfigurationError(f"--{name.replace('_', '-')}: expected 1 or more")
    for name in ("batch_wait", "reload_interval"):
        if not 0 <= getattr(options, name) < 1e6:
            raise ConfigurationError(f"--{name.replace('_', '-')}: expected 0 or more")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    logging.getLogger("rlzmq.serve").setLevel(logging.INFO)
    return run_async(_main(options))


async def _main(options: ServeOptions) -> int:
    from rlzmq.deploy.policy_server import AsyncPolicyServer

    token_file = options.token_file or place_of(options, "serve.token", "--token-file")
    server = AsyncPolicyServer(
        options.checkpoint,
        **policy_arguments(options),
        http=f"[{options.host}]:{options.port}" if ":" in options.host else f"{options.host}:{options.port}",
        token=token_in(token_file),
        allowed_hosts=options.allow_host,
        insecure=options.insecure,
        max_body_bytes=options.max_body,
        max_batch_size=options.max_batch_size,
        batch_wait_timeout_s=options.batch_wait / 1000,
        reload_interval_s=options.reload_interval,
    )
    loop = asyncio.get_running_loop()
    interrupted: asyncio.Future[int] = loop.create_future()
    tasks: set[asyncio.Task[Any]] = set()

    def reload() -> None:
        task = loop.create_task(server.reload())
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    with on_signals(interrupted.set_result):
        with unknown_ids_explained():
            await server.start()
        loop.add_signal_handler(signal.SIGHUP, reload)
        print(f"serving     {server.checkpoint}")
        print(f"http        {server.http_url}")
        print(f"token       {token_file}")
        sys.stdout.flush()
        await interrupted
        print("ending", flush=True)
        loop.remove_signal_handler(signal.SIGHUP)
        await server.stop()
    return EXIT_INTERRUPTED if interrupted.result() == signal.SIGINT else 0
