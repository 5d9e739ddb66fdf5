"""``rlzmq broker``: a standalone broker, for schedulers that start each role separately."""

from __future__ import annotations

import signal
import sys
import tomllib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlzmq.cli.joining import on_signals, run_async
from rlzmq.cli.main import EXIT_INTERRUPTED, EXIT_RESUMABLE
from rlzmq.cli.parsing import parse
from rlzmq.core.errors import ConfigurationError
from rlzmq.roles.broker.run_lock import RunLock

__all__ = ["BrokerCommand", "run"]


@dataclass
class BrokerCommand:
    """Options of ``rlzmq broker``."""

    listen: str
    """tcp://HOST:PORT of one interface: data on PORT, weights on PORT + 1; 0: any free ports."""
    join_file: Path = Path("join.toml")
    """Path of the runners' join file; those of the other roles are written next to it (default: ./join.toml).
    Existing keys are reused, so that a restarted broker serves the same run."""
    advertise: str | None = None
    """Host name by which other machines reach HOST (default: HOST)."""
    quarantine_dir: Path | None = None
    """Directory for fragments that killed learners (default: they are not written)."""
    driver_timeout: float = 30.0
    """Seconds without a driver, after one has connected, until the broker ends (default: 30)."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with `arguments`, which follow ``rlzmq broker``; return the exit code."""
    options = parse(
        BrokerCommand,
        arguments,
        usage="rlzmq broker --listen tcp://HOST:PORT [options]",
        description="Run a broker that waits for the roles of a run.",
    )
    return run_async(_main(options))


async def _main(options: BrokerCommand) -> int:
    import asyncio

    from rlzmq.driver.join_files import at_host, listen_addresses, write_join_files
    from rlzmq.roles.broker.broker_role import BrokerRole

    lock = RunLock.take(options.join_file)
    run_id, keys = _keys(options.join_file)
    broker = BrokerRole(
        run_id,
        {"driver_timeout_s": options.driver_timeout},
        incarnation=lock.incarnation,
        listen=listen_addresses(options.listen),
        curve=keys.curve,
        roles=keys.roles,
        quarantine_dir=str(options.quarantine_dir) if options.quarantine_dir else None,
    )
    addresses = await broker.start()
    remote = {name: at_host(addresses[f"remote_{name}"], options.advertise) for name in ("data", "weights")}
    files = write_join_files(keys, options.join_file, run_id, remote)
    print(f"listening   {remote['data']}  {remote['weights']}")
    print(f"driver      config.networking(broker={str(files['driver'])!r})")
    print(f"runners     rlzmq runner --join {files['runner']}")
    print(f"look on     rlzmq top {files['observer']}", flush=True)
    interrupted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with on_signals(interrupted.set_result):
        await asyncio.wait((broker.ended, interrupted), return_when=asyncio.FIRST_COMPLETED)
    why = broker.ended.result() if broker.ended.done() else ("interrupted", "")
    await broker.stop()
    lock.release()
    print(f"{why[0]}: {why[1]}", file=sys.stderr)
    if interrupted.done():
        return EXIT_INTERRUPTED if interrupted.result() == signal.SIGINT else EXIT_RESUMABLE
    return 0


def _keys(join_file: Path) -> tuple[str, Any]:
    """Return (run id, keys) of an earlier broker with this join file; generate and store new ones if there are none."""
    from rlzmq.driver.join_files import ROLES, JoinKeys
    from rlzmq.net.keys import KeyPair, read_private_file, write_private_file

    path = join_file.absolute().with_name(f"{join_file.stem}.broker.toml")
    if path.exists():
        try:
            data = tomllib.loads(read_private_file(path))
            pairs = {role: KeyPair.from_secret(data[role]) for role in (*ROLES, "server")}
            run_id = str(data["run_id"])
        except (tomllib.TOMLDecodeError, KeyError) as error:
            raise ConfigurationError(f"{path} is not a broker's key file: {error!r}. Remove it.") from None
        return run_id, JoinKeys(pairs.pop("server"), pairs)
    run_id, keys = uuid.uuid4().hex, JoinKeys.generate()
    secrets = {"server": keys.server.secret, **{role: pair.secret for role, pair in keys.clients.items()}}
    lines = [f'run_id = "{run_id}"', *(f"{name} = '{secret}'" for name, secret in secrets.items())]
    try:
        write_private_file(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
    return run_id, keys
